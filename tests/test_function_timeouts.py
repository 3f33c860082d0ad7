"""function_timeout_s: a reward or rollout function that hangs is a named failure of its sample, and of nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gate_engine import TAIL, GateEngine
from real_schedulers import config, scheduler
from virtual_rollouts import Rollouts, now, on_virtual_time, table

import april
from april.config.settings import RETRY_PAUSE_S
from april.core.types import DropReason, Prompt, SampleId
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.driver.user_calls import Timeouts, UserCalls, WorkerThreads
from april.driver.user_code import harmless
from april.errors import RolloutError

# ---------------------------------------------------------------- async functions, on virtual time


@pytest.mark.parametrize("ending", ["answers late", "raises late"])
@on_virtual_time
async def test_an_async_reward_that_ignores_its_cancellation_is_left_behind(ending: str) -> None:
    """Its late answer is nobody's: the answer of the second call is delivered."""
    late: list[float] = []

    async def judge(prompt: Prompt, response: Response) -> float:
        if not late:
            late.append(-1.0)
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                await asyncio.sleep(20)
                late.append(now())
                if ending == "raises late":
                    raise ValueError("late") from None
                return 99.0
        await asyncio.sleep(40)
        return 1.0

    rollouts = Rollouts(table({}), n=1, reward=judge, function_timeout_s=50)
    batch = await rollouts.step()
    assert batch.rewards.tolist() == [1.0]
    assert late == [-1.0, 75.0]
    assert now() == 5 + 50 + RETRY_PAUSE_S + 40
    assert rollouts.core.counters["late_events"] == 0


@on_virtual_time
async def test_time_in_generate_does_not_count() -> None:
    """Responses and parked times far beyond the limit, over several steps; each tool has the whole limit."""

    async def agent(prompt: Prompt, llm: LLM) -> None:
        await asyncio.sleep(9)
        done = await llm.generate()
        await asyncio.sleep(9)
        await llm.generate([*done.conversation, 950])
        await asyncio.sleep(9)

    lengths = table({(0, 0): 400}, default=50)
    rollouts = Rollouts(lengths, n=1, over=2, rollout=agent, function_timeout_s=10)
    samples: dict[SampleId, int] = {}
    while SampleId(0, 0) not in samples:
        batch = await rollouts.driver.next_batch()
        samples |= {s.id: len(s.segments) for s in batch.samples}
        await asyncio.sleep(100)  # the trainer
        await rollouts.driver.update_weights()
    assert samples[SampleId(0, 0)] > 3  # two calls and what the tool said, in more than one attempt each
    assert now() > 400
    assert rollouts.core.counters["failed_samples"] == 0


@on_virtual_time
async def test_a_tool_that_runs_while_training_is_paused_uses_its_time() -> None:
    """A pause stops generation, not the user's tools, so their time goes on."""

    async def agent(prompt: Prompt, llm: LLM) -> None:
        await llm.generate()
        await asyncio.sleep(30)

    rollouts = Rollouts(table({}), n=1, rollout=agent, function_timeout_s=20)
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(6)
    async with rollouts.driver.paused():
        await asyncio.sleep(100)
        assert rollouts.core.counters["failed_samples"] == 1
    waiter.cancel()


@on_virtual_time
async def test_time_limits_run_out_in_order_and_start_again() -> None:
    """The same limit for all: late in the order of their starts, exactly in time; stopped ones never. One timer serves
    all, also where something begins anew in the moment in which it is late; after close nothing starts."""
    events: list[tuple[str, float]] = []

    class Timed:
        def __init__(self, name: str) -> None:
            self.name = name

        def on_timeout(self) -> None:
            events.append((self.name, now()))
            if self.name == "again":
                limits.start(self)

    def timers() -> int:
        handles: list[asyncio.TimerHandle] = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
        return sum(not handle.cancelled() for handle in handles)

    limits = Timeouts(10)

    stopped, first, again, restarted = (Timed(n) for n in ("stopped", "first", "again", "restarted"))
    for timed in (stopped, first, restarted):
        limits.start(timed)
    await asyncio.sleep(4)
    limits.start(first)  # running already: nothing
    limits.start(again)
    limits.stop(stopped)
    limits.stop(restarted)
    limits.start(restarted)
    for _ in range(13):
        assert timers() == 1
        await asyncio.sleep(2)
    assert events == [("first", 10.0), ("again", 14.0), ("restarted", 14.0), ("again", 24.0)]
    limits.close()
    limits.start(stopped)
    assert timers() == 0
    await asyncio.sleep(100)
    assert len(events) == 4


