"""What a thread waits for that has asked april's loop for something.

A signal handler may run between any two steps of the thread that waits, and ask the loop for something itself. So who
waits holds no lock that the loop needs, as the futures of the standard library do, and an interrupted wait can be begun
again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")

OUTCOME = "outcome"
LOOK_AGAIN_S = 1.0
"""A thread that waits looks by itself as often: its wake-up call may have gone to a wait that was interrupted."""


class Reply(Generic[T]):
    """A result or an error, given once, by whoever is first; any number of threads may wait, and give.

    ``heard`` is called when it is there.
    """

    def __init__(self, *heard: Callable[[Reply[T]], object]) -> None:
        self._heard = heard
        self._gate = threading.Lock()
        self._gate.acquire()
        self._given: dict[str, tuple[Any, BaseException | None]] = {}
        """Empty, or with one entry, which ``setdefault`` puts there in one step."""
        self._task: asyncio.Task[T] | None = None
        self._unwanted = False
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---------------------------------------------------------------- any thread

    def done(self) -> bool:
        """Whether it has been given."""
        return bool(self._given)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is given; False: it has taken longer than ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._given:
            left = LOOK_AGAIN_S if end is None else min(LOOK_AGAIN_S, end - time.monotonic())
            if left <= 0.0:
                return False
            self._gate.acquire(timeout=left)
        self._open()  # for the next one who waits
        return True

    def result(self, timeout: float | None = None) -> T:
        """Wait for it. Raises its error; CancelledError of concurrent.futures if it was cancelled; TimeoutError."""
        if not self.wait(timeout):
            raise TimeoutError
        value, error = self._given[OUTCOME]
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def error(self) -> BaseException | None:
        """Of one that is given."""
        return self._given[OUTCOME][1] if self._given else None

    def cancel(self) -> None:
        """Nobody wants it any more: what would give it is cancelled, or does not begin."""
        self._unwanted = True
        if self._loop is not None and not self._given:
            with suppress(RuntimeError):  # closed
                self._loop.call_soon_threadsafe(self._cancel_task)

    def give(self, value: T | None, error: BaseException | None = None) -> None:
        """It is there; what comes second is not heard."""
        mine = value, error
        if self._given.setdefault(OUTCOME, mine) is mine:
            self._open()
            for heard in self._heard:
                heard(self)

    # ---------------------------------------------------------------- on the loop

    def run(self, function: Callable[[], T]) -> None:
        """Give what a plain function returns or raises."""
        if self._unwanted:
            self.give(None, CancelledError())
            return
        try:
            value = function()
        except BaseException as error:
            self.give(None, error)
        else:
            self.give(value)

    def follow(self, task: asyncio.Task[T]) -> None:
        """Give what becomes of a task."""
        self._task, self._loop = task, task.get_loop()
        task.add_done_callback(self._take)
        if self._unwanted:
            task.cancel()

    def _take(self, task: asyncio.Task[T]) -> None:
        error = CancelledError() if task.cancelled() else task.exception()
        self.give(None if error is not None else task.result(), error)

    def _cancel_task(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def _open(self) -> None:
        with suppress(RuntimeError):  # it is open
            self._gate.release()
