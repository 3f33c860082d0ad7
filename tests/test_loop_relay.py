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
