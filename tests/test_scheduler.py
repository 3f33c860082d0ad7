"""The scheduler as a trainer sees it: both faces, on real loops, with engines that cost next to nothing."""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from gate_engine import GateEngine
from real_schedulers import check, config, engine, scheduler

import april
from april.driver.rewards import Response
from april.engines.simulated.engine import SimulatedEngine
from april.errors import (
    EngineError,
    RolloutError,
    SchedulerClosed,
)

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# ---------------------------------------------------------------- the two faces


def test_the_blocking_face() -> None:
    """Batches, versions, books, story and repr, for a trainer without an event loop."""
    with scheduler() as rollouts:
        delivered = []
        for step in range(6):
            batch = rollouts.next_batch()
            check(batch)
            assert len(batch) == 6
            assert batch.version == rollouts.version == (0, step)
            assert rollouts.weight_update() == (0, step + 1)
            delivered += [s.id for s in batch.samples]
        assert len(set(delivered)) == 36
        books = rollouts.ledger()
        assert books["tokens"].balanced
        assert books["prompts"].balanced
        assert books["prompts"].delivered == 18
        assert books["tokens"].delivered <= books["tokens"].observed
        rollouts.validate()
        assert [e.name for e in rollouts.engines] == ["e0", "e1"]
        assert "leased in batch" in rollouts.story(*delivered[0])
        assert re.fullmatch(
            r"<RolloutScheduler version=0\.6, between steps: \d+ groups held, \d+ of them finished; "
            r"0 requests in flight; tokens: \d+ generated, \d+ delivered, \d+ held, 0 dropped>",
            repr(rollouts),
        )


@pytest.mark.asyncio
async def test_the_async_face() -> None:
    """The same for a trainer with an event loop of its own, which is never blocked."""
    rollouts = scheduler()
    try:
        for step in range(4):
            batch = await rollouts.anext_batch()
            check(batch)
            transfers = []
            assert await rollouts.aweight_update(transfer=lambda done=transfers: done.append(1)) == (0, step + 1)
            assert transfers == [1]
        result = await rollouts.aevaluate([[5, 6]], n_samples=2)
        assert result.rewards.shape == (1, 2)
    finally:
        await asyncio.to_thread(rollouts.close)


def test_a_loop_over_the_batches() -> None:
    """It is next_batch again and again, ends with the data, and may be left and entered again without a loss."""
    prompts = [[1 + i, 2] for i in range(12)]
    with scheduler(prompts=prompts) as rollouts:
        seen: list[april.Batch] = []
        for batch in rollouts:
            rollouts.weight_update()
            seen.append(batch)
            if len(seen) == 2:
                break
        for batch in rollouts:
            assert rollouts.weight_update() == (0, batch.id + 1)
            seen.append(batch)
        assert list(rollouts) == []
        with pytest.raises(april.DataExhausted):
            rollouts.next_batch()
    assert [batch.id for batch in seen] == list(range(4))
    assert sorted(int(n) for batch in seen for n in set(batch.group_ids)) == list(range(12))


def test_a_loop_without_updates_says_so() -> None:
    """More batches than max_staleness are out, so the next one is refused as next_batch refuses it."""
    with scheduler(config=config(max_staleness=1)) as rollouts, pytest.raises(RolloutError, match="train"):
        for _ in zip(range(9), rollouts, strict=False):
            pass


@pytest.mark.asyncio
async def test_an_async_loop_over_the_batches() -> None:
    """The async face has the same loop."""
    async with scheduler(prompts=[[1 + i, 2] for i in range(6)]) as rollouts:
        seen = []
        async for batch in rollouts:
            seen.append(batch.id)
            await rollouts.aweight_update()
    assert seen == [0, 1]


@pytest.mark.asyncio
@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_anext_batch_loses_nothing(turns: int) -> None:
    """Wherever a trainer's loop gives up, between two threads included: the next call gets the same batch."""
    rollouts = scheduler(engines=[engine()])
    try:
        seen = []
        for _ in range(12):
            waiter = asyncio.create_task(rollouts.anext_batch())
            for _ in range(turns):
                await asyncio.sleep(0)
            if turns == 5:  # the batch is there, and this loop has not looked yet
                while not rollouts._thread.call(lambda: rollouts._driver.core.leased):
                    pass
            waiter.cancel()
            outcome = (await asyncio.gather(waiter, return_exceptions=True))[0]
            batch = outcome if isinstance(outcome, april.Batch) else await rollouts.anext_batch()
            check(batch)
            seen.append(batch.id)
            await rollouts.aweight_update()
        assert seen == list(range(12))
        assert not rollouts._thread.call(lambda: dict(rollouts._driver.core.leased))
    finally:
        await asyncio.to_thread(rollouts.close)


