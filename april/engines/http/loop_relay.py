"""Runs an asynchronous generator or a coroutine on one event loop, and awaits it from another (or the same)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")

POLL_S = 1.0
"""Seconds between checks whether the other loop still runs, because a stopped loop notifies nobody."""


async def result_from(there: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the loop ``there`` and return its result. Raises RuntimeError if that loop stops first."""
    future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, there))
    try:
        while not (await asyncio.wait([future], timeout=POLL_S))[0]:
            if await _stopped(there) and not future.done():
                raise RuntimeError("the event loop of the call was stopped")
        return future.result()
    finally:
        future.cancel()


async def _stopped(there: asyncio.AbstractEventLoop) -> bool:
    """Return whether the loop ``there`` has stopped; if so, first run the callbacks that it has queued on this loop."""
    if there.is_running():
        return False
    await asyncio.sleep(0)  # continues after all callbacks that are queued now
    return True


class LoopRelay:
    """Iterates on the present event loop over the generator ``make()``, which runs on the event loop ``there``.

    The generator starts at once, and the relay must be closed. An error in the generator is raised after its last item,
    and RuntimeError if ``there`` was stopped.
    """

    def __init__(self, there: asyncio.AbstractEventLoop, make: Callable[[], AsyncGenerator[Any, None]]) -> None:
        self._source_loop = there
        self._consumer_loop = asyncio.get_running_loop()
        self._make = make
        self._items: deque[Any] = deque()
        self._item_arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ended = False
        self._error: BaseException | None = None
        there.call_soon_threadsafe(self._start)

    def __aiter__(self) -> LoopRelay:
        return self

    async def __anext__(self) -> Any:
        while not self._items and not self._ended:
            if not await self._more():
                raise RuntimeError("the event loop of the request was stopped")
        if self._items:
            return self._items.popleft()
        error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopAsyncIteration

    async def close(self) -> None:
        """Cancel the generator if it is running, and wait until it ends or its loop has stopped."""
        if self._ended:
            return
        with contextlib.suppress(RuntimeError):  # the other loop is closed
            self._source_loop.call_soon_threadsafe(self._cancel)
        while not self._ended and not await _stopped(self._source_loop):
            await self._more()

    async def _more(self) -> bool:
        """Wait for an item or the end; False if neither can come any more."""
        self._item_arrived.clear()
        try:
            async with asyncio.timeout(POLL_S):
                await self._item_arrived.wait()
        except TimeoutError:
            return not await _stopped(self._source_loop) or self._item_arrived.is_set()
        return True

    # ---------------------------------------------------------------- on the generator's loop

    def _start(self) -> None:
        self._task = self._source_loop.create_task(self._run())
        self._task.add_done_callback(self._done)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            async with aclosing(self._make()) as items:
                async for item in items:
                    self._call_consumer(self._receive, item)
        except Exception as error:
            self._call_consumer(self._finish, error)
        else:
            self._call_consumer(self._finish, None)  # not left to _done, which never runs if this loop stops now

    def _done(self, task: asyncio.Task[None]) -> None:
        """Report the end if :meth:`_run` could not, because it was cancelled, perhaps before it began."""
        error = None if task.cancelled() else task.exception()
        self._call_consumer(self._finish, error or RuntimeError("the request was cancelled on its event loop"))

    def _call_consumer(self, function: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the consumer's loop is closed, so nobody is waiting
            self._consumer_loop.call_soon_threadsafe(function, value)

    # ---------------------------------------------------------------- on the consumer's loop

    def _receive(self, item: Any) -> None:
        self._items.append(item)
        self._item_arrived.set()

    def _finish(self, error: BaseException | None) -> None:
        if not self._ended:
            self._ended, self._error = True, error
            self._item_arrived.set()
