"""Events: all that can happen. They enter :meth:`april.core.state.RolloutCore.handle`; nothing else changes a core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from april.core.attachments import Placed
from april.core.sampling import SamplingParams
from april.core.settings import EngineLimits
from april.core.tape import NOTHING_CAME, AttemptCounts, Int32
from april.core.types import Attempt, AttemptFailure, DropReason, EngineFinish, Prompt, Refill, SampleId, Timer
from april.core.types import EvaluationRequested as EvaluationRequested
from april.core.types import Event as Event
from april.core.versions import PolicyVersion


class StepRequested(Event, frozen=True):
    """The trainer wants a batch."""


class PromptsDrawn(Event, frozen=True):
    """Answer to DrawPrompts. ``exhausted``: the source has ended; ``error``: the next prompt is unusable."""

    prompts: Sequence[Prompt]
    exhausted: bool
    error: str | None = None


NEW_CHAIN = -1


class CallMade(Event, frozen=True):
    """A rollout function called ``llm.generate``; ``token_ids`` is the conversation to continue (None means as is)."""

    sample: SampleId
    sampling: SamplingParams
    token_ids: Int32 | None = None
    number: int = 0
    """The number by which the function knows the call."""
    any_chain: bool = False
    """``token_ids`` may be any conversation: one that extends a chain continues it, any other begins a chain."""
    attached: tuple[Placed, ...] = ()
    """What is attached to ``token_ids``, in order; without them, what the conversation has."""
    chain: int | None = None
    """With ``any_chain``: the number of the chain, NEW_CHAIN for a new one; None means that the tokens tell."""


class CallUnheard(Event, frozen=True):
    """Nobody will hear the answer of the call with this ``number``: what it brought, or brings, is dropped."""

    sample: SampleId
    number: int


class StopFound(Event, frozen=True):
    """An attempt that goes on has completed a stop string: its counts will say so, whatever ends it now."""

    attempt_id: str


class AttemptStalled(Event, frozen=True):
    """The engine has sent no token for an attempt for too long."""

    attempt_id: str
    seconds: float = 0.0


class AttemptEnded(Event, frozen=True):
    """An attempt is over; ``fenced``: not by its engine, which did not end it in time."""

    attempt_id: str
    finish: EngineFinish
    counts: AttemptCounts = NOTHING_CAME
    fenced: bool = False

    @classmethod
    def of(cls, attempt: Attempt, finish: EngineFinish, *, fenced: bool = False) -> Self:
        """The end of this attempt, with what is on its tape; where that has a stop string, no budget has ended it."""
        if finish is EngineFinish.LENGTH and attempt.tape.stopped:
            finish = EngineFinish.STOP
        return cls(attempt.id, finish, attempt.counts(), fenced)


class AttemptFailed(Event, frozen=True, kw_only=True):
    """An attempt broke off. ``rejected`` tokens came and are not in its counts: corrupt ones, or of no known weights.

    ``busy_s`` is how long a busy engine asks to wait; 0 means that it does not say.
    """

    attempt_id: str
    error: str
    kind: AttemptFailure = AttemptFailure.BROKE_OFF
    rejected: int = 0
    busy_s: float = 0.0
    counts: AttemptCounts = NOTHING_CAME

    @classmethod
    def of(cls, attempt: Attempt, error: str, kind: AttemptFailure = AttemptFailure.BROKE_OFF, **how: Any) -> Self:
        """The failure of this attempt, with what is on its tape."""
        return cls(attempt_id=attempt.id, error=error, kind=kind, **how, counts=attempt.counts())


class SampleReturned(Event, frozen=True):
    """A rollout function returned."""

    sample: SampleId


class TokensUnused(Event, frozen=True):
    """So many tokens came that belong to no attempt's tape: they are dropped for this reason."""

    count: int
    reason: DropReason


class SampleFailed(Event, frozen=True):
    """A rollout or reward function raised, or returned what cannot be.

    ``kind``: what was raised in which line, if another try would not mend it.
    """

    sample: SampleId
    error: str
    kind: str = ""


class FunctionsLost(Event, frozen=True):
    """The rollout and reward functions of these groups died with their host, and nothing is heard of them any more.

    They begin again elsewhere: StartSample follows, and what their calls had been answered comes from the tape; those
    of evaluations begin again from nothing.

    ``died``: nobody wanted the end of that host, and what ran there may be why.
    """

    groups: Sequence[int]
    died: bool = False


class Scored(Event, frozen=True):
    """Rewards of the named samples of one group."""

    group: int
    rewards: Sequence[tuple[int, float]]
    """(sample index, reward); they count rounded to float32, as batches hold them."""


class GroupJudged(Event, frozen=True, kw_only=True):
    """The filter's verdict on a scored group; ``judgement`` as in JudgeGroup. ``error``: it has none.

    ``kind``: as in SampleFailed.
    """

    group: int
    judgement: int
    keep: bool
    error: str | None = None
    kind: str = ""


class TimerFired(Event, frozen=True):
    """A StartTimer has run out."""

    timer: Timer


class PauseRequested(Event, frozen=True):
    """Stop all generation, as weights change; evaluations that have begun end first."""


class Resumed(Event, frozen=True):
    """Generation may go on."""


