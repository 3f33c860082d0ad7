"""What can happen. Events go into :meth:`april.core.state.RolloutCore.handle`; nothing else changes its state."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Self

from april.core.sampling import SamplingParams
from april.core.settings import EngineLimits
from april.core.tape import NOTHING_CAME, AttemptCounts, Int32
from april.core.types import (
    Attempt,
    AttemptFailure,
    DropReason,
    EngineFinish,
    Message,
    Prompt,
    Refill,
    SampleId,
    Timer,
)
from april.core.types import (
    EvaluationRequested as EvaluationRequested,
)
from april.core.versions import PolicyVersion


class StepRequested(Message, frozen=True):
    """The trainer wants a batch."""


class PromptsDrawn(Message, frozen=True):
    """Answer to DrawPrompts. ``exhausted``: the source has ended; ``error``: the next prompt is unusable."""

    prompts: Sequence[Prompt]
    exhausted: bool
    error: str | None = None


class CallMade(Message, frozen=True):
    """A rollout function called ``llm.generate``. ``token_ids``: the conversation it wants continued (None: as is)."""

    sample: SampleId
    sampling: SamplingParams
    token_ids: Int32 | None = None


class StopFound(Message, frozen=True):
    """An attempt that goes on has completed a stop string: its counts will say so, whatever ends it now."""

    attempt_id: str


class AttemptStalled(Message, frozen=True):
    """The engine has sent no token for an attempt for too long."""

    attempt_id: str
    seconds: float = 0.0


class AttemptEnded(Message, frozen=True):
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


class AttemptFailed(Message, frozen=True, kw_only=True):
    """An attempt broke off. ``rejected`` tokens came and are not in its counts: corrupt ones, or of no known weights.

    ``busy_s``: how long a busy engine asks to wait (0: it does not say).
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


class SampleReturned(Message, frozen=True):
    """A rollout function returned."""

    sample: SampleId


class TokensUnused(Message, frozen=True):
    """So many tokens came that belong to no attempt's tape: they are dropped for this reason."""

    count: int
    reason: DropReason


class SampleFailed(Message, frozen=True):
    """A rollout or reward function raised, or returned what cannot be.

    ``kind``: what was raised in which line, if another try would not mend it.
    """

    sample: SampleId
    error: str
    kind: str = ""


class FunctionsLost(Message, frozen=True):
    """The rollout and reward functions of these groups died with their host, and nothing is heard of them any more.

    They begin again elsewhere: StartSample follows, and what their calls had been answered comes from the tape; those
    of evaluations begin again from nothing.

    ``died``: nobody wanted the end of that host, and what ran there may be why.
    """

    groups: Sequence[int]
    died: bool = False


class Scored(Message, frozen=True):
    """Rewards of the named samples of one group."""

    group: int
    rewards: Sequence[tuple[int, float]]
    """(sample index, reward); they count rounded to float32, as batches hold them."""


class GroupJudged(Message, frozen=True, kw_only=True):
    """The filter's verdict on a scored group; ``judgement`` as in JudgeGroup. ``error``: it has none.

    ``kind``: as in SampleFailed.
    """

    group: int
    judgement: int
    keep: bool
    error: str | None = None
    kind: str = ""


class TimerFired(Message, frozen=True):
    """A StartTimer has run out."""

    timer: Timer


class PauseRequested(Message, frozen=True):
    """Stop all generation, as weights change; evaluations that have begun end first."""


class Resumed(Message, frozen=True):
    """Generation may go on."""


class UpdateRequested(Message, frozen=True, kw_only=True):
    """The trainer has new weights for the engines; UpdateEnded says what came of it."""

    update: int
    """Unique, from 1."""
    version: PolicyVersion | None = None
    """None: the next one."""
    path: str | None = None
    """Where the engines load them from; None: the trainer hands them over, or they are in place."""
    content: str = ""
    """Stands for what is in that directory; empty: it cannot be read where the update was asked for."""
    transfers: bool = False
    """The trainer hands them over when HandOver says that the engines are paused."""
    restores: bool = False
    """They are those of a saved state; whoever asks holds a pause (PauseRequested)."""
    trained: int | None = None
    """As in WeightsUpdated."""


class UpdateCancelled(Message, frozen=True):
    """Nobody waits for an update any more: it does not happen, unless engines are loading already.

    Of a transfer that has begun HandedOver tells the end.
    """

    update: int


class HandedOver(Message, frozen=True):
    """The trainer has handed its weights over, or (``error``) has broken off in the middle."""

    update: int
    error: str | None = None


