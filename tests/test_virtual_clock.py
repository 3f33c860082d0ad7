"""The virtual clock: time jumps, order is fixed, and a program that would hang says so; and the tests' real loops."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from steady_loop import SteadyLoop, turn_of_all

from april.testing.virtual_clock import VirtualDeadlock, run_virtual


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


async def polls_for_ever() -> None:
    while True:  # noqa: ASYNC110  # polling is the point here
        await asyncio.sleep(1.0)


async def waits_for_many() -> None:
    await asyncio.gather(*(asyncio.Event().wait() for _ in range(50)))


cleaned: list[bool] = []


async def waits_for_nobody() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        cleaned.append(True)


async def waits_for_a_culprit() -> None:
    await asyncio.sleep(3.0)
    await asyncio.create_task(waits_for_nobody(), name="the culprit")


@pytest.mark.parametrize(
    ("main", "words"),
    [
        pytest.param(
            waits_for_a_culprit,
            r"virtual time 3\.0 s.*2 tasks wait.*the culprit in .*waits_for_nobody",
            id="who, where",
        ),
        pytest.param(waits_for_many, r"51 tasks wait.* and 39 more", id="only the first of many tasks are named"),
        pytest.param(polls_for_ever, r"reached at 100\.0 s.*limit_s.*1 tasks wait", id="a poll runs into the limit"),
    ],
)
def test_a_program_that_would_hang_is_an_error(main: Callable[[], Any], words: str) -> None:
    """The message says who waits and where; what waited is cleaned up."""
    cleaned.clear()
    with pytest.raises(VirtualDeadlock, match=words):
        run_virtual(main(), limit_s=100.0)
    assert cleaned == [True] * (main is waits_for_a_culprit)


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


# ---------------------------------------------------------------- the real loops of the tests


def test_every_loop_is_steady() -> None:
    """Those that april makes for itself, and those of asyncio.run."""
    loop = asyncio.new_event_loop()
    loop.close()
    assert isinstance(loop, SteadyLoop)


def test_a_stall_makes_nothing_due() -> None:
    """What was held up for 50 ms finds its timers one after the other, as they were set."""
    order: list[str] = []

    async def program() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.002, order.append, "first")
        loop.call_later(0.002, lambda: loop.call_soon(order.append, "after first"))
        loop.call_later(0.004, order.append, "second")
        before = loop.time()
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            pass
        assert loop.time() == before
        await asyncio.sleep(0.006)

    asyncio.run(program())
    assert order == ["first", "after first", "second"]


def test_a_turn_of_all_is_one_of_every_loop() -> None:
    """A loop on another thread has had its turn; one that has ended is not waited for."""
    there = asyncio.new_event_loop()
    thread = threading.Thread(target=there.run_forever)
    thread.start()
    runs = threading.Event()
    there.call_soon_threadsafe(runs.set)
    runs.wait()
    turns: list[int] = []

    async def program() -> None:
        for number in range(20):
            there.call_soon_threadsafe(turns.append, number)
            await turn_of_all()
            assert turns[-1] == number
        there.call_soon_threadsafe(there.stop)
        thread.join()
        await turn_of_all()
        there.close()
        await turn_of_all()

    asyncio.run(program())
