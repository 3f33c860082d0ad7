"""Deadlines for signs of life. Time is given; own pauses are nobody else's death."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

BEATS = 4
"""Heartbeats within the deadline."""


class Heartbeats(Generic[K]):
    """Deadlines of some others, of whom something is to be heard every ``interval_s`` at least."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.interval_s = deadline_s / BEATS
        self.paused = False
        """True if this process itself did not run for a while before the last look."""
        self._heard: dict[K, float] = {}
        self._looked: float | None = None

    def hear(self, whom: K, now: float) -> None:
        """Note that anything was heard."""
        self._heard[whom] = now

    def forget(self, whom: K) -> None:
        """Expect nothing more."""
        self._heard.pop(whom, None)

    def silent(self, now: float) -> list[K]:
        """Return those whose deadline is over; if this process did not run for a while, they all begin anew."""
        self.paused = self._looked is not None and now - self._looked > self.deadline_s / 2
        self._looked = now
        if self.paused:  # what was said meanwhile is on its way
            self._heard = dict.fromkeys(self._heard, now)
        return [whom for whom, heard in self._heard.items() if now - heard >= self.deadline_s]