@pytest.mark.asyncio
async def test_two_calls_do_not_get_the_same_batch() -> None:
    """A second call while one waits is refused with a sentence, in either face; the first one gets its batch."""
    with scheduler() as rollouts:
        first = asyncio.create_task(rollouts.anext_batch())
        await asyncio.sleep(0)
        with pytest.raises(RolloutError, match="one batch at a time"):
            await rollouts.anext_batch()
        with pytest.raises(RolloutError, match="one batch at a time"):
            rollouts.next_batch()
        assert [(await first).id, (await rollouts.anext_batch()).id] == [0, 1]


# ---------------------------------------------------------------- weight updates


def test_the_transfer_runs_in_the_trainers_thread_while_engines_are_paused() -> None:
    """transfer is called where weight_update was called; an exception of it, or Ctrl-C, changes nothing."""
    with scheduler() as rollouts:
        rollouts.next_batch()
        seen: list[Any] = []

        def transfer() -> None:
            seen.append((threading.current_thread(), [e._paused for e in rollouts.engines], rollouts.version))  # type: ignore[attr-defined]

        assert rollouts.weight_update(transfer=transfer) == (0, 1)
        assert seen == [(threading.current_thread(), [True, True], (0, 0))]

        for error in (OSError("the network is down"), KeyboardInterrupt()):

            def fails(error: BaseException = error) -> None:
                raise error

            rollouts.next_batch()
            with pytest.raises(type(error)):
                rollouts.weight_update(transfer=fails)
            assert rollouts.version == (0, 1)
            assert not any(e._paused for e in rollouts.engines)  # type: ignore[attr-defined]
            check(rollouts.next_batch())
        assert rollouts.weight_update("a directory") == (0, 2)


@pytest.mark.parametrize("what", ["next_batch", "weight_update", "evaluate"])
def test_blocking_calls_inside_a_transfer_are_refused(what: str) -> None:
    """They would wait for the weight update that waits for the transfer; the update can be repeated."""
    with scheduler() as rollouts:
        calls = {
            "next_batch": rollouts.next_batch,
            "weight_update": rollouts.weight_update,
            "evaluate": lambda: rollouts.evaluate([[1, 2]]),
        }
        rollouts.next_batch()
        with pytest.raises(RolloutError, match="or a transfer, because they may wait"):
            rollouts.weight_update(transfer=calls[what])
        assert rollouts.version == (0, 0)
        assert rollouts.weight_update(transfer=rollouts.ledger) == (0, 1)


def test_an_engine_that_cannot_load() -> None:
    """The engine's error comes out of weight_update; nobody waits for a transfer that will not be asked for."""

    class Fails(SimulatedEngine):
        async def pause(self) -> None:
            raise EngineError("cannot pause")

    with scheduler(engines=[engine(kind=Fails)]) as rollouts:
        with pytest.raises(EngineError, match="cannot pause"):
            rollouts.weight_update(transfer=lambda: pytest.fail("the engine is not paused"))
        check(rollouts.next_batch())


# ---------------------------------------------------------------- calls inside of functions


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("what", ["next_batch", "anext_batch", "weight_update", "evaluate", "close"])
def test_blocking_calls_inside_a_reward_are_refused(asynchronous: bool, what: str) -> None:
    """They would wait for the very reward that makes them: a clear error, no deadlock; looking inside is allowed."""
    errors: list[BaseException] = []
    looked: list[str] = []
    holder: list[april.RolloutScheduler] = []

    def judge(prompt: april.Prompt, response: Response) -> float:
        (rollouts,) = holder
        looked.append(repr(rollouts) + rollouts.story(0, 0) + str(rollouts.ledger()))
        try:
            called = getattr(rollouts, what)(*([[[1]]] if what == "evaluate" else []))
            for _ in range(2 * (what == "anext_batch")):
                called.send(None)
        except RolloutError as error:
            errors.append(error)
        return float(len(response.tokens))

    async def async_judge(prompt: april.Prompt, response: Response) -> float:
        return judge(prompt, response)

    with scheduler(reward=async_judge if asynchronous else judge) as rollouts:
        holder.append(rollouts)
        check(rollouts.next_batch())
    assert errors
    assert all("inside a rollout or reward function" in str(e) for e in errors)
    assert all(look.startswith("<RolloutScheduler version=0.0, ") for look in looked)


# ---------------------------------------------------------------- the end


