"""A public coroutine cancelled between any two turns of the loop: the books hold, nothing is lost, the next call works.

A turn is one callback of the event loop. The uncut run is counted first; then it runs again and again, and each time
the call is cancelled before another one of its turns.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest
from virtual_rollouts import RecordingEngine, Rollouts, now, prompt_ids

from april.core.batch import Batch
from april.core.sampling import SamplingParams
from april.core.types import Prompt, Refill
from april.core.versions import PolicyVersion
from april.driver.llm import LLM
from april.driver.rewards import EvaluationResult, Response
from april.engines.simulated.response_lengths import LognormalLengths
from april.testing.virtual_clock import VirtualClockLoop

RUNS = int(os.environ.get("APRIL_RANDOM_LIVES", "80"))
"""The longest program is cut at so many of its turns at most."""
LENGTHS = LognormalLengths(12, 0.7, 0.7, seed=9)


class _Turns(deque[Any]):
    """The loop's queue of callbacks; says so before each of them."""

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self.before = before

    def popleft(self) -> Any:
        self.before()
        return super().popleft()


class Scissors:
    """Counts the turns that pass while a call is pending, and cancels it before turn number ``at``."""

    def __init__(self, at: int = -1) -> None:
        self.at = at
        self.turns = 0
        self.task: asyncio.Task[Any] | None = None
        self.cut = False

    def turn(self) -> None:
        if self.task is None:
            return
        if self.turns == self.at:
            self.task.cancel()
        self.turns += 1

    async def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of the call, or None if it was cancelled."""
        self.task = asyncio.get_running_loop().create_task(coroutine)
        try:
            await asyncio.wait([self.task])
        finally:
            task, self.task = self.task, None
        self.cut = task.cancelled()
        return None if self.cut else task.result()

    def run(self, program: Callable[[Scissors], Awaitable[Any]]) -> Any:
        class Loop(VirtualClockLoop):
            def __init__(loop) -> None:
                super().__init__()
                loop._ready = _Turns(self.turn)

        async def main() -> Any:
            return await program(self)

        with asyncio.Runner(loop_factory=Loop) as runner:
            return runner.run(main())


def cut_everywhere(program: Callable[[Scissors], Awaitable[Any]], most_runs: int = 150) -> int:
    """Run ``program`` uncut, then cut at its turns; the result must be the same. Returns how many runs were cut.

    Where there are more than ``most_runs`` turns, they are sampled evenly.
    """
    uncut = Scissors()
    expected = uncut.run(program)
    assert uncut.turns > 5
    step = max(1, -(-uncut.turns // most_runs))
    cut = 0
    for at in range(0, uncut.turns, step):
        scissors = Scissors(at)
        assert scissors.run(program) == expected, f"cancelled before turn {at} of {uncut.turns}"
        cut += scissors.cut
    return cut


# ---------------------------------------------------------------- the run


async def two_turns(prompt: Prompt, llm: LLM) -> str:
    first = await llm.generate(max_tokens=8)
    await asyncio.sleep(1.0)
    await llm.generate([*first.conversation, 5, 6])
    return "done"


async def slow_reward(prompt: Prompt, response: Response) -> float:
    await asyncio.sleep(0.5)
    return float(len(response.tokens))


async def slow_filter(prompt: Prompt, responses: Sequence[Response]) -> bool:
    await asyncio.sleep(0.75)
    return responses[0].sample_id.group % 4 != 1


SEVERAL_TURNS: dict[str, Any] = {"rollout": two_turns, "reward": slow_reward, "filter": slow_filter}


def new(**changes: Any) -> Rollouts:
    """N = 2, N' = 4, n = 2, on two engines, one of them streaming."""
    slow = {"pause": 0.5, "resume": 0.25, "close": 0.5}
    engines = [
        RecordingEngine(LENGTHS.sample, "e0", slow=slow, weight_update_s=1.0),
        RecordingEngine(LENGTHS.sample, "e1", slow=slow, weight_update_s=2.0, stream_interval_s=4.0),
    ]
    values: dict[str, Any] = {"n": 2, "samples": 2, "over": 4, "max_response_len": 60, "engines": engines}
    return Rollouts(LENGTHS.sample, **(values | changes))


