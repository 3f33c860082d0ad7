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

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from april.core.attachments import NO_EXTRAS, Extras
from april.core.engine_limits import CAUSES, Limit
from april.core.ledger import DropReason
from april.core.sampling import LogprobKind as LogprobKind
from april.core.types import EngineFinish as EngineFinish
from april.core.types import OnWeightUpdate as OnWeightUpdate
from april.core.types import Request as Request
from april.core.versions import PolicyVersion

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
ROUTED_EXPERTS = "routed_experts"
"""Name of the extras that hold the experts chosen for each token: [R, layers, experts per token], uint8 or uint16."""


class AbortMeans(StrEnum):
    """How ``abort`` ends requests early on this engine."""

    BY_ID = "by id"
    """Each request is aborted by its id; the answer contains its tokens."""
    PAUSE = "pause"
    """All requests are aborted at once, by pausing the server in its abort mode."""
    CLOSE = "close"
    """The client closes the stream: tokens that were read are kept, tokens that the server had not sent yet are
    lost."""


class FirstWeights(StrEnum):
    """What a run knows about the weights of an engine when it connects, before the first weight update."""

    KNOWN = "known"
    """The engine has the weights that it was started with, or those that the settings declare as the first version.
    This is assumed of an engine whose weights have no label to tell by."""
    UNVERIFIED = "unverified"
    """Another program has labelled the weights. april takes them for the first version."""
    OTHERS = "others"
    """Another run of april has loaded all or some of the weights. They belong to no version of this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSite:
    """How an engine loads adapters (LoRA) as policy versions."""

    max_rank: int | None = None
    """Largest rank of an adapter; None if unknown."""
    slots: int | None = None
    """Number of adapters whose requests can run at the same time, the base model not counted; None if unknown."""
    scales: bool = True
    """True if the engine supports scales and ranks per layer, and rank-stabilised adapters."""
    base: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)
    """Shapes of the model's matrices, indexed by layer name, as far as they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities of an engine. The layers above decide by this record, never by the engine's name."""

    logprob_kind: LogprobKind
    vocab_size: int
    """Size of the vocabulary; token ids are in [0, vocab_size)."""
    max_context: int
    """Largest number of tokens of prompt plus response."""
    eos_token_ids: tuple[int, ...] = ()
    """Token ids that end every response, in addition to the stop ids of a request."""
    max_in_flight: int | None = None
    """Number of requests decoded at the same time; further ones are queued inside the engine. None if unknown or
    unbounded."""
    returns_partials: bool = True
    """True if an aborted request returns the tokens generated so far."""
    shares_weights: bool = False
    """True if the engine generates from the trainer's own parameters: it must be idle while the optimizer writes.
    Such an engine implements :class:`SharesModel`."""
    gathers_weights: bool = False
    """True if the parameters are sharded over ranks: the engine generates only between ``gather`` and ``release``.
    Such an engine implements :class:`GathersWeights`."""
    updates_from_disk: bool = False
    """True if ``update_weights`` accepts a path."""
    adapters: AdapterSite | None = None
    """How ``update_weights`` accepts the directory of an adapter (LoRA); None if it does not."""
    adapters_need: str = ""
    """What the user should do to make the engine accept adapters; empty if nothing helps or it does already."""
    collective: tuple[str, ...] = ()
    """Back-ends ("nccl", "gloo") over which the trainer's process can send weights. An engine with any implements
    :class:`~april.engines.weight_transfer.ReceivesWeights`."""
    takes_tensors: bool = False
    """True if the engine accepts tensors of this process, by :class:`~april.engines.weight_transfer.TakesTensors`."""
    abort_means: AbortMeans = AbortMeans.BY_ID
    """How ``abort`` works on this engine."""
    version_spans: bool = True
    """True if replies say which weights made which token. If False, tokens get the version at submission, and no
    request may live through a weight update."""
    in_flight_updates: tuple[OnWeightUpdate, ...] = ()
    """What requests may do at a weight update besides being cut; if not empty, the engine implements
    :class:`KeepsRequests`."""
    streams: bool = True
    """True if tokens arrive while they are made. If False, all tokens of running requests are lost when the engine
    dies."""
    remote: bool = False
    """True if the engine is behind a server, which others may update and which may restart: while it works, april
    asks regularly for its load and its weights."""
    own_weights: bool = False
    """True if the engine is no server but a trainer copies weights into it: after a transfer that broke off, nobody
    knows which weights it has."""
    verifies_weights: bool = True
    """True if the engine can show which weights it has. If False, new weights are unverified: april believes whoever
    loaded them."""
    first_weights: FirstWeights = FirstWeights.KNOWN
    """What is known about the weights at creation. With OTHERS, nothing is generated before a weight update."""
    honours_seeds: bool = True
    """True if repeating a request with its seed gives the same tokens."""
    attachments: tuple[str, ...] = ()
    """Kinds of attachments ("image") that the engine accepts with a prompt."""
    attachments_need: str = ""
    """What the user should do if the model reads attachments but the engine accepts none; empty if nothing helps."""
    extras: tuple[str, ...] = ()
    """Names of the arrays ("routed_experts") that the engine can return with generated tokens."""
    extras_need: str = ""
    """What the user should do to get these arrays if the engine gives none; empty if nothing helps."""
    bans: bool = False
    """True if ``sampling.banned_ids`` are honoured."""
    answers_late: bool = False
    """True if the engine may answer a request with tokens that an earlier, fenced request made under older weights."""
    limits: tuple[Limit, ...] = ()
    """What a user should know about this engine: the promises that april cannot keep with it, and why."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The limits, one sentence each."""
        return tuple(limit.sentence for limit in self.limits)

    def cause(self, field: str) -> Limit | None:
        """Return the limit that reduces ``field`` (of :data:`~april.core.engine_limits.CAUSES`), or None."""
        return next((limit for code in CAUSES[field] for limit in self.limits if limit.code is code), None)


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
    """False if ``version`` is a guess because of a weight update meanwhile; the last chunk then has ``versions``."""
    versions: Sequence[tuple[PolicyVersion, int]] | None = None
    """Versions of all tokens of the request, run-length encoded; on the last chunk if an earlier one was not
    ``sure``."""
    extras: Extras = NO_EXTRAS
    """The arrays that the request asked for, on the last chunk: the rows described at :attr:`Request.extras_from`.
    If they are missing, april drops the tokens and generates them again."""
    own_end: bool = False
    """True if the request could end for reasons that april does not know, so its last token says nothing about the
    end."""


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
