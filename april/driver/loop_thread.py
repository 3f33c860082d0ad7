"""april's own event loop on a background thread, alive for the whole run.

Rewards and parked rollout functions live on it while the trainer trains, whether the trainer is synchronous
or asynchronous itself.

Invariant: a signal handler may run, call back and raise between any two steps of a thread that asks. So nothing here
holds a lock, and the loop is told things in one way only: a function is queued.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from april.daemon_pool import DaemonPool
from april.driver.user_code import is_aprils_coroutine, is_users, refuse_inside_user_code
from april.errors import RolloutError, SchedulerClosed

log = logging.getLogger("april")

T = TypeVar("T")
Work = Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]]

STOP_PATIENCE_S = 10.0
"""Seconds that stop waits for cancelled tasks and for threads."""
ANSWER_PATIENCE_S = 10.0
"""Seconds that the end waits for a loop that something blocks."""

_CLOSED = "the scheduler is closed; create a new one"


class LoopThread:
    """A daemon thread that runs one event loop until :meth:`stop`."""

    threads_wake_it = True
    """True if other threads can wake the loop while it waits."""

    def __init__(self, name: str = "april-loop") -> None:
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._pool = DaemonPool(f"{name}-to-thread")
        self._loop.set_default_executor(self._pool)
        self._pending: set[Reply[Any]] = set()
        """Replies that somebody waits for; the end of the loop answers them all."""
        self._stopping = self._ended = False
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._watch = LoopWatch(self._loop, self._thread)
        self._thread.start()
        self._watch.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._ended:
            try:
                self._loop.run_forever()
            except BaseException:
                # a task raised SystemExit, which ends run_forever; it must not end the run of everybody else
                log.exception("a background task tried to end the process; april goes on")
        self._watch.stop()
        self._refuse_pending()
        self._loop.close()
        self._pool.shutdown(wait=False)

    @property
    def alive(self) -> bool:
        """True if coroutines can still be submitted."""
        return not self._stopping

    @property
    def here(self) -> bool:
        """False in a child that was forked off: threads stay behind in the parent."""
        return os.getpid() == self._process

    def blocked(self) -> tuple[float, str]:
        """Seconds for which functions have blocked the loop since this was last asked, and the one that did most."""
        return self._watch.take()

    # ---------------------------------------------------------------- from any thread

    def refuse_waiting(self) -> None:
        """Raise RolloutError where waiting for the loop would never end: in what april waits for, or on the loop."""
        refuse_inside_user_code()
        if threading.current_thread() is self._thread:
            raise RolloutError("a call from april's own loop would wait for itself; call it where the trainer runs")

    def submit(self, work: Work[T], *heard: Callable[[Reply[T]], object]) -> Reply[T]:
        """Start ``work`` on the loop, a coroutine or what makes one there; ``heard`` is called there with its reply.

        An interrupt that comes too early leaves a coroutine behind that nobody awaits; what makes one, it does not.

        Raises:
            SchedulerClosed: the loop has been stopped.
            RolloutError: called inside a function that april waits for, or on the loop itself: waiting for the result
                would never end. Or in a forked process, where there is no loop.
        """
        reply = Reply(self._pending.discard, *heard)
        try:
            self.refuse_waiting()
            self._queue(lambda: reply.follow(self._loop.create_task(_coroutine(work))), reply)
        except (RolloutError, SchedulerClosed):
            if not callable(work):
                work.close()  # never begun; after an interrupt it may already run
            raise
        return reply

    def follow(self, coroutine: Coroutine[Any, Any, T], *heard: Callable[[Reply[T]], object]) -> Reply[T]:
        """:meth:`submit`, on the loop."""
        reply = Reply(self._pending.discard, *heard)
        self._pending.add(reply)
        reply.follow(self._loop.create_task(coroutine))
        return reply

    def _queue(self, function: Callable[[], None], reply: Reply[Any]) -> None:
        """Run on the loop what will give ``reply``."""
        self._refuse_elsewhere()
        self._pending.add(reply)
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            self._pending.discard(reply)
            raise SchedulerClosed(_CLOSED) from None  # in this very moment
        if self._ended:
            reply.give(None, CancelledError())  # too late for the loop to see it

    def _refuse_elsewhere(self) -> None:
        if not self.here:
            raise RolloutError(
                f"this scheduler belongs to process {self._process}, and this is process {os.getpid()}, forked off "
                "later: threads do not live on in a fork. Create the scheduler after forking, in the process that "
                "trains, or start other processes by the method spawn"
            )
        if self._stopping:
            raise SchedulerClosed(_CLOSED)

    def run(self, work: Work[T]) -> T:
        """:meth:`submit`, and wait for the result. An interrupt of the wait cancels the coroutine."""
        return result_of(self.submit(work))

    async def run_async(self, work: Work[T]) -> T:
        """:meth:`run` for a caller with an event loop of its own; its cancellation cancels the coroutine."""
        loop = asyncio.get_running_loop()
        there = loop.create_future()

        def heard(_: Reply[T]) -> None:
            with suppress(RuntimeError):  # the caller's loop has ended
                loop.call_soon_threadsafe(wake)

        def wake() -> None:
            if not there.done():
                there.set_result(None)

        reply = self.submit(work, heard)
        try:
            await there
        except asyncio.CancelledError:
            reply.cancel()
            raise
        return result_of(reply)

    def call(self, function: Callable[[], T]) -> T:
        """Run a plain function on the loop and wait for its result; allowed from everywhere, signal handlers too."""
        if threading.current_thread() is self._thread:
            return function()

        reply: Reply[T] = Reply(self._pending.discard)
        self._queue(lambda: reply.run(function), reply)
        return result_of(reply)

    def wait_for(self, begin: Callable[[Reply[T]], object]) -> T:
        """Run ``begin`` on the loop and wait for the reply that it is handed, which something there gives later.

        Raises SchedulerClosed where the loop is stopped before, and whatever ``begin`` raises.
        """
        reply: Reply[T] = Reply(self._pending.discard)

        def begun() -> None:
            try:
                begin(reply)
            except Exception as error:
                reply.give(None, error)

        self._queue(begun, reply)
        return result_of(reply)

    def call_later(self, function: Callable[[], object]) -> None:
        """Run a plain function on the loop, if it lives, and do not wait for it."""
        with suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(function)

    # ---------------------------------------------------------------- the end

    def waits_for(self, reply: Reply[Any]) -> bool:
        """Return whether something submitted has ended, well or badly; False: the loop has not answered for a while."""
        while True:
            alive = Reply[None]()
            self.call_later(partial(alive.give, None))
            if reply.wait(ANSWER_PATIENCE_S):
                return True
            if not alive.done():
                return False

    def stop(self, *, answers: bool = True) -> None:
        """Cancel everything, end the loop and its thread; idempotent. In a forked child it does nothing.

        Tasks, and then threads of asyncio.to_thread, have STOP_PATIENCE_S to end; after that they are left behind. So
        is the loop itself if something blocks it, after ANSWER_PATIENCE_S or if it is known not to answer.
        """
        if not self.here:
            return
        self.begin_to_stop()
        self._thread.join(ANSWER_PATIENCE_S if answers else 0.0)
        if self._ending is not None:
            self._thread.join(STOP_PATIENCE_S)
        if self._thread.is_alive():
            log.error(
                "april's loop does not answer and is left behind: it is inside %s. An async function must not block: "
                "await there, or make it a plain function, which runs in a thread of its own",
                self._where(),
            )
            self._refuse_pending()
        elif not self._pool.join(STOP_PATIENCE_S):
            log.error("a function in a thread of asyncio.to_thread does not end and is left behind")

    def begin_to_stop(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """:meth:`stop` without the wait, from anywhere, in the middle of anything; ``last`` is awaited at the end."""
        if self.here:
            self._stopping = True
            self.call_later(lambda: self._end(last))

    def _end(self, last: Callable[[], Awaitable[None]] | None) -> None:
        if self._ending is None:
            self._ending = self._loop.create_task(_cancel_everything(last))
            self._ending.add_done_callback(self._stop_loop)

    def _stop_loop(self, _: asyncio.Task[None]) -> None:
        self._ended = True
        self._loop.stop()

    def _refuse_pending(self) -> None:
        for reply in self._pending.copy():
            reply.give(None, CancelledError())

    def _where(self) -> str:
        """The function that the loop's thread is in: the user's, not a library's that it calls."""
        inmost = frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
            frame = frame.f_back
        frame = frame or inmost
        if frame is None:
            return "an unknown function"
        return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}, line {frame.f_lineno})"


