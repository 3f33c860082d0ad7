"""Limits how many tasks go on per iteration of the event loop, so that thousands started together do not block it."""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 256
"""Most tasks that go on in one iteration of the event loop."""


class Pace:
    """Lets AT_ONCE tasks go on per iteration of the event loop, in the order in which they call :meth:`turn`."""

    def __init__(self) -> None:
        self._left = AT_ONCE
        """Number of tasks that may still go on in this iteration."""
        self._counts = False
        """True if :meth:`_next_turn` is scheduled for the next iteration."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Wait until this task may go on; returns at once while the iteration's limit is not reached."""
        loop = asyncio.get_running_loop()
        if not self._counts:
            self._counts = True
            loop.call_soon(self._next_turn)
        if self._left:
            self._left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _next_turn(self) -> None:
        self._left = AT_ONCE
        while self._waiting and self._left:
            place = self._waiting.popleft()
            if not place.done():  # the waiting task may be cancelled
                place.set_result(None)
                self._left -= 1
        self._counts = self._left < AT_ONCE
        if self._counts:
            asyncio.get_running_loop().call_soon(self._next_turn)