class Restored(Message, frozen=True):
    """A saved state is in the core."""

    update: int


class CallResult(StrEnum):
    """How a call of an engine ended."""

    DONE = "done"
    REFUSED = "refused"
    """It says what is wrong."""
    BUSY = "busy"
    """It takes no calls for now; nothing has changed."""
    OTHER_CONTENT = "other content"
    """It was given nothing, for the weights of the version are gone: the directory holds others, or the server that had
    them was started anew."""
    UNREACHABLE = "unreachable"
    """There was no answer, or none in time."""


class EngineCallEnded(Message, frozen=True):
    """Answer to PauseEngine, LoadEngine and ResumeEngine, with their ``call``."""

    engine: str
    call: int
    result: CallResult
    error: str = ""
    content: str = ""
    """Stands for what the directory held that it has loaded; empty: there was none, or it cannot be read there."""


class EngineProbed(Message, frozen=True, kw_only=True):
    """Answer to ProbeEngine, with its ``probe``."""

    engine: str
    probe: int
    answered: bool
    ok: bool = False
    """It is well."""
    current: bool = False
    """It has the weights that it was given last."""
    detail: str = ""
    load: LoadReported | None = None


class WeightsWritten(Message, frozen=True):
    """Weights were written while an engine generated from them, outside of any update."""

    error: str


class EnginesAsked(Message, frozen=True):
    """Somebody wants to know now whether the engines have their weights (an evaluation)."""


class WeightsUpdated(Message, frozen=True):
    """The policy is now ``version``, and the named engines (None: all) confirmed it; they update themselves.

    ``trained``: the last batch that these weights were trained on; it and those before it are committed. None: no batch
    that is out.
    """

    version: PolicyVersion
    engines: Sequence[str] | None = None
    trained: int | None = None


class EngineReady(Message, frozen=True):
    """A quarantined engine is well again; ``version``: it was given these weights (None: it has those it had)."""

    engine: str
    version: PolicyVersion | None = None


class EngineStale(Message, frozen=True):
    """An engine does not have the weights that it was given: its server was started anew."""

    engine: str


class EngineFailed(Message, frozen=True):
    """An engine failed outside of any attempt."""

    engine: str


class EnginesJoined(Message, frozen=True):
    """A host brings engines, for the first time or anew, of which ``EngineTable.unfit`` has said that they can join.

    One that comes anew has nothing in flight: what had been has failed. Whatever else it was asked for before is void.
    """

    engines: Sequence[EngineLimits]


class EnginesLeft(Message, frozen=True):
    """A host has taken its engines away for good; they have nothing in flight."""

    names: Sequence[str]


class LoadReported(Message, frozen=True, kw_only=True):
    """What an engine says of its load: requests decoded and queued, share of key-value memory in use, preemptions."""

    engine: str
    running: int
    waiting: int
    kv_usage: float
    preemptions: int


class EvaluationCancelled(Message, frozen=True):
    """Nobody waits for it any more; its requests are ended, and EvaluationFailed follows."""

    evaluation: int


class BatchCommitted(Message, frozen=True):
    """The trainer is done with this batch, and no weight update of its own follows."""

    batch_id: int


class StalenessLowered(Message, frozen=True):
    """What is drawn from now on is trained within ``bound`` weight updates; what was drawn keeps the bound it had."""

    bound: int


class WorkChanged(Message, frozen=True, kw_only=True):
    """How much is to be in work from now on, of what ``CoreSettings.auto`` names; None: as it is."""

    over_sampling_batch_size: int | None = None
    refill: Refill | None = None
    max_in_flight: int | None = None
    group_quorum: float | None = None


class SourceExtended(Message, frozen=True):
    """There are prompts again."""


Event = (
    StepRequested
    | PromptsDrawn
    | CallMade
    | StopFound
    | AttemptStalled
    | AttemptEnded
    | AttemptFailed
    | TokensUnused
    | SampleReturned
    | SampleFailed
    | FunctionsLost
    | Scored
    | GroupJudged
    | TimerFired
    | PauseRequested
    | Resumed
    | UpdateRequested
    | UpdateCancelled
    | HandedOver
    | Restored
    | EngineCallEnded
    | EngineProbed
    | WeightsWritten
    | EnginesAsked
    | WeightsUpdated
    | EngineReady
    | EngineStale
    | EngineFailed
    | EnginesJoined
    | EnginesLeft
    | LoadReported
    | EvaluationRequested
    | EvaluationCancelled
    | BatchCommitted
    | StalenessLowered
    | WorkChanged
    | SourceExtended
)
