"""Measures how the trainer and the engines spend the time between two deliveries.

Invariant: the trainer's seconds add up to ``step_s``, and the shares of the places (slots for requests in flight) add
up to 1. The caller passes the time; nothing here reads a clock. :func:`bottleneck` says whether the trainer or the
engines limited a step, and what to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from statistics import fmean, median

from april.core.partial_buffer import IdleCause
from april.core.rollout_core import RolloutCore
from april.core.settings import CoreSettings
from april.core.types import GenerationMode, Work
from april.core.weight_updates import Phase


class TrainerTime(StrEnum):
    """Activities of the trainer as april sees them; if several apply, the first in this list counts."""

    UPDATES = "update_s"
    EVALUATES = "evaluation_s"
    WAITS = "trainer_wait_s"
    """The trainer asks for a batch and has no other batch to train on."""
    AHEAD = "asked_ahead_s"
    """The trainer asks for a batch while earlier batches are untrained, so it may be training on those batches."""
    TRAINS = "train_s"
    """A delivered batch is untrained, and the trainer does not ask for another (or must update the weights first)."""
    OTHER = "other_s"


# module-level names, as an enum member costs 60 ns per use on Python 3.11 and these are used at every event
UPDATES, EVALUATES, WAITS = TrainerTime.UPDATES, TrainerTime.EVALUATES, TrainerTime.WAITS
AHEAD, TRAINS, OTHER = TrainerTime.AHEAD, TrainerTime.TRAINS, TrainerTime.OTHER
TRAINER_PARTS = (UPDATES, EVALUATES, TRAINS, OTHER)
"""Activities in which the trainer does not wait for rollouts."""

UPDATE_PARTS = {
    Phase.IDLE: "update_stop_s",  # the update waits for an evaluation
    Phase.STOPPING: "update_stop_s",
    Phase.PAUSING: "update_pause_s",
    Phase.RECALLING: "update_pause_s",
    Phase.HANDING_OVER: "update_transfer_s",
    Phase.LOADING: "update_load_s",
    Phase.CHECKING: "update_load_s",
    Phase.RESTORING: "update_load_s",
    Phase.RESUMING: "update_resume_s",
}
"""Metric that counts the time of each phase of a weight update."""
SECONDS = ("step_s", *TrainerTime, *dict.fromkeys(UPDATE_PARTS.values()), "bound_wait_s", "rollout_wall_s")
SHARES = ("engines_busy", *(f"idle_{cause}" for cause in IdleCause))
"""Metrics that are shares of (number of places x ``step_s``)."""


class RunTimes:
    """Computes the time metrics of each batch of a core.

    Call :meth:`update` after the events of each moment, and :meth:`delivered` when a Deliver command is executed, with
    times that never decrease.
    """

    def __init__(self, core: RolloutCore) -> None:
        self._core, self._places = core, core.context.places
        self.places = 0
        """Number of places for samples in flight: ``max_in_flight``, or the engines' slots if they are fewer."""
        self.batches = 0
        """Number of batches delivered."""
        self._began: float | None = None
        """Time of the last delivery, or of the first request for a batch; None before the first request."""
        self._since = 0.0
        self._busy = self._evaluating = self._reserved = self._free = 0
        self._why: IdleCause = IdleCause.TRAINER
        self._trainer: TrainerTime = TrainerTime.OTHER
        self._phase = Phase.IDLE
        self._generates = False
        self._clear()
        self._engines_changed()

    def _engines_changed(self) -> None:
        """Update the number of places after engines or limits changed; earlier time counts with the old number."""
        core, before = self._core, self.places
        most = self._most = self._places.total
        self.places = min(most, sum(s.limits.max_in_flight or most for s in core.engines.states.values()))
        self._turnover = core.engines.turnover
        if self._began is not None:
            self._place_s_before += (before - self.places) * (self._since - self._began)
            self._rollout_place_s_before += (before - self.places) * self._rollout_s

    def _clear(self) -> None:
        self._place_s_before = self._rollout_place_s_before = 0.0
        self._busy_place_s = self._rollout_s = 0.0
        # _count adds to lists that are picked in advance, as a dict lookup by an enum member would cost more than the
        # rest of _count. A list in _idle holds [place-seconds, seconds], the others hold [seconds].
        self._idle: dict[IdleCause, list[float]] = {cause: [0.0, 0.0] for cause in IdleCause}
        self._doing: dict[TrainerTime, list[float]] = {name: [0.0] for name in TrainerTime}
        self._updating: dict[Phase, list[float]] = {phase: [0.0] for phase in UPDATE_PARTS}
        self._evaluating_cell, self._reserved_cell = self._idle[EVALUATION], self._idle[FUNCTIONS]
        self._enter()

    def _enter(self) -> None:
        """Pick the lists in which the time of the present state is counted."""
        self._idle_cell, self._trainer_cell = self._idle[self._why], self._doing[self._trainer]
        self._update_cell = self._updating[self._phase] if self._trainer is UPDATES else None

    def update(self, now_s: float) -> None:
        """Count the time since the last call for the state that was read then; then read the present state."""
        core = self._core
        if self._began is not None:
            self._count(now_s)
        elif core.batch_wanted:
            self._began = self._since = now_s
        else:
            return
        if core.engines.turnover != self._turnover or self._places.total != self._most:
            self._engines_changed()
        attempts, updates = core.context.attempts, core.updates
        self._busy = min(len(core.attempts), self.places)  # more may run after a limit was lowered
        self._evaluating = min(len(attempts.of_evaluations), self.places - self._busy)
        free = self.places - self._busy - self._evaluating
        self._reserved = min(len(self._places.reserved), free) if self._places.reserved else 0
        self._free = free - self._reserved
        why = why_idle(core) if self._free > 0 else self._why
        if updates.pending:
            trainer = UPDATES
        elif core.context.evaluations:
            trainer = EVALUATES
        elif core.batch_wanted and not core.train_first:
            trainer = AHEAD if core.leased else WAITS
        else:
            trainer = TRAINS if core.leased else OTHER
        self._generates = core.step is not None
        if why is not self._why or trainer is not self._trainer or updates.phase is not self._phase:
            self._why, self._trainer, self._phase = why, trainer, updates.phase
            self._enter()

    def _count(self, now_s: float) -> None:
        passed = now_s - self._since
        if passed <= 0.0:
            return
        self._since = now_s
        self._busy_place_s += self._busy * passed
        self._trainer_cell[0] += passed
        if self._generates:
            self._rollout_s += passed
        if self._free > 0:
            cell = self._idle_cell
            cell[0] += self._free * passed
            cell[1] += passed
        if self._update_cell is not None:
            self._update_cell[0] += passed
        if self._evaluating or self._reserved:
            self._evaluating_cell[0] += self._evaluating * passed
            self._reserved_cell[0] += self._reserved * passed

    def delivered(self, now_s: float) -> dict[str, float]:
        """Return the time metrics of the batch that is delivered now, and begin to count for the next batch."""
        self.batches += 1
        began = self._began
        if began is None:  # the first request was answered at once, from a saved state
            began = self._since = now_s
        self._count(now_s)
        step_s = now_s - began
        most = self.places * step_s + self._place_s_before
        per_place = 1.0 / most if most > 0 else 0.0
        out = {
            "step_s": step_s,
            **{str(name): cell[0] for name, cell in self._doing.items()},
            **dict.fromkeys(UPDATE_PARTS.values(), 0.0),
            "engines_busy": self._busy_place_s * per_place,
            **{f"idle_{cause}": cell[0] * per_place for cause, cell in self._idle.items()},
            "bound_wait_s": self._idle[BOUND][1],
            "rollout_wall_s": self._rollout_s,
            "bubble": _bubble(self._busy_place_s, self.places * self._rollout_s + self._rollout_place_s_before),
        }
        for phase, cell in self._updating.items():
            out[UPDATE_PARTS[phase]] += cell[0]
        self._began = self._since = now_s
        self._clear()
        return out


