"""The virtual clock: time jumps, order is fixed, and a program that would hang says so."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Callable

import pytest

from april.testing.virtual_clock import VirtualClockLoop, VirtualDeadlock, run_virtual


def test_sleeping_takes_virtual_time_only() -> None:
    """A year passes at once, and loop.time() shows exactly a year."""

    async def main() -> float:
        await asyncio.sleep(365 * 86_400.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main(), start_s=5.0, limit_s=math.inf) == 5.0 + 365 * 86_400.0


@pytest.mark.parametrize("start_s", [0.0, 0.1, 1e9])
def test_timers_run_at_their_exact_time_and_order(start_s: float) -> None:
    """A callback runs at its very time, one float later comes after, and what is ready at t runs before t ends."""
    log: list[tuple[str, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        at = start_s + 0.3

        def note(what: str) -> None:
            log.append((what, loop.time()))

        async def hops() -> None:
            for _ in range(20):
                await asyncio.sleep(0)
            note("after 20 hops")

        tasks: list[asyncio.Task[None]] = []
        loop.call_at(math.nextafter(at, math.inf), note, "one float later")
        loop.call_at(at, lambda: tasks.append(loop.create_task(hops())))
        loop.call_at(start_s + 0.2, note, "first")
        loop.call_at(start_s - 1.0, note, "overdue")
        await asyncio.sleep(1.0)

    run_virtual(main(), start_s=start_s)

    at = start_s + 0.3
    assert log == [
        ("overdue", start_s),
        ("first", start_s + 0.2),
        ("after 20 hops", at),
        ("one float later", math.nextafter(at, math.inf)),
    ]


def test_timeouts_queues_and_cancellation_work() -> None:
    """What driver code uses behaves as on a real loop."""

    async def main() -> list[object]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[int] = asyncio.Queue()
        seen: list[object] = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await queue.get()
        seen.append(loop.time())
        loop.call_later(1.0, queue.put_nowait, 7)
        seen.append(await asyncio.wait_for(queue.get(), timeout=3.0))
        sleeper = asyncio.create_task(asyncio.sleep(1e6))
        await asyncio.sleep(0.5)
        sleeper.cancel()
        await asyncio.wait([sleeper])
        return [*seen, sleeper.cancelled(), loop.time()]

    assert run_virtual(main()) == [2.5, 7, True, 4.0]


def test_call_soon_threadsafe_from_the_loop_thread() -> None:
    """The thread-safe call needs no pipe when it comes from the loop's own thread."""

    async def main() -> str:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon_threadsafe(future.set_result, "called")
        return await future

    assert run_virtual(main()) == "called"


def test_deadlock_is_an_error_that_names_the_waiting_tasks() -> None:
    """With nothing scheduled a real loop would hang; here the message says who waits and where, and cleans up."""
    cleaned = []

    async def waits_for_nobody() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    async def main() -> None:
        await asyncio.sleep(3.0)
        await asyncio.create_task(waits_for_nobody(), name="the culprit")

    with pytest.raises(VirtualDeadlock, match=r"virtual time 3\.0 s.*2 tasks wait.*the culprit in .*waits_for_nobody"):
        run_virtual(main())
    assert cleaned == [True]


def test_deadlock_with_many_tasks_stays_readable() -> None:
    """Only the first tasks are named, the rest are counted."""

    async def main() -> None:
        await asyncio.gather(*(asyncio.Event().wait() for _ in range(50)))

    with pytest.raises(VirtualDeadlock, match=r"51 tasks wait.* and 39 more"):
        run_virtual(main())


def test_timers_that_never_end_run_into_the_limit() -> None:
    """A poll that waits for ever keeps a loop alive; the limit of virtual time ends it with an error."""

    async def main() -> None:
        while True:  # noqa: ASYNC110  # polling is the point here
            await asyncio.sleep(1.0)

    with pytest.raises(VirtualDeadlock, match=r"over at 100\.0 s.*limit_s.*1 tasks wait"):
        run_virtual(main(), limit_s=100.0)


def test_threads_cannot_hide_a_deadlock() -> None:
    """Waiting for a thread would make time depend on the machine: an error, not a race."""
    release = threading.Event()

    async def main() -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, release.wait)
        finally:
            release.set()

    with pytest.raises(VirtualDeadlock, match="threads or sockets cannot wake"):
        run_virtual(main())


def test_sockets_and_signals_are_refused() -> None:
    """What a virtual loop cannot serve fails at once."""

    async def main(use: Callable[[asyncio.AbstractEventLoop, socket.socket], object]) -> None:
        with socket.socket() as sock:
            sock.setblocking(False)
            use(asyncio.get_running_loop(), sock)

    with pytest.raises(NotImplementedError, match="no socket"):
        run_virtual(main(lambda loop, sock: loop.add_reader(sock, print)))
    with pytest.raises(NotImplementedError, match="no signals"):
        run_virtual(main(lambda loop, sock: loop.add_signal_handler(2, print)))


def test_the_wall_clock_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time does not touch time.monotonic, so a run is the same on any machine."""

    def broken() -> float:
        raise AssertionError("the wall clock was read")

    async def main() -> float:
        await asyncio.gather(*(asyncio.sleep(i / 7) for i in range(100)))
        return asyncio.get_running_loop().time()

    monkeypatch.setattr(time, "monotonic", broken)
    monkeypatch.setattr(time, "perf_counter", broken)
    monkeypatch.setattr(time, "sleep", broken)
    assert run_virtual(main()) == 99 / 7


def test_debug_mode_and_exceptions() -> None:
    """asyncio's debug mode works, and an exception of the program comes out as it is."""

    async def main() -> None:
        await asyncio.sleep(10.0)
        raise LookupError("mine")

    loop = VirtualClockLoop()
    loop.set_debug(True)
    try:
        with pytest.raises(LookupError, match="mine"):
            loop.run_until_complete(main())
    finally:
        loop.close()
    assert loop.is_closed()
