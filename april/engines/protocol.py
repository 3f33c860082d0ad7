"""The protocol of engines: token ids in; tokens, log-probabilities and versions out.

Contract that every engine keeps:

* ``generate`` yields chunks in order and ends with exactly one chunk whose ``finish`` is set, or raises
  :class:`~april.errors.EngineError`. Every token is yielded exactly once.
* After ``abort`` the streams of the named attempts end soon, with ``finish=ABORT`` and every generated token, or with
  another reason if the request had finished before. An id that is unknown, or not registered yet, is ignored: april
  repeats the abort until the attempt has ended.
* EOS (or the stop token) is in the tokens, with its log-probability.
* The version on a chunk is the version of the weights that generated its tokens.
* While paused, no token is generated and new requests wait.
* No token of ``sampling.banned_ids`` is generated.
* Attachments of a request are identified by their digest only, and the tokens say where the model reads them. Anything
  that the engine caches of them is discarded at a weight update.

:class:`Capabilities` says which parts an engine cannot do; ``april.testing.conformance`` checks all others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from april.core.attachments import NO_EXTRAS, Extras
from april.core.ledger import DropReason
from april.core.sampling import LogprobKind as LogprobKind
from april.core.types import EngineFinish as EngineFinish
from april.core.types import OnWeightUpdate as OnWeightUpdate
from april.core.types import Request as Request
from april.core.versions import PolicyVersion
from april.engines.abilities import AbortMeans as AbortMeans
from april.engines.abilities import AdapterSite as AdapterSite
from april.engines.abilities import Capabilities as Capabilities
from april.engines.abilities import FirstWeights as FirstWeights

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
ROUTED_EXPERTS = "routed_experts"
"""Name of the extras that hold the experts chosen for each token: [tokens, layers, experts per token], uint8 or
uint16."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [k] int32 with log-probabilities [k] float32 (nats), all sampled under ``version``; k may be 0.

    april copies the arrays when it receives the chunk, so an engine may reuse its buffers.
    """

    tokens: Int32
    logprobs: Float32
    version: PolicyVersion
    finish: EngineFinish | None = None
    stopped_at: int | str | None = None
    """Token or text at which the engine stopped, if ``finish`` is STOP and the engine says it."""
    sure: bool = True
    """False if ``version`` is a guess, because the weights changed during the request. The last chunk then has
    ``versions``."""
    versions: Sequence[tuple[PolicyVersion, int]] | None = None
    """Versions of all tokens of the request, run-length encoded; on the last chunk if an earlier one was not
    ``sure``."""
    extras: Extras = NO_EXTRAS
    """The arrays that the request asked for, on the last chunk: the rows described at :attr:`Request.extras_from`.
    If they are missing, april drops the tokens and generates them again."""
    own_end: bool = False
    """True if the engine may end the request by a rule that april does not know, so that april cannot conclude from the
    last token why it ended."""
    cached_tokens: int | None = None
    """Number of the request's input tokens whose keys and values the engine had cached; on the last chunk. None if the
    engine does not say."""


PIECES_AT_ONCE = 32
"""Number of pieces of one response that may accumulate before they are parsed."""


class BufferedStream:
    """An iterator of chunks, as ``generate`` returns it, that can also accumulate pieces and parse them together.

    Parsing many small pieces at once is far cheaper. april then owns the arrays of the chunks and does not copy
    them. One task uses the stream, either as an iterator or through :meth:`arrived` and :meth:`take`; ``take`` may
    be called at any time.
    """

    __slots__ = ()

    waiting: int
    """Number of pieces that have arrived and were not taken yet."""

    @property
    def over(self) -> bool:
        """True if the whole answer has arrived, so only :meth:`take` is left to call."""
        raise NotImplementedError

    async def arrived(self) -> bool:
        """Wait for more to :meth:`take`; return False once the request has ended and everything was taken.

        Raises what the iterator would raise, once everything before the error was taken.
        """
        raise NotImplementedError

    def take(self) -> list[Chunk]:
        """Return the chunks of everything that has arrived; never waits."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of an engine as reported by the engine itself, with the requests of other clients."""

    running: int
    """Number of requests being decoded."""
    waiting: int
    """Number of requests queued inside the engine."""
    kv_usage: float
    """Fraction of the key-value cache in use, 0 to 1."""
    preemptions: int = 0
    """Number of requests preempted for lack of memory since the engine started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Answer to a health probe."""

    ok: bool
    detail: str = ""
    counters: dict[str, float] = field(default_factory=dict)
    current: bool = True
    """True if the engine still has the weights of the last update; False after its server restarted."""
    load: EngineLoad | None = None
    """Load that the engine reports; None if it reports none."""


