"""Detects peers that have been silent for too long."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
BEATS = 4
"""Number of heartbeats within one deadline."""


class Heartbeats(Generic[K]):
    """Detects which peers, each sending a heartbeat every ``interval_s``, have been silent for ``deadline_s``.

    The caller gives the time. While this process itself was stopped, no peer counts as silent.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.interval_s = deadline_s / BEATS
        self.paused = False
        """True if this process itself did not run for a while before the last check."""
        self._heard: dict[K, float] = {}
        self._looked: float | None = None

    def hear(self, whom: K, now: float) -> None:
        """Note that a peer was heard."""
        self._heard[whom] = now

    def forget(self, whom: K) -> None:
        """Expect no more heartbeats from a peer."""
        self._heard.pop(whom, None)

    def silent(self, now: float) -> list[K]:
        """Return the peers whose deadline is over; if this process itself was stopped, all deadlines begin anew."""
        self.paused = self._looked is not None and now - self._looked > self.deadline_s / 2
        self._looked = now
        if self.paused:  # what was said meanwhile is on its way
            self._heard = dict.fromkeys(self._heard, now)
        return [whom for whom, heard in self._heard.items() if now - heard >= self.deadline_s]