Seen = list[Any]


def record(rollouts: Rollouts, batch: Batch, *, single_turn: bool = True) -> Any:
    """What a trainer sees of a batch."""
    if single_turn:
        rollouts.check(batch)
    return [
        (s.id, s.tokens.tolist(), s.logprobs.tolist(), s.versions.tolist(), s.reward) for s in batch.samples
    ] + [batch.id, batch.version]


async def rest(rollouts: Rollouts, seen: Seen, *, steps: int = 2, single_turn: bool = True) -> Seen:
    """The run goes on as if nothing had happened, and leaves nothing behind."""
    rollouts.core.validate()
    for _ in range(steps):
        batch = await rollouts.driver.next_batch()
        seen.append(record(rollouts, batch, single_turn=single_turn))
        await rollouts.driver.update_weights()
    rollouts.check_ledger()
    assert rollouts.core.counters["committed_batches"] == rollouts.core.context.batches
    await rollouts.close()
    return seen


@pytest.mark.parametrize("refill", list(Refill))
@pytest.mark.parametrize("turns", [1, 2], ids=["one turn", "two turns"])
def test_next_batch(refill: Refill, turns: int) -> None:
    """The next call returns the batch that the cancelled one would have returned, token for token."""

    async def program(scissors: Scissors) -> Seen:
        rollouts = new(refill=refill, **(SEVERAL_TURNS if turns == 2 else {}))
        single = turns == 1
        seen = []
        await rollouts.driver.next_batch()
        await rollouts.driver.update_weights()
        batch = await scissors.call(rollouts.driver.next_batch())
        rollouts.core.validate()
        if batch is None:
            batch = await rollouts.driver.next_batch()
        seen.append(record(rollouts, batch, single_turn=single))
        await rollouts.driver.update_weights()
        return await rest(rollouts, seen, steps=1, single_turn=single)

    assert cut_everywhere(program, most_runs=RUNS if refill is Refill.NONE else 50) > 20


@pytest.mark.parametrize("path", [None, "weights"])
def test_update_weights_between_steps(path: str | None) -> None:
    """It took effect or it did not, on all engines alike and as the version says; the run goes on the same."""

    async def program(scissors: Scissors) -> Seen:
        rollouts = new()
        seen = [record(rollouts, await rollouts.driver.next_batch())]
        transferred = []

        async def transfer() -> None:
            await asyncio.sleep(1)
            transferred.append(1)

        await scissors.call(rollouts.driver.update_weights(path, transfer))
        rollouts.core.validate()
        n = rollouts.core.clock.current.n
        assert {e.engine._version for e in rollouts.engines} == {PolicyVersion(0, n)}
        assert not any(e.engine._paused for e in rollouts.engines)
        assert len(rollouts.core.leased) == 1 - n
        if n == 0:
            await rollouts.driver.update_weights(path, transfer)
        else:
            assert transferred == [1]
        return await rest(rollouts, seen)

    assert cut_everywhere(program) > 10


def test_update_weights_in_the_middle_of_a_step() -> None:
    """An asynchronous trainer's update: whatever became of it, the step that runs delivers what it would have."""

    async def program(scissors: Scissors) -> Seen:
        rollouts = new(over=2)
        waiter = asyncio.create_task(rollouts.driver.next_batch())
        await asyncio.sleep(7.5)
        await scissors.call(rollouts.driver.update_weights())
        rollouts.core.validate()
        if rollouts.core.clock.current.n == 0:
            await rollouts.driver.update_weights()
        assert rollouts.core.clock.current.n == 1
        batch = await waiter
        rollouts.check(batch)
        await rollouts.driver.update_weights()
        seen = [sorted((s.id, s.tokens.tolist()) for s in batch.samples)]
        batch = await rollouts.driver.next_batch()
        seen.append(sorted((s.id, s.tokens.tolist()) for s in batch.samples))
        rollouts.check(batch)
        rollouts.check_ledger()
        await rollouts.close()
        return seen

    assert cut_everywhere(program) > 20


