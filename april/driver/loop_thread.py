"""april's own event loop on a background thread, alive for the whole run.

Rewards and parked rollout functions live on it while the trainer trains, whether the trainer is synchronous
or asynchronous itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from april.driver.user_code import refuse_inside_user_code
from april.errors import RolloutError, SchedulerClosed

log = logging.getLogger("april")

T = TypeVar("T")

STOP_PATIENCE_S = 10.0
"""How long stop waits for cancelled tasks to end, and for threads."""


_CLOSED = "the scheduler is closed; create a new one"


class LoopThread:
    """A daemon thread that runs one event loop until :meth:`stop`."""

    threads_wake_it = True
    """Other threads may call something on its loop while that waits."""

    def __init__(self, name: str = "april-loop") -> None:
        self._loop = asyncio.new_event_loop()
        self._pool = ThreadPoolExecutor(thread_name_prefix=f"{name}-to-thread")
        self._loop.set_default_executor(self._pool)
        self._lock = threading.Lock()
        self._stopping = self._ended = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._ended:
            try:
                self._loop.run_forever()
            except BaseException:
                # a task raised SystemExit, which ends run_forever; it must not end the run of everybody else
                log.exception("a background task tried to end the process; april goes on")

    @property
    def alive(self) -> bool:
        """Whether coroutines can still be submitted."""
        return not self._stopping

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``coroutine`` on the loop.

        Raises:
            SchedulerClosed: the loop has been stopped.
            RolloutError: called inside a function that april waits for, or on the loop itself: waiting for the result
                would never end.
        """
        try:
            refuse_inside_user_code()
            if threading.current_thread() is self._thread:
                raise RolloutError("a call from april's own loop would wait for itself; call it where the trainer runs")
            return self._submit(coroutine)
        except (RolloutError, SchedulerClosed):
            coroutine.close()  # never begun; after an interrupt it may already run
            raise

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._stopping:
                raise SchedulerClosed(_CLOSED)
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """:meth:`submit`, and wait for the result. An interrupt of the wait cancels the coroutine."""
        return result_of(self.submit(coroutine))

    async def run_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """:meth:`run` for a caller with an event loop of its own; its cancellation cancels the coroutine."""
        future = self.submit(coroutine)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if self._stopping and (me is None or not me.cancelling()):
                raise SchedulerClosed(_CLOSED) from None
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Run a plain function on the loop and wait for its result; allowed from everywhere."""
        if threading.current_thread() is self._thread:
            return function()

        async def run() -> T:
            return function()

        coroutine = run()
        try:
            future = self._submit(coroutine)
        except SchedulerClosed:
            coroutine.close()
            raise
        return result_of(future)

    def call_later(self, function: Callable[[], object]) -> None:
        """Run a plain function on the loop, after everything submitted before and before everything after."""
        with self._lock:
            if not self._stopping:
                self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Cancel everything, end the loop and its thread; idempotent.

        Tasks, and then threads of asyncio.to_thread, have STOP_PATIENCE_S to end; after that they are left behind.
        """
        with self._lock:
            first, self._stopping = not self._stopping, True
            if first:
                ending = asyncio.run_coroutine_threadsafe(_cancel_everything(), self._loop)
        if first:
            try:
                ending.result()
            finally:
                self._ended = True
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()
                self._end_pool()
        else:
            self._thread.join()


    def _end_pool(self) -> None:
        waiting = threading.Thread(target=self._pool.shutdown, daemon=True)
        waiting.start()
        waiting.join(STOP_PATIENCE_S)
        if waiting.is_alive():
            log.error("a function in a thread of asyncio.to_thread does not end and is left behind")


def result_of(future: Future[T]) -> T:
    """Wait for a submitted coroutine; raises SchedulerClosed if the loop was stopped. An interrupt cancels it."""
    try:
        return future.result()
    except CancelledError:
        raise SchedulerClosed(_CLOSED) from None
    except BaseException:
        future.cancel()
        raise


async def _cancel_everything() -> None:
    me = asyncio.current_task()
    tasks = [t for t in asyncio.all_tasks() if t is not me]
    for task in tasks:
        task.cancel()
    if tasks:
        _, stubborn = await asyncio.wait(tasks, timeout=STOP_PATIENCE_S)
        for task in stubborn:
            log.error("%s ignores its cancellation and is left behind", task.get_coro())
    await asyncio.get_running_loop().shutdown_asyncgens()
