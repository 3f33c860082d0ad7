"""The driver on virtual time: what is delivered, when, and what survives pauses, cancellation and weight updates."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from virtual_rollouts import RecordingEngine, Rollouts, now, on_virtual_time, table, virtual

from april.core.types import DropReason, OnStale, Prompt, Refill, SampleState
from april.core.versions import PolicyVersion
from april.driver.rewards import Response
from april.engines.simulated.response_lengths import LognormalLengths
from april.errors import SchedulerClosed

pytestmark = on_virtual_time

LENGTHS = LognormalLengths(30, 0.6, 0.6, seed=3)


# ---------------------------------------------------------------- what is delivered


@pytest.mark.parametrize("refill", list(Refill))
@pytest.mark.parametrize("interval", [None, 4.0])
async def test_batches_hold_exactly_what_the_engines_made(refill: Refill, interval: float | None) -> None:
    """Over many steps, cut and resumed on two engines, every sample is its uncut sequence with exact provenance."""
    engines = [RecordingEngine(LENGTHS.sample, f"e{i}", stream_interval_s=interval) for i in range(2)]
    rollouts = Rollouts(LENGTHS.sample, n=3, samples=4, over=5, engines=engines, refill=refill, max_response_len=120)
    batches = [await rollouts.step() for _ in range(8)]

    assert [b.version for b in batches] == [PolicyVersion(0, i) for i in range(8)]
    assert [b.id for b in batches] == list(range(8))
    samples = [s for b in batches for s in b.samples]
    assert len(samples) == len({s.id for s in samples}) == 8 * 12
    resumed = [s for s in samples if s.attempts > 1]
    assert len(resumed) > 10
    assert any(len({g.engine for g in s.segments}) == 2 for s in resumed)
    assert max(s.staleness for s in samples) >= 2
    for batch in batches:
        old = sum(int((s.versions[:, 1] < batch.version.n).sum()) for s in batch.samples)
        assert batch.off_policy_share == old / sum(len(s.tokens) for s in batch.samples)
        assert batch.metrics["staleness_max"] == max(s.staleness for s in batch.samples)
        assert 0 <= batch.metrics["bubble"] <= 1
        assert [s.reward for s in batch.samples] == [float(s.tokens[0] + len(s.tokens) / 1024) for s in batch.samples]


async def test_versions_over_weight_updates() -> None:
    """Tokens carry the version of the weights that made them; the sample's versions never decrease."""
    rollouts = Rollouts(table({(0, 0): 25}, 10), n=1, over=2)  # group 0 is the straggler of three steps
    await rollouts.step()
    await rollouts.step()
    batch = await rollouts.step()

    (sample,) = batch.samples
    assert sample.id == (0, 0)
    assert [(s.version.n, s.count) for s in sample.segments] == [(0, 10), (1, 10), (2, 5)]
    assert sample.versions.tolist() == [[0, 0]] * 10 + [[0, 1]] * 10 + [[0, 2]] * 5
    assert sample.staleness == 2
    assert batch.off_policy_share == 20 / 25
    assert rollouts.engines[0].engine._version == PolicyVersion(0, 3)


async def test_resumed_requests_continue_exactly() -> None:
    """A resumed request sends prompt + everything so far, with the budget that is left and another seed."""
    rollouts = Rollouts(table({(0, 0): 25}, 10), n=1, over=2, max_response_len=40)
    for _ in range(3):
        await rollouts.step()
    first, second, third = (r for r in rollouts.engines[0].requests.values() if r.sample_key == (0, 0))
    assert [len(r.token_ids) - 3 for r in (first, second, third)] == [0, 10, 20]
    assert [r.response_offset for r in (first, second, third)] == [0, 10, 20]
    assert third.token_ids[: len(second.token_ids)].tolist() == second.token_ids.tolist()
    assert [r.sampling.max_tokens for r in (first, second, third)] == [40, 30, 20]
    assert len({r.sampling.seed for r in (first, second, third)}) == 3


