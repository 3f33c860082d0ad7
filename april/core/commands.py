"""What is to be done. The layer above executes commands in order and reports back with events."""

from __future__ import annotations

from dataclasses import dataclass

from april.core.batch import Batch
from april.core.timers import Timer
from april.core.types import Attempt, AttemptFailure, DropReason, GenerateCall, Group, Sample
from april.core.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class DrawPrompts:
    """Take up to ``count`` prompts from the source; answer with PromptsDrawn."""

    count: int


@dataclass(frozen=True, slots=True)
class StartSample:
    """Run the rollout function of this sample."""

    sample: Sample


@dataclass(frozen=True, slots=True)
class Submit:
    """Send this attempt to its engine."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Abort:
    """Ask an engine to end these attempts; ``everything``: they are all it has."""

    engine: str
    attempt_ids: tuple[str, ...]
    everything: bool


@dataclass(frozen=True, slots=True)
class CallCompleted:
    """A generate call is complete and has its ``result``. Wake its rollout function."""

    call: GenerateCall


@dataclass(frozen=True, slots=True)
class ScoreSample:
    """Compute the reward of one sample; answer with Scored or SampleFailed."""

    sample: Sample


@dataclass(frozen=True, slots=True)
class ScoreGroup:
    """All samples of a group have returned: compute its rewards in one call; answer with Scored or SampleFailed."""

    group: Group


@dataclass(frozen=True, slots=True)
class JudgeGroup:
    """The quorum of a group is finished: ask the filter about ``group.first``; answer with GroupJudged and the same
    ``judgement``."""

    group: Group
    judgement: int


@dataclass(frozen=True, slots=True)
class CancelSample:
    """The sample was given up: end its rollout or reward function, if there is one still."""

    sample: Sample


@dataclass(frozen=True, slots=True)
class ReportDrop:
    """A group was given up; for whoever watches."""

    group: Group
    reason: DropReason
    why: str


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Answer with TimerFired(timer) after ``seconds``; ``why`` is for whoever watches, if it is not empty."""

    timer: Timer
    seconds: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Fence:
    """These attempts did not end in time: close their streams; answer each with AttemptEnded, ``fenced``."""

    engine: str
    attempt_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProbeEngine:
    """Ask an engine for its health once; answer with EngineProbed and the same ``probe``.

    A host that looks after its engines itself answers with EngineReady, EngineStale or EngineFailed.
    """

    engine: str
    probe: int


@dataclass(frozen=True, slots=True)
class PauseEngine:
    """Close the engine's admission; answer with EngineCallEnded, as UNREACHABLE after ``within_s``.

    A call of an engine that still runs when another one is asked for is cancelled before that one begins.
    """

    engine: str
    call: int
    within_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEngine:
    """The engine's weights are ``version`` from now on, loaded from ``path`` if there is one; as in PauseEngine.

    The directory must hold one of ``contents`` then, if there are any, and what it holds must not change meanwhile.
    """

    engine: str
    call: int
    within_s: float
    version: PolicyVersion
    path: str | None
    contents: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResumeEngine:
    """Open the engine's admission; as in PauseEngine."""

    engine: str
    call: int
    within_s: float


@dataclass(frozen=True, slots=True)
class HandOver:
    """The engines are paused: the trainer hands its weights over now; answer with HandedOver."""

    update: int


@dataclass(frozen=True, slots=True)
class Restore:
    """The engines have the weights of a saved state: put it into this core; answer with Restored."""

    update: int


@dataclass(frozen=True, slots=True)
class UpdateEnded:
    """A weight update is over, and the policy is ``version``.

    ``failed``: the call of an engine (0: the transfer) whose error is the update's; None: there is none. ``why``: what
    is wrong if that call itself has raised nothing.
    """

    update: int
    version: PolicyVersion
    failed: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Warn:
    """Something that people should know."""

    message: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """The step is complete: hand this batch to the trainer."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class EndOfData:
    """The source has ended; ``kept`` complete groups, or with a quorum samples, wait for more."""

    kept: int = 0


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """All groups of an evaluation are finished and scored."""

    evaluation: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class EvaluationFailed:
    """An evaluation cannot be finished, or was cancelled; nothing of it is at an engine any more.

    ``kind``: how the request broke off that is to blame; None: a function of the user's is.
    """

    evaluation: int
    error: str
    kind: AttemptFailure | None


@dataclass(frozen=True, slots=True)
class Paused:
    """Nothing is in flight any more; nothing starts before Resumed."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Going on makes no sense; tell the trainer why.

    ``weights``: those of the engines are to blame, and only a weight update helps.
    """

    error: str
    weights: bool = False


HostCommand = (
    StartSample
    | Submit
    | Abort
    | CallCompleted
    | ScoreSample
    | ScoreGroup
    | JudgeGroup
    | CancelSample
    | Fence
    | ProbeEngine
    | PauseEngine
    | LoadEngine
    | ResumeEngine
)
"""Carried out where the engines and the functions are; all others where the core is."""

Command = (
    HostCommand
    | DrawPrompts
    | ReportDrop
    | StartTimer
    | HandOver
    | Restore
    | UpdateEnded
    | Warn
    | Deliver
    | EndOfData
    | EvaluationDone
    | EvaluationFailed
    | Paused
    | Fail
)
