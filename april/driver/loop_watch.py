"""Functions that block april's event loop: nothing else of april runs meanwhile, and the time looks like generation.

A thread asks the loop for an answer a few times a second, and looks what it is in where none comes.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

from april.driver.failure_kind import is_users

log = logging.getLogger("april")

EVERY_S = 0.25
PATIENCE_S = 0.05
"""A loop that is not blocked answers sooner."""
WARN_S = 1.0
"""A function that has blocked the loop for so long is told of, once."""


class LoopWatch:
    """Of the loop that ``thread`` runs. Nothing is seen on a loop with a clock of its own, as tests have them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        self._loop = loop
        self._thread = thread
        self._closed = threading.Event()
        self._answered = threading.Event()
        self._looked_s = loop.time()
        self._blocked: defaultdict[str, float] = defaultdict(float)
        """Seconds by function since they were last taken."""
        self._in_all: defaultdict[str, float] = defaultdict(float)
        self._told: set[str] = set()

    def start(self) -> None:
        """Watch, in a thread of its own."""
        if abs(self._loop.time() - time.monotonic()) < 1.0:
            threading.Thread(target=self._main, name=f"{self._thread.name}-watch", daemon=True).start()

    def stop(self) -> None:
        """At once; from any thread."""
        self._closed.set()

    def take(self) -> tuple[float, str]:
        """Seconds for which functions have blocked the loop since this was last called, and the one that did most."""
        blocked, self._blocked = self._blocked, defaultdict(float)
        longest = max(blocked, key=lambda name: blocked[name], default="")
        return sum(blocked.values()), longest

    def _main(self) -> None:
        while not self._closed.wait(EVERY_S):
            self.look()

    def look(self) -> None:
        """Ask the loop, until it answers; what it is in meanwhile has blocked it since the last look."""
        self._answered.clear()
        try:
            self._loop.call_soon_threadsafe(self._answered.set)
        except RuntimeError:  # closed
            return
        patience = PATIENCE_S
        while not self._answered.wait(patience) and not self._closed.is_set():
            found, patience = self._function(), EVERY_S
            now = self._loop.time()
            passed = now - self._looked_s
            self._looked_s = now
            if found:
                self._add(*found, passed)
        self._looked_s = self._loop.time()

    def _add(self, name: str, line: str, seconds: float) -> None:
        self._blocked[name] += seconds
        self._in_all[name] += seconds
        if self._in_all[name] >= WARN_S and name not in self._told:
            self._told.add(name)
            log.warning(
                "%s blocks april's event loop, %.1f s so far (%s): nothing else of april runs meanwhile; make it a "
                "plain def, which april runs in a thread, or await what it waits for",
                name, self._in_all[name], line,
            )  # fmt: skip

    def _function(self) -> tuple[str, str] | None:
        """The user's function that the loop is in, by name and place, and the line it is at; None: there is none."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        line, code = "", None
        while frame is not None and frame.f_code is not asyncio.Handle._run.__code__:  # below is who runs the loop
            if is_users(frame.f_code.co_filename):
                code, line = frame.f_code, line or f"line {frame.f_lineno} of {Path(frame.f_code.co_filename).name}"
            frame = frame.f_back
        if frame is None or code is None:  # the loop waits, or does april's own work
            return None
        return f"{code.co_qualname} (line {code.co_firstlineno} of {Path(code.co_filename).name})", line
