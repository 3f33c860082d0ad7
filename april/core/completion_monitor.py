"""Tracks the finished groups (or samples), and decides when the step has enough of them for a batch.

A *unit* is a group or, with a group quorum below 1, a sample. A step delivers ``target`` units. A staleness limit gives
units deadlines: a unit with *slack* k must be in this batch or in one of the k batches after it. Those deliver at most
``k * target`` units, so of the n units with slack <= k this step *owes* (must deliver) at least ``n - k * target``, for
every k. This is the scheduling rule "earliest deadline first".

``RolloutCore._enough`` decides when a step ends with fewer units, because no prompts are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from april.core.types import Group, Sample

Unit = Group | Sample
"""Unit in which batches are counted: a group or, with a group quorum below 1, a sample."""


class CompletionMonitor:
    """Counts the complete units (groups or samples) towards the target of a step.

    A group is complete once enough of its samples (its quorum) are finished and scored and the filter, if there is one,
    has accepted it. Where samples are the units, a sample is complete once it is finished and scored in such a group.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._ready: dict[int, Unit] = {}
        """Complete units by ``id()``, in the order of completion."""
        self._held_by_slack: list[int] = []
        self._ready_by_slack: list[int] = []
        self._owed: list[int] = []
        """Number of units with slack <= k that this step must deliver, for every k."""

    @property
    def ready(self) -> int:
        return len(self._ready)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._ready.values())

    def plan(self, slacks: Iterable[tuple[Unit, int]], horizon: int) -> list[Unit]:
        """Record each held unit's slack, and return the units with priority, as the step must deliver some of them.

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
        """Return up to ``target`` complete units: owed units first, then by ``goes_first``, then by completion."""
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
