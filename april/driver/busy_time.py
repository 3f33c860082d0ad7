"""Busy places in flight integrated over the time of a step: the bubble."""

from __future__ import annotations


class BusyTime:
    """``slots`` places; ``change`` on every submission and end; O(1) each."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._in_flight = 0
        self._since = 0.0
        self._busy_s = 0.0
        self._step_start = 0.0

    def change(self, by: int, now_s: float) -> None:
        """One more or one less in flight."""
        self._busy_s += self._in_flight * (now_s - self._since)
        self._since = now_s
        self._in_flight += by

    def step_started(self, now_s: float) -> None:
        """A step begins."""
        self.change(0, now_s)
        self._step_start, self._busy_s = now_s, 0.0

    def step_ended(self, now_s: float) -> dict[str, float]:
        """``rollout_wall_s`` and ``bubble`` (1 - busy / (slots x wall)) of the step."""
        self.change(0, now_s)
        wall = now_s - self._step_start
        return {
            "rollout_wall_s": wall,
            "bubble": 1.0 - self._busy_s / (self._slots * wall) if wall > 0 else 0.0,
        }
