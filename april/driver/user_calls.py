"""Calls the user's functions with a time limit: async functions on the event loop, plain functions in daemon threads.

Invariant: each call is answered at most once, and never after it was cancelled. A function that goes on after its
cancellation (in a thread, or a coroutine that ignores the cancellation) is left running, and its result is ignored.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from april.concurrency.daemon_threads import DaemonPool
from april.driver.loop_throttle import LoopThrottle
from april.driver.user_code import (
    Outcome,
    cancelled_inside,
    harmless,
    inside_user_code,
    is_async,
    name_of,
    outcome_of,
    run_as_user_code,
)
from april.errors import RolloutError

log = logging.getLogger("april")

PLAIN_FUNCTIONS_AT_ONCE = min(32, (os.cpu_count() or 1) + 4)
"""Maximum number of plain reward functions and filters that run at once; those past their time limit do not count."""

WARN_AGAIN = 10
"""Multiple of the warning time (``warn_s``) that must pass before a warning names the same function again."""

ResultCallback = Callable[[Any, BaseException | None], None]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(slots=True, eq=False, repr=False)
class UserCall:
    """A call of a user's function."""

    _calls: UserCalls
    _function: Callable[..., Any]
    _where: object
    _on_result: ResultCallback | None
    _warned: bool = False
    """True once a warning has named this call."""
    task: asyncio.Task[None] | None = None
    """Task that runs the function on the loop; None for a function in a thread."""

    @property
    def name(self) -> str:
        """Name of the function."""
        return name_of(self._function)

    @property
    def done(self) -> bool:
        """True once the call is answered or cancelled."""
        return self._on_result is None

    def answer(self, value: Any, error: BaseException | None) -> None:
        """Pass the result to the callback, unless the call was answered or cancelled before."""
        answered, self._on_result = self._on_result, None
        if answered is None:
            return
        self._calls.limits.stop(self)
        answered(value, error)

    def on_timeout(self) -> float | None:
        """Log a warning at the first timeout, if there is a warning time; otherwise answer the call with an error."""
        limits = self._calls.limits
        if limits.warn_s is not None and not self._warned:
            self._warned = True
            self._calls.warn_slow(self.name, self._where)
            return None if limits.seconds is None else limits.seconds - limits.warn_s
        error = RolloutError(
            f"{self.name} did not finish {self._where} within function_timeout_s={limits.seconds:g}; set "
            "a time limit on whatever it waits for, or raise function_timeout_s"
        )
        if not self.done:
            if self.task is not None:
                self.task.cancel()  # comes before the answer, as the answer may start the next call
            self.answer(None, error)
        self._calls.release_thread(self)
        return None

    def cancel(self) -> None:
        """Discard the answer; a coroutine is cancelled, a plain function runs to its end."""
        self._on_result = None
        if self.task is not None:
            self._calls.limits.stop(self)
            self.task.cancel()

    def stop_timeout(self) -> None:
        """Stop the function's timeout."""
        self._calls.limits.stop(self)

    def start_timeout(self) -> None:
        """Restart the function's timeout from zero."""
        if not self.done:
            self._warned = False
            self._calls.limits.start(self)


