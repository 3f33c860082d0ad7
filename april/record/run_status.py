"""Summarises the state of a run in a few figures, for people who watch it live or through its record."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from april.core.partial_buffer import IdleCause
from april.core.rollout_core import RolloutCore
from april.core.run_times import why_idle
from april.core.types import SampleState

UNFINISHED = (SampleState.NEW, SampleState.RUNNING)


class WaitReason(StrEnum):
    """Reasons why the next batch is not ready yet."""

    RESPONSES = "responses"
    ENDS = "requests to end"
    UPDATE = "a weight update"
    PAUSE = "the end of a pause"
    EVALUATION = "an evaluation"
    TRAINER = "the trainer"
    BOUND = "training: max_staleness"
    ENGINES = "an engine"
    FUNCTIONS = "functions and rewards"
    PROMPTS = "prompts"


# module-level names, as these are used at every event: looking up an enum member costs 60 ns on Python 3.11
RESPONSES, ENDS, UPDATE, EVALUATION = WaitReason.RESPONSES, WaitReason.ENDS, WaitReason.UPDATE, WaitReason.EVALUATION
TRAINER, BOUND = WaitReason.TRAINER, WaitReason.BOUND
_REASON_WHILE_IDLE = {
    IdleCause.UPDATE: WaitReason.UPDATE, IdleCause.PAUSE: WaitReason.PAUSE, IdleCause.EVALUATION: WaitReason.EVALUATION,
    IdleCause.TRAINER: WaitReason.TRAINER, IdleCause.BOUND: WaitReason.BOUND, IdleCause.STOP: WaitReason.ENDS,
    IdleCause.ENGINES: WaitReason.ENGINES,
    IdleCause.FUNCTIONS: WaitReason.FUNCTIONS, IdleCause.PROMPTS: WaitReason.PROMPTS,
}  # fmt: skip
"""Reason for the wait while no request is in flight, indexed by the cause that keeps the engines idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """State of a run at one moment.

    Attributes:
        step: number of the next batch.
        ready: number of complete groups for the next batch; with a group quorum below 1, of complete samples.
        target: number of groups or samples that a batch needs.
        whole_groups: whether ``ready`` and ``target`` count groups.
        in_flight: number of training requests at engines.
        partials: number of unfinished responses with tokens from older weights than the current ones.
        oldest: number of weight updates between the oldest of these tokens and the training of the next batch; 0 if
            there are no such tokens.
        observed: number of response tokens received so far.
        waits: reason for the wait, as :func:`wait_text` returns it.
        engines: number of requests in flight, by engine.
        waited_s: seconds that the trainer has waited for this reason, as far as known; the wait may be longer.
    """

    step: int
    ready: int
    target: int
    whole_groups: bool
    in_flight: int
    partials: int
    oldest: int
    observed: int
    waits: str
    engines: dict[str, int]
    waited_s: float = 0.0


def run_status(core: RolloutCore, waited_s: float = 0.0) -> RunStatus:
    """Return the state of a core that handles no event now. Takes time proportional to the number of held responses.

    ``waited_s`` is the known length of the current wait in seconds.
    """
    partials = oldest = 0
    now = core.clock.current
    for sample in core.buffer.samples():
        if sample.state in UNFINISHED and (version := core.buffer.oldest(sample)) is not None and version != now:
            partials += 1
            oldest = max(oldest, core.leases.age(version))
    engines = Counter(dict.fromkeys(core.engines.states, 0))
    engines.update(attempt.engine for attempt in core.attempts.values())
    return RunStatus(
        step=core.context.batches, ready=core.monitor.ready, target=core.settings.target,
        whole_groups=core.settings.whole_groups, in_flight=len(core.attempts), partials=partials, oldest=oldest,
        observed=core.observed_tokens(), waits=wait_text(core), engines=dict(engines),
        waited_s=waited_s,
    )  # fmt: skip


def wait_text(core: RolloutCore) -> str:
    """Return a text that says what the trainer waits for; for a weight update, also what the update waits for."""
    waits = wait_reason(core)
    return f"{waits}: {core.updates.waits_for}" if waits is WaitReason.UPDATE else waits.value


def wait_reason(core: RolloutCore) -> WaitReason:
    """Return the reason why the trainer waits."""
    if core.updates.pending:
        return UPDATE
    if core.context.evaluations:
        return EVALUATION
    if not core.batch_wanted:
        return TRAINER
    if core.train_first:
        return BOUND
    if core.step is not None and core.attempts:
        return ENDS if core.step.stopping else RESPONSES
    return _REASON_WHILE_IDLE.get(why_idle(core), RESPONSES)