class UpdateRequested(Event, frozen=True, kw_only=True):
    """The trainer has new weights for the engines; UpdateEnded says what came of it."""

    update: int
    """Unique, from 1."""
    version: PolicyVersion | None = None
    """The version of the weights; None means the next one."""
    path: str | None = None
    """The directory to load from; None means that the trainer hands the weights over, or that they are in place."""
    content: str = ""
    """A hash of the directory; empty where it cannot be read by whoever asked for the update."""
    adapter: bool = False
    """The directory has an adapter, which is laid over the whole weights that the engines have."""
    transfers: bool = False
    """The trainer hands them over when HandOver says that the engines are paused."""
    sends: bool = False
    """april itself hands them over then, and knows of each engine what it has got: one that failed can be left out."""
    restores: bool = False
    """The weights are those of a saved state; whoever asks holds a pause (PauseRequested)."""
    trained: int | None = None
    """As in WeightsUpdated."""


class UpdateCancelled(Event, frozen=True):
    """An update is not wanted any more, and does not happen unless engines are loading already.

    HandedOver tells the end of a transfer that has begun.
    """

    update: int


@dataclass(frozen=True, slots=True)
class NotGiven:
    """An engine that did not get the weights that were sent to it."""

    engine: str
    why: str
    torn: bool
    """It may have a part of them; if not, it has what it had."""


class HandedOver(Event, frozen=True):
    """The trainer has handed its weights over, or (``error``) has broken off in the middle."""

    update: int
    error: str | None = None
    not_given: tuple[NotGiven, ...] | None = None
    """Engines that did not get them, all others having them, or, after an error, what they had; None: nobody knows."""


class Restored(Event, frozen=True):
    """A saved state is in the core."""

    update: int


class CallResult(StrEnum):
    """Ends of a call of an engine."""

    DONE = "done"
    REFUSED = "refused"
    """The engine says what is wrong."""
    BUSY = "busy"
    """The engine takes no calls for now; nothing has changed."""
    OTHER_CONTENT = "other content"
    """The weights of the version are gone, as the directory holds others or the server was started anew; the engine was
    given nothing."""
    UNREACHABLE = "unreachable"
    """There was no answer, or none in time."""


class EngineCallEnded(Event, frozen=True):
    """Answer to PauseEngine, LoadEngine and ResumeEngine, with their ``call``."""

    engine: str
    call: int
    result: CallResult
    error: str = ""
    content: str = ""
    """A hash of the directory that was loaded; empty if there was none, or it cannot be read there."""
    silent: tuple[str, ...] = ()
    """Attempts that have no token where an engine is paused that keeps its requests."""


class EngineProbed(Event, frozen=True, kw_only=True):
    """Answer to ProbeEngine, with its ``probe``."""

    engine: str
    probe: int
    answered: bool
    ok: bool = False
    current: bool = False
    """The engine has the weights that it was given last."""
    detail: str = ""
    load: LoadReported | None = None


class WeightsWritten(Event, frozen=True):
    """Weights were written while an engine generated from them, outside of any update."""

    error: str


class EnginesAsked(Event, frozen=True):
    """The engines are to be asked now whether they have their weights (for an evaluation)."""


class WeightsUpdated(Event, frozen=True):
    """The policy is now ``version``, and the named engines (None means all) confirmed it; they update themselves.

    ``trained``: the last batch that these weights were trained on; it and those before it are committed. None: no batch
    that is out.
    """

    version: PolicyVersion
    engines: Sequence[str] | None = None
    trained: int | None = None


class EngineReady(Event, frozen=True):
    """A quarantined engine is well again, with the weights of ``version`` (None means those it had)."""

    engine: str
    version: PolicyVersion | None = None


class EngineStale(Event, frozen=True):
    """An engine does not have the weights that it was given: its server was started anew."""

    engine: str


class EngineFailed(Event, frozen=True):
    """An engine failed outside of any attempt."""

    engine: str


class EnginesJoined(Event, frozen=True):
    """A host brings engines, for the first time or anew, of which ``EngineTable.unfit`` has said that they can join.

    One that comes anew has nothing in flight: what had been has failed. Whatever else it was asked for before is void.
    """

    engines: Sequence[EngineLimits]


class EnginesLeft(Event, frozen=True):
    """A host has taken its engines away for good; they have nothing in flight."""

    names: Sequence[str]


class LoadReported(Event, frozen=True, kw_only=True):
    """An engine's load: requests decoded and queued, share of key-value memory in use, preemptions."""

    engine: str
    running: int
    waiting: int
    kv_usage: float
    preemptions: int


class EvaluationCancelled(Event, frozen=True):
    """An evaluation is not wanted any more; its requests are ended, and EvaluationFailed follows."""

    evaluation: int


class BatchCommitted(Event, frozen=True):
    """The trainer is done with this batch, and no weight update of its own follows."""

    batch_id: int


class StalenessLowered(Event, frozen=True):
    """Prompts drawn from now on are trained within ``bound`` weight updates; earlier ones keep their bound."""

    bound: int


class WorkChanged(Event, frozen=True, kw_only=True):
    """Other values for the settings that ``CoreSettings.auto`` names; None leaves one as it is."""

    over_sampling_batch_size: int | None = None
    refill: Refill | None = None
    max_in_flight: int | None = None
    group_quorum: float | None = None


class SourceExtended(Event, frozen=True):
    """There are prompts again."""
