"""Where the time between two deliveries went: the trainer's, and that of every place.

Invariant: the trainer's seconds add up to ``step_s``, the shares of the places to 1. Whoever drives a core tells the
time; nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
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
        most = core.settings.max_in_flight
        slots = (state.limits.max_in_flight or most for state in core.engines.states.values())
        self.places = min(most, sum(slots))
        """Most samples in flight: ``max_in_flight``, or the engines' slots if they are fewer."""
        self._core = core
        self._began: float | None = None
        """The last delivery, or the first request; None: there was none yet."""
        self._since = 0.0
        self._busy = self._evaluating = self._reserved = self._free = 0
        self._why: Idle = Idle.TRAINER
        self._trainer: TrainerTime = TrainerTime.OTHER
        self._phase = Phase.IDLE
        self._generates = False
        self._clear()

    def _clear(self) -> None:
        self._busy_place_s = self._rollout_s = self._bound_s = 0.0
        self._idle_place_s: dict[Idle, float] = dict.fromkeys(Idle, 0.0)
        self._trainer_s: dict[TrainerTime, float] = dict.fromkeys(TrainerTime, 0.0)
        self._update_s: dict[Phase, float] = dict.fromkeys(UPDATE_PARTS, 0.0)

    def look(self, now_s: float) -> None:
        """Something may have happened: what held until now is counted, and what holds from now on remembered."""
        core = self._core
        if self._began is not None:
            self._count(now_s)
        elif core.wanted:
            self._began = self._since = now_s
        else:
            return
        context, updates = core.context, core.updates
        self._busy, self._evaluating = len(core.attempts), len(context.attempts.of_evaluations)
        free = self.places - self._busy - self._evaluating
        self._reserved = min(len(context.places.reserved), free)
        self._free = free - self._reserved
        if self._free > 0:
            self._why = why_idle(core)
        self._phase = updates.phase
        if updates.running or updates.waits:
            self._trainer = UPDATES
        elif context.evaluations:
            self._trainer = EVALUATES
        elif core.wanted and not core.train_first:
            self._trainer = AHEAD if core.leased else WAITS
        else:
            self._trainer = TRAINS if core.leased else OTHER
        self._generates = core.step is not None

    def _count(self, now_s: float) -> None:
        passed = now_s - self._since
        if passed <= 0.0:
            return
        self._since = now_s
        self._busy_place_s += self._busy * passed
        self._trainer_s[self._trainer] += passed
        if self._trainer is UPDATES:
            self._update_s[self._phase] += passed
        if self._generates:
            self._rollout_s += passed
        if self._free > 0:
            self._idle_place_s[self._why] += self._free * passed
            if self._why is BOUND:
                self._bound_s += passed
        if self._evaluating or self._reserved:
            self._idle_place_s[EVALUATION] += self._evaluating * passed
            self._idle_place_s[FUNCTIONS] += self._reserved * passed

    def delivered(self, now_s: float) -> dict[str, float]:
        """The metrics of the batch that is delivered now; what follows is of the next one."""
        self._count(now_s)
        began = now_s if self._began is None else self._began
        step_s = now_s - began
        most = self.places * step_s
        per_place = 1.0 / most if most > 0 else 0.0
        out = {
            "step_s": step_s,
            **{str(name): seconds for name, seconds in self._trainer_s.items()},
            **dict.fromkeys(UPDATE_PARTS.values(), 0.0),
            "engines_busy": self._busy_place_s * per_place,
            **{f"idle_{cause}": place_s * per_place for cause, place_s in self._idle_place_s.items()},
            "bound_wait_s": self._bound_s,
            "rollout_wall_s": self._rollout_s,
            "bubble": _bubble(self._busy_place_s, self.places * self._rollout_s),
        }
        for phase, seconds in self._update_s.items():
            out[UPDATE_PARTS[phase]] += seconds
        self._began = self._since = now_s
        self._clear()
        return out


def whole(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The times of several steps as if they were one: seconds are summed up, shares weighed by the time."""
    out = dict.fromkeys((*SECONDS, *SHARES, "bubble"), 0.0)
    for step in steps:
        for name in SECONDS:
            out[name] += step[name]
        for name in SHARES:
            out[name] += step[name] * step["step_s"]
    for name in SHARES:
        out[name] = out[name] / out["step_s"] if out["step_s"] else 0.0
    out["bubble"] = _bubble(out["engines_busy"] * out["step_s"], out["rollout_wall_s"])
    return out


def _bubble(busy: float, most: float) -> float:
    return 1.0 - busy / most if most > 0 else 0.0