class UserCalls:
    """Calls the user's functions for one driver; must be used on its event loop."""

    def __init__(
        self, limits: Timeouts, threads: WorkerThreads, spawn: Spawn, throttle: LoopThrottle | None = None
    ) -> None:  # fmt: skip
        self.limits = limits
        self._throttle = throttle or LoopThrottle()
        self._threads = threads
        self._spawn = spawn
        self._context = copy_context()
        self._closed = False
        self._warned: dict[str, float] = {}
        """Loop time from which a warning may name a function again, by the name of the function."""
        self._free_threads = PLAIN_FUNCTIONS_AT_ONCE
        self._waiting: deque[tuple[UserCall, Callable[..., Any], tuple[Any, ...]]] = deque()
        """Queue of plain functions for which no thread is allowed yet."""
        self._in_threads: dict[UserCall, asyncio.Future[None] | None] = {}
        """Running plain functions; after :meth:`close`, each with a future that is done when the function ends."""

    def begin(
        self, function: Callable[..., Any], args: tuple[Any, ...], where: object, answered: ResultCallback
    ) -> UserCall:
        """Start ``function(*args)``; ``answered(value, error)`` is called on the loop with its result, at most once.

        ``where`` (a sample's id) appears in the error of a function that takes too long.
        """
        if is_async(function):
            return self.begin_async(function, args, where, answered)
        call = UserCall(self, function, where, answered)
        self._waiting.append((call, function, args))
        self._start_threads()
        return call

    def begin_async(
        self, function: Callable[..., Any], args: tuple[Any, ...], where: object, answered: ResultCallback
    ) -> UserCall:
        """Do the same as :meth:`begin`, for a function that is known to be async."""
        call = UserCall(self, function, where, answered)
        call.task = self._spawn(self._run_on_loop(call, function, args))
        call.task.set_name(f"{name_of(function)} for {where}")
        return call

    def warn_slow(self, name: str, where: object) -> None:
        """Warn that a function takes long, at most once per ``WARN_AGAIN`` times the warning time for each function."""
        early_s, seconds, now = self.limits.warn_s, self.limits.seconds, asyncio.get_running_loop().time()
        assert early_s is not None
        if now < self._warned.get(name, now):
            return
        self._warned[name] = now + WARN_AGAIN * early_s
        ends = "no limit is set (function_timeout_s)" if seconds is None else f"april ends it after {seconds:g} s"
        log.warning("%s has been working on %s for %g s; %s", name, where, early_s, ends)

    def release_thread(self, call: UserCall) -> None:
        """Stop counting a call as running, and start the next plain function in the queue."""
        if call in self._in_threads:
            ended = self._in_threads.pop(call)
            if ended is not None and not ended.done():
                ended.set_result(None)
            self._free_threads += 1
            self._start_threads()

    def close(self) -> dict[asyncio.Future[None], str]:
        """Start and answer no more calls. Returns the names of running plain functions, by futures of their ends."""
        self._closed = True
        self.limits.close()
        self._waiting.clear()
        loop = asyncio.get_running_loop()
        futures = {call: loop.create_future() for call in self._in_threads}
        for call, future in futures.items():
            call.cancel()
            self._in_threads[call] = future
        return {future: call.name for call, future in futures.items()}

    # ---------------------------------------------------------------- on the loop

    async def _run_on_loop(
        self, call: UserCall, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...]
    ) -> None:
        value: Any = None
        error: BaseException | None = None
        await self._throttle.wait_turn()
        call.start_timeout()
        try:
            with inside_user_code():
                value = await function(*args)
        except asyncio.CancelledError:
            if call.done or self._closed:
                raise
            error = cancelled_inside()
        except GeneratorExit:
            raise  # the event loop has ended
        except BaseException as raised:
            error = harmless(raised)
        if not self._closed:
            call.answer(value, error)

    # ---------------------------------------------------------------- in threads

    def _start_threads(self) -> None:
        while self._free_threads and self._waiting:
            call, function, args = self._waiting.popleft()
            if not call.done:
                self._start_thread(call, function, args)

    def _start_thread(self, call: UserCall, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        def on_outcome(outcome: Outcome) -> None:
            self.limits.stop(call)
            self._thread_ended(call, outcome)
            self.release_thread(call)

        try:
            self._threads.run(self._context.copy(), run_as_user_code, (function, *args), on_outcome)
        except RolloutError as error:
            call.answer(None, error)
            return
        self._free_threads -= 1
        self._in_threads[call] = None
        self.limits.start(call)

    def _thread_ended(self, call: UserCall, outcome: Outcome) -> None:
        error = outcome.error
        if isinstance(error, asyncio.CancelledError):
            error = cancelled_inside()
        if call.done:
            return
        if outcome.awaitable:
            # a plain function returned a coroutine, which must be closed if its task is cancelled before it starts
            call.task = self._spawn(self._run_on_loop(call, outcome.take, ()))
            call.task.add_done_callback(lambda _: outcome.close())
        else:
            call.answer(outcome.take(), error)


class HasTimeout(Protocol):
    """An operation with a timeout."""

    def on_timeout(self) -> float | None:
        """Handle the timeout, on the loop; returns the seconds until the next timeout, or None if there is none."""


class Timeouts:
    """Calls ``on_timeout()`` of each operation that was started and not stopped within ``seconds`` (None means never).

    If ``warn_s`` is less than ``seconds``, the first call comes after ``warn_s``, so that the operation can log a
    warning; ``on_timeout()`` then returns the time left.
    """

    def __init__(self, seconds: float | None, warn_s: float | None = None) -> None:
        self.seconds = seconds
        self.warn_s = warn_s if warn_s is not None and (seconds is None or warn_s < seconds) else None
        self._first = seconds if self.warn_s is None else self.warn_s
        self._deadlines: OrderedDict[HasTimeout, float] = OrderedDict()
        """Deadlines in loop time, earliest first."""
        self._timer: asyncio.TimerHandle | None = None
        self._extended: dict[HasTimeout, asyncio.TimerHandle] = {}
        """Timers of operations whose ``on_timeout()`` returned a time left."""
        self._closed = False

    def start(self, what: HasTimeout) -> None:
        """Start the timeout of an operation, unless it is running already."""
        if self._first is None or self._closed or what in self._deadlines or what in self._extended:
            return
        loop = asyncio.get_running_loop()
        self._deadlines[what] = deadline = loop.time() + self._first
        if self._timer is None:
            self._timer = loop.call_at(deadline, self._check)

    def stop(self, what: HasTimeout) -> None:
        """Stop the timeout of an operation; the next start begins from zero."""
        self._deadlines.pop(what, None)
        if (timer := self._extended.pop(what, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        """Stop all timeouts for good."""
        self._closed = True
        self._deadlines.clear()
        for timer in self._extended.values():
            timer.cancel()
        self._extended.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        """Call ``on_timeout()`` of all operations past their deadline, and set the timer for the next deadline."""
        loop = asyncio.get_running_loop()
        # _timer stays set in this loop, so that start(), when on_timeout() calls it, does not set a second timer
        while self._deadlines:
            what, deadline = next(iter(self._deadlines.items()))
            if deadline > loop.time():
                self._timer = loop.call_at(deadline, self._check)
                return
            del self._deadlines[what]
            self._call_on_timeout(what)
        self._timer = None

    def _call_on_timeout(self, what: HasTimeout) -> None:
        self._extended.pop(what, None)
        left = what.on_timeout()
        if left is not None and not self._closed:
            self._extended[what] = asyncio.get_running_loop().call_later(left, self._call_on_timeout, what)


class WorkerThreads:
    """A pool of daemon threads for the user's plain functions, without a limit on their number.

    A thread that hangs costs only its memory: the next function gets another thread.
    """

    def __init__(self) -> None:
        self._pool = DaemonPool("april-worker", max_workers=sys.maxsize)

    def run(
        self, context: Context, function: Callable[..., Any], args: tuple[Any, ...],
        on_outcome: Callable[[Outcome], None],
    ) -> Future[Outcome]:  # fmt: skip
        """Run ``function(*args)`` in a thread, in ``context``, and call ``on_outcome`` on the running loop.

        Returns a future of the outcome, on which threads can wait. A closed loop does not call ``on_outcome``.

        Raises:
            RolloutError: the system allows no more threads.
        """
        loop = asyncio.get_running_loop()
        try:
            job = self._pool.submit(outcome_of, partial(context.run, partial(function, *args)))
        except RuntimeError as error:
            raise RolloutError(
                f"the system gives no more threads ({error}; this process has {threading.active_count()}), and each "
                "plain function needs one; start fewer samples at a time, or write async functions"
            ) from None
        job.add_done_callback(lambda done: call_on(loop, on_outcome, done.result()))
        return job

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(*args)`` in a thread and return its result; raises its errors and those of :meth:`run`."""
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.run(copy_context(), function, args, lambda o: None if ended.done() else ended.set_result(o))
        outcome = await ended
        if outcome.error is not None:
            raise outcome.error
        return outcome.take()

    def close(self) -> None:
        """End idle threads now, and other threads when their function has returned; does not wait for them."""
        self._pool.shutdown(wait=False)


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Schedule a function on the loop from another thread; does nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
