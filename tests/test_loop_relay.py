"""Work on another event loop: awaited to its end, or to the end of its loop, never longer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager

import pytest

from april.engines.http import loop_relay
from april.engines.http.loop_relay import LoopRelay, result_from


@contextmanager
def another_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that does not run yet; what is left on it is ended."""
    there = asyncio.new_event_loop()

    def end() -> None:
        tasks = asyncio.all_tasks(there)
        for task in tasks:
            task.cancel()
        there.run_until_complete(asyncio.sleep(0))
        there.run_until_complete(there.shutdown_asyncgens())
        there.close()

    try:
        yield there
    finally:
        with on_a_thread(end):
            pass


@contextmanager
def on_a_thread(work: Callable[[], None]) -> Iterator[None]:
    """Do it beside the block, whose end waits for it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join()


def run_until_it_stops(there: asyncio.AbstractEventLoop) -> None:
    """The calling loop looks at nothing meanwhile."""
    with on_a_thread(there.run_forever):
        pass


@pytest.fixture(autouse=True)
def look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience with a loop that says nothing is short."""
    monkeypatch.setattr(loop_relay, "POLL_S", 0.001)


@pytest.mark.parametrize("closing", [False, True], ids=["reading", "closing"])
async def test_a_stopped_loop_is_not_waited_for(closing: bool) -> None:
    """It tells nobody that it was stopped: who reads gets an error, and close returns."""
    with another_loop() as there, on_a_thread(there.run_forever):

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


async def test_a_result_of_a_stopped_loop_is_not_waited_for() -> None:
    """Neither is that of a single call; results and errors of a loop that runs come through."""
    with another_loop() as there, on_a_thread(there.run_forever):

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


@pytest.mark.parametrize("ends", [False, True])
async def test_what_a_loop_has_handed_over_before_its_stop_comes_through(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patience ends with the items on their way and their loop stopped: they come first, then the error; or the end
    itself, for a request that is whole is not taken for one that broke off."""
    monkeypatch.setattr(loop_relay, "POLL_S", 0.0)
    with another_loop() as there:

        async def items() -> AsyncGenerator[int, None]:
            yield 1
            yield 2
            there.stop()
            if not ends:
                await asyncio.Event().wait()

        relay = LoopRelay(there, items)
        run_until_it_stops(there)
        assert [await anext(relay), await anext(relay)] == [1, 2]
        with pytest.raises(StopAsyncIteration if ends else RuntimeError, match=None if ends else "was stopped"):
            await anext(relay)
        await relay.close()


async def test_a_result_given_before_the_stop_of_its_loop_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single call likewise, also where its loop gets to it between the end of a wait and the look at the loop."""
    monkeypatch.setattr(loop_relay, "POLL_S", 0.0)
    with another_loop() as there:

        async def work() -> str:
            there.call_soon(there.call_soon, there.stop)  # after the callbacks of the task, in the next cycle
            return "done"

        def just_before() -> bool:
            monkeypatch.undo()
            run_until_it_stops(there)
            return there.is_running()

        monkeypatch.setattr(there, "is_running", just_before)
        assert await result_from(there, work()) == "done"