def test_close_is_idempotent_and_final() -> None:
    """After close everything raises SchedulerClosed, repr says so, and close does nothing; an error in the with block
    comes out of it."""
    rollouts = scheduler()
    with pytest.raises(ZeroDivisionError), rollouts:
        rollouts.next_batch().lengths.tolist()[0] / 0
    rollouts.close()
    assert repr(rollouts) == "<RolloutScheduler closed>"
    for call in (
        rollouts.next_batch, rollouts.weight_update, rollouts.ledger, rollouts.validate,
        lambda: rollouts.evaluate([[1]]), lambda: rollouts.story(0, 0),
        lambda: rollouts.weight_update(transfer=lambda: pytest.fail("closed")),
        lambda: asyncio.run(rollouts.anext_batch()), lambda: asyncio.run(rollouts.aevaluate([[1]])),
    ):  # fmt: skip
        with pytest.raises(SchedulerClosed, match="closed"):
            call()


def test_close_from_two_threads_at_once() -> None:
    """Both return when it is over; neither cuts an engine off that is still releasing what it has."""
    begun, release = threading.Event(), threading.Event()
    released: list[str] = []

    class Slow(GateEngine):
        async def close(self) -> None:
            if not begun.is_set():  # idempotent: a second call returns at once
                begun.set()
                await asyncio.to_thread(release.wait)
                released.append(self.name)

    rollouts = scheduler(engines=[Slow()])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rollouts.close)
        begun.wait()
        second = pool.submit(rollouts.close)
        with pytest.raises(RolloutError, match="a call from april's own event loop"):
            # a whole round of the loop: the second call has arrived
            rollouts._thread.call(rollouts.close)
        assert not released
        release.set()
        first.result()
        second.result()
    assert released == ["gate"]


@pytest.mark.parametrize("what", ["next_batch", "evaluate", "transfer"])
def test_close_while_another_thread_waits(what: str) -> None:
    """Who waits gets SchedulerClosed, at once; nothing is left behind."""
    inside, release = threading.Event(), threading.Event()

    async def never(prompt: april.Prompt, response: Response) -> float:
        inside.set()
        await asyncio.Event().wait()
        return 0.0

    def transfer() -> None:
        inside.set()
        release.wait()

    rollouts = scheduler(reward=never)
    calls = {
        "next_batch": rollouts.next_batch, "evaluate": partial(rollouts.evaluate, [[1]]),
        "transfer": partial(rollouts.weight_update, transfer=transfer),
    }  # fmt: skip
    with ThreadPoolExecutor() as pool:
        waiter = pool.submit(calls[what])
        inside.wait()
        rollouts.close()
        release.set()
        assert isinstance(waiter.exception(), SchedulerClosed)


def test_a_bad_prompt_names_its_position_and_loses_no_good_one() -> None:
    """Prompts before and after the bad one are all delivered."""
    prompts: list[Any] = [[1], [2], [3], [4], "oops", [6], [7]]
    with scheduler(prompts=prompts, config=config(over_sampling_batch_size=3)) as rollouts:
        batches = [rollouts.next_batch()]
        with pytest.raises(RolloutError, match="prompt 4 is of type str"):
            rollouts.next_batch()
        batches.append(rollouts.next_batch())
        delivered = {int(s.prompt.token_ids[0]) for b in batches for s in b.samples}
        assert delivered == {1, 2, 3, 4, 6, 7}


# ---------------------------------------------------------------- engines


def test_engines_from_the_configuration() -> None:
    """Without engine objects the scheduler builds what config.engine describes."""
    settings = config(engine={"kind": "simulated", "count": 2, "median_len": 3, "slots": 8}, max_response_len=4)
    with scheduler(config=settings, engines=None) as rollouts:
        assert [e.name for e in rollouts.engines] == ["simulated0", "simulated1"]
        assert len(rollouts.next_batch()) == 6


def test_numbers_of_numpy_are_numbers() -> None:
    """In every call that takes a whole number, as in the configuration."""
    with scheduler() as rollouts:
        batch = rollouts.next_batch()
        assert batch.padded(np.int64(7))["response_ids"].dtype == np.int32
        assert len(batch.split(np.int64(1))) == 1
        rollouts.record_report(np.int64(batch.id), {"tokens": 1.0})
        rollouts.evaluate([[1]], n_samples=np.int64(2), max_tokens=np.int32(3), seed=np.int64(1))
        rollouts.weight_update(transfer=lambda: None, trained=np.int64(batch.id), label=np.int64(9))
        assert rollouts.version.n == 9
        assert rollouts.lower_staleness(np.int64(0)) == 0
        rollouts.commit(np.int64(rollouts.next_batch().id))
