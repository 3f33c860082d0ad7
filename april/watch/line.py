"""The line that says how a run stands: the same in ``next_batch`` and in ``april watch``."""

from __future__ import annotations

from collections import deque

from april.record.standing import Standing, Waits
from april.server_text import said

WINDOW_S = 10.0
LEAST_WAIT_S = 3.0
"""Of a wait for the same thing, before it is said how long it has lasted."""
_GOES_WITHOUT_SAYING = Waits.RESPONSES


class Line:
    """Takes how a run stands, with the time, and says it on one line; the most important stands first.

    Args:
        window_s: tokens per second are those of so long.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()
        self._latest: Standing | None = None
        self._began: float | None = None
        self._waits_since = 0.0

    def take(self, time_s: float, standing: Standing) -> None:
        """How it stands now; times do not go back."""
        if self._latest is not None and standing.observed < self._latest.observed:
            self._seen.clear()  # another state was loaded
        if self._latest is None or standing.step != self._latest.step:
            self._began = self._waits_since = time_s
        elif standing.waits != self._latest.waits:
            self._waits_since = time_s
        self._waits_since = min(self._waits_since, time_s - standing.waited_s)
        self._latest = standing
        self._seen.append((time_s, standing.observed))
        while len(self._seen) > 2 and time_s - self._seen[1][0] >= self._window_s:
            self._seen.popleft()

    @property
    def tokens_per_s(self) -> float | None:
        """Lately; None: too little was seen."""
        if len(self._seen) < 2 or (passed := self._seen[-1][0] - self._seen[0][0]) <= 0:
            return None
        return (self._seen[-1][1] - self._seen[0][1]) / passed

    def __str__(self) -> str:
        return self.at(self._seen[-1][0]) if self._seen else ""

    def at(self, time_s: float) -> str:
        """The line at a time since which nothing else was seen."""
        now = self._latest
        if now is None or self._began is None:
            return ""
        unit = "groups" if now.whole_groups else "samples"
        parts = [f"step {now.step}", f"{now.ready}/{now.target} {unit}", f"{time_s - self._began:.0f} s"]
        if (speed := self.tokens_per_s) is not None:
            parts.append(f"{short(speed)} tok/s")
        parts.append(f"{now.in_flight} in flight")
        if now.partials:
            parts.append(f"{now.partials} partial, oldest {now.oldest} update{'' if now.oldest == 1 else 's'}")
        if now.waits != _GOES_WITHOUT_SAYING:
            waited = time_s - self._waits_since
            parts.append(f"waits for {said(now.waits, 100)}{f' ({waited:.0f} s)' if waited >= LEAST_WAIT_S else ''}")
        return "  ".join(parts)


def short(number: float) -> str:
    """About so many, in at most five characters."""
    for least, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= least:
            return f"{number / least:.1f}{letter}" if number < 100 * least else f"{number / least:.0f}{letter}"
    return f"{number:.0f}"
