"""The protocol of engines: token ids in; tokens, log-probabilities and versions out.

Semantic contract, for every engine:

* ``generate`` yields chunks in order and ends with exactly one chunk whose ``finish`` is set, or raises
  :class:`~april.errors.EngineError`. Every token is yielded exactly once.
* After ``abort`` the streams of the named attempts end soon, with ``finish=ABORT`` and everything that was
  generated, or with the reason that came first. An id that is unknown, or not registered yet, is ignored:
  april asks again until the attempt has ended.
* EOS (or the stop token) is in the tokens, with its log-probability.
* The version on a chunk is that of the weights which produced its tokens.
* While paused, no token is generated and new requests wait.
* No token of ``sampling.banned_ids`` is generated.
* A request's attachments are read as its tokens say, each by its digest and never by another name: whatever the engine
  keeps of them is not used after an update of the weights.

What an engine cannot do is on its :class:`Capabilities`; ``april.testing.conformance`` holds it to the rest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from april.core.attachments import NO_EXTRAS, Extras, Placed
from april.core.sampling import LogprobKind as LogprobKind
from april.core.sampling import SamplingParams
from april.core.types import EngineFinish as EngineFinish
from april.core.types import OnWeightUpdate as OnWeightUpdate
from april.core.versions import PolicyVersion
from april.engine_limits import CAUSES, Limit

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
ROUTED_EXPERTS = "routed_experts"
"""Extras: the experts that a model chose for a token, [R, layers, experts per token], uint8 or uint16."""


class AbortMeans(StrEnum):
    """The way in which an engine's requests are ended early."""

    BY_ID = "by id"
    """Each request by its id; the answer hands over its tokens."""
    PAUSE = "pause"
    """All requests at once, by pausing the server in its abort mode."""
    CLOSE = "close"
    """The stream is closed: what was read is kept, what the server had not sent yet is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSite:
    """A place where an engine takes adapters (LoRA) as versions of the policy."""

    max_rank: int | None = None
    """The largest rank of an adapter. None: unknown."""
    slots: int | None = None
    """Adapters, the model itself left out, under which requests run at the same time. None: unknown."""
    scales: bool = True
    """Scales and ranks by layer, and rank-stabilised ones, are followed."""
    base: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)
    """Shapes of the model's matrices by name of the layer, as far as they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities of an engine; the layers above decide by this record, never by its name."""

    logprob_kind: LogprobKind
    vocab_size: int
    """Token ids are in [0, vocab_size)."""
    max_context: int
    """Most tokens of prompt plus response."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end every response, in addition to the stop ids of a request."""
    max_in_flight: int | None = None
    """Requests decoded at the same time; more are queued inside the engine. None: unknown or unbounded."""
    returns_partials: bool = True
    """An aborted request hands over the tokens it has."""
    shares_weights: bool = False
    """Generates from the trainer's own parameters: must be idle while the optimizer writes. A :class:`SharesModel`."""
    gathers_weights: bool = False
    """The parameters are spread over ranks: the engine generates only between ``gather`` and ``release``. A
    :class:`GathersWeights`."""
    updates_from_disk: bool = False
    """``update_weights`` accepts a path."""
    adapters: AdapterSite | None = None
    """``update_weights`` accepts the directory of an adapter (LoRA); None: it does not."""
    adapters_need: str = ""
    """The remedy where it does not, an order to the user; empty if there is none."""
    collective: tuple[str, ...] = ()
    """Back-ends ("nccl", "gloo") over which the trainer's process can send it weights. A
    :class:`~april.engines.weight_routes.ReceivesWeights`."""
    takes_tensors: bool = False
    """It takes tensors of this process. A :class:`~april.engines.weight_routes.TakesTensors`."""
    abort_means: AbortMeans = AbortMeans.BY_ID
    """The way in which ``abort`` works here."""
    version_spans: bool = True
    """Replies say which weights made which token; if not, the version at submission is taken, and no request lives
    through a weight update."""
    in_flight_updates: tuple[OnWeightUpdate, ...] = ()
    """What requests may do at a weight update besides being cut; then the engine :class:`KeepsRequests`."""
    streams: bool = True
    """Tokens come while they are made; if not, an engine that dies takes those of its running requests along."""
    remote: bool = False
    """True behind a server, which others may load and which may be started anew: it is asked for its load and
    its weights from time to time while it works."""
    own_weights: bool = False
    """The engine is no server, and yet a trainer hands its weights over to it: what a transfer that broke off has
    left there, nobody knows."""
    verifies_weights: bool = True
    """The engine shows which weights it has; if not, new ones are unverified, taken on the word of others."""
    honours_seeds: bool = True
    """A request that is repeated with its seed gives the same tokens."""
    attachments: tuple[str, ...] = ()
    """Kinds of attachments ("image") that it takes with a prompt."""
    attachments_need: str = ""
    """The remedy where its model takes some and it takes none, an order to the user; empty if there is none."""
    extras: tuple[str, ...] = ()
    """Names of the arrays ("routed_experts") that it can give with the tokens that it generates."""
    extras_need: str = ""
    """The remedy where it cannot and perhaps could, an order to the user; empty if there is none."""
    bans: bool = False
    """``sampling.banned_ids`` are honoured."""
    limits: tuple[Limit, ...] = ()
    """Facts that a user should know of this engine: promises that it does not offer and why."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The limits, one sentence each."""
        return tuple(limit.sentence for limit in self.limits)

    def cause(self, field: str) -> Limit | None:
        """The cause why ``field``, one of :data:`~april.engine_limits.CAUSES`, is less than it could be, if any."""
        return next((limit for code in CAUSES[field] for limit in self.limits if limit.code is code), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An attempt: continue ``token_ids`` (prompt plus what the sample already has)."""

    attempt_id: str
    token_ids: Int32
    sampling: SamplingParams
    priority: int = 0
    """Lower is more urgent; engines without priorities ignore it."""
    sample_key: tuple[int, int] | None = None
    """(group, index) of the sample. A label: what a real engine generates never depends on it; a simulated engine
    draws the length of the response from it."""
    response_offset: int = 0
    """The number of tokens at the end of ``token_ids`` that are of this very response, generated by earlier attempts;
    ``len(token_ids) - response_offset`` tokens are prompt."""
    stream: bool = False
    """Tokens are wanted as they come, for april may end the request by what it reads. Engines that yield only at the
    end serve it too; what they generate in vain is dropped."""
    in_flight: OnWeightUpdate = OnWeightUpdate.RESUBMIT
    """What becomes of it at a weight update. With KEEP the engine lets it meet no keys and values that other weights
    wrote, nor let others meet its own under later ones."""
    attached: tuple[Placed, ...] = ()
    """What is attached to the conversation, in order; ``token_ids`` have as many tokens for each as the model reads it
    as. An engine that expands prompts itself is sent :func:`april.core.attachments.collapsed`."""
    extras: tuple[str, ...] = ()
    """Names of the arrays that are wanted with the tokens."""
    extras_from: int = 0
    """With k tokens generated, the last chunk has rows [extras_from, len(token_ids) + k - 1) of them: row i is of the
    step that read token i of the conversation, and so made, or would have made, token i + 1."""

    def rows_wanted(self, generated: int) -> int:
        """The number of rows that the last chunk has, with so many tokens generated."""
        return len(self.token_ids) + generated - 1 - self.extras_from


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [k] int32 with log-probabilities [k] float32 (nats), all sampled under ``version``; k may be 0."""

    tokens: Int32
    logprobs: Float32
    version: PolicyVersion
    finish: EngineFinish | None = None
    stopped_at: int | str | None = None
    """With STOP, where the engine says it: the token, or the text, that it stopped at."""
    sure: bool = True
    """False: ``version`` is a guess, as a weight update has passed, and the last chunk of the request says it."""
    versions: Sequence[tuple[PolicyVersion, int]] | None = None
    """On the last chunk after such guesses: the versions of all tokens of the request, run-length."""
    extras: Extras = NO_EXTRAS
    """On the last chunk: the rows that the request asked for, of all its tokens, as :attr:`Request.extras_from` says.
    Without them the tokens are dropped, and generated again."""


class BufferedStream:
    """An iterator of chunks, as ``generate`` returns it, that can also let pieces of an answer pile up.

    Many small pieces cost far less when they are looked at together. Used by one task, either as an iterator or by
    :meth:`arrived` and :meth:`take`; what has arrived can be taken at any time.
    """

    __slots__ = ()

    waiting: int
    """Pieces that have arrived and were not taken."""

    @property
    def over(self) -> bool:
        """The answer is here, whole: nothing but :meth:`take` is left to do."""
        raise NotImplementedError

    async def arrived(self) -> bool:
        """Wait until more may be there to :meth:`take`; False: the request has ended and all was taken.

        Raises what the iterator would raise, after all that came before it was taken.
        """
        raise NotImplementedError

    def take(self) -> list[Chunk]:
        """The chunks of everything that has arrived; never waits."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of an engine as it tells it itself; requests of others are in it."""

    running: int
    """Requests being decoded."""
    waiting: int
    """Requests queued inside the engine."""
    kv_usage: float
    """Share of the key-value memory in use, 0 to 1."""
    preemptions: int = 0
    """Requests put back for want of memory, since the engine's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Answer of a health probe."""

    ok: bool
    detail: str = ""
    counters: dict[str, float] = field(default_factory=dict)
    current: bool = True
    """True if it still has the weights that it was last given here; False after a restart of its server."""
    load: EngineLoad | None = None
    """The load by its own words; None if it does not say it."""


@runtime_checkable
class SharesModel(Protocol):
    """The methods that engines with ``shares_weights`` have besides the methods of :class:`Engine`."""

    async def quiet(self) -> None:
        """Returns when nothing runs on the model, and it is as the trainer left it."""
        ...


@runtime_checkable
class KeepsAdapters(Protocol):
    """Engines whose server reads adapters (LoRA) from directories, perhaps again and again."""

    @property
    def whole_version(self) -> PolicyVersion:
        """The version of the whole weights below them."""
        ...

    def adapter_paths(self) -> frozenset[str]:
        """Return those that it may read again: of the present version, and of versions under which requests run."""
        ...


@runtime_checkable
class ShowsWeights(Protocol):
    """Engines whose weights can be compared with those of another process."""

    def weight_sample(self) -> NDArray[np.float32]:
        """Return some values of the weights, always of the same places; called while the weights are not written."""
        ...


@runtime_checkable
class ReadsPaths(Protocol):
    """Engines whose path of a weight update is no directory that april could look into, such as an address."""

    async def content_of(self, path: str) -> str:
        """Stands for what is there now: another text whenever it is something else. Empty: that cannot be said."""
        ...


@runtime_checkable
class KeepsRequests(Protocol):
    """The methods of engines whose requests may live through weight updates (``in_flight_updates``)."""

    async def pause_in_flight(self, in_flight: OnWeightUpdate) -> None:
        """Close admission and stop generating; requests stay, and go on with :meth:`Engine.resume`.

        Until then ``update_weights`` may come, and an abort ends a request with what it had. With KEEP they go on over
        their keys and values, with RECOMPUTE the engine writes these anew under the weights that it has then.
        """
        ...


@runtime_checkable
class GathersWeights(Protocol):
    """The methods that engines with ``gathers_weights`` have besides, called in the trainer's thread."""

    def gather(self) -> None:
        """Make the weights whole on this rank: collective, so every rank calls it at the same time.

        Requests may come once it has returned on their rank; before that they fail.
        """
        ...

    def release(self) -> None:
        """Give the memory back; ends generating here if it still goes on. Waits for no other rank; idempotent."""
        ...


@runtime_checkable
class Engine(Protocol):
    """An engine. Methods are called on april's event loop; a call may be cancelled at any await."""

    @property
    def name(self) -> str:
        """Short unique label for segments, metrics and messages."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Known after construction; constant."""
        ...

    def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Start the request when first iterated; see the module's contract."""
        ...

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Ask for the end of these attempts (None: all). Returns when asked, not when ended."""
        ...

    async def pause(self) -> None:
        """Close admission and stop generating; returns when the weights may be written."""
        ...

    async def resume(self) -> None:
        """Open admission again."""
        ...

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """While paused: from now on the weights are ``version`` (loaded from ``path`` if given)."""
        ...

    async def health(self) -> Health:
        """Probe; never raises for a sick engine."""
        ...

    async def close(self) -> None:
        """Release everything; idempotent."""
        ...