def pace(steps: Iterable[Mapping[str, float]]) -> tuple[float, int]:
    """Estimate the trainer's seconds per batch, and how many batches it asks for ahead.

    ``steps`` are the metrics of batches. The training time of a trainer that asks ahead is visible only in steps where
    the next batch was ready before the trainer was. If most steps are like this, the time asked ahead counts as
    training; otherwise it is not counted, as the trainer may have waited for a batch in that time.
    """
    steps = list(steps)
    if not steps:
        return 0.0, 0
    ahead = int(median(step.get("batches_out", 0.0) for step in steps))
    slower = [step for step in steps if step.get(TRAINS, 0.0) > 0.01 * step["step_s"]] if ahead else []
    if 2 * len(slower) > len(steps):
        parts = (*TRAINER_PARTS, AHEAD)
        # the mean of the slower steps alone is too high if one step contains the training of two batches
        means = (fmean(sum(step.get(part, 0.0) for part in parts) for step in some) for some in (slower, steps))
        return min(means), ahead
    return fmean(sum(step.get(part, 0.0) for part in TRAINER_PARTS) for step in steps), ahead


def whole(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the times of several steps as if they were one: seconds are summed, shares weighted by time."""
    steps = list(steps)
    out = {name: sum((step[name] for step in steps), 0.0) for name in SECONDS}
    total = out["step_s"]
    for name in SHARES:
        out[name] = sum(step[name] * step["step_s"] for step in steps) / total if total else 0.0
    out["loop_blocked_s"] = sum(step.get("loop_blocked_s", 0.0) for step in steps)
    out["bubble"] = _bubble(out["engines_busy"] * out["step_s"], out["rollout_wall_s"])
    return out


def _bubble(busy: float, most: float) -> float:
    return 1.0 - busy / most if most > 0 else 0.0


# module-level names, as an enum member costs 60 ns per use on Python 3.11 and these are used at every event
UPDATE, PAUSE, EVALUATION, TRAINER, BOUND, STOP = (
    IdleCause.UPDATE, IdleCause.PAUSE, IdleCause.EVALUATION, IdleCause.TRAINER, IdleCause.BOUND, IdleCause.STOP,
)  # fmt: skip
ENGINES, FUNCTIONS = IdleCause.ENGINES, IdleCause.FUNCTIONS
PROMPTS, OVER_SAMPLING = IdleCause.PROMPTS, IdleCause.OVER_SAMPLING
STEPWISE = GenerationMode.STEPWISE


def why_idle(core: RolloutCore) -> IdleCause:
    """Return the reason why a place is unused in the present state of the core."""
    updates, queue = core.updates, core.over_sampler
    evaluates = bool(core.context.evaluations)
    if updates.running or updates.half_updated is not None:
        return UPDATE
    if core.pause_held:
        return PAUSE
    if evaluates and core.settings.generation is STEPWISE:
        return EVALUATION
    step = core.step
    if step is None or core.context.failure is not None:  # a failure is reported with the next request
        return TRAINER
    if core.train_first:
        return BOUND
    if step.stopping:
        return STOP
    if queue.waiting:
        return ENGINES
    if queue.requested:
        return PROMPTS
    if not core.attempts and core.monitor.ready < core.buffer.units and not core.monitor.target_reached:
        return FUNCTIONS
    if queue.exhausted:
        return PROMPTS
    return core.buffer.limit_cause if queue.held_back else OVER_SAMPLING


LITTLE = 0.1
"""Share of a step below which waiting is not mentioned."""
TURNS = 0.25
"""Share of a step that each side must wait for the other before the text says that they take turns."""
PARTS = {
    "update_stop_s": "until nothing was in flight",
    "update_pause_s": "to pause the engines",
    "update_transfer_s": "for the transfer",
    "update_load_s": "to load",
    "update_resume_s": "to resume the engines",
}
"""Text for the parts of a weight update, by metric."""


def bottleneck_of(steps: Sequence[Mapping[str, float]], settings: CoreSettings) -> str:
    """Return the bottleneck of several steps as a sentence.

    The first step includes the start-up, so it counts only if there is no other.
    """
    return bottleneck(whole(steps[1:] or steps), settings, first=len(steps) == 1)


def bottleneck(
    times: Mapping[str, float], settings: CoreSettings, blocking: str = "", *, first: bool = False
) -> str:
    """Return a sentence on what a step waited for and what to change; empty if the step took no time.

    ``times`` come from :class:`RunTimes`, or from :func:`whole` for several steps. ``blocking`` names the function that
    blocked the event loop for most of ``loop_blocked_s``. ``first`` is True for the first batch, which includes the
    start-up.
    """
    step = times["step_s"]
    if step <= 0.0:
        return ""
    blocked = times.get("loop_blocked_s", 0.0)
    if blocked >= TURNS * step:
        return (
            f"{blocking or 'a function (its name is in the log)'} is the bottleneck: it blocked april's event loop for "
            f"{_of(min(blocked, step), step)}; make it a plain def, which april runs in a thread, or await whatever it "
            "waits for"
        )
    waited, ahead = times[TrainerTime.WAITS], times[TrainerTime.AHEAD]
    stepwise = settings.generation is GenerationMode.STEPWISE
    if ahead > waited:  # the trainer may train meanwhile, but a short TRAINS shows that no batch had to wait
        starved = times[TrainerTime.TRAINS] < LITTLE * step
    else:  # stepwise, the trainer always waits while the engines work
        starved = waited >= (0.5 if stepwise else LITTLE) * step
    # if updates or evaluations took longer, faster engines would not help
    starved = starved and max(waited, ahead) >= max(times[TrainerTime.UPDATES], times[TrainerTime.EVALUATES])
    turns = times["idle_trainer"] + times["idle_update"]
    if first:
        starved = False
        side = (
            f"start-up: the trainer waited {_of(waited, step)} for the first batch; later batches show what the "
            "bottleneck is"
        )
    elif stepwise and min(waited / step, turns) >= TURNS:
        side = f"trainer and engines take turns: the trainer waited {_of(waited, step)} for rollouts"
    elif not starved:
        side = _trainer_side(times)
    elif ahead > waited:
        side = f"generation is the bottleneck: a batch requested ahead of training was not ready for {_of(ahead, step)}"
    else:
        side = f"generation is the bottleneck: the trainer waited {_of(waited, step)} for rollouts"
    return f"{side}; {_engines(times, settings, starved=starved)}"


def _trainer_side(times: Mapping[str, float]) -> str:
    step = times["step_s"]
    own = (TrainerTime.TRAINS, TrainerTime.UPDATES, TrainerTime.EVALUATES, TrainerTime.OTHER)
    longest = max(own, key=lambda name: times[name])
    took = _of(times[longest], step)
    waited = f"the trainer waited {_seconds(times[TrainerTime.WAITS], step)} s for rollouts"
    if longest is TrainerTime.UPDATES:
        part = max(PARTS, key=lambda name: times[name])
        of_it = f"{_seconds(times[part], step)} s of it {PARTS[part]}"
        return f"the weight update is the bottleneck: it took {took}, {of_it}; {waited}"
    what = {
        TrainerTime.TRAINS: "training is the bottleneck: it took",
        TrainerTime.EVALUATES: "evaluation is the bottleneck: it took",
        TrainerTime.OTHER: "the trainer is the bottleneck: it neither trained nor asked for anything for",
    }[longest]
    return f"{what} {took}; {waited}"


def _engines(times: Mapping[str, float], settings: CoreSettings, *, starved: bool) -> str:
    """Return how busy the engines were and why they were idle, with advice if the trainer ``starved`` for batches."""
    idle = {cause: times[f"idle_{cause}"] for cause in IdleCause}
    total = sum(idle.values())
    cause = max(idle, key=lambda c: idle[c])
    if total < LITTLE:
        busy = f"engines were busy {times['engines_busy']:.0%} of the time"
        return busy + ("; only more or faster engines would help" if starved else "")
    others = "" if idle[cause] > 0.9 * total else f", {idle[cause]:.0%}"
    because, change = _reason(cause, settings)
    if cause is IdleCause.BOUND and not starved:
        change = "" if settings.generation is GenerationMode.STEPWISE else "fewer engines would do"
    said = f"engines stood idle {total:.0%} of the time{others} because {because}"
    return f"{said}; {change}" if change else said


def _reason(cause: IdleCause, s: CoreSettings) -> tuple[str, str]:
    """Return the text for why places were unused, and advice on what to change (may be empty).

    The advice does not name settings that april chooses itself (``auto``).
    """
    limits = {"max_held_tokens": s.max_held_tokens is not None, "max_extras_bytes": bool(s.extras)}
    more = {
        "raise over_sampling_batch_size": Work.OVER_SAMPLING not in s.auto,
        "set refill: sample": Work.REFILL not in s.auto,
    }
    return {
        IdleCause.UPDATE: ("weights were updated", ""),
        IdleCause.PAUSE: ("generation was paused", ""),
        IdleCause.EVALUATION: ("of an evaluation", ""),
        IdleCause.TRAINER: (
            "no batch was asked for",
            "engines with GPUs of their own could continue (generation: continuous)"
            if s.generation is GenerationMode.STEPWISE else "",
        ),
        IdleCause.BOUND: (
            f"max_staleness {s.max_staleness} allows no more work", "raise it or train faster",
        ),
        IdleCause.STOP: ("aborted requests took long to end", ""),
        IdleCause.ENGINES: ("no engine accepted the waiting work", "see engine/NAME/cap and the log"),
        IdleCause.FUNCTIONS: ("only functions ran (rollout, reward, filter)", "make these functions faster"),
        IdleCause.PROMPTS: ("prompts were being drawn or have ended", ""),
        IdleCause.HELD: (
            "the limit of held tokens or extras is reached",
            " or ".join(f"raise {name}" for name, applies in limits.items() if applies),
        ),
        IdleCause.OVER_SAMPLING: (
            "rounds waited for their longest responses", "set partial_rollout: true"
        ) if s.tail_batching else (
            f"only {s.groups_wanted} groups were in progress (refill: {s.refill})",
            " or ".join(words for words, fixed in more.items() if fixed),
        ),
    }[cause]  # fmt: skip


def _of(seconds: float, step: float) -> str:
    return f"{_seconds(seconds, step)} of {_seconds(step, step)} s"


def _seconds(seconds: float, step: float) -> str:
    """Format seconds with a precision that suits the length of the step."""
    return f"{seconds:.{0 if step >= 100 else 1 if step >= 10 else 2 if step >= 1 else 4}f}"
