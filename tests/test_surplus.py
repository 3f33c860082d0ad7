"""What is drawn while a step waits is bounded in every mode, and not left to age."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from core_machine import CoreMachine, settings

from april import Config
from april.core import events as ev
from april.core.types import OnStale, Refill
from april.testing import FakeEngine, Rollouts, rollouts, run_virtual

N, SAMPLES = 4, 2


def heavy_tails(request: Any) -> int:
    """A few prompts whose responses take as long as ten steps."""
    group, index = request.sample_key
    prompt, own = random.Random(group), random.Random(group * 64 + index + 7)
    return max(1, min(20_000, int(500 * prompt.lognormvariate(0, 1.0) * own.lognormvariate(0, 0.8))))


def run(on_stale: str, refill: str, steps: int, reward: Any = None, bound: int = 1, lengths: Any = heavy_tails) -> Any:
    """Metrics of each batch, and the share of tokens dropped."""

    async def main() -> tuple[list[dict[str, float]], float]:
        config = Config(
            rollout_batch_size=N, n_samples_per_prompt=SAMPLES, over_sampling_batch_size=2 * N, refill=refill,
            max_in_flight=2 * N * SAMPLES, on_stale=on_stale, max_staleness=bound, max_response_len=20_000,
            engine={"kind": "simulated"}, function_timeout_s=900,
        )  # fmt: skip
        engine = FakeEngine("e", lengths=lengths, max_running=999, seconds_per_token=0.01)
        prompts = ([1, 2] for _ in range(10**6))
        async with rollouts(config, engines=[engine], prompts=prompts, reward=reward, check=False) as run:
            batches = [await step(run) for _ in range(steps)]
            tokens = run.ledger()["tokens"]
            return batches, sum(tokens.dropped.values()) / tokens.observed

    async def step(run: Rollouts) -> dict[str, float]:
        batch = await run.next_batch()
        await run.weight_update()
        assert any(s.loss_mask.any() for s in batch.samples)
        return dict(batch.metrics)

    return run_virtual(main(), limit_s=1e7)


@pytest.mark.parametrize("refill", ["group", "sample"])
@pytest.mark.parametrize("on_stale", ["finish", "mask", "restart", "drop"])
def test_surplus_stays_below_what_can_be_delivered_in_time(on_stale: str, refill: str) -> None:
    """Heavy tails, a bound of one update: no more than 2 N groups are held, each batch has loss, little is lost."""
    batches, dropped = run(on_stale, refill, 60)
    assert max(b["surplus_groups"] + b["carried_groups"] for b in batches) <= 2 * N
    assert sum(b["masked_tokens"] for b in batches) == 0
    assert on_stale == "drop" or dropped == 0.0


@pytest.mark.parametrize("refill", ["none", "group", "sample"])
@pytest.mark.parametrize("on_stale", ["finish", "mask", "restart", "drop"])
def test_a_judge_that_is_away_for_minutes_does_not_spoil_what_comes_after(on_stale: str, refill: str) -> None:
    """Prompts are drawn for a few batches at most, and those after the outage are as fresh as ever."""

    async def judge(prompt: Any, response: Any) -> float:
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(300.0 - now if 20.0 < now < 300.0 else 0.0)
        return 0.0

    batches, _ = run(on_stale, refill, 120, judge, bound=5, lengths=60)
    assert max(b["prompts_drawn"] for b in batches) <= 6 * N
    assert max(b["surplus_groups"] for b in batches) <= 6 * N
    assert sum(b["masked_tokens"] for b in batches) == 0
    assert max(b["staleness_max"] for b in batches[-40:]) <= 5


@pytest.mark.parametrize("on_stale", list(OnStale))
def test_a_bound_that_means_none_is_finite_and_costs_nothing(on_stale: OnStale) -> None:
    """max_staleness 10^6: at most eight times the work wanted at a time is held; the plan is as long as that."""
    m = CoreMachine(
        settings(
            n=2, samples=1, over=4, refill=Refill.SAMPLE, max_staleness=10**6, max_age=4 * 10**6, on_stale=on_stale
        ),
        lambda g, i: 3 if g else 500,
        auto_score=False,
    )
    m.post(ev.StepRequested())
    for _ in range(200):
        short = [a.id for a in m.in_flight.values() if a.sample.id.group]
        if not short:
            break
        m.end(short[0])
    assert len(m.core.buffer) == m.core.buffer.capacity == 8 * 4
    assert m.core.buffer.horizon <= len(m.core.buffer) // 2 + 1
