"""How many requests an engine takes at the same time: its own limit, and what its memory holds as seen while it runs.

An engine whose key-value memory is too small for its requests puts some of them back and prefills them again later,
which costs more than to wait. It says so: preemptions grow, or requests wait while the memory is full. Then the cap
goes down to what it really held; it goes up again by an eighth per report while there is room. One that refuses
requests gets a cap of what it took, which goes up by an eighth as well whenever a cap-full of them has ended.
"""

from __future__ import annotations

FULL = 0.95
"""Share of the key-value memory from which on waiting requests wait for memory."""
ROOM = 0.85
"""Share below which there is room for more."""
LOSS_PER_BURST = 4
"""A burst of refusals leaves at least this part of what was tried: an engine that refuses everything has not said how
much it holds."""


class AdmissionCap:
    """The cap of one engine; ``ceiling`` is its configured or declared limit, None: there is none."""

    __slots__ = ("_by_refusal", "_ended", "_held", "_least", "_measured", "_preemptions", "ceiling", "value")

    def __init__(self, ceiling: int | None) -> None:
        self.ceiling = ceiling
        self.value = ceiling
        """Most requests at the same time; None: any number."""
        self._measured: int | None = None
        self._preemptions: int | None = None
        self._held = 0
        """Requests of april that it ran at the last report."""
        self._by_refusal = False
        """What was measured is what it took when it refused more."""
        self._ended = 0
        """Requests that ended under such a cap since it changed."""
        self._least = 1
        """Where the present burst of refusals ends."""

    @property
    def measured(self) -> int | None:
        """What was found to be enough, at least 1; None: nothing speaks against the ceiling."""
        return self._measured

    @measured.setter
    def measured(self, measured: int | None) -> None:
        self._measured = measured
        self.value = min((most for most in (measured, self.ceiling) if most is not None), default=None)

    def admits(self, in_flight: int) -> bool:
        """Whether one more may go."""
        return self.value is None or in_flight < self.value

    def report(self, in_flight: int, running: int, waiting: int, kv_usage: float, preemptions: int) -> bool:
        """Take what the engine says of itself; True when the cap went down."""
        before, self._preemptions = self._preemptions, preemptions
        recently, self._held = self._held, min(in_flight, running)
        if not self._held:
            return False  # what was put back before it became idle says nothing of what it holds
        preempted = before is not None and preemptions > before
        if preempted or (waiting > 0 and kv_usage >= FULL):
            held = self._held
            if preempted and in_flight < recently:
                held = max(held, recently)  # it put back some of those that ran then, not of the few that are left
            # a sixteenth less than what it held: responses grow while they are decoded
            lower = max(1, held - max(1, held // 16))
            if self.measured is None or lower < self.measured:
                self.measured, self._by_refusal = lower, False
                return True
            return False
        if self.measured is not None and waiting == 0 and kv_usage < ROOM and in_flight >= self.measured:
            self._raise(self.measured)
        return False

    def refused(self, in_flight: int, *, again: bool = False) -> None:
        """The engine took no more than ``in_flight``; ``again``: in the same burst of refusals as before."""
        if not again:
            self._least = max(1, (in_flight + 1) // LOSS_PER_BURST)
        took = max(self._least, in_flight)
        self.measured = took if self.measured is None else min(took, self.measured)
        self._by_refusal, self._ended = True, 0

    def request_ended(self, in_flight: int) -> bool:
        """One request ended in order; an engine that refused more is tried with more after a cap-full: True then."""
        if self._by_refusal and self.measured is not None and in_flight + 1 >= self.measured:
            self._ended += 1
            if self._ended >= self.measured:
                self._raise(self.measured)
                return True
        return False

    def _raise(self, measured: int) -> None:
        self._ended = 0
        self.measured = measured + max(1, measured // 8)
        if self.ceiling is not None and self.measured >= self.ceiling:
            self.measured, self._by_refusal = None, False
