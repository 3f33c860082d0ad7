"""Defines the commands by which the scheduling core asks the driver for actions, such as sending a request.

The driver executes commands in order. "Answer with X" means that it later passes the event X (``events``) to the core.
"""

from __future__ import annotations

import msgspec

from april.core.batch import Batch
from april.core.types import Attempt, AttemptFailure, DropReason, GenerateCall, Group, OnWeightUpdate, Sample, Timer
from april.core.versions import PolicyVersion


class Command(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """Base class of all commands."""


class DrawPrompts(Command, frozen=True):
    """Take up to ``count`` prompts from the source; answer with PromptsDrawn."""

    count: int


class Continue(Command, frozen=True):
    """Answer with Continued once other tasks of the event loop have run, so that the core can start more work."""


class StartSample(Command, frozen=True):
    """Run the rollout function of this sample."""

    sample: Sample


class Submit(Command, frozen=True):
    """Send this attempt to its engine."""

    attempt: Attempt


class Abort(Command, frozen=True):
    """Ask an engine to end these attempts (requests); ``everything`` means that the engine has no other attempts."""

    engine: str
    attempt_ids: tuple[str, ...]
    everything: bool


class CallCompleted(Command, frozen=True):
    """Return the ``result`` of a completed generate call to its rollout function."""

    call: GenerateCall


class ScoreSample(Command, frozen=True):
    """Compute the reward of one sample; answer with Scored or SampleFailed."""

    sample: Sample


class ScoreGroup(Command, frozen=True):
    """Compute the rewards of a whole group in one call; answer with Scored or SampleFailed."""

    group: Group


class JudgeGroup(Command, frozen=True):
    """Call the user's filter with ``group.first_finishers``; answer with GroupJudged and the same ``judgement``."""

    group: Group
    judgement: int


class CancelSample(Command, frozen=True):
    """Cancel the rollout or reward function of a sample that was dropped or begins again, if it still runs."""

    sample: Sample


class ReportDrop(Command, frozen=True):
    """Report a dropped group to observers and the user."""

    group: Group
    reason: DropReason
    why: str


class StartTimer(Command, frozen=True):
    """Answer with TimerFired(timer) after ``seconds``; a non-empty ``why`` is a message for the user."""

    timer: Timer
    seconds: float
    why: str = ""


class Fence(Command, frozen=True):
    """Close the streams of attempts that did not end in time; answer with AttemptEnded(fenced=True) for each."""

    engine: str
    attempt_ids: tuple[str, ...]


class ProbeEngine(Command, frozen=True):
    """Probe an engine's health once; answer with EngineProbed and the same ``probe``."""

    engine: str
    probe: int


class PauseEngine(Command, frozen=True):
    """Pause an engine; answer with EngineCallEnded, with the result UNREACHABLE if it takes over ``within_s`` seconds.

    ``in_flight`` says what happens to the engine's requests; with KEEP the answer lists requests without a token yet.
    If an earlier call to the engine is still running, it is cancelled before this one begins.
    """

    engine: str
    call: int
    within_s: float
    in_flight: OnWeightUpdate = OnWeightUpdate.RESUBMIT


class LoadEngine(Command, frozen=True, kw_only=True):
    """Load the weights of ``version`` from the directory ``path``; answer as for PauseEngine.

    If ``path`` is None, the engine has these weights already and is only told their version.
    If ``contents`` is not empty, the directory must have one of these content hashes before and after the load.
    """

    engine: str
    call: int
    within_s: float
    version: PolicyVersion
    path: str | None
    contents: tuple[str, ...] = ()
    base: PolicyVersion | None = None
    """Version of the full weights that the engine must have if ``path`` holds an adapter for them; None if ``path``
    holds full weights."""


class ResumeEngine(Command, frozen=True):
    """Let a paused engine admit requests again; answer as for PauseEngine."""

    engine: str
    call: int
    within_s: float


class HandOver(Command, frozen=True):
    """Let the trainer send its weights to these paused engines; answer with HandedOver."""

    update: int
    engines: tuple[str, ...] = ()


class Restore(Command, frozen=True):
    """Restore a saved state into this core, now that the engines have the state's weights; answer with Restored."""

    update: int


class UpdateEnded(Command, frozen=True):
    """Report the end of a weight update, after which the policy is ``version``.

    ``failed`` is the number of the engine call whose error failed the update (0 for the trainer's transfer); None if
    the update succeeded or was cancelled. ``why`` is the error text for a failure without an exception.
    """

    update: int
    version: PolicyVersion
    failed: int | None = None
    why: str = ""


class Warn(Command, frozen=True):
    """Log a warning for the user."""

    message: str


class Deliver(Command, frozen=True):
    """Deliver the batch of a completed step to the trainer."""

    batch: Batch


class EndOfData(Command, frozen=True):
    """Tell the trainer that the prompts have ended; ``kept`` complete groups (or samples) wait for more prompts."""

    kept: int = 0


class EvaluationDone(Command, frozen=True):
    """Return the finished and scored groups of an evaluation to its caller."""

    evaluation: int
    groups: tuple[Group, ...]


class EvaluationFailed(Command, frozen=True):
    """Report an evaluation that failed or was cancelled, once none of its requests is at an engine.

    ``kind`` says how the request that caused the failure broke off; None for other causes, such as a user function.
    """

    evaluation: int
    error: str
    kind: AttemptFailure | None


class Paused(Command, frozen=True):
    """Report that generation is paused: nothing is in flight, and nothing starts before the event Resumed."""


class Fail(Command, frozen=True):
    """End the step with an error for the trainer.

    ``weights`` is True if the engines' weights are the cause, so that only a weight update helps.
    """

    error: str
    weights: bool = False
