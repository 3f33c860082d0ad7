"""Where the time between two deliveries went: the trainer's, and that of every place.

Invariant: the trainer's seconds add up to ``step_s``, the shares of the places to 1. Whoever drives a core tells the
time; nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from statistics import fmean, median
from typing import TYPE_CHECKING

from april.core.idle import BOUND, EVALUATION, FUNCTIONS, Idle, why_idle
from april.core.weight_updates import Phase

if TYPE_CHECKING:
    from april.core.state import RolloutCore


class TrainerTime(StrEnum):
    """What the trainer does, as far as april sees it; the first of these that holds."""

    UPDATES = "update_s"
    EVALUATES = "evaluation_s"
    WAITS = "trainer_wait_s"
    """A batch is asked for, and it has none to train on."""
    AHEAD = "asked_ahead_s"
    """A batch is asked for, and earlier ones are out: it may train on those."""
    TRAINS = "train_s"
    """A batch is out, and none is asked for, or none may be generated before an update."""
    OTHER = "other_s"


# names of the module: an enum's member costs 60 ns per use on Python 3.11, and these are used at every event
UPDATES, EVALUATES, WAITS = TrainerTime.UPDATES, TrainerTime.EVALUATES, TrainerTime.WAITS
AHEAD, TRAINS, OTHER = TrainerTime.AHEAD, TrainerTime.TRAINS, TrainerTime.OTHER
TRAINER_PARTS = (UPDATES, EVALUATES, TRAINS, OTHER)
"""Time in which the trainer does something else than wait for rollouts."""

UPDATE_PARTS = {
    Phase.IDLE: "update_stop_s",  # it waits for an evaluation
    Phase.STOPPING: "update_stop_s",
    Phase.PAUSING: "update_pause_s",
    Phase.HANDING_OVER: "update_transfer_s",
    Phase.LOADING: "update_load_s",
    Phase.CHECKING: "update_load_s",
    Phase.RESTORING: "update_load_s",
    Phase.RESUMING: "update_resume_s",
}
"""Metric by how far an update is."""
SECONDS = ("step_s", *TrainerTime, *dict.fromkeys(UPDATE_PARTS.values()), "bound_wait_s", "rollout_wall_s")
SHARES = ("engines_busy", *(f"idle_{cause}" for cause in Idle))
"""Of places x ``step_s``."""


class RunTimes:
    """Call :meth:`look` after every event of ``core``, and :meth:`delivered` where its Deliver is carried out.

    Args:
        core: all that happens to it is told, with times that never go back.
    """

    def __init__(self, core: RolloutCore) -> None:
        self._core, self._places = core, core.context.places
        self.places = 0
        """Most samples in flight: ``max_in_flight``, or the engines' slots if they are fewer."""
        self._began: float | None = None
        """The last delivery, or the first request; None: there was none yet."""
        self._since = 0.0
        self._busy = self._evaluating = self._reserved = self._free = 0
        self._why: Idle = Idle.TRAINER
        self._trainer: TrainerTime = TrainerTime.OTHER
        self._phase = Phase.IDLE
        self._generates = False
        self._clear()
        self._engines_changed()

    def _engines_changed(self) -> None:
        """Other engines, or another number of places: what passed before did so with the places there were then."""
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
        # cells, as a dict's lookup by an enum's member costs more than all the rest
        self._idle: dict[Idle, list[float]] = {cause: [0.0, 0.0] for cause in Idle}
        self._doing: dict[TrainerTime, list[float]] = {name: [0.0] for name in TrainerTime}
        self._updating: dict[Phase, list[float]] = {phase: [0.0] for phase in UPDATE_PARTS}
        self._evaluating_cell, self._reserved_cell = self._idle[EVALUATION], self._idle[FUNCTIONS]
        self._enter()

    def _enter(self) -> None:
        """The cells of what holds now."""
        self._idle_cell, self._trainer_cell = self._idle[self._why], self._doing[self._trainer]
        self._update_cell = self._updating[self._phase] if self._trainer is UPDATES else None

    def look(self, now_s: float) -> None:
        """Something may have happened: what held until now is counted, and what holds from now on remembered."""
        core = self._core
        if self._began is not None:
            self._count(now_s)
        elif core.wanted:
            self._began = self._since = now_s
        else:
            return
        if core.engines.turnover != self._turnover or self._places.total != self._most:
            self._engines_changed()
        attempts, updates = core.context.attempts, core.updates
        self._evaluating = min(len(attempts.of_evaluations), self.places)
        self._busy = min(len(core.attempts), self.places - self._evaluating)  # more, where there were more places
        free = self.places - self._busy - self._evaluating
        self._reserved = min(len(self._places.reserved), free) if self._places.reserved else 0
        self._free = free - self._reserved
        why = why_idle(core) if self._free > 0 else self._why
        if updates.pending:
            trainer = UPDATES
        elif core.context.evaluations:
            trainer = EVALUATES
        elif core.wanted and not core.train_first:
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
        """The metrics of the batch that is delivered now; what follows is of the next one."""
        began = self._began
        if began is None:  # there by the first request, out of a saved state
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
    """Seconds that a batch takes the trainer, and how many more it asks for before it is done with one.

    ``steps``: metrics of batches. One that asks ahead is seen to train only where the next batch had to wait for it;
    elsewhere it may have waited itself, and counts as one that takes little time.
    """
    steps = list(steps)
    if not steps:
        return 0.0, 0
    ahead = int(median(step.get("batches_out", 0.0) for step in steps))
    slower = [step for step in steps if step.get(TRAINS, 0.0) > 0.01 * step["step_s"]] if ahead else []
    if 2 * len(slower) > len(steps):
        parts = (*TRAINER_PARTS, AHEAD)
        # some of these have the rest of a batch and nearly all of the next one, which the others lack
        means = (fmean(sum(step.get(part, 0.0) for part in parts) for step in some) for some in (slower, steps))
        return min(means), ahead
    return fmean(sum(step.get(part, 0.0) for part in TRAINER_PARTS) for step in steps), ahead


def whole(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The times of several steps as if they were one: seconds are summed up, shares weighed by the time."""
    steps = list(steps)
    out = dict.fromkeys((*SECONDS, *SHARES, "bubble"), 0.0)
    for step in steps:
        for name in SECONDS:
            out[name] += step[name]
        for name in SHARES:
            out[name] += step[name] * step["step_s"]
    for name in SHARES:
        out[name] = out[name] / out["step_s"] if out["step_s"] else 0.0
    out["loop_blocked_s"] = sum(step.get("loop_blocked_s", 0.0) for step in steps)
    out["bubble"] = _bubble(out["engines_busy"] * out["step_s"], out["rollout_wall_s"])
    return out


def _bubble(busy: float, most: float) -> float:
    return 1.0 - busy / most if most > 0 else 0.0
