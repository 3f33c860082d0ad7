"""Calls of the user's functions: async ones on the loop, plain ones in daemon threads, none for longer than allowed.

Invariant: each call is answered at most once, and not at all after it was cancelled. A function that goes on after
that (a thread, a coroutine that ignores its cancellation) is left behind, and nobody listens to it any more.
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
from functools import partial
from typing import Any, Protocol, TypeVar

from april.daemon_pool import DaemonPool
from april.driver.user_code import Outcome, cancelled_inside, harmless, inside_user_code, is_async, name_of, outcome_of
from april.errors import RolloutError

log = logging.getLogger("april")

PLAIN_FUNCTIONS_AT_ONCE = min(32, (os.cpu_count() or 1) + 4)
"""Plain reward functions and filters that run at the same time; those past their time limit are not counted."""

WARN_AGAIN = 10
"""A function is named again after this many times the limit of a slow one."""

T = TypeVar("T")
Answered = Callable[[Any, BaseException | None], None]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Call:
    """A call of a user's function."""

    __slots__ = ("_answered", "_calls", "_function", "_warned", "_where", "task")

    def __init__(self, calls: UserCalls, function: Callable[..., Any], where: object, answered: Answered) -> None:
        self._calls = calls
        self._function = function
        self._where = where
        self._answered: Answered | None = answered
        self._warned = False
        """True once a warning has named this call."""
        self.task: asyncio.Task[None] | None = None
        """The task that runs the function on the loop, if one does."""

    @property
    def name(self) -> str:
        """The function's name."""
        return name_of(self._function)

    @property
    def over(self) -> bool:
        """True once the call is answered or cancelled."""
        return self._answered is None

    def answer(self, value: Any, error: BaseException | None) -> None:
        """Tell who waits for it, unless that was done."""
        answered, self._answered = self._answered, None
        if answered is None:
            return
        self._calls.limits.stop(self)
        answered(value, error)

    def late(self) -> float | None:
        """Warn once of a call that takes long; answer one that takes too long with an error and leave it behind."""
        limits = self._calls.limits
        if limits.early_s is not None and not self._warned:
            self._warned = True
            self._calls.warn_of(name_of(self._function), self._where)
            return None if limits.seconds is None else limits.seconds - limits.early_s
        error = RolloutError(
            f"{name_of(self._function)} was not done with {self._where} after "
            f"function_timeout_s={limits.seconds:g}; limit what it waits for, or raise function_timeout_s"
        )
        if not self.over:
            if self.task is not None:
                self.task.cancel()  # before the answer, which may begin the next one
            self.answer(None, error)
        self._calls.leave(self)
        return None

    def cancel(self) -> None:
        """Drop the answer; a coroutine is cancelled, a plain function runs to its end."""
        self._answered = None
        if self.task is not None:
            self._calls.limits.stop(self)
            self.task.cancel()

    def stop_clock(self) -> None:
        """Stop counting the function's time."""
        self._calls.limits.stop(self)

    def start_clock(self) -> None:
        """Count the function's time from zero again."""
        if not self.over:
            self._warned = False
            self._calls.limits.start(self)


