"""april's own event loop on a background thread, alive for the whole run.

Rewards and parked rollout functions live on it while the trainer trains, whether the trainer is synchronous
or asynchronous itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from april.errors import SchedulerClosed

T = TypeVar("T")


class LoopThread:
    """A daemon thread that runs one event loop until :meth:`stop`."""

    def __init__(self, name: str = "april-loop") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    @property
    def alive(self) -> bool:
        """Whether coroutines can still be submitted."""
        return self._thread.is_alive() and not self._loop.is_closed()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``coroutine`` on the loop; raises SchedulerClosed when there is none any more."""
        if not self.alive:
            coroutine.close()
            raise SchedulerClosed("the scheduler is closed; create a new one")
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise SchedulerClosed(
                "a blocking call from april's own loop would wait for itself; use the async face inside rollout "
                "and reward functions"
            )
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[[], T]) -> T:
        """Run a plain function on the loop and wait for its result."""

        async def run() -> T:
            return function()

        return self.submit(run()).result()

    def stop(self) -> None:
        """End the loop and its thread; idempotent."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(_cancel_everything(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()


async def _cancel_everything() -> None:
    me = asyncio.current_task()
    tasks = [t for t in asyncio.all_tasks() if t is not me]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
