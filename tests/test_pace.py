"""What thousands of requests do at the same time is spread over turns of the loop, in order, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from virtual_rollouts import RecordingEngine, Rollouts

from april.core import events as ev
from april.core.types import Prompt
from april.driver import loop_throttle
from april.driver.llm import LLM
from april.driver.loop_throttle import LoopThrottle
from april.driver.rollout_driver import RolloutDriver
from april.testing.virtual_clock import VirtualClockLoop, run_virtual

AT_ONCE = 16
"""In place of the real number."""


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests need no thousands."""
    monkeypatch.setattr(loop_throttle, "TASKS_PER_ITERATION", AT_ONCE)


class Turns:
    """Counts the turns of a virtual loop, and what happens in each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.seen: Counter[tuple[str, int]] = Counter()
        once = VirtualClockLoop._run_once  # type: ignore[attr-defined]

        def counted(loop: VirtualClockLoop) -> None:
            self.now += 1
            once(loop)

        monkeypatch.setattr(VirtualClockLoop, "_run_once", counted)

    def note(self, what: str) -> None:
        self.seen[what, self.now] += 1

    def most(self, what: str) -> int:
        return max(count for (name, _), count in self.seen.items() if name == what)

    def total(self, what: str) -> int:
        return sum(count for (name, _), count in self.seen.items() if name == what)


def test_so_many_go_on_in_one_turn_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones at once; who is cancelled takes no place; the loop may wait when all have had theirs."""
    turns, order = Turns(monkeypatch), []

    async def one(pace: LoopThrottle, number: int) -> None:
        await pace.wait_turn()
        turns.note("went on")
        order.append(number)

    async def program() -> None:
        pace = LoopThrottle()
        tasks = [asyncio.create_task(one(pace, number)) for number in range(3 * AT_ONCE)]
        await asyncio.sleep(0)
        assert order == list(range(AT_ONCE))
        gone = tasks[AT_ONCE : AT_ONCE + 5]
        for task in gone:
            task.cancel()
        await asyncio.sleep(1.0)  # virtual: it passes only when no turn is left
        assert all(task.cancelled() for task in gone)
        await pace.wait_turn()

    run_virtual(program())
    assert order == [*range(AT_ONCE), *range(AT_ONCE + 5, 3 * AT_ONCE)]
    assert turns.most("went on") == AT_ONCE


@pytest.mark.parametrize("own", [False, True])
def test_thousands_of_requests_do_not_hold_the_loop(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many functions and requests begin in one turn, and so many requests end where all are cut, over two steps:
    the second one sends again what the first one has cut."""
    turns, post = Turns(monkeypatch), RolloutDriver.post

    class Engine(RecordingEngine):
        def generate(self, request: Any) -> Any:
            turns.note("request")
            return super().generate(request)

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        turns.note("function")
        await llm.generate()

    def posted(driver: RolloutDriver, event: ev.Event) -> None:
        if isinstance(event, ev.AttemptEnded):
            turns.note("end")
        post(driver, event)

    async def program() -> None:
        monkeypatch.setattr(RolloutDriver, "post", posted)
        engine = Engine(length, max_running=4 * AT_ONCE)
        more = {"rollout": rollout} if own else {}
        rollouts = Rollouts(length, n=2 * AT_ONCE, over=4 * AT_ONCE, engines=[engine], check=False, **more)
        for _ in range(2):
            assert len((await rollouts.step()).samples) == 2 * AT_ONCE
        await rollouts.driver.close()

    def length(group: int, index: int) -> int:
        return 500 if 2 * AT_ONCE <= group < 4 * AT_ONCE else 5

    run_virtual(program())
    for what in ("request", "end", *(["function"] if own else [])):
        assert turns.most(what) == AT_ONCE
        assert turns.total(what) >= 4 * AT_ONCE
