"""How many requests an engine takes at the same time: its own limit, and what its memory holds as seen while it runs.

An engine whose key-value memory is too small for its requests puts some of them back and prefills them again later,
which costs more than to wait. It says so: preemptions grow, or requests wait while the memory is full. Then the cap
goes down to what it really held; it goes up again by an eighth per report while there is room.
"""

from __future__ import annotations

FULL = 0.95
"""Share of the key-value memory from which on waiting requests wait for memory."""
ROOM = 0.85
"""Share below which there is room for more."""


class AdmissionCap:
    """The cap of one engine; ``ceiling`` is its configured or declared limit, None: there is none."""

    __slots__ = ("_preemptions", "ceiling", "measured")

    def __init__(self, ceiling: int | None) -> None:
        self.ceiling = ceiling
        self.measured: int | None = None
        """What was found to be enough, at least 1; None: nothing speaks against the ceiling."""
        self._preemptions: int | None = None

    @property
    def value(self) -> int | None:
        """Most requests at the same time; None: any number."""
        if self.measured is None or self.ceiling is None:
            return self.ceiling if self.measured is None else self.measured
        return min(self.measured, self.ceiling)

    def admits(self, in_flight: int) -> bool:
        """Whether one more may go."""
        cap = self.value
        return cap is None or in_flight < cap

    def report(self, in_flight: int, running: int, waiting: int, kv_usage: float, preemptions: int) -> bool:
        """Take what the engine says of itself; True when the cap went down."""
        before, self._preemptions = self._preemptions, preemptions
        preempted = before is not None and preemptions > before
        if preempted or (waiting > 0 and kv_usage >= FULL):
            held = min(in_flight, running)
            # a sixteenth less than what it held: responses grow while they are decoded
            lower = max(1, held - max(1, held // 16))
            if self.measured is None or lower < self.measured:
                self.measured = lower
                return True
            return False
        if self.measured is not None and waiting == 0 and kv_usage < ROOM and in_flight >= self.measured:
            self._raise(max(1, self.measured // 8), in_flight)
        return False

    def refused(self, in_flight: int) -> None:
        """The engine took no more than ``in_flight``."""
        self.measured = max(1, in_flight if self.measured is None else min(in_flight, self.measured))

    def request_ended(self, in_flight: int) -> None:
        """One request ended in order; an engine that says nothing of its memory is tried with one more."""
        if self._preemptions is None and self.measured is not None and in_flight + 1 >= self.measured:
            self._raise(1, in_flight)

    def _raise(self, by: int, in_flight: int) -> None:
        assert self.measured is not None
        self.measured += by
        if self.ceiling is not None and self.measured >= self.ceiling:
            self.measured = None
