"""Rewards on virtual time: each takes as long as the others, and as many as may are computed at once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from april.core.types import SampleId


class SimulatedRewards:
    """Of one run.

    Args:
        seconds: that one takes; 0: it is there at once.
        at_once: most that are computed at the same time; None: all.
        ended: told of each.
    """

    def __init__(self, seconds: float, at_once: int | None, ended: Callable[[SampleId], None]) -> None:
        self._seconds, self._ended = seconds, ended
        self._free = [0.0] * at_once if at_once else None
        """When each of those that compute has nothing more to do."""
        self._running: deque[tuple[float, SampleId]] = deque()

    def begin(self, sample: SampleId, now: float) -> None:
        """Compute that of a sample, after those that came before it."""
        if not self._seconds:
            self._ended(sample)
            return
        if self._free is not None:
            now = max(now, self._free.pop(0))
            self._free.append(now + self._seconds)
        self._running.append((now + self._seconds, sample))

    @property
    def next_s(self) -> float:
        """When the next one is there; inf: there is none."""
        return self._running[0][0] if self._running else math.inf

    def go_on(self) -> None:
        """It is that time."""
        self._ended(self._running.popleft()[1])
