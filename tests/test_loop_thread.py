"""The background loop: submits, waits, survives, and ends without leaving anything behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import itertools
import logging
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from test_function_timeouts import awaited

from april.concurrency import daemon_threads as daemon_pool
from april.concurrency.daemon_threads import DaemonPool
from april.driver import loop_thread
from april.driver.loop_thread import LoopThread, LoopWatch, Reply, result_of
from april.driver.user_calls import Timeouts, UserCalls, WorkerThreads
from april.driver.user_code import file_of, is_user_file
from april.errors import SchedulerClosed


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    loop_thread = LoopThread("test-loop")
    yield loop_thread
    loop_thread.stop()
    gc.collect(1)  # a forgotten task or coroutine complains now


async def call_user(function: Callable[[], object]) -> object:
    """Call a plain function as april calls a user's."""
    threads = WorkerThreads()
    try:
        calls = UserCalls(Timeouts(None), threads, asyncio.get_running_loop().create_task)
        return await awaited(calls, function, where="the test")
    finally:
        threads.close()


async def where() -> str:
    return threading.current_thread().name


async def for_ever(ended: list[str] | None = None) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        if ended is not None:
            ended.append("ended")


def test_stop_cancels_what_runs_and_tells_who_waits(thread: LoopThread) -> None:
    """Tasks end through their finally blocks, async generators are closed, waiters get SchedulerClosed."""
    ended: list[str] = []

    async def generator() -> Iterator[int]:
        try:
            yield 1
        finally:
            ended.append("generator")

    async def iterate() -> None:
        async for _ in generator():
            await asyncio.Event().wait()

    waiting = [thread.submit(partial(for_ever, ended)), thread.submit(iterate)]
    thread.call(lambda: None)
    thread.stop()
    assert sorted(ended) == ["ended", "generator"]
    for future in waiting:
        with pytest.raises(SchedulerClosed):
            result_of(future)


def test_stop_tells_who_waits_for_what_nobody_gives(thread: LoopThread) -> None:
    """The end of the loop ends the wait, whatever came first; the coroutine may also fail, or return at once."""
    assert thread.wait_for(partial(asyncio.sleep, 0, 5)) == 5

    async def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        thread.wait_for(fails)
    begun = threading.Event()
    outcome: list[BaseException] = []

    async def waits_for_ever() -> None:
        begun.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            thread.wait_for(waits_for_ever)
        except BaseException as error:
            outcome.append(error)

    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    begun.wait()
    thread.stop()
    waits.join(10)
    assert [type(error) for error in outcome] == [SchedulerClosed]
    with pytest.raises(SchedulerClosed):
        thread.wait_for(waits_for_ever)