_LIBRARIES = (os.path.dirname(os.__file__), "<")
"""The directory of the standard library and of installed packages."""


def result_of(reply: Reply[T]) -> T:
    """Wait for what was submitted; raises SchedulerClosed if the loop was stopped. An interrupt cancels it."""
    try:
        return reply.result()
    except CancelledError:
        raise SchedulerClosed(_CLOSED) from None
    except BaseException:
        reply.cancel()
        raise


def _coroutine(work: Work[T]) -> Coroutine[Any, Any, T]:
    return work() if callable(work) else work


async def _cancel_everything(last: Callable[[], Awaitable[None]] | None) -> None:
    me = asyncio.current_task()
    tasks = [t for t in asyncio.all_tasks() if t is not me]
    for task in tasks:
        task.cancel()
    if tasks:
        _, stubborn = await asyncio.wait(tasks, timeout=STOP_PATIENCE_S)
        for task in stubborn:
            log.error("%s ignores its cancellation and is left behind", task.get_coro())
    if last is not None:
        await last()
    await asyncio.get_running_loop().shutdown_asyncgens()


OUTCOME = "outcome"
LOOK_AGAIN_S = 1.0
"""Seconds after which a waiting thread looks by itself: an interrupted wait may have taken its wake-up call."""


class Reply(Generic[T]):
    """A result or an error, given once, by whoever is first; any number of threads may wait, and give.

    ``heard`` is called when it is there.
    """

    def __init__(self, *heard: Callable[[Reply[T]], object]) -> None:
        self._heard = heard
        self._gate = threading.Lock()
        self._gate.acquire()
        self._given: dict[str, tuple[Any, BaseException | None]] = {}
        """The outcome, once there is one: ``setdefault`` puts it here in one step."""
        self._task: asyncio.Task[T] | None = None
        self._unwanted = False
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---------------------------------------------------------------- any thread

    def done(self) -> bool:
        """Return whether it has been given."""
        return bool(self._given)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is given; returns False after ``timeout`` seconds without it."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._given:
            left = LOOK_AGAIN_S if end is None else min(LOOK_AGAIN_S, end - time.monotonic())
            if left <= 0.0:
                return False
            self._gate.acquire(timeout=left)
        self._open()  # for the next one who waits
        return True

    def result(self) -> T:
        """Wait for it. Raises its error; CancelledError of concurrent.futures if it was cancelled."""
        self.wait()
        value, error = self._given[OUTCOME]
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def error(self) -> BaseException | None:
        """The error of a reply that is given, or None."""
        return self._given[OUTCOME][1] if self._given else None

    def cancel(self) -> None:
        """Cancel what would give it, or keep it from beginning."""
        self._unwanted = True
        if self._loop is not None and not self._given:
            with suppress(RuntimeError):  # closed
                self._loop.call_soon_threadsafe(self._cancel_task)

    def give(self, value: T | None, error: BaseException | None = None) -> None:
        """Give a result or an error; only the first counts."""
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


