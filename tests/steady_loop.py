"""Event loops whose clock stands still while nobody waits, so that a stalled machine changes no order of events.

On an ordinary loop a process that was held up for 50 ms finds all timers of those 50 ms due at once, and whatever a
test wanted to cut in between is over. Here a wait of 2 ms moves the clock by 2 ms at most, however long it took.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from contextlib import suppress
from typing import Any

GRACE_S = 1.0
BELOW_EPOLL_S = 1e-3
"""Shorter waits do not wait: epoll would make a millisecond of them."""
TURN_S = 1e-5
"""A turn takes so long, so that what took turns took time."""


class _Selector(selectors.DefaultSelector):
    """Tells its loop how long it was to wait, or less where something came before."""

    waited_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.waited_s += TURN_S
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        if timeout is not None and timeout < BELOW_EPOLL_S:
            found = super().select(0)
            self.waited_s += 0.0 if found else timeout
            return found
        began = time.monotonic()
        found = super().select(timeout)
        passed = time.monotonic() - began
        self.waited_s += passed if timeout is None else min(passed, timeout) if found else timeout
        return found


class SteadyLoop(asyncio.SelectorEventLoop):
    """An ordinary event loop, by a clock of what it waited for."""

    def __init__(self) -> None:
        self._waits = _Selector()
        super().__init__(self._waits)
        with _lock:
            _loops.add(self)

    def time(self) -> float:
        return self._waits.waited_s

    def close(self) -> None:
        with _lock:
            _loops.discard(self)
            _blocked.discard(self)
        super().close()


_lock = threading.Lock()
_loops: set[SteadyLoop] = set()
_blocked: set[SteadyLoop] = set()
"""Those that have been told of a turn and had none yet."""


class SteadyPolicy(asyncio.DefaultEventLoopPolicy):
    """Makes every loop of the process a steady one."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return SteadyLoop()


async def turn_of_all() -> None:
    """One turn of this loop, and then one of every other loop that runs in this process.

    A loop that has not had its turn after GRACE_S is blocked by what runs on it, and not waited for until it turns.
    """
    here: Any = asyncio.get_running_loop()
    await asyncio.sleep(0)
    with _lock:
        others = [loop for loop in _loops if loop is not here and loop.is_running() and loop not in _blocked]
    for there in others:
        turned = asyncio.Event()
        _blocked.add(there)  # before it can have its turn
        try:
            there.call_soon_threadsafe(_tell, there, here, turned)
        except RuntimeError:  # closed in between
            _blocked.discard(there)
            continue
        end = time.monotonic() + GRACE_S
        while not turned.is_set() and there in _loops and time.monotonic() < end:
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S / 20):
                    await turned.wait()


def _tell(there: SteadyLoop, here: asyncio.AbstractEventLoop, turned: asyncio.Event) -> None:
    _blocked.discard(there)
    with suppress(RuntimeError):  # closed in between
        here.call_soon_threadsafe(turned.set)