def test_the_same_run_twice_is_the_same() -> None:
    """Same settings, same virtual world: same batches at the same times."""

    def run() -> list[tuple[float, Any]]:
        seen: list[tuple[float, Any]] = []

        async def program() -> None:
            rollouts = Rollouts(LENGTHS.sample, n=2, samples=3, over=4)
            for _ in range(5):
                batch = await rollouts.step()
                seen.append((now(), [(s.id, s.tokens.tolist(), s.versions.tolist()) for s in batch.samples]))
            await rollouts.close()

        virtual(program)
        return seen

    assert run() == run()


# ---------------------------------------------------------------- rewards beside generation


async def test_slow_rewards_overlap_generation() -> None:
    """While a reward is awaited, others generate; a step does not wait for a reward that it can do without."""

    async def reward(prompt: Prompt, response: Response) -> float:
        await asyncio.sleep({5: 20.0, 3: 500.0}.get(len(response.tokens), 0.0))
        return 1.0

    rollouts = Rollouts(table({(0, 0): 5, (1, 0): 3, (2, 0): 90}), n=1, over=3, reward=reward)
    batch = await rollouts.step()
    assert now() == pytest.approx(5 + 20, abs=1e-6)
    assert batch.samples[0].id == (0, 0)
    # the straggler went on during the 20 s of the reward, and was stopped at once when it came
    assert len(rollouts.sample(2, 0).tape) == 25
    assert rollouts.sample(1, 0).state is SampleState.SCORING

    await asyncio.sleep(1000)  # the trainer trains; the reward of group 1 arrives meanwhile
    assert rollouts.sample(1, 0).state is SampleState.FINISHED
    batch = await rollouts.step()
    assert now() == pytest.approx(1025, abs=1e-6)  # surplus: delivered without waiting
    assert batch.samples[0].id == (1, 0)


async def test_group_rewards_are_one_call_per_group() -> None:
    """group_reward gets the n responses in order, once, when the last has returned."""
    calls: list[tuple[float, int, list[int]]] = []

    async def group_reward(prompt: Prompt, responses: list[Response]) -> list[float]:
        calls.append((now(), responses[0].sample_id.group, [len(r.tokens) for r in responses]))
        await asyncio.sleep(2)
        return [r.sample_id.group * 10.0 + r.sample_id.index for r in responses]

    lengths = {(0, 0): 4, (0, 1): 9, (0, 2): 6, (1, 0): 30}
    rollouts = Rollouts(table(lengths), n=2, samples=3, group_reward=group_reward)
    batch = await rollouts.step()
    assert [(round(t, 6), g, n) for t, g, n in calls] == [(9, 0, [4, 9, 6]), (30, 1, [30, 5, 5])]
    assert batch.rewards.tolist() == [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]


async def test_group_rewards_with_restarts_of_stale_samples() -> None:
    """on_stale: restart together with group rewards: every group is scored as a whole, again if need be."""

    async def group_reward(prompt: Prompt, responses: list[Response]) -> list[float]:
        return [float(len(r.tokens)) for r in responses]

    rollouts = Rollouts(
        LENGTHS.sample, n=2, samples=3, over=6, group_reward=group_reward, max_staleness=1, on_stale=OnStale.RESTART
    )
    for _ in range(12):
        batch = await rollouts.step()
        assert batch.rewards.tolist() == [len(s.tokens) for s in batch.samples]
        assert max(s.staleness for s in batch.samples) <= 1
    assert rollouts.core.tokens.dropped[DropReason.STALE] > 0


# ---------------------------------------------------------------- cancellation


# ---------------------------------------------------------------- the end of the data, and of the driver


async def test_an_error_that_nobody_expected_reaches_the_trainer(caplog: pytest.LogCaptureFixture) -> None:
    """A mistake in april itself must not leave the trainer waiting for ever: it is told, with the cause."""

    rollouts = Rollouts(table({}), n=1)

    def explode(command: Any) -> None:
        raise ZeroDivisionError("a bug")

    pump = rollouts.driver._pump
    pump._executors = dict.fromkeys(pump._executors, explode)
    with pytest.raises(SchedulerClosed, match="ZeroDivisionError: a bug") as caught:
        await rollouts.driver.next_batch()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    await rollouts.close()
    assert "april stops" in caplog.text