# ---------------------------------------------------------------- plain functions, in threads


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """What hung functions wait for; set when the test is over, and then their threads end."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith("april-worker"):
            thread.join(30)
            assert not thread.is_alive()


def limited(**arguments: Any) -> april.RolloutScheduler:
    """N = n = 1; functions have 50 ms. A slow machine may make others late: what is late may begin again for ever."""
    settings = config(
        rollout_batch_size=1, n_samples_per_prompt=1, over_sampling_batch_size=1, function_timeout_s=0.05,
        max_attempt_failures=10**6,
    )  # fmt: skip
    return scheduler(**({"config": settings, "engines": [GateEngine()], "reward": None} | arguments))


def test_a_plain_reward_that_hangs_is_asked_again(release: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left behind in its thread, which gives its place to the next; close does not wait for it."""
    monkeypatch.setattr("april.config.settings.RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr("april.driver.user_calls.PLAIN_FUNCTIONS_AT_ONCE", 1)
    hung: list[str] = []

    def judge(prompt: april.Prompt, response: Response) -> float:
        if not hung:
            hung.append(str(response.sample_id))
            release.wait()
            return 99.0
        return 1.0

    with limited(reward=judge) as rollouts:
        assert rollouts.next_batch().rewards.tolist() == [1.0]
        assert "judge did not finish g0.s0 within function_timeout_s=0.05" in rollouts.story(0, 0)
        assert not rollouts.ledger()["tokens"].dropped
    assert not release.is_set()


def test_a_plain_rollout_function_that_hangs_begins_again(release: threading.Event) -> None:
    """Between two calls: a new thread for the sample; the old one is cancelled when it next generates."""
    hung: list[str] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def agent(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        llm.generate()
        if not hung:
            hung.append(str(llm.sample_id))
            release.wait()
            try:
                llm.generate()
            except BaseException as error:
                errors.append(error)
                ended.set()
                raise

    with limited(rollout=agent) as rollouts:
        (sample,) = rollouts.next_batch().samples
        assert sample.id == (0, 0)
        assert sample.tokens.tolist() == TAIL
        assert "agent did not finish g0.s0 within function_timeout_s=0.05" in rollouts.story(0, 0)
        assert rollouts.ledger()["tokens"].dropped[DropReason.FAILED] % len(TAIL) == 0
        release.set()
        assert ended.wait(30)
    assert [type(e) for e in errors] == [asyncio.CancelledError]


@pytest.mark.parametrize("what", ["rollout", "reward", "async reward"])
def test_a_function_that_hangs_in_an_evaluation_is_named(
    what: str, release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RolloutError instead of an evaluation without end, a coroutine that ignores its cancellation included."""
    monkeypatch.setattr("april.driver.command_executor.CLOSE_PATIENCE_S", 0.01)
    async_release = asyncio.Event()

    def agent(prompt: april.Prompt, llm: april.BlockingLLM) -> None:
        llm.generate()
        if what == "rollout":
            release.wait()

    def judge(prompt: april.Prompt, response: Response) -> float:
        if what == "reward":
            release.wait()
        return 1.0

    async def async_judge(prompt: april.Prompt, response: Response) -> float:
        while not async_release.is_set():
            try:
                await async_release.wait()
            except asyncio.CancelledError:
                continue
        return 1.0

    with limited(rollout=agent, reward=async_judge if what == "async reward" else judge) as rollouts:
        with pytest.raises(RolloutError, match=r"did not finish g0.s0 within function_timeout_s=0.05"):
            rollouts.evaluate([[1, 2]])
        rollouts._thread.call(async_release.set)


async def awaited(calls: UserCalls, function: Callable[..., Any], *args: Any, where: object) -> Any:
    """The answer of a call as april makes it; raises what the function raises. If this is cancelled, so is the call."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(harmless(error))

    call = calls.begin(function, args, where, answered)
    try:
        return await future
    except asyncio.CancelledError:
        call.cancel()
        raise


async def test_only_so_many_plain_functions_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait their turn, without using up their time; one that was cancelled meanwhile never starts."""
    monkeypatch.setattr("april.driver.user_calls.PLAIN_FUNCTIONS_AT_ONCE", 2)
    threads = WorkerThreads()
    calls = UserCalls(Timeouts(1000), threads, asyncio.get_running_loop().create_task)
    inside, most, ran = [0], [0], []
    lock = threading.Lock()
    gates = [threading.Event() for _ in range(6)]

    def function(number: int) -> int:
        with lock:
            ran.append(number)
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        gates[number].wait()
        with lock:
            inside[0] -= 1
        return number

    tasks = [asyncio.create_task(awaited(calls, function, i, where=i)) for i in range(6)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    tasks[0].cancel()  # this one runs: its place is taken until it ends
    await asyncio.sleep(0)
    for gate in gates:
        gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [r for r in results if isinstance(r, int)] == [1, 2, 4, 5]
    assert sorted(ran) == [0, 1, 2, 4, 5]
    assert most[0] <= 2
    threads.close()
