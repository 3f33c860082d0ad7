"""The event loops of the tests keep their order of events on a machine that stalls."""

from __future__ import annotations

import asyncio
import threading
import time

from steady_loop import SteadyLoop, turn_of_all


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
