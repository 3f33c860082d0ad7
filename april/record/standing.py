"""The state of a run in a few figures, for people who look at it while it runs, live or out of its record."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from april.core.partial_buffer import Idle
from april.core.run_times import why_idle
from april.core.state import RolloutCore
from april.core.types import SampleState

UNFINISHED = (SampleState.NEW, SampleState.RUNNING)


class Waits(StrEnum):
    """The thing that the next batch waits for."""

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


# names of the module: an enum's member costs 60 ns per use on Python 3.11, and these are used at every event
RESPONSES, ENDS, UPDATE, EVALUATION = Waits.RESPONSES, Waits.ENDS, Waits.UPDATE, Waits.EVALUATION
TRAINER, BOUND = Waits.TRAINER, Waits.BOUND
_INSTEAD = {
    Idle.UPDATE: Waits.UPDATE, Idle.PAUSE: Waits.PAUSE, Idle.EVALUATION: Waits.EVALUATION,
    Idle.TRAINER: Waits.TRAINER, Idle.BOUND: Waits.BOUND, Idle.STOP: Waits.ENDS, Idle.ENGINES: Waits.ENGINES,
    Idle.FUNCTIONS: Waits.FUNCTIONS, Idle.PROMPTS: Waits.PROMPTS,
}  # fmt: skip
"""The wait by the cause of empty places, where nothing is in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A moment of a run.

    Attributes:
        step: number of the next batch.
        ready: groups, or with a group quorum samples, that are complete.
        target: how many a batch has.
        whole_groups: whether they are groups.
        in_flight: requests of training at engines.
        partials: unfinished responses that have tokens of older weights than those now.
        oldest: weight updates between the oldest of these tokens and the training of the next batch; 0 without any.
        observed: response tokens that have come so far.
        waits: the thing that is waited for, as :func:`waits_for` words it.
        engines: requests in flight, by engine.
        waited_s: time for which it has waited for that, at least.
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


def standing_of(core: RolloutCore, waited_s: float = 0.0) -> Standing:
    """Return the state between two events; takes time in proportion to the responses that are held.

    ``waited_s`` is the time for which the same thing is waited for, as far as that is known.
    """
    partials = oldest = 0
    now = core.clock.current
    for sample in core.buffer.samples():
        if sample.state in UNFINISHED and (version := core.buffer.oldest(sample)) is not None and version != now:
            partials += 1
            oldest = max(oldest, core.leases.age(version))
    engines = Counter(dict.fromkeys(core.engines.states, 0))
    engines.update(attempt.engine for attempt in core.attempts.values())
    return Standing(
        step=core.context.batches, ready=core.monitor.ready, target=core.settings.target,
        whole_groups=core.settings.whole_groups, in_flight=len(core.attempts), partials=partials, oldest=oldest,
        observed=core.observed_tokens(), waits=waits_for(core), engines=dict(engines),
        waited_s=waited_s,
    )  # fmt: skip


def waits_for(core: RolloutCore) -> str:
    """Return the thing that the trainer waits for, in words; for a weight update also what that waits for."""
    waits = waits_of(core)
    return f"{waits}: {core.updates.waits_for}" if waits is Waits.UPDATE else waits.value


def waits_of(core: RolloutCore) -> Waits:
    """Return the thing that the trainer waits for."""
    if core.updates.pending:
        return UPDATE
    if core.context.evaluations:
        return EVALUATION
    if not core.wanted:
        return TRAINER
    if core.train_first:
        return BOUND
    if core.step is not None and core.attempts:
        return ENDS if core.step.stopping else RESPONSES
    return _INSTEAD.get(why_idle(core), RESPONSES)
