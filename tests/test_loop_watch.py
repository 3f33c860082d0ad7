"""What blocks april's loop is named, with its line, once; no clock of the test decides anything."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from april.driver import loop_thread
from april.driver.loop_thread import LoopWatch


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
    looked = threading.Event()

    async def main() -> None:
        await asyncio.create_task(program())
        while not looked.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: loop.inner.run_until_complete(main()))
    watch = LoopWatch(loop, thread)  # type: ignore[arg-type]
    thread.start()
    try:
        look(watch)
    finally:
        looked.set()
        thread.join(30)
    loop.inner.close()
    return watch


@pytest.fixture
def blocking(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., LoopWatch]:
    """The watch of a loop that ``block`` blocks, called by an async function, until it has been seen a few times."""
    monkeypatch.setattr(loop_thread, "PATIENCE_S", 0.0)
    monkeypatch.setattr(loop_thread, "EVERY_S", 0.0)

    def run(**clock: Any) -> LoopWatch:
        inside, enough = threading.Event(), threading.Event()

        def ask_the_judge() -> None:
            inside.set()
            assert enough.wait(30)

        async def reward() -> None:
            ask_the_judge()

        def look(watch: LoopWatch) -> None:
            assert inside.wait(30)
            seen = itertools.count()
            function = watch._function

            def counted() -> tuple[str, str] | None:
                if next(seen) == 4:
                    enough.set()
                return function()

            watch._function = counted  # type: ignore[method-assign]
            watch.look()
            watch.look()

        return watched(reward, look, **clock)

    with caplog.at_level(logging.WARNING, "april"):
        return run


def test_a_function_that_blocks_is_named_once(
    blocking: Callable[..., LoopWatch], caplog: pytest.LogCaptureFixture
) -> None:
    """The user's own by its name, with the line that it is at; the seconds are there for the batch."""
    watch = blocking()
    seconds, name = watch.take()
    assert seconds >= 5
    assert name.endswith(f"reward (line {line_of('async def reward')} of test_loop_watch.py)")
    assert watch.take() == (0.0, "")
    (said,) = caplog.messages
    assert said.startswith(f"{name} blocks april's event loop, ")
    assert f"(line {line_of('assert enough.wait')} of test_loop_watch.py)" in said
    assert said.endswith("make it a plain def, which april runs in a thread, or await what it waits for")


def test_a_loop_with_a_clock_of_its_own_is_not_blocked(
    blocking: Callable[..., LoopWatch], caplog: pytest.LogCaptureFixture
) -> None:
    """Where no time passes, none is lost: virtual clocks and stalled machines raise no alarm, and no thread watches."""
    watch = blocking(stands_still=True)
    assert watch.take()[0] == 0.0
    assert not caplog.messages
    before = threading.active_count()
    watch.start()
    assert threading.active_count() == before


def test_a_loop_that_turns_is_not_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers; and a loop that is closed ends the look."""
    monkeypatch.setattr(loop_thread, "PATIENCE_S", 30.0)

    async def nothing() -> None:
        """The loop goes on turning."""

    def look(watch: LoopWatch) -> None:
        for _ in range(20):
            watch.look()

    watch = watched(nothing, look)
    assert watch.take() == (0.0, "")
    watch.look()


def line_of(text: str) -> int:
    """Of this file, the first."""
    with open(__file__, encoding="utf-8") as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