def test_stop_is_not_held_up_by_a_task_that_ignores_it(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A function that swallows its cancellation is named in the log and left behind."""
    monkeypatch.setattr("april.driver.loop_thread.STOP_PATIENCE_S", 0.01)
    release = threading.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        thread_tasks.append(task)

    thread_tasks: list[asyncio.Task[None]] = []
    thread.run(main)
    thread.stop()
    assert "stubborn" in caplog.text
    # asyncio would complain about a pending task; this one is meant to be
    thread_tasks[0]._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine = thread_tasks[0].get_coro()
    release.set()
    with pytest.raises((StopIteration, RuntimeError)):
        coroutine.throw(asyncio.CancelledError())  # type: ignore[union-attr]


def test_stop_is_not_held_up_by_a_thread_of_to_thread(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A function that hangs in asyncio.to_thread is told of in the log and left behind."""
    release, ended = threading.Event(), threading.Event()
    begun = threading.Event()

    def hang() -> None:
        begun.set()
        release.wait()
        ended.set()

    async def main() -> None:
        await asyncio.to_thread(hang)

    future = thread.submit(main)
    begun.wait()
    monkeypatch.setattr("april.driver.loop_thread.STOP_PATIENCE_S", 0.01)
    thread.stop()
    assert "asyncio.to_thread does not end" in caplog.text
    assert not ended.is_set()
    with pytest.raises(SchedulerClosed):
        result_of(future)
    release.set()
    assert ended.wait(30)


def test_a_task_that_exits_does_not_end_the_loop(thread: LoopThread, caplog: pytest.LogCaptureFixture) -> None:
    """sys.exit in a background task stops an ordinary loop; here the others go on, and the log tells."""

    async def exits() -> None:
        raise SystemExit(2)

    caplog.set_level(logging.ERROR)
    other = thread.submit(partial(asyncio.sleep, 0.01, "fine"))
    future = thread.submit(exits)
    with pytest.raises(SystemExit):
        result_of(future)
    assert other.result() == "fine"
    assert thread.run(where) == "test-loop"
    assert "tried to end the process" in caplog.text


def test_an_interrupted_wait_cancels_the_coroutine(thread: LoopThread) -> None:
    """What nobody waits for any more does not go on in the dark."""
    ended: list[str] = []

    class Interrupted(concurrent.futures.Future):  # type: ignore[type-arg]
        def __init__(self, inner: concurrent.futures.Future[None]) -> None:
            self.inner = inner

        def result(self, timeout: float | None = None) -> None:
            raise KeyboardInterrupt

        def cancel(self) -> bool:
            return self.inner.cancel()

    future = thread.submit(partial(for_ever, ended))
    thread.call(lambda: None)
    with pytest.raises(KeyboardInterrupt):
        result_of(Interrupted(future))
    thread.run(partial(asyncio.sleep, 0))
    assert ended == ["ended"]


async def test_an_awaitable_that_nobody_fetches_is_closed() -> None:
    """A plain function has returned a coroutine when its caller is cancelled: nothing is left un-awaited."""
    returning = threading.Event()

    def lazy() -> object:
        coroutine = where()
        returning.set()
        return coroutine

    assert await call_user(lazy) == threading.current_thread().name
    for _ in range(20):
        returning.clear()
        task = asyncio.create_task(call_user(lazy))
        await asyncio.sleep(0)
        returning.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    gc.collect(1)


async def test_run_async_over_a_stop(thread: LoopThread) -> None:
    """A waiter of another loop gets SchedulerClosed, not a cancellation that it would take for its own."""
    waiter = asyncio.create_task(thread.run_async(for_ever))
    await asyncio.sleep(0)
    await asyncio.to_thread(thread.stop)
    with pytest.raises(SchedulerClosed):
        await waiter


@contextmanager
def at_step(number: int, code: CodeType, function: Callable[[], object]) -> Iterator[list[bool]]:
    """Another thread may do ``function`` between any two instructions of ``code``: here before the one of a number.

    Yields a list that is not empty once that has happened.
    """
    left, happened = number, list[bool]()

    def each(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0 and not happened:
                happened.append(True)
                function()
        return each

    before = sys.gettrace()
    sys.settrace(each)
    try:
        yield happened
    finally:
        sys.settrace(before)


def test_a_reply_is_what_came_first_whole() -> None:
    """The loop gives a result while its end refuses it: one of the two is heard, once, and not a mixture."""
    number, reached = 0, True
    while reached:
        heard: list[BaseException | None] = []
        reply = Reply[str](lambda given, into=heard: into.append(given.error()))  # type: ignore[misc]
        with at_step(number, Reply.set.__code__, partial(reply.set, None, SchedulerClosed("late"))) as happened:
            reply.set("a batch")
        assert len(heard) == 1
        if isinstance(heard[0], SchedulerClosed):
            with pytest.raises(SchedulerClosed):
                reply.result()
        else:
            assert reply.result() == "a batch"
        number, reached = number + 1, bool(happened)
    assert number > 5


def test_a_job_is_refused_or_done_whenever_its_pool_ends() -> None:
    """Nobody waits for ever for a job that came behind the end of the threads."""
    number, reached = 0, True
    while reached:
        pool = DaemonPool("test-pool", 1)
        pool.submit(int).result()
        futures: list[concurrent.futures.Future[int]] = []
        ender = threading.Thread(target=pool.shutdown)
        with at_step(number, DaemonPool.submit.__code__, ender.start) as happened, suppress(RuntimeError):
            futures.append(pool.submit(int))
        if not happened:
            ender.start()
        ender.join()
        assert all(future.done() for future in futures)
        number, reached = number + 1, bool(happened)
    assert number > 20


def test_a_pool_that_ends_at_once_cancels_what_waits() -> None:
    """``cancel_futures`` leaves no future without an end."""
    pool, begun, go_on = DaemonPool("test-pool", 1), threading.Event(), threading.Event()

    def holds() -> None:
        begun.set()
        go_on.wait()

    first = pool.submit(holds)
    begun.wait()
    second = pool.submit(int)
    pool.shutdown(wait=False, cancel_futures=True)
    assert second.cancelled()
    go_on.set()
    assert pool.join(60.0)
    assert first.done()


# ----------------------------------------------------------------
# What blocks april's loop is named, with its line, once; no clock of the test decides anything.


class Clock:
    """An event loop whose time is a second later whenever it is asked for."""

    def __init__(self) -> None:
        self.inner = asyncio.new_event_loop()
        self.call_soon_threadsafe = self.inner.call_soon_threadsafe
        self.ticks = itertools.count()
        self.stands_still = False

    def time(self) -> float:
        return 0.0 if self.stands_still else float(next(self.ticks))


def watched(
    program: Callable[[], Coroutine[Any, Any, None]], look: Callable[[LoopWatch], None], **clock: Any
) -> LoopWatch:
    """``look`` while the loop runs ``program``."""
    loop = Clock()
    vars(loop).update(clock)
    task = loop.inner.create_task(program())
    thread = threading.Thread(target=loop.inner.run_forever)  # nothing else of this file is on the loop
    watch = LoopWatch(loop, thread)  # type: ignore[arg-type]
    thread.start()
    try:
        look(watch)
    finally:
        loop.inner.call_soon_threadsafe(loop.inner.stop)
        thread.join(30)
    loop.inner.run_until_complete(task)
    loop.inner.close()
    return watch


@pytest.fixture
def blocking(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., LoopWatch]:
    """The watch of a loop that ``block`` blocks, called by an async function, until it has been seen a few times."""
    monkeypatch.setattr(loop_thread, "SAMPLE_INTERVAL_S", 0.0)
    monkeypatch.setattr(loop_thread, "MAX_SAMPLE_GAP_S", math.inf)

    def run(in_april: str = "", **clock: Any) -> LoopWatch:
        inside, enough = threading.Event(), threading.Event()

        def ask_the_judge() -> None:
            inside.set()
            assert enough.wait(30)

        async def chat() -> None:
            inside.set()
            enough.wait(30)

        def base_url() -> None:
            inside.set()
            enough.wait(30)

        for function in (chat, base_url):
            function.__code__ = function.__code__.replace(co_filename=loop_thread.__file__)

        async def reward() -> None:
            if in_april == "chat":
                await chat()
            elif in_april:
                base_url()
            else:
                ask_the_judge()

        def look(watch: LoopWatch) -> None:
            assert inside.wait(30)
            seen = itertools.count()
            function = watch._function

            def counted() -> loop_thread.BlockingFunction | None:
                if next(seen) == 6:
                    enough.set()
                return function()

            watch._function = counted  # type: ignore[method-assign]
            watch.sample()
            watch.sample()

        return watched(reward, look, **clock)

    with caplog.at_level(logging.WARNING, "april"):
        return run


def test_a_function_that_blocks_is_named_once(
    blocking: Callable[..., LoopWatch], caplog: pytest.LogCaptureFixture
) -> None:
    """The user's own by its name, with the line that it is at; the seconds are there for the batch."""
    watch = blocking()
    seconds, name = watch.take_blocked()
    assert seconds >= 5
    assert name.endswith(f"reward (line {line_of('async def reward')} of test_loop_thread.py)")
    assert watch.take_blocked() == (0.0, "")
    (said,) = caplog.messages
    assert said.startswith(f"{name} has blocked april's event loop for ")
    assert f"(line {line_of('assert enough.wait')} of test_loop_thread.py)" in said
    assert said.endswith("make it a plain def, which april runs in a thread, or await whatever it waits for")


@pytest.mark.parametrize("which", ["chat", "base_url"])
def test_a_function_that_waits_for_april_is_not_named(
    which: str, blocking: Callable[..., LoopWatch], caplog: pytest.LogCaptureFixture
) -> None:
    """What takes long inside of april, such as a first import, is not the fault of who awaits or calls it."""
    assert blocking(in_april=which).take_blocked() == (0.0, "")
    assert not caplog.messages


def test_a_busy_loop_is_not_the_fault_of_whom_it_calls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While april has much to do for many samples, one function or another of the user's is always seen on the loop;
    none of their calls lasts from one look to the next."""
    monkeypatch.setattr(loop_thread, "SAMPLE_INTERVAL_S", 0.0)
    monkeypatch.setattr(loop_thread, "MAX_SAMPLE_GAP_S", math.inf)
    calls = [(threading.Event(), threading.Event()) for _ in range(20)]

    def short(inside: threading.Event, enough: threading.Event) -> None:
        inside.set()
        assert enough.wait(30)

    async def many() -> None:
        for call in calls:
            asyncio.get_running_loop().call_soon(short, *call)
        await asyncio.sleep(0)

    def look(watch: LoopWatch) -> None:
        assert calls[0][0].wait(30)  # the others are queued
        turn = iter(calls)
        function = watch._function

        def seen_once() -> loop_thread.BlockingFunction | None:
            if (call := next(turn, None)) is None:
                return None
            assert call[0].wait(30)
            seen = function()
            assert seen is not None
            call[1].set()
            return seen

        watch._function = seen_once  # type: ignore[method-assign]
        watch.sample()
        assert next(turn, None) is None

    assert watched(many, look).take_blocked() == (0.0, "")
    assert not caplog.messages


def test_time_that_the_whole_process_has_lost_blames_nobody(
    blocking: Callable[..., LoopWatch], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two looks that are far apart, as while the garbage is collected, prove no more than MOST_S."""
    monkeypatch.setattr(loop_thread, "MAX_SAMPLE_GAP_S", 0.0)
    assert blocking().take_blocked()[0] == 0.0
    assert not caplog.messages


def test_a_loop_with_a_clock_of_its_own_is_not_blocked(
    blocking: Callable[..., LoopWatch], caplog: pytest.LogCaptureFixture
) -> None:
    """Where no time passes, none is lost: virtual clocks and stalled machines raise no alarm, and no thread watches."""
    watch = blocking(stands_still=True)
    assert watch.take_blocked()[0] == 0.0
    assert not caplog.messages
    before = threading.active_count()
    watch.start()
    assert threading.active_count() == before


def test_a_loop_that_turns_is_not_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers; and a loop that is closed ends the look."""
    monkeypatch.setattr(loop_thread, "SAMPLE_INTERVAL_S", 30.0)

    async def nothing() -> None:
        """The loop goes on turning."""

    def look(watch: LoopWatch) -> None:
        for _ in range(20):
            watch.sample()

    watch = watched(nothing, look)
    assert watch.take_blocked() == (0.0, "")
    watch.sample()


@dataclass
class Generated:
    """Has an ``__init__`` that was generated."""

    function: Callable[[], FrameType]

    def __post_init__(self) -> None:
        self.frame = self.function()


def test_whose_code_it_is(tmp_path: Path) -> None:
    """Python's and april's own, and whatever is installed, is not the user's; an editable checkout is. Generated code
    is that of the module for which it was generated."""
    for file in (
        threading.__file__, loop_thread.__file__, pytest.__file__, "<frozen importlib._bootstrap>", "<string>",
        "/root/.local/lib/python3.11/site-packages/aiohttp/client.py", "/usr/lib/python3/dist-packages/aiohttp.py",
        "/opt/shared/site-packages/openai/_client.py",
    ):  # fmt: skip
        assert not is_user_file(file), file
    for file in (__file__, f"{tmp_path}/src/rewards.py", "/tmp/ipykernel_7/12.py"):  # noqa: S108
        assert is_user_file(file), file
    frame = Generated(lambda: sys._getframe(2)).frame  # __post_init__ is between
    assert (frame.f_code.co_filename, file_of(frame)) == ("<string>", __file__)
    for main, users in (("__main__", True), ("attrs_generated", False)):
        given = {"__name__": main, "sys": sys}
        exec(compile("frame = sys._getframe()", "<stdin>", "exec"), given)  # noqa: S102
        assert is_user_file(file_of(given["frame"])) is users  # type: ignore[arg-type]


def line_of(text: str) -> int:
    """Of this file, the first."""
    with open(__file__, encoding="utf-8") as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


# ----------------------------------------------------------------
# The end of a process in which functions of the user still run in threads.


CHILD = """
import atexit, sys, threading, time
from april.concurrency import daemon_threads as daemon_pool
from april.concurrency.daemon_threads import DaemonPool
daemon_pool.EXIT_PATIENCE_S, daemon_pool.TELL_S, daemon_pool.INTERRUPT_S = {patience}, 0.0, 60.0
begun, go_on = threading.Event(), threading.Event()
def judge():
    begun.set()
    while not go_on.is_set():
        sum(range(100))
    print("judged", flush=True)
DaemonPool("test").submit(judge)
begun.wait()
if {ends}:
    atexit.register(go_on.set)
{last}
"""


@pytest.mark.parametrize(
    ("ends", "last", "code"),
    [(True, "", 0), (False, "", 0), (False, "sys.exit(3)", 3), (False, "raise ValueError('mine')", 1)],
)
def test_a_function_that_still_runs_cannot_abort_the_process(ends: bool, last: str, code: int) -> None:
    """It is waited for, by its name, and then interrupted: the code is that of the run."""
    child = CHILD.format(patience=60 if ends else 0, ends=ends, last=last)
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert ("judged" in done.stdout) is ends
    assert ("judge did not end; it is interrupted" in done.stderr) is not ends
    assert ("ValueError: mine" in done.stderr) is ("mine" in last)


def test_what_has_ended_is_not_waited_for() -> None:
    """Whether it returned or raised; and names are those of the user's own functions."""

    def fails() -> None:
        assert daemon_pool._names().endswith("fails")
        raise ValueError

    pool = DaemonPool("test")
    with pytest.raises(ValueError, match=r"^$"):
        pool.submit(partial(lambda function: function(), fails)).result()
    pool.shutdown()
    assert not daemon_pool._running


QUEUE = """
import asyncio, sys, threading, time
from contextvars import copy_context
from april.concurrency import daemon_threads as daemon_pool
from april.driver.user_calls import WorkerThreads
daemon_pool.EXIT_PATIENCE_S, daemon_pool.TELL_S = 0.0, 0.0
begun, threads = threading.Event(), WorkerThreads()
def judge(name):
    print(name, flush=True)
    begun.set()
    while True:
        sum(range(100))
def loop():
    async def main():
        def heard(outcome):
            print("answered", outcome, flush=True)
            threads.run(copy_context(), judge, ("second",), heard)
        threads.run(copy_context(), judge, ("first",), heard)
        await asyncio.sleep(600)
    asyncio.run(main())
threading.Thread(target=loop, daemon=True).start()
begun.wait()
"""


def test_nothing_begins_once_what_ran_was_interrupted() -> None:
    """The interrupted function is answered to nobody, so no other one takes its place and is torn out."""
    done = subprocess.run([sys.executable, "-c", QUEUE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "first\n"), done.stderr
