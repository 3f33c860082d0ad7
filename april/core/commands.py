"""What is to be done. The layer above executes commands in order and reports back with events."""

from __future__ import annotations

from dataclasses import dataclass

from april.core.batch import Batch
from april.core.types import Attempt, DropReason, GenerateCall, Group, Sample


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
    """All samples of a group are finished: ask the filter; answer with GroupJudged and the same ``judgement``."""

    group: Group
    judgement: int


@dataclass(frozen=True, slots=True)
class CancelSample:
    """The sample was given up: end its rollout or reward function."""

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

    timer: int
    seconds: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Fence:
    """These attempts did not end in time: close their streams; answer each with AttemptEnded, ``fenced``."""

    engine: str
    attempt_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProbeEngine:
    """The engine is quarantined: probe it until it is well, then report EngineReady."""

    engine: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """The step is complete: hand this batch to the trainer."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class EndOfData:
    """The source has ended, and there is nothing to deliver but ``kept`` complete groups that wait for more."""

    kept: int = 0


@dataclass(frozen=True, slots=True)
class Paused:
    """Nothing is in flight any more; nothing starts before Resumed."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Going on makes no sense; tell the trainer why."""

    error: str


Command = (
    DrawPrompts
    | StartSample
    | Submit
    | Abort
    | CallCompleted
    | ScoreSample
    | ScoreGroup
    | JudgeGroup
    | CancelSample
    | ReportDrop
    | StartTimer
    | Fence
    | ProbeEngine
    | Deliver
    | EndOfData
    | Paused
    | Fail
)