EVERY_S = 0.25
PATIENCE_S = 0.05
"""Seconds within which a loop that is not blocked answers."""
WARN_S = 1.0
"""Seconds after which a function that blocks the loop is warned of, once."""


class LoopWatch:
    """Watches the loop that ``thread`` runs; a loop with a virtual clock is not watched."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        self._loop = loop
        self._thread = thread
        self._closed = threading.Event()
        self._answered = threading.Event()
        self._looked_s = loop.time()
        self._blocked: defaultdict[str, float] = defaultdict(float)
        """Seconds for which each function has blocked the loop since the last ``take``."""
        self._in_all: defaultdict[str, float] = defaultdict(float)
        self._told: set[str] = set()

    def start(self) -> None:
        """Begin to watch, in a thread of its own."""
        if abs(self._loop.time() - time.monotonic()) < 1.0:
            threading.Thread(target=self._main, name=f"{self._thread.name}-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching; may be called from any thread."""
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
        """Ask the loop until it answers; the function that it is in meanwhile has blocked it since the last look."""
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
        """The user's function that the loop is in, by name and place, and the line it is at; None: there is none, or it
        awaits what april itself does.
        """
        frame = sys._current_frames().get(self._thread.ident or 0)
        line, code = "", None
        while frame is not None and frame.f_code is not asyncio.Handle._run.__code__:  # below is who runs the loop
            if code is None and is_aprils_coroutine(frame.f_code):
                return None
            if is_users(frame.f_code.co_filename):
                code, line = frame.f_code, line or f"line {frame.f_lineno} of {Path(frame.f_code.co_filename).name}"
            frame = frame.f_back
        if frame is None or code is None:  # the loop waits, or does april's own work
            return None
        return f"{code.co_qualname} (line {code.co_firstlineno} of {Path(code.co_filename).name})", line