class UserCalls:
    """Calls functions, for one driver; must be used on its loop."""

    def __init__(self, limits: TimeLimits, threads: WorkerThreads, spawn: Spawn) -> None:
        self.limits = limits
        self._threads = threads
        self._spawn = spawn
        self._context = copy_context()
        self._closed = False
        self._warned: dict[str, float] = {}
        """The time, by function, before which no warning names it again."""
        self._places = PLAIN_FUNCTIONS_AT_ONCE
        self._waiting: deque[tuple[Call, Callable[..., Any], tuple[Any, ...]]] = deque()
        """Plain functions that wait for a place."""
        self._in_threads: dict[Call, asyncio.Future[None] | None] = {}
        """Plain functions that hold a place, each with the future of its end, if somebody waits for that."""

    def begin(self, function: Callable[..., Any], args: tuple[Any, ...], where: object, answered: Answered) -> Call:
        """Call ``function(*args)``; then ``answered(value, error)`` on the loop, at most once.

        ``where`` (a sample's id) is named in the error of a function that takes too long.
        """
        if is_async(function):
            return self.begin_async(function, args, where, answered)
        call = Call(self, function, where, answered)
        self._waiting.append((call, function, args))
        self._start_threads()
        return call

    def begin_async(
        self, function: Callable[..., Any], args: tuple[Any, ...], where: object, answered: Answered
    ) -> Call:
        """:meth:`begin` for a function that is known to be async."""
        call = Call(self, function, where, answered)
        call.task = self._spawn(self._on_the_loop(call, function, args))
        call.task.set_name(f"{name_of(function)} for {where}")
        return call

    def warn_of(self, name: str, where: object) -> None:
        """A function takes long; said of each from time to time, as it may do so for every sample."""
        early_s, seconds, now = self.limits.early_s, self.limits.seconds, asyncio.get_running_loop().time()
        assert early_s is not None
        if now < self._warned.get(name, now):
            return
        self._warned[name] = now + WARN_AGAIN * early_s
        ends = "nothing ends it (function_timeout_s)" if seconds is None else f"it is ended after {seconds:g} s"
        log.warning("%s has been at work on %s for %g s; %s", name, where, early_s, ends)

    def leave(self, call: Call) -> None:
        """Give the place that a call holds, if any, to the next one."""
        if call in self._in_threads:
            ended = self._in_threads.pop(call)
            if ended is not None and not ended.done():
                ended.set_result(None)
            self._places += 1
            self._start_threads()

    def close(self) -> dict[asyncio.Future[None], str]:
        """Begin and answer nothing any more; returns futures for ends of plain functions, and their names."""
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

    async def _on_the_loop(self, call: Call, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        value: Any = None
        error: BaseException | None = None
        call.start_clock()
        try:
            with inside_user_code():
                value = await function(*args)
        except asyncio.CancelledError:
            if call.over or self._closed:
                raise
            error = cancelled_inside()
        except GeneratorExit:
            raise  # the loop has ended
        except BaseException as raised:
            error = harmless(raised)
        call.answer(value, error)

    # ---------------------------------------------------------------- in threads

    def _start_threads(self) -> None:
        while self._places and self._waiting:
            call, function, args = self._waiting.popleft()
            if not call.over:
                self._start_thread(call, function, args)

    def _start_thread(self, call: Call, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        def heard(outcome: Outcome) -> None:
            self.limits.stop(call)
            self._heard(call, outcome)
            self.leave(call)

        try:
            self._threads.run(self._context.copy(), marked, (function, *args), heard)
        except RolloutError as error:
            call.answer(None, error)
            return
        self._places -= 1
        self._in_threads[call] = None
        self.limits.start(call)

    def _heard(self, call: Call, outcome: Outcome) -> None:
        error = outcome.error
        if isinstance(error, asyncio.CancelledError):
            error = cancelled_inside()
        if call.over:
            return
        if outcome.awaitable:
            # a plain function that only makes a coroutine; its task may be cancelled before it begins
            call.task = self._spawn(self._on_the_loop(call, outcome.take, ()))
            call.task.add_done_callback(lambda _: outcome.close())
        else:
            call.answer(outcome.take(), error)


def marked(function: Callable[..., T], *args: Any) -> T:
    """Call a function of the user's, in a thread, where calls of april's are refused."""
    with inside_user_code():
        return function(*args)


class Timed(Protocol):
    """Something that can be late."""

    def late(self) -> float | None:
        """Handle the end of its time, on the loop; returns the seconds that are left after all, or None."""


class TimeLimits:
    """Runs ``late`` of everything that was started and not stopped within ``seconds`` (None: never).

    ``early_s``: where it is less, ``late`` is run then for the first time, and may return what is left.
    """

    def __init__(self, seconds: float | None, early_s: float | None = None) -> None:
        self.seconds = seconds
        self.early_s = early_s if early_s is not None and (seconds is None or early_s < seconds) else None
        self._first = seconds if self.early_s is None else self.early_s
        self._deadlines: OrderedDict[Timed, float] = OrderedDict()
        """In the order of their deadlines."""
        self._timer: asyncio.TimerHandle | None = None
        self._given_more: dict[Timed, asyncio.TimerHandle] = {}
        """A timer for each that still had time left when its first limit ran out."""
        self._closed = False

    def start(self, what: Timed) -> None:
        """Begin to count its time, unless it is counted already."""
        if self._first is None or self._closed or what in self._deadlines or what in self._given_more:
            return
        loop = asyncio.get_running_loop()
        self._deadlines[what] = deadline = loop.time() + self._first
        if self._timer is None:
            self._timer = loop.call_at(deadline, self._check)

    def stop(self, what: Timed) -> None:
        """Stop timing; the next start begins from zero."""
        self._deadlines.pop(what, None)
        if (timer := self._given_more.pop(what, None)) is not None:
            timer.cancel()

    def restart(self, what: Timed) -> None:
        """Begin from zero, if its time was running."""
        if what in self._deadlines and self._first is not None:
            self._deadlines[what] = asyncio.get_running_loop().time() + self._first
            self._deadlines.move_to_end(what)

    def close(self) -> None:
        """Stop all timing for good."""
        self._closed = True
        self._deadlines.clear()
        for timer in self._given_more.values():
            timer.cancel()
        self._given_more.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        """Call ``late`` of all whose time is over, and set the timer for the next."""
        loop = asyncio.get_running_loop()
        # until the end this timer counts as running: what late() starts needs no second one
        while self._deadlines:
            what, deadline = next(iter(self._deadlines.items()))
            if deadline > loop.time():
                self._timer = loop.call_at(deadline, self._check)
                return
            del self._deadlines[what]
            self._call_late(what)
        self._timer = None

    def _call_late(self, what: Timed) -> None:
        self._given_more.pop(what, None)
        left = what.late()
        if left is not None and not self._closed:
            self._given_more[what] = asyncio.get_running_loop().call_later(left, self._call_late, what)


class WorkerThreads:
    """Daemon threads for the user's plain functions, as many as run at the same time; they are used again.

    A thread that hangs costs its memory and nothing else: the next function gets another one.
    """

    def __init__(self) -> None:
        self._pool = DaemonPool("april-worker", max_workers=sys.maxsize)

    def run(
        self, context: Context, function: Callable[..., Any], args: tuple[Any, ...], heard: Callable[[Outcome], None]
    ) -> Future[Outcome]:
        """Call ``function(*args)`` in a thread, in ``context``; then ``heard(outcome)`` on this loop, if it lives.

        Returns the outcome for a thread that would rather wait for it.

        Raises:
            RolloutError: the system gives no more threads.
        """
        loop = asyncio.get_running_loop()
        try:
            job = self._pool.submit(outcome_of, partial(context.run, partial(function, *args)))
        except RuntimeError as error:
            raise RolloutError(
                f"the system gives no more threads ({error}; this process has {threading.active_count()}); plain "
                "functions need one each: start fewer samples at a time, or write async functions"
            ) from None
        job.add_done_callback(lambda done: call_on(loop, heard, done.result()))
        return job

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Await ``function(*args)`` in a thread; raises what it raises, and RolloutError as :meth:`run`."""
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.run(copy_context(), function, args, lambda o: None if ended.done() else ended.set_result(o))
        outcome = await ended
        if outcome.error is not None:
            raise outcome.error
        return outcome.take()

    def close(self) -> None:
        """End idle threads now, and the others after the function that they run; none is waited for."""
        self._pool.shutdown(wait=False)


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Call a function on the loop from another thread; do nothing if the loop has ended."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