@runtime_checkable
class SharesModel(Protocol):
    """Additional methods of an engine with ``shares_weights``."""

    async def quiet(self) -> None:
        """Wait until nothing computes on the model and it is in the state in which the trainer left it."""
        ...


@runtime_checkable
class KeepsAdapters(Protocol):
    """An engine whose server reads adapters (LoRA) from directories, possibly more than once."""

    @property
    def whole_version(self) -> PolicyVersion:
        """The version of the base model's whole weights, without adapters."""
        ...

    def adapter_paths(self) -> frozenset[str]:
        """Return directories that may be read again: of the present version and of versions with running requests."""
        ...


@runtime_checkable
class TellsUnused(Protocol):
    """An engine that may receive tokens which no request can use."""

    unused: Callable[[int, DropReason], None]
    """Callback ``(count, reason)`` that counts such tokens as dropped; set before the first request."""


@runtime_checkable
class ShowsWeights(Protocol):
    """An engine whose weights can be compared with those of another process."""

    def weight_sample(self) -> NDArray[np.float32]:
        """Return some values of the weights, always from the same positions; not called while weights are written."""
        ...


@runtime_checkable
class ReadsPaths(Protocol):
    """An engine whose weight-update paths are not local directories, but for instance addresses."""

    async def content_of(self, path: str) -> str:
        """Return a text that changes whenever the content behind the path changes; empty if that cannot be told."""
        ...


@runtime_checkable
class KeepsRequests(Protocol):
    """Additional methods of an engine whose requests may live through weight updates (``in_flight_updates``)."""

    async def pause_in_flight(self, in_flight: OnWeightUpdate) -> None:
        """Close admission and stop generating; requests stay, and continue after :meth:`Engine.resume`.

        In between, ``update_weights`` may be called, and an abort ends a request with its tokens so far. With KEEP,
        requests continue with their old keys and values; with RECOMPUTE, the engine computes them again under the
        new weights.
        """
        ...


@runtime_checkable
class GathersWeights(Protocol):
    """Additional methods of an engine with ``gathers_weights``; called in the trainer's thread."""

    def gather(self) -> None:
        """Gather the full weights on this rank. This is collective: every rank calls it at the same time.

        Requests are accepted once it has returned on their rank; before that they fail.
        """
        ...

    def release(self) -> None:
        """Free the gathered memory; generation that still runs here ends. Waits for no other rank; idempotent."""
        ...


@runtime_checkable
class Engine(Protocol):
    """The methods of every engine. They are called on april's event loop; a call may be cancelled at any await."""

    @property
    def name(self) -> str:
        """Short unique label for segments, metrics and messages."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of the engine; known after construction, constant."""
        ...

    def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Run one request, which starts at the first iteration; the module's docstring has the contract."""
        ...

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Ask the engine to end these attempts (None means all). Returns when asked, not when they have ended."""
        ...

    async def pause(self) -> None:
        """Close admission and stop generating; returns when the weights may be written."""
        ...

    async def resume(self) -> None:
        """Reopen admission."""
        ...

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Begin ``version``, loading the weights from ``path`` if given; called while the engine is paused."""
        ...

    async def health(self) -> Health:
        """Probe the engine; an unhealthy engine is reported, not raised."""
        ...

    async def close(self) -> None:
        """Release all resources; idempotent."""
        ...
