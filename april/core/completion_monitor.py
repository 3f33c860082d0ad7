"""Tracks the finished groups (or samples), and decides when the step has enough of them for a batch.

A *unit* is a group or, with a group quorum below 1, a sample. A step delivers ``target`` units. With a staleness limit
it must also deliver enough older units: a unit's *slack* is the number of batches after which it is too old. All units
can be delivered in time only if, for every k, at most ``(k + 1) * target`` units have slack <= k. So this step owes
(must deliver) at least ``units with slack <= k  -  k * target`` of them. This is the rule "earliest deadline first"; a
unit with slack 0 is too old unless it is in this batch.

``RolloutCore._enough`` decides when a step ends with fewer units, because no prompt can be added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from april.core.types import Group, Sample

Unit = Group | Sample
"""Unit in which batches are counted: a group or, with a group quorum below 1, a sample."""


class CompletionMonitor:
    """Counts the complete units towards the target of a step.

    A unit counts once it is finished and scored and the filter, if there is one, has accepted its group. A sample
    counts only if as many samples of its group as the group quorum requires are finished and scored.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._ready: dict[int, Unit] = {}
        """Complete units by identity, in the order of completion."""
        self._held_by_slack: list[int] = []
        self._ready_by_slack: list[int] = []
        self._owed: list[int] = []
        """Number of units with slack <= k that this step must deliver, for every k."""

    @property
    def ready(self) -> int:
        """Number of complete units that wait for delivery."""
        return len(self._ready)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._ready.values())

    def plan(self, slacks: Iterable[tuple[Unit, int]], horizon: int) -> list[Unit]:
        """Record each held unit's slack, and return the units with priority.

        A slack of ``horizon`` or more sets no deadline.
        """
        self._held_by_slack = [0] * horizon
        self._ready_by_slack = [0] * horizon
        units: list[Unit] = []
        for unit, slack in slacks:
            unit.slack = max(0, slack)
            if unit.slack < horizon:
                units.append(unit)
                self._held_by_slack[unit.slack] += 1
                self._ready_by_slack[unit.slack] += unit.ready
        self._count_owed()
        last = max((k for k, owed in enumerate(self._owed) if owed > 0), default=-1)
        return [unit for unit in units if unit.slack <= last]

    def _count_owed(self) -> None:
        held = accumulate(self._held_by_slack)
        self._owed = [min(count - k * self._target, self._target) for k, count in enumerate(held)]

    @property
    def target_reached(self) -> bool:
        """True if enough units are complete, including enough of the units that would otherwise get too old."""
        if len(self._ready) < self._target:
            return False
        ready = 0
        for owed, count in zip(self._owed, self._ready_by_slack, strict=True):
            ready += count
            if ready < owed:
                return False
        return True

    def accept(self, unit: Unit) -> None:
        """Count a unit that has become complete."""
        self._ready[id(unit)] = unit
        if unit.slack < len(self._ready_by_slack):
            self._ready_by_slack[unit.slack] += 1

    def forget(self, unit: Unit) -> None:
        """Remove a unit that was dropped."""
        self.not_ready(unit)
        if unit.slack < len(self._held_by_slack):
            self._held_by_slack[unit.slack] -= 1
            self._count_owed()

    def not_ready(self, unit: Unit) -> None:
        """Stop counting a unit as complete, if it was counted."""
        if self._ready.pop(id(unit), None) is not None and unit.slack < len(self._ready_by_slack):
            self._ready_by_slack[unit.slack] -= 1

    def take(self, goes_first: Callable[[Unit], int] = lambda unit: 0) -> list[Unit]:
        """Remove and return the units of the next batch, see :meth:`next_units`."""
        chosen = self.next_units(goes_first)
        for unit in chosen:
            del self._ready[id(unit)]
        self._held_by_slack, self._ready_by_slack, self._owed = [], [], []
        return chosen

    def next_units(self, goes_first: Callable[[Unit], int] = lambda unit: 0) -> list[Unit]:
        """Return up to ``target`` complete units: owed ones first, then by ``goes_first`` and completion."""
        chosen: dict[int, Unit] = {}
        ready = sorted(self._ready.values(), key=lambda u: (goes_first(u), u.since))
        for k, owed in enumerate(self._owed):
            missing = owed - sum(1 for u in chosen.values() if u.slack <= k)
            for unit in ready:
                if missing <= 0:
                    break
                if unit.slack <= k and id(unit) not in chosen:
                    chosen[id(unit)] = unit
                    missing -= 1
        for unit in ready:
            if len(chosen) >= self._target:
                break
            chosen[id(unit)] = unit
        return sorted(chosen.values(), key=lambda u: u.since)
