"""Commands: the core's decisions. The layer above executes commands in order and reports back with events."""

from __future__ import annotations

import msgspec

from april.core.batch import Batch
from april.core.types import Attempt, AttemptFailure, DropReason, GenerateCall, Group, OnWeightUpdate, Sample, Timer
from april.core.versions import PolicyVersion


class Command(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """The base of all commands."""


class DrawPrompts(Command, frozen=True):
    """Take up to ``count`` prompts from the source; answer with PromptsDrawn."""

    count: int


class StartSample(Command, frozen=True):
    """Run the rollout function of this sample."""

    sample: Sample


class Submit(Command, frozen=True):
    """Send this attempt to its engine."""

    attempt: Attempt


class Abort(Command, frozen=True):
    """Ask an engine to end these attempts; ``everything``: they are all it has."""

    engine: str
    attempt_ids: tuple[str, ...]
    everything: bool


class CallCompleted(Command, frozen=True):
    """A generate call is complete and has its ``result``. Wake its rollout function."""

    call: GenerateCall


class ScoreSample(Command, frozen=True):
    """Compute the reward of one sample; answer with Scored or SampleFailed."""

    sample: Sample


class ScoreGroup(Command, frozen=True):
    """All samples of a group have returned: compute its rewards in one call; answer with Scored or SampleFailed."""

    group: Group


class JudgeGroup(Command, frozen=True):
    """The quorum of a group is finished: ask the filter about ``group.first``; answer with GroupJudged and the same
    ``judgement``."""

    group: Group
    judgement: int


class CancelSample(Command, frozen=True):
    """The sample was given up: end its rollout or reward function, if there is one still."""

    sample: Sample


class ReportDrop(Command, frozen=True):
    """A group was given up; for whoever watches."""

    group: Group
    reason: DropReason
    why: str


class StartTimer(Command, frozen=True):
    """Answer with TimerFired(timer) after ``seconds``; ``why`` is for whoever watches, if it is not empty."""

    timer: Timer
    seconds: float
    why: str = ""


class Fence(Command, frozen=True):
    """Close the streams of attempts that did not end in time; answer each with AttemptEnded, ``fenced``."""

    engine: str
    attempt_ids: tuple[str, ...]


class ProbeEngine(Command, frozen=True):
    """Ask an engine for its health once; answer with EngineProbed and the same ``probe``.

    A host that looks after its engines itself answers with EngineReady, EngineStale or EngineFailed.
    """

    engine: str
    probe: int


class PauseEngine(Command, frozen=True):
    """Close the engine's admission; answer with EngineCallEnded, as UNREACHABLE after ``within_s``.

    ``in_flight``: what becomes of its requests; with KEEP the answer names those that have no token.
    A call of an engine that still runs when another one is asked for is cancelled before that one begins.
    """

    engine: str
    call: int
    within_s: float
    in_flight: OnWeightUpdate = OnWeightUpdate.RESUBMIT


class LoadEngine(Command, frozen=True, kw_only=True):
    """The engine's weights are ``version`` from now on, loaded from ``path`` if there is one; as in PauseEngine.

    The directory must hold one of ``contents`` then, if there are any, and what it holds must not change meanwhile.
    """

    engine: str
    call: int
    within_s: float
    version: PolicyVersion
    path: str | None
    contents: tuple[str, ...] = ()
    base: PolicyVersion | None = None
    """The version whose whole weights the engine must have below an adapter; None: these are whole ones."""


class ResumeEngine(Command, frozen=True):
    """Open the engine's admission; as in PauseEngine."""

    engine: str
    call: int
    within_s: float


class HandOver(Command, frozen=True):
    """These engines are paused: the trainer hands its weights over now; answer with HandedOver."""

    update: int
    engines: tuple[str, ...] = ()


class Restore(Command, frozen=True):
    """The engines have the weights of a saved state: put it into this core; answer with Restored."""

    update: int


class UpdateEnded(Command, frozen=True):
    """A weight update is over, and the policy is ``version``.

    ``failed``: the call of an engine (0: the transfer) whose error is the update's; None: there is none. ``why``: what
    is wrong if that call itself has raised nothing.
    """

    update: int
    version: PolicyVersion
    failed: int | None = None
    why: str = ""


class Warn(Command, frozen=True):
    """Something that people should know."""

    message: str


class Deliver(Command, frozen=True):
    """The step is complete: hand this batch to the trainer."""

    batch: Batch


class EndOfData(Command, frozen=True):
    """The source has ended; ``kept`` complete groups, or with a quorum samples, wait for more."""

    kept: int = 0


class EvaluationDone(Command, frozen=True):
    """All groups of an evaluation are finished and scored."""

    evaluation: int
    groups: tuple[Group, ...]


class EvaluationFailed(Command, frozen=True):
    """An evaluation cannot be finished, or was cancelled; nothing of it is at an engine any more.

    ``kind``: how the request broke off that is to blame; None: a function of the user's is.
    """

    evaluation: int
    error: str
    kind: AttemptFailure | None


class Paused(Command, frozen=True):
    """Nothing is in flight any more; nothing starts before Resumed."""


class Fail(Command, frozen=True):
    """Going on makes no sense; tell the trainer why.

    ``weights``: those of the engines are to blame, and only a weight update helps.
    """

    error: str
    weights: bool = False
