"""Daemon threads for the user's plain functions: made on demand, used again, at exit waited for with a limit.

A thread that hangs costs its memory and nothing else: the next function gets another one, and the process can end.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from contextvars import Context
from functools import partial
from queue import SimpleQueue
from typing import Any

from april.driver.user_code import Outcome, outcome_of
from april.errors import RolloutError
from april.exit_wait import stay_if_over, waited_for

_Job = tuple[Callable[[], Any], Callable[[Outcome], None]]
"""What to call, and what to do with its outcome."""


class WorkerThreads:
    """As many threads as functions run at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_Job | None]] = []
        """The letter box of each idle thread."""
        self._numbers = itertools.count(1)
        self._closed = False

    def run(
        self, context: Context, function: Callable[..., Any], args: tuple[Any, ...], heard: Callable[[Outcome], None]
    ) -> None:
        """Call ``function(*args)`` in a thread, in ``context``; then ``heard(outcome)`` on this loop, if it lives.

        Raises:
            RolloutError: the system gives no more threads.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            box = self._idle.pop() if self._idle else None

        def called() -> Any:
            try:
                with waited_for(partial(function, *args)):
                    stay_if_over()
                    return context.run(function, *args)
            finally:
                stay_if_over()

        (box or self._new_thread()).put((called, lambda o: tell(loop, heard, o)))

    def _new_thread(self) -> SimpleQueue[_Job | None]:
        box: SimpleQueue[_Job | None] = SimpleQueue()
        name = f"april-worker-{next(self._numbers)}"
        try:
            threading.Thread(target=self._work, args=(box,), name=name, daemon=True).start()
        except RuntimeError as error:
            raise RolloutError(
                f"the system gives no more threads ({error}; this process has {threading.active_count()}); plain "
                "functions need one each: start fewer samples at a time, or write async functions"
            ) from None
        return box

    def _work(self, box: SimpleQueue[_Job | None]) -> None:
        ends = False
        while not ends and (job := box.get()) is not None:
            function, heard = job
            outcome = outcome_of(function)
            with self._lock:
                # idle before anybody hears of it, so that who comes next needs no new thread
                ends = self._closed
                if not ends:
                    self._idle.append(box)
            heard(outcome)
            del job, function, heard, outcome  # they must not live on in an idle thread

    def close(self) -> None:
        """Idle threads end now, the others after the function that they run; none is waited for."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for box in idle:
            box.put(None)


def tell(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Call on the loop, from a thread; a loop that has ended is not interested."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
