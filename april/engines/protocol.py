"""The protocol that every engine implements: it continues token ids, and yields tokens, log-probabilities and versions.

Every engine keeps this contract (an *attempt* is one request to an engine):

* ``generate`` yields chunks in order and ends with exactly one chunk whose ``finish`` is set, or raises
  :class:`~april.errors.EngineError`. Every token is yielded exactly once.
* After ``abort`` the streams of the named attempts end soon, with ``finish=ABORT`` and every generated token, or with
  another reason if the request had finished before. Unknown ids are ignored; april repeats the abort until the attempt
  has ended, because the engine may learn of an attempt later than of its abort.
* The EOS or stop token that ends a response is among its tokens, with its log-probability.
* The version on a chunk is the version of the weights that generated its tokens.
* While paused, no token is generated and new requests wait.
* No token of ``sampling.banned_ids`` is generated.
* Attachments (images) of a request are identified by their digest only; placeholder tokens in the prompt say where the
  model reads them. Whatever the engine caches for attachments is discarded at a weight update.

:class:`Capabilities` says which parts of the contract an engine cannot keep; ``april.testing.conformance`` tests all
other parts.
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
"""Name of the array with the experts that each token was routed to, uint8 or uint16, of shape [tokens, layers, experts
per token]."""


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
    """Token id or text at which the engine stopped; None if ``finish`` is not STOP or the engine does not say."""
    sure: bool = True
    """False if ``version`` is a guess, because the weights changed during the request. The last chunk then has
    ``versions``."""
    versions: Sequence[tuple[PolicyVersion, int]] | None = None
    """Pairs (version, number of consecutive tokens) for all tokens of the request; on the last chunk, if the version of
    an earlier chunk was not ``sure``."""
    extras: Extras = NO_EXTRAS
    """The per-token arrays that the request asked for, on the last chunk; :attr:`Request.extras_from` says which rows.
    If they are missing, april drops the tokens and generates them again."""
    own_end: bool = False
    """True if the engine may have ended the request by a rule unknown to april. april then does not check whether the
    finish reason agrees with the tokens."""
    cached_tokens: int | None = None
    """Number of the request's input tokens that the engine found in its prefix cache; on the last chunk. None if the
    engine does not say."""


PIECES_AT_ONCE = 32
"""Number of received pieces of one response that april lets accumulate before it parses them together."""


class BufferedStream:
    """Iterator of chunks that ``generate`` may return, and that can collect received pieces and parse them together.

    Parsing many small pieces together is far cheaper. april owns the arrays of these chunks and does not copy them.
    One task uses the stream, either as an iterator or through :meth:`arrived` and :meth:`take`; ``take`` may be called
    at any time.
    """

    __slots__ = ()

    waiting: int
    """Number of pieces that have arrived but were not taken yet."""

    @property
    def over(self) -> bool:
        """True if the whole response has arrived, so that only :meth:`take` remains to be called."""
        raise NotImplementedError

    async def arrived(self) -> bool:
        """Wait until :meth:`take` has something to return; return False if the request has ended and all was taken.

        An error that the iterator would raise is raised here, after everything before the error was taken.
        """
        raise NotImplementedError

    def take(self) -> list[Chunk]:
        """Return the chunks of everything that has arrived; never waits."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of an engine as reported by the engine itself, including the requests of other clients."""

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
    """Result of a health check of an engine."""

    ok: bool
    detail: str = ""
    counters: dict[str, float] = field(default_factory=dict)
    current: bool = True
    """True if the engine still has the weights of the last update; False after its server restarted."""
    load: EngineLoad | None = None
    """Load that the engine reports; None if it reports none."""


@runtime_checkable
class SharesModel(Protocol):
    """Additional methods of an engine with the capability ``shares_weights``."""

    async def quiet(self) -> None:
        """Wait until nothing computes with the model, and the model is in the state in which the trainer left it."""
        ...


@runtime_checkable
class KeepsAdapters(Protocol):
    """An engine whose server reads adapters (LoRA) from directories, possibly more than once."""

    @property
    def whole_version(self) -> PolicyVersion:
        """The version of the base model's whole weights, without adapters."""
        ...

    def adapter_paths(self) -> frozenset[str]:
        """Return the directories that the server may read again, for the present version and running requests."""
        ...


@runtime_checkable
class TellsUnused(Protocol):
    """An engine that may receive tokens that no request can use."""

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
    """An engine for which the path of a weight update need not be a local directory; it may be a URL, for example."""

    async def content_of(self, path: str) -> str:
        """Return a text that changes whenever the content of the path changes; empty if changes cannot be noticed."""
        ...


@runtime_checkable
class KeepsRequests(Protocol):
    """Additional methods of an engine whose requests can continue after weight updates (``in_flight_updates``)."""

    async def pause_in_flight(self, in_flight: OnWeightUpdate) -> None:
        """Admit no new requests and stop generating; running requests continue after :meth:`Engine.resume`.

        Until then ``update_weights`` may be called, and an abort ends a request with its tokens so far. With KEEP,
        requests continue with their old keys and values; with RECOMPUTE, the engine computes their keys and values
        again under the new weights.
        """
        ...


@runtime_checkable
class GathersWeights(Protocol):
    """Additional methods of an engine with the capability ``gathers_weights``; called in the trainer's thread."""

    def gather(self) -> None:
        """Gather the full weights on this rank. This call is collective: every rank makes it at the same time.

        A rank accepts requests once its call has returned; earlier requests fail.
        """
        ...

    def release(self) -> None:
        """Free the gathered weights and end this rank's requests, without waiting for other ranks; idempotent."""
        ...


@runtime_checkable
class Engine(Protocol):
    """The methods of every engine. They are called on april's event loop; a call may be cancelled at any await."""

    @property
    def name(self) -> str:
        """Short unique label of the engine, used in metrics, messages and the records of samples."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of the engine; constant once the engine was constructed."""
        ...

    def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Run one request, which starts at the first iteration; the contract is in the docstring of this module."""
        ...

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Ask the engine to end these attempts (None means all), without waiting until they have ended."""
        ...

    async def pause(self) -> None:
        """Admit no new requests and stop generating; returns when the weights may be written."""
        ...

    async def resume(self) -> None:
        """Admit requests again, and continue generating."""
        ...

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Switch to ``version``, loading its weights from ``path`` if given; called while the engine is paused."""
        ...

    async def health(self) -> Health:
        """Probe the engine; an unhealthy engine is reported, not raised."""
        ...

    async def close(self) -> None:
        """Release all resources; idempotent."""
        ...
