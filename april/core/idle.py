"""Why places stand empty: the core's answer, as a fact. How long each reason holds is counted in ``run_times``."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from april.core.types import GenerationMode

if TYPE_CHECKING:
    from april.core.state import RolloutCore


class Idle(StrEnum):
    """What keeps a place empty."""

    UPDATE = "update"
    """A weight update: what was in flight ends, engines pause, load and resume."""
    PAUSE = "pause"
    """Somebody has paused generation, to load a state; or a trainer that changes the weights itself (AReaL)."""
    EVALUATION = "evaluation"
    """It has the place, or training waits for its end."""
    TRAINER = "trainer"
    """No batch is asked for."""
    BOUND = "bound"
    """``max_staleness``: with more work, some could not be trained in time."""
    STOP = "stop"
    """The batch is complete; what else is in flight ends."""
    ENGINES = "engines"
    """Work waits, and no engine takes it: full by its own measure, at rest, or quarantined."""
    FUNCTIONS = "functions"
    """A function has the place and has asked for nothing yet, or nothing is left but functions, to complete a batch."""
    PROMPTS = "prompts"
    """They are being drawn, or have ended."""
    HELD = "held"
    """So much is held already: ``max_held_tokens``, or several times what is wanted in work."""
    OVER_SAMPLING = "over_sampling"
    """N' groups are in work, and the refill mode adds none."""


# names of the module: an enum's member costs 60 ns per use on Python 3.11, and these are used at every event
UPDATE, PAUSE, EVALUATION, TRAINER, BOUND, STOP = (
    Idle.UPDATE, Idle.PAUSE, Idle.EVALUATION, Idle.TRAINER, Idle.BOUND, Idle.STOP,
)  # fmt: skip
ENGINES, FUNCTIONS, PROMPTS, OVER_SAMPLING = Idle.ENGINES, Idle.FUNCTIONS, Idle.PROMPTS, Idle.OVER_SAMPLING
STEPWISE = GenerationMode.STEPWISE


def why_idle(core: RolloutCore) -> Idle:
    """Why a place that nothing has stays empty, between two events."""
    updates, queue = core.updates, core.over_sampler
    evaluates = bool(core.context.evaluations)
    if updates.running or updates.half_updated is not None:
        return UPDATE
    if core.held:
        return PAUSE
    if evaluates and core.settings.generation is STEPWISE:
        return EVALUATION
    step = core.step
    if step is None or core.context.failure is not None:  # a failure is told with the next request
        return TRAINER
    if core.train_first:
        return BOUND
    if step.stopping:
        return STOP
    if queue.waiting:
        return ENGINES
    if queue.asked:
        return PROMPTS
    if not core.attempts and core.monitor.ready < core.buffer.units and not core.monitor.target_reached:
        return FUNCTIONS
    if queue.exhausted:
        return PROMPTS
    return core.buffer.limit if queue.held_back else OVER_SAMPLING
