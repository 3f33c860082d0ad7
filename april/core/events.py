"""What can happen. Events go into :meth:`april.core.state.RolloutCore.handle`; nothing else changes its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from april.core.sampling import SamplingParams
from april.core.settings import EngineLimits
from april.core.tape import NOTHING_CAME, AttemptCounts, Int32
from april.core.timers import Timer
from april.core.types import Attempt, AttemptFailure, DropReason, EngineFinish, Prompt, Refill, SampleId
from april.core.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class StepRequested:
    """The trainer wants a batch."""


@dataclass(frozen=True, slots=True)
class PromptsDrawn:
    """Answer to DrawPrompts. ``exhausted``: the source has ended; ``error``: the next prompt is unusable."""

    prompts: Sequence[Prompt]
    exhausted: bool
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CallMade:
    """A rollout function called ``llm.generate``. ``token_ids``: the conversation it wants continued (None: as is)."""

    sample: SampleId
    sampling: SamplingParams
    token_ids: Int32 | None = None


@dataclass(frozen=True, slots=True)
class StopFound:
    """An attempt that goes on has completed a stop string: its counts will say so, whatever ends it now."""

    attempt_id: str


@dataclass(frozen=True, slots=True)
class AttemptStalled:
    """The engine has sent no token for an attempt for too long."""

    attempt_id: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AttemptEnded:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
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


@dataclass(frozen=True, slots=True)
class SampleReturned:
    """A rollout function returned."""

    sample: SampleId


@dataclass(frozen=True, slots=True)
class TokensUnused:
    """So many tokens came that belong to no attempt's tape: they are dropped for this reason."""

    count: int
    reason: DropReason


@dataclass(frozen=True, slots=True)
class SampleFailed:
    """A rollout or reward function raised, or returned what cannot be.

    ``kind``: what was raised in which line, if another try would not mend it.
    """

    sample: SampleId
    error: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class FunctionsLost:
    """The rollout and reward functions of these groups died with their host, and nothing is heard of them any more.

    They begin again elsewhere: StartSample follows, and what their calls had been answered comes from the tape; those
    of evaluations begin again from nothing.

    ``died``: nobody wanted the end of that host, and what ran there may be why.
    """

    groups: Sequence[int]
    died: bool = False


@dataclass(frozen=True, slots=True)
class Scored:
    """Rewards of the named samples of one group."""

    group: int
    rewards: Sequence[tuple[int, float]]
    """(sample index, reward); they count rounded to float32, as batches hold them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJudged:
    """The filter's verdict on a scored group; ``judgement`` as in JudgeGroup. ``error``: it has none.

    ``kind``: as in SampleFailed.
    """

    group: int
    judgement: int
    keep: bool
    error: str | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A StartTimer has run out."""

    timer: Timer


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """Stop all generation, as weights change; evaluations that have begun end first."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Generation may go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRequested:
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


@dataclass(frozen=True, slots=True)
class UpdateCancelled:
    """Nobody waits for an update any more: it does not happen, unless engines are loading already.

    Of a transfer that has begun HandedOver tells the end.
    """

    update: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The trainer has handed its weights over, or (``error``) has broken off in the middle."""

    update: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Restored:
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


@dataclass(frozen=True, slots=True)
class EngineCallEnded:
    """Answer to PauseEngine, LoadEngine and ResumeEngine, with their ``call``."""

    engine: str
    call: int
    result: CallResult
    error: str = ""
    content: str = ""
    """Stands for what the directory held that it has loaded; empty: there was none, or it cannot be read there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProbed:
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


@dataclass(frozen=True, slots=True)
class WeightsWritten:
    """Weights were written while an engine generated from them, outside of any update."""

    error: str


@dataclass(frozen=True, slots=True)
class EnginesAsked:
    """Somebody wants to know now whether the engines have their weights (an evaluation)."""


@dataclass(frozen=True, slots=True)
class WeightsUpdated:
    """The policy is now ``version``, and the named engines (None: all) confirmed it; they update themselves.

    ``trained``: the last batch that these weights were trained on; it and those before it are committed. None: no batch
    that is out.
    """

    version: PolicyVersion
    engines: Sequence[str] | None = None
    trained: int | None = None


@dataclass(frozen=True, slots=True)
class EngineReady:
    """A quarantined engine is well again; ``version``: it was given these weights (None: it has those it had)."""

    engine: str
    version: PolicyVersion | None = None


@dataclass(frozen=True, slots=True)
class EngineStale:
    """An engine does not have the weights that it was given: its server was started anew."""

    engine: str


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """An engine failed outside of any attempt."""

    engine: str


@dataclass(frozen=True, slots=True)
class EnginesJoined:
    """A host brings engines, for the first time or anew, of which ``EngineTable.unfit`` has said that they can join.

    One that comes anew has nothing in flight: what had been has failed. Whatever else it was asked for before is void.
    """

    engines: Sequence[EngineLimits]


@dataclass(frozen=True, slots=True)
class EnginesLeft:
    """A host has taken its engines away for good; they have nothing in flight."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReported:
    """What an engine says of its load: requests decoded and queued, share of key-value memory in use, preemptions."""

    engine: str
    running: int
    waiting: int
    kv_usage: float
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequested:
    """Answer these prompts under the present weights; EvaluationDone or EvaluationFailed ends it.

    ``evaluation``: its number; ``functions_at_once``: most of its rollout functions that run at a time (None: any).
    """

    evaluation: int
    prompts: Sequence[Prompt]
    n_samples: int
    sampling: SamplingParams
    seed: int
    functions_at_once: int | None = None


@dataclass(frozen=True, slots=True)
class EvaluationCancelled:
    """Nobody waits for it any more; its requests are ended, and EvaluationFailed follows."""

    evaluation: int


@dataclass(frozen=True, slots=True)
class BatchCommitted:
    """The trainer is done with this batch, and no weight update of its own follows."""

    batch_id: int


@dataclass(frozen=True, slots=True)
class StalenessLowered:
    """What is drawn from now on is trained within ``bound`` weight updates; what was drawn keeps the bound it had."""

    bound: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkChanged:
    """How much is to be in work from now on, of what ``CoreSettings.auto`` names; None: as it is."""

    over_sampling_batch_size: int | None = None
    refill: Refill | None = None
    max_in_flight: int | None = None
    group_quorum: float | None = None


@dataclass(frozen=True, slots=True)
class SourceExtended:
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
