"""Work on another event loop: awaited to its end, or to the end of its loop, never longer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from april.engines.http import loop_relay
from april.engines.http.loop_relay import LoopRelay, result_from

PATIENCE_S = 60.0


def beside(program: Callable[[asyncio.AbstractEventLoop], Awaitable[None]]) -> None:
    """The program with another loop, which runs on a thread and may be stopped by it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await program(loop)

    try:
        asyncio.run(bounded())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.call_soon(loop.stop)
        loop.run_forever()  # the first stop, if the program had stopped it before
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks) if tasks else asyncio.sleep(0))
        loop.close()


@pytest.mark.parametrize("closing", [False, True], ids=["reading", "closing"])
def test_a_stopped_loop_is_not_waited_for(closing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells nobody that it was stopped: who reads gets an error, and close returns."""
    monkeypatch.setattr(loop_relay, "LOOK_AGAIN_S", 0.001)

    async def program(there: asyncio.AbstractEventLoop) -> None:
        async def items() -> AsyncGenerator[int, None]:
            yield 1
            there.stop()
            await asyncio.Event().wait()

        relay = LoopRelay(there, items)
        assert await anext(relay) == 1
        if not closing:
            with pytest.raises(RuntimeError, match="was stopped"):
                await anext(relay)
        await relay.close()

    beside(program)


def test_a_result_of_a_stopped_loop_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is that of a single call; results and errors of a loop that runs come through."""
    monkeypatch.setattr(loop_relay, "LOOK_AGAIN_S", 0.001)

    async def program(there: asyncio.AbstractEventLoop) -> None:
        async def never() -> None:
            there.stop()
            await asyncio.Event().wait()

        async def fails() -> None:
            raise ValueError("so it is")

        assert await result_from(there, asyncio.sleep(0, "done")) == "done"
        with pytest.raises(ValueError, match="so it is"):
            await result_from(there, fails())
        with pytest.raises(RuntimeError, match="was stopped"):
            await result_from(there, never())

    beside(program)


def run_until_it_stops(there: asyncio.AbstractEventLoop) -> None:
    """Run a loop on a thread to its stop; the calling loop looks at nothing meanwhile."""
    thread = threading.Thread(target=there.run_forever)
    thread.start()
    thread.join()


def to_its_end(there: asyncio.AbstractEventLoop, program: Callable[[], Awaitable[None]]) -> None:
    """The program on a loop of its own; then what is left on ``there`` is ended."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await program()

    try:
        asyncio.run(bounded())
    finally:
        for task in asyncio.all_tasks(there):
            task.cancel()
        there.run_until_complete(asyncio.sleep(0))
        there.run_until_complete(there.shutdown_asyncgens())
        there.close()


def test_what_a_loop_has_handed_over_before_its_stop_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience ends with the items on their way and their loop stopped: they come first, then the error."""
    monkeypatch.setattr(loop_relay, "LOOK_AGAIN_S", 0.0)
    there = asyncio.new_event_loop()

    async def items() -> AsyncGenerator[int, None]:
        yield 1
        yield 2
        there.stop()
        await asyncio.Event().wait()

    async def program() -> None:
        relay = LoopRelay(there, items)
        run_until_it_stops(there)
        assert [await anext(relay), await anext(relay)] == [1, 2]
        with pytest.raises(RuntimeError, match="was stopped"):
            await anext(relay)
        await relay.close()

    to_its_end(there, program)


def test_the_end_of_a_generator_that_came_before_the_stop_of_its_loop_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is the end itself: a request that is whole is not taken for one that broke off."""
    monkeypatch.setattr(loop_relay, "LOOK_AGAIN_S", 0.0)
    there = asyncio.new_event_loop()

    async def items() -> AsyncGenerator[int, None]:
        yield 1
        there.stop()

    async def program() -> None:
        relay = LoopRelay(there, items)
        run_until_it_stops(there)
        assert [item async for item in relay] == [1]
        await relay.close()

    to_its_end(there, program)


def test_a_result_given_before_the_stop_of_its_loop_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single call likewise, also where its loop gets to it between the end of a wait and the look at the loop."""
    monkeypatch.setattr(loop_relay, "LOOK_AGAIN_S", 0.0)
    there = asyncio.new_event_loop()

    async def work() -> str:
        there.call_soon(there.call_soon, there.stop)  # after the callbacks of the task, in the next cycle
        return "done"

    def just_before() -> bool:
        monkeypatch.undo()
        run_until_it_stops(there)
        return there.is_running()

    async def program() -> None:
        monkeypatch.setattr(there, "is_running", just_before)
        assert await result_from(there, work()) == "done"

    to_its_end(there, program)
