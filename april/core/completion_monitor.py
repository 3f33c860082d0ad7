"""Completion monitor: what is complete, and when the step has what it needs.

It counts *units*: groups, or, with a group quorum below 1, samples. A step delivers so many of them (N groups, or N x n
samples). With a staleness bound it must also deliver enough of the older ones: a unit's *slack* is the number of
batches after which it is too old, and however the later steps go, all units can only be delivered in time if, for
every k, at most ``(k + 1) * target`` of them have slack <= k. So a step owes at least ``units with slack <= k  -
k * target`` of those (earliest deadline first, k = 0 being the last chance).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from april.core.types import Group, Sample

Unit = Group | Sample
"""A unit is what a batch counts."""


class CompletionMonitor:
    """Counts towards the target.

    A unit counts when it is finished and scored (a group: all of it; a sample: with the quorum of its group), and the
    filter, if there is one, has accepted its group.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._ready: dict[int, Unit] = {}
        """Complete units by identity, in the order of completion."""
        self._held_by_slack: list[int] = []
        self._ready_by_slack: list[int] = []
        self._owed: list[int] = []
        """The number of units with slack <= k, for every k, that this step has to deliver."""

    @property
    def ready(self) -> int:
        """Complete units that wait for delivery."""
        return len(self._ready)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._ready.values())

    # ---------------------------------------------------------------- deadlines

    def plan(self, slacks: Iterable[tuple[Unit, int]], horizon: int) -> list[Unit]:
        """Take down each held unit's slack, those below ``horizon`` count; returns what goes first."""
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
        """So many units are complete, and enough of those that would get too old."""
        if len(self._ready) < self._target:
            return False
        ready = 0
        for owed, count in zip(self._owed, self._ready_by_slack, strict=True):
            ready += count
            if ready < owed:
                return False
        return True

    # ---------------------------------------------------------------- units

    def accept(self, unit: Unit) -> None:
        """A unit counts from now on."""
        self._ready[id(unit)] = unit
        if unit.slack < len(self._ready_by_slack):
            self._ready_by_slack[unit.slack] += 1

    def forget(self, unit: Unit) -> None:
        """The unit is given up."""
        self.not_ready(unit)
        if unit.slack < len(self._held_by_slack):
            self._held_by_slack[unit.slack] -= 1
            self._count_owed()

    def not_ready(self, unit: Unit) -> None:
        """If it counts, it is to count no more."""
        if self._ready.pop(id(unit), None) is not None and unit.slack < len(self._ready_by_slack):
            self._ready_by_slack[unit.slack] -= 1

    def take(self, goes_first: Callable[[Unit], int] = lambda unit: 0) -> list[Unit]:
        """Complete units, up to the target: what is owed, then the least by ``goes_first``, then by completion."""
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
        for key in chosen:
            del self._ready[key]
        self._held_by_slack, self._ready_by_slack, self._owed = [], [], []
        return sorted(chosen.values(), key=lambda u: u.since)
