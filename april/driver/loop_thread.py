"""Runs april's own event loop on a background thread for the whole run.

Reward functions and suspended rollout functions run on it while the trainer trains, whether the trainer is synchronous
or asynchronous itself.

A signal handler may interrupt a calling thread anywhere, call this module again, and raise. Invariant: therefore no
code here runs under a lock, and threads reach the loop in one way only: ``call_soon_threadsafe``.
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
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

from april.concurrency.daemon_threads import DaemonPool
from april.concurrency.garbage import collecting_less
from april.driver.tracebacks import shorten
from april.driver.user_code import file_of, is_april_file, is_user_file, refuse_inside_user_code
from april.errors import AprilError, RolloutError, SchedulerClosed

log = logging.getLogger("april")

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]

STOP_PATIENCE_S = 10.0
"""Seconds that ``stop`` waits for cancelled tasks, and then for threads."""
ANSWER_PATIENCE_S = 10.0
"""Seconds that ``stop`` waits for a blocked loop to react."""

_CLOSED = "the scheduler is closed; create a new one"


class LoopThread:
    """A daemon thread that runs one event loop until :meth:`stop`."""

    threads_wake_it = True
    """True if other threads can wake the loop while the loop waits."""

    def __init__(self, name: str = "april-loop", *, relax_gc: bool = False) -> None:
        self._relax_gc = relax_gc
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._pool = DaemonPool(f"{name}-to-thread")
        self._loop.set_default_executor(self._pool)
        self._pending: set[Reply[Any]] = set()
        """Replies that are not given yet; the end of the loop cancels them all."""
        self._stopping = self._ended = False
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._watch = LoopWatch(self._loop, self._thread)
        self._thread.start()
        self._watch.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        with collecting_less() if self._relax_gc else nullcontext():
            while not self._ended:
                try:
                    self._loop.run_forever()
                except BaseException:
                    # a task raised SystemExit, which ends run_forever; the loop must go on for all other tasks
                    log.exception("a background task tried to end the process; april goes on")
        self._watch.stop()
        self._refuse_pending()
        self._loop.close()
        self._pool.shutdown(wait=False)

    @property
    def alive(self) -> bool:
        """True until the loop is told to stop; after that no coroutine can be submitted."""
        return not self._stopping

    @property
    def in_own_process(self) -> bool:
        """True in the process that created the loop; False in a forked child, which has no copy of the thread."""
        return os.getpid() == self._process

    def blocked(self) -> tuple[float, str]:
        """Return how long user functions have blocked the loop, as :meth:`LoopWatch.take_blocked` says."""
        return self._watch.take_blocked()

    # ---------------------------------------------------------------- from any thread

    def refuse_waiting(self) -> None:
        """Raise RolloutError where waiting would deadlock: on the loop, and in a function that april waits for."""
        refuse_inside_user_code()
        if threading.current_thread() is self._thread:
            raise RolloutError(
                "a call from april's own event loop would wait for itself; make the call in the thread of the trainer"
            )

    def submit(self, work: Work[T], *on_done: Callable[[Reply[T]], object]) -> Reply[T]:
        """Start a coroutine on the loop; return its thread-safe future, a Reply, which each ``on_done`` function gets.

        ``work`` makes the coroutine on the loop, so that a signal cannot interrupt this call and leave it unawaited.

        Raises:
            SchedulerClosed: the loop has been stopped.
            RolloutError: this was called in a function that april waits for, or on the loop itself, where waiting for
                the result would deadlock; or in a forked process, where the loop does not run.
        """
        reply = Reply(self._pending.discard, *on_done)
        self.refuse_waiting()
        self._queue(lambda: reply.follow(self._loop.create_task(work())), reply)
        return reply

    def follow(self, coroutine: Coroutine[Any, Any, T], *on_done: Callable[[Reply[T]], object]) -> Reply[T]:
        """Start a coroutine and return its reply, as :meth:`submit` does, for callers on the loop itself."""
        reply = Reply(self._pending.discard, *on_done)
        self._pending.add(reply)
        reply.follow(self._loop.create_task(coroutine))
        return reply

    def _queue(self, function: Callable[[], None], reply: Reply[Any]) -> None:
        """Queue a function on the loop that will give ``reply``; raises SchedulerClosed or RolloutError."""
        self._refuse_other_process()
        self._pending.add(reply)
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            self._pending.discard(reply)
            raise SchedulerClosed(_CLOSED) from None  # the loop was closed after the check
        if self._ended:
            reply.set(None, CancelledError())  # the loop has ended and will not run the function

    def _refuse_other_process(self) -> None:
        if not self.in_own_process:
            raise RolloutError(
                f"this scheduler belongs to process {self._process}, but this is process {os.getpid()}, which was "
                "forked off later, and threads do not survive a fork. Create the scheduler after forking, in the "
                "process that trains, or start other processes with the method spawn"
            )
        if self._stopping:
            raise SchedulerClosed(_CLOSED)

    def run(self, work: Work[T]) -> T:
        """Run a coroutine on the loop and return its result; interrupting the wait cancels the coroutine."""
        return result_of(self.submit(work))

    async def run_async(self, work: Work[T]) -> T:
        """Do the same as :meth:`run` in a caller's own event loop; cancelling the call cancels the coroutine."""
        loop = asyncio.get_running_loop()
        there = loop.create_future()

        def on_done(_: Reply[T]) -> None:
            with suppress(RuntimeError):  # the caller's loop has ended
                loop.call_soon_threadsafe(wake)

        def wake() -> None:
            if not there.done():
                there.set_result(None)

        reply = self.submit(work, on_done)
        try:
            await there
        except asyncio.CancelledError:
            reply.cancel()
            raise
        return result_of(reply)

    def call(self, function: Callable[[], T]) -> T:
        """Run a plain function on the loop and return its result; may be called anywhere, also in signal handlers."""
        if threading.current_thread() is self._thread:
            return function()

        reply: Reply[T] = Reply(self._pending.discard)
        self._queue(lambda: reply.run(function), reply)
        return result_of(reply)

    def wait_for(self, work: Work[T]) -> T:
        """Do the same as :meth:`run`; user functions may call this if the coroutine does not wait for them."""
        reply: Reply[T] = Reply(self._pending.discard)
        self._queue(lambda: reply.follow(self._loop.create_task(work())), reply)
        return result_of(reply)

    def run_or_call(self, work: Work[T], at_once: Callable[[], T]) -> T:
        """Return the result of :meth:`wait_for`, or ``at_once()`` if this is the loop's thread."""
        return at_once() if threading.current_thread() is self._thread else self.wait_for(work)

    def call_later(self, function: Callable[[], object]) -> None:
        """Run a plain function on the loop without waiting for it; does nothing if the loop is closed."""
        with suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(function)

    # ---------------------------------------------------------------- the end

    def wait_while_responsive(self, reply: Reply[Any]) -> bool:
        """Wait for a reply as long as the loop reacts; returns False if it has not reacted for ANSWER_PATIENCE_S."""
        while True:
            alive = Reply[None]()
            self.call_later(partial(alive.set, None))
            if reply.wait(ANSWER_PATIENCE_S):
                return True
            if not alive.done():
                return False

    def end_with(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``last`` on the loop, then stop the loop; idempotent. If a signal interrupts this, call :meth:`stop`."""
        if self.alive and self.in_own_process:
            self.wait_for(last)
        self.request_stop()

    def stop(self, *, answers: bool = True, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancel all tasks, await ``last``, end the loop and its thread; idempotent. Does nothing in a forked child.

        Tasks, and then threads of asyncio.to_thread, have STOP_PATIENCE_S to end; after that they are left running. A
        blocked loop is left running after ANSWER_PATIENCE_S, or at once if ``answers`` is False.
        """
        if not self.in_own_process:
            return
        self.request_stop(last)
        self._thread.join(ANSWER_PATIENCE_S if answers else 0.0)
        if self._ending is not None:
            self._thread.join(STOP_PATIENCE_S)
        if self._thread.is_alive():
            log.error(
                "april's event loop does not answer and is left running: it is inside %s. An async function must not "
                "block: await there, or make it a plain function, which runs in a thread of its own",
                self._where(),
            )
            self._refuse_pending()
        elif not self._pool.join(STOP_PATIENCE_S):
            log.error("a function started with asyncio.to_thread does not end and is left running")

    def request_stop(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Stop the loop without waiting for it, from any thread or signal handler; ``last`` is awaited at the end."""
        if self.in_own_process:
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
            reply.set(None, CancelledError())

    def _where(self) -> str:
        """Describe the user's function that the loop's thread runs; if there is none, the innermost function."""
        inmost = frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None and not is_user_file(file_of(frame)):
            frame = frame.f_back
        frame = frame or inmost
        if frame is None:
            return "an unknown function"
        return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}, line {frame.f_lineno})"


def result_of(reply: Reply[T]) -> T:
    """Wait for a reply and return its result; raises SchedulerClosed if the loop was stopped.

    Interrupting the wait cancels the task behind the reply.
    """
    try:
        return reply.result()
    except CancelledError:
        raise SchedulerClosed(_CLOSED) from None
    except BaseException as error:
        reply.cancel()
        if isinstance(error, AprilError):
            shorten(error)
        raise


async def _cancel_everything(last: Callable[[], Awaitable[None]] | None) -> None:
    me = asyncio.current_task()
    tasks = [t for t in asyncio.all_tasks() if t is not me]
    for task in tasks:
        task.cancel()
    if tasks:
        _, stubborn = await asyncio.wait(tasks, timeout=STOP_PATIENCE_S)
        for task in stubborn:
            log.error("%s ignores its cancellation and is left running", task.get_coro())
    if last is not None:
        await last()
    await asyncio.get_running_loop().shutdown_asyncgens()


OUTCOME = "outcome"
RECHECK_S = 1.0
"""Seconds after which a waiting thread checks again; its wake-up may have gone to a thread that was interrupted."""


class Reply(Generic[T]):
    """A future that any thread may set or wait for; only the first result or error counts.

    A reply is "given" when its result or error is set; then each callback of ``on_done`` is called with the reply.
    """

    def __init__(self, *on_done: Callable[[Reply[T]], object]) -> None:
        self._callbacks = on_done
        self._lock = threading.Lock()
        """Lock that is held until the reply is given, so that acquiring it means waiting for the reply."""
        self._lock.acquire()
        self._outcome: dict[str, tuple[Any, BaseException | None]] = {}
        """The outcome (result, error), once it is given; ``setdefault`` stores it atomically."""
        self._task: asyncio.Task[T] | None = None
        self._cancel_requested = False

    # ---------------------------------------------------------------- any thread

    def done(self) -> bool:
        """Return whether the reply was given."""
        return bool(self._outcome)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the reply is given; returns False if it is not given within ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._outcome:
            left = RECHECK_S if end is None else min(RECHECK_S, end - time.monotonic())
            if left <= 0.0:
                return False
            self._lock.acquire(timeout=left)
        self._release_lock()  # for the next waiting thread
        return True

    def result(self) -> T:
        """Wait for the result; raises the error if one was given, concurrent.futures.CancelledError if cancelled."""
        self.wait()
        value, error = self._outcome[OUTCOME]
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def error(self) -> BaseException | None:
        """Return the error that was given, or None if there is none (yet)."""
        return self._outcome[OUTCOME][1] if self._outcome else None

    def cancel(self) -> None:
        """Cancel the task or function that would give the reply, even before its start."""
        self._cancel_requested = True
        if (task := self._task) is not None and not self._outcome:
            with suppress(RuntimeError):  # closed
                task.get_loop().call_soon_threadsafe(task.cancel)

    def set(self, value: T | None, error: BaseException | None = None) -> None:
        """Give a result or an error; only the first one counts."""
        mine = value, error
        if self._outcome.setdefault(OUTCOME, mine) is mine:
            self._release_lock()
            for callback in self._callbacks:
                callback(self)

    # ---------------------------------------------------------------- on the loop

    def run(self, function: Callable[[], T]) -> None:
        """Call a plain function and give its result or error."""
        if self._cancel_requested:
            self.set(None, CancelledError())
            return
        try:
            value = function()
        except BaseException as error:
            self.set(None, error)
        else:
            self.set(value)

    def follow(self, task: asyncio.Task[T]) -> None:
        """Give the result, error or cancellation of a task when it ends."""
        self._task = task
        task.add_done_callback(self._copy)
        if self._cancel_requested:
            task.cancel()

    def _copy(self, task: asyncio.Task[T]) -> None:
        error = CancelledError() if task.cancelled() else task.exception()
        self.set(None if error is not None else task.result(), error)

    def _release_lock(self) -> None:
        with suppress(RuntimeError):  # the lock is released already
            self._lock.release()


WATCH_INTERVAL_S = 0.25
SAMPLE_INTERVAL_S = 0.05
"""Seconds within which an unblocked loop reacts; also the interval between two samples of a blocked loop."""
MAX_SAMPLE_GAP_S = 0.25
"""Maximum seconds counted as blocked between two samples; a longer gap means that the whole process was held up."""
WARN_BLOCKED_S = 1.0
"""Seconds of blocking after which april warns of a function, once for each function."""


class BlockingFunction(NamedTuple):
    """A user's function that runs on the loop: its frame, its name with its file, and its current line."""

    frame: FrameType
    name: str
    line: str


class LoopWatch:
    """Finds user functions that block the event loop of ``thread``, by sampling its stack while it does not react.

    If two consecutive samples find the same call, the time between them counts as blocked by this call. A call that
    only one sample finds does not count, as april's own work may have kept the loop busy. A loop with a virtual clock
    is not watched.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        self._loop = loop
        self._thread = thread
        self._closed = threading.Event()
        self._responded = threading.Event()
        self._blocked: defaultdict[str, float] = defaultdict(float)
        """Seconds for which each function blocked the loop since the last ``take_blocked``."""
        self._warned: set[str] = set()

    def start(self) -> None:
        """Start the watching thread."""
        if abs(self._loop.time() - time.monotonic()) < 1.0:
            threading.Thread(target=self._main, name=f"{self._thread.name}-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching; may be called from any thread."""
        self._closed.set()

    def take_blocked(self) -> tuple[float, str]:
        """Return the seconds for which user functions blocked the loop since the last call, and the name of the one
        that blocked it longest (empty if there is none)."""
        blocked, self._blocked = self._blocked, defaultdict(float)
        longest = max(blocked, key=lambda name: blocked[name], default="")
        return sum(blocked.values()), longest

    def _main(self) -> None:
        while not self._closed.wait(WATCH_INTERVAL_S):
            self.sample()

    def sample(self) -> None:
        """Queue a callback, sample the loop's stack until the loop runs it, and warn of functions that block."""
        self._responded.clear()
        try:
            self._loop.call_soon_threadsafe(self._responded.set)
        except RuntimeError:  # closed
            return
        before, looked_s, blocked_s = None, 0.0, 0.0
        while not self._responded.wait(SAMPLE_INTERVAL_S) and not self._closed.is_set():
            seen, now = self._function(), self._loop.time()
            if seen is not None and before is not None and seen.frame is before.frame:
                passed = min(now - looked_s, MAX_SAMPLE_GAP_S)
                blocked_s += passed
                self._blocked[seen.name] += passed
                self._warn(seen, blocked_s)
            else:
                blocked_s = 0.0
            before, looked_s = seen, now

    def _warn(self, seen: BlockingFunction, seconds: float) -> None:
        if seconds >= WARN_BLOCKED_S and seen.name not in self._warned:
            self._warned.add(seen.name)
            log.warning(
                "%s has blocked april's event loop for %.1f s (%s), and nothing else in april runs meanwhile; make it "
                "a plain def, which april runs in a thread, or await whatever it waits for",
                seen.name, seconds, seen.line,
            )  # fmt: skip

    def _function(self) -> BlockingFunction | None:
        """Return the user's function that the loop runs now; None if the loop waits or runs april's own code."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        line, user = "", None
        while frame is not None and frame.f_code is not asyncio.Handle._run.__code__:  # outer frames run the loop
            file = file_of(frame)
            if user is None and is_april_file(file):
                return None
            if is_user_file(file):
                user, line = frame, line or f"line {frame.f_lineno} of {Path(frame.f_code.co_filename).name}"
            frame = frame.f_back
        if frame is None or user is None:  # the loop waits, or runs april's own code
            return None
        code = user.f_code
        name = f"{code.co_qualname} (line {code.co_firstlineno} of {Path(code.co_filename).name})"
        return BlockingFunction(user, name, line)
