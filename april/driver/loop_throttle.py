"""Limits how many tasks continue in one iteration of the event loop, as thousands at once would block the loop."""

from __future__ import annotations

import asyncio
from collections import deque

TASKS_PER_ITERATION = 64
"""Maximum number of tasks that continue in one iteration of the event loop."""


class LoopThrottle:
    """Lets TASKS_PER_ITERATION tasks continue per iteration of the event loop, first come, first served."""

    def __init__(self) -> None:
        self._remaining = TASKS_PER_ITERATION
        """Number of tasks that may still continue in this iteration."""
        self._reset_scheduled = False
        """True if :meth:`_reset` is scheduled for the next iteration."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait_turn(self) -> None:
        """Wait until this task may continue; returns at once while the iteration's limit is not reached."""
        loop = asyncio.get_running_loop()
        if not self._reset_scheduled:
            self._reset_scheduled = True
            loop.call_soon(self._reset)
        if self._remaining:
            self._remaining -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _reset(self) -> None:
        self._remaining = TASKS_PER_ITERATION
        while self._waiting and self._remaining:
            place = self._waiting.popleft()
            if not place.done():  # the waiting task may be cancelled
                place.set_result(None)
                self._remaining -= 1
        self._reset_scheduled = self._remaining < TASKS_PER_ITERATION
        if self._reset_scheduled:
            asyncio.get_running_loop().call_soon(self._reset)