@pytest.mark.parametrize("running", [False, True], ids=["between steps", "in a step"])
def test_evaluate(running: bool) -> None:
    """A cancelled evaluation leaves no request and no pause behind, and the next one has the same result."""

    async def program(scissors: Scissors) -> Seen:
        rollouts = new(over=2 if running else 4)
        evaluator = rollouts.driver
        waiter = None
        if running:
            waiter = asyncio.create_task(rollouts.driver.next_batch())
            await asyncio.sleep(7.5)

        def evaluate() -> Coroutine[Any, Any, EvaluationResult]:
            return evaluator.evaluate([Prompt(prompt_ids(i)) for i in (900, 901)], 2, SamplingParams(max_tokens=20), 3)

        books = rollouts.core.observed_tokens()
        result = await scissors.call(evaluate())
        rollouts.core.validate()
        if scissors.cut and not running:
            await asyncio.sleep(0)
            assert not any(e.open_streams for e in rollouts.engines)
            assert rollouts.core.observed_tokens() == books
        if result is None:
            result = await evaluate()
        seen: Seen = [[r.tokens.tolist() for rs in result.responses for r in rs], result.rewards.tolist()]
        if waiter is not None:
            batch = await waiter
        else:
            batch = await rollouts.driver.next_batch()
        for sample in batch.samples:
            rollouts.check_provenance(sample)
        rollouts.core.validate()
        await rollouts.driver.update_weights()
        await rollouts.close()
        return [*seen, sorted((s.id, s.tokens.tolist()) for s in batch.samples)]

    assert cut_everywhere(program) > 20


def test_load_state_dict() -> None:
    """Loaded or not, never half: a driver whose load was cancelled takes the state again, or has it."""

    async def saved(scissors: Scissors) -> bytes:
        rollouts = new()
        await rollouts.driver.next_batch()
        await rollouts.driver.update_weights()
        waiter = asyncio.create_task(rollouts.driver.next_batch())
        await asyncio.sleep(6.5)
        state = msgspec.msgpack.encode(rollouts.driver.state_dict(None))
        waiter.cancel()
        await rollouts.close()
        return state

    state = msgspec.msgpack.decode(Scissors().run(saved))

    async def program(scissors: Scissors) -> Seen:
        rollouts = new()
        driver, core = rollouts.driver, rollouts.core
        await scissors.call(driver.load_state_dict(state))
        core.validate()
        assert not any(e.engine._paused for e in rollouts.engines)
        if core.clock.current == PolicyVersion(0, 0):
            assert len(core.buffer) == 0
            assert driver._source.position == 0
            assert await driver.load_state_dict(state) == PolicyVersion(1, 1)
        assert core.clock.current == PolicyVersion(1, 1)
        assert {e.engine._version for e in rollouts.engines} == {PolicyVersion(1, 1)}
        seen = []
        for _ in range(3):
            batch = await driver.next_batch()
            seen.append([(s.id, s.tokens.tolist(), s.versions.tolist()) for s in batch.samples])
            await driver.update_weights()
        core.validate()
        await rollouts.close()
        return seen

    assert cut_everywhere(program) > 10


@pytest.mark.parametrize("at", [0.0, 6.5, 200.0])
def test_close(at: float) -> None:
    """A cancelled close is finished by the next one; no task, stream or waiter is left."""

    async def program(scissors: Scissors) -> Seen:
        rollouts = new()
        waiter = asyncio.create_task(rollouts.driver.next_batch())
        await asyncio.sleep(at)
        await scissors.call(rollouts.driver.close())
        await rollouts.close()
        assert all(e.engine._closed for e in rollouts.engines)
        (outcome,) = await asyncio.gather(waiter, return_exceptions=True)
        rollouts.core.validate()
        return [type(outcome).__name__, now() < at + 20]

    assert cut_everywhere(program) > 5
