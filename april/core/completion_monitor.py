"""Completion monitor: which groups are complete, and when the step has what it needs.

A step delivers N groups. With a staleness bound it must also deliver enough of the older ones: a group's *slack* is the
number of batches after which it is too old, and however the later steps go, all groups can only be delivered in time
if, for every k, at most ``(k + 1) * N`` groups have slack <= k. So a step owes at least ``groups with slack <= k  -
k * N`` of those (earliest deadline first, k = 0 being the last chance).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from april.core.types import Group, GroupState


class CompletionMonitor:
    """Counts towards the target of N groups.

    A group counts when all its samples are finished and scored, and the filter, if there is one, has accepted it.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._ready: deque[Group] = deque()
        self._held_by_slack: list[int] = []
        self._ready_by_slack: list[int] = []
        self._owed: list[int] = []
        """For every k: how many groups with slack <= k this step has to deliver."""

    @property
    def ready(self) -> int:
        """Complete groups that wait for delivery."""
        return len(self._ready)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._ready)

    # ---------------------------------------------------------------- deadlines

    def plan(self, slacks: Iterable[tuple[Group, int]], horizon: int) -> list[Group]:
        """Take down each held group's slack, those below ``horizon`` count; returns the groups that go first."""
        self._held_by_slack = [0] * horizon
        self._ready_by_slack = [0] * horizon
        groups: list[Group] = []
        for group, slack in slacks:
            group.slack = max(0, slack)
            group.urgent = False
            if group.slack < horizon:
                groups.append(group)
                self._held_by_slack[group.slack] += 1
                self._ready_by_slack[group.slack] += group.state is GroupState.READY
        self._count_owed()
        last = max((k for k, owed in enumerate(self._owed) if owed > 0), default=-1)
        urgent = [g for g in groups if g.slack <= last]
        for group in urgent:
            group.urgent = True
        return urgent

    def _count_owed(self) -> None:
        held = accumulate(self._held_by_slack)
        self._owed = [min(count - k * self._target, self._target) for k, count in enumerate(held)]

    @property
    def target_reached(self) -> bool:
        """N groups are complete, and enough of those that would get too old."""
        if len(self._ready) < self._target:
            return False
        ready = 0
        for owed, count in zip(self._owed, self._ready_by_slack, strict=True):
            ready += count
            if ready < owed:
                return False
        return True

    # ---------------------------------------------------------------- groups

    def sample_finished(self, group: Group) -> bool:
        """One more sample of ``group`` is finished; True when it was the last one."""
        group.unfinished -= 1
        return group.unfinished == 0

    def accept(self, group: Group) -> None:
        """A group that is READY counts from now on."""
        self._ready.append(group)
        if group.slack < len(self._ready_by_slack):
            self._ready_by_slack[group.slack] += 1

    def forget(self, group: Group) -> None:
        """The group is given up."""
        self.not_ready(group)
        if group.slack < len(self._held_by_slack):
            self._held_by_slack[group.slack] -= 1
            self._count_owed()

    def not_ready(self, group: Group) -> None:
        """If it counts, it is to count no more."""
        if group.state is GroupState.READY:
            self._ready.remove(group)
            if group.slack < len(self._ready_by_slack):
                self._ready_by_slack[group.slack] -= 1

    def take(self, goes_first: Callable[[Group], int] = lambda group: 0) -> list[Group]:
        """Up to N complete groups: what the step owes, then the least by ``goes_first``, then by completion."""
        chosen: dict[int, Group] = {}
        ready = sorted(self._ready, key=lambda g: (goes_first(g), g.since))
        for k, owed in enumerate(self._owed):
            missing = owed - sum(1 for g in chosen.values() if g.slack <= k)
            for group in ready:
                if missing <= 0:
                    break
                if group.slack <= k and group.id not in chosen:
                    chosen[group.id] = group
                    missing -= 1
        for group in ready:
            if len(chosen) >= self._target:
                break
            chosen[group.id] = group
        self._ready = deque(g for g in self._ready if g.id not in chosen)
        self._held_by_slack, self._ready_by_slack, self._owed = [], [], []
        return sorted(chosen.values(), key=lambda g: g.since)
