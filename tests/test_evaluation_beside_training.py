"""How long evaluations take beside continuous training, on simulated engines and virtual time."""

from __future__ import annotations

import asyncio

import pytest

import april
from april.engines.protocol import Request
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine
from april.testing import rollouts
from april.testing.same_loop import Rollouts

pytestmark = pytest.mark.on_virtual_time

COST = DecodeCost(0.010, 0.00002, 0.0, 0.00001)
ANSWER = 200
"""Tokens of each answer of the evaluations; training's have 400 to 1,999."""


def length_of(request: Request) -> int:
    group, index = request.sample_key or (0, 0)
    return ANSWER if request.sampling.temperature == 0 else 400 + (group * 797 + index * 331) % 1600


def opened(slots: int) -> Rollouts:
    """Two engines, and training with 64 requests in flight."""
    config = april.Config(
        rollout_batch_size=4, n_samples_per_prompt=8, max_response_len=2000, generation="continuous", max_staleness=8,
        max_in_flight=64,
    )  # fmt: skip
    engines = [SimulatedEngine(f"e{i}", COST, length_of, max_running=slots) for i in range(2)]
    return rollouts(
        config, engines=engines, prompts=[[i] for i in range(1, 1000)], reward=lambda p, r: 1.0, check=False,
    )  # fmt: skip


async def seconds(run: Rollouts, prompts: int) -> float:
    loop = asyncio.get_running_loop()
    before = loop.time()
    result = await run.evaluate([[i] for i in range(1, 1 + prompts)], temperature=0)
    assert {len(row[0].tokens) for row in result.responses} == {ANSWER}
    return loop.time() - before


@pytest.mark.parametrize("slots", [64, 32], ids=["room", "full"])
async def test_an_evaluation_beside_training_takes_about_as_long_as_alone(slots: int) -> None:
    """Engines have room for it, or training has all their slots; training keeps its tokens, and goes on with them."""
    async with opened(slots) as run:
        alone = await seconds(run, 24)
        for _ in range(2):
            await run.next_batch()
            assert await seconds(run, 24) <= 1.3 * alone
            await run.weight_update()
        assert not run.ledger()["tokens"].dropped
        run.validate()


async def test_an_evaluation_larger_than_its_share_leaves_training_the_rest_of_full_engines() -> None:
    """Training gives up 32 of 64 slots once, and is not cut again for each answer."""
    async with opened(32) as run:
        await run.next_batch()
        core = run.scheduler._driver.core
        before = core.counters["aborted_attempts"]
        evaluation = asyncio.create_task(seconds(run, 160))
        await asyncio.sleep(10)
        assert (len(core.context.attempts.of_evaluations), len(core.attempts)) == (32, 32)
        await evaluation
        assert core.counters["aborted_attempts"] - before <= 44
        core.validate()
