"""How long a function may take or an engine be silent: one limit for all, so the first to begin is the next to be late.

Invariant: starting and stopping costs the same however many run; there is one timer, for the oldest.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol


class Timed(Protocol):
    """Something that can be late."""

    def late(self) -> float | None:
        """Its time is over; called on the loop. Returns the seconds that it has left after all (None: it was late)."""


class TimeLimits:
    """Runs ``late`` of everything that was started and not stopped within ``seconds`` (None: never).

    ``early_s``: where it is less, ``late`` is run then for the first time, and may return what is left.
    """

    def __init__(self, seconds: float | None, early_s: float | None = None) -> None:
        self.seconds = seconds
        self.early_s = early_s if early_s is not None and (seconds is None or early_s < seconds) else None
        self._first = seconds if self.early_s is None else self.early_s
        self._deadlines: OrderedDict[Timed, float] = OrderedDict()
        """In the order of their deadlines."""
        self._timer: asyncio.TimerHandle | None = None
        self._given_more: dict[Timed, asyncio.TimerHandle] = {}
        """Those that had time left when they were late, each with a timer of its own."""
        self._closed = False

    def start(self, what: Timed) -> None:
        """Its time begins now; nothing happens if it is running already."""
        if self._first is None or self._closed or what in self._deadlines or what in self._given_more:
            return
        loop = asyncio.get_running_loop()
        self._deadlines[what] = deadline = loop.time() + self._first
        if self._timer is None:
            self._timer = loop.call_at(deadline, self._check)

    def stop(self, what: Timed) -> None:
        """It does not run any more; its next start begins from zero."""
        self._deadlines.pop(what, None)
        if (timer := self._given_more.pop(what, None)) is not None:
            timer.cancel()

    def restart(self, what: Timed) -> None:
        """Its time begins again, if it was running."""
        if what in self._deadlines and self._first is not None:
            self._deadlines[what] = asyncio.get_running_loop().time() + self._first
            self._deadlines.move_to_end(what)

    def close(self) -> None:
        """Nothing is late any more, and nothing starts."""
        self._closed = True
        self._deadlines.clear()
        for timer in self._given_more.values():
            timer.cancel()
        self._given_more.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        """The timer of the oldest has run out, or of one that has been stopped since."""
        loop = asyncio.get_running_loop()
        # until the end this timer counts as running: what late() starts needs no second one
        while self._deadlines:
            what, deadline = next(iter(self._deadlines.items()))
            if deadline > loop.time():
                self._timer = loop.call_at(deadline, self._check)
                return
            del self._deadlines[what]
            self._call_late(what)
        self._timer = None

    def _call_late(self, what: Timed) -> None:
        self._given_more.pop(what, None)
        left = what.late()
        if left is not None and not self._closed:
            self._given_more[what] = asyncio.get_running_loop().call_later(left, self._call_late, what)
