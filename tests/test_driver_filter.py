"""Dynamic sampling through the driver: only accepted groups count, rejected ones are dropped by name and replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from real_schedulers import assert_nothing_is_left, config, reward, scheduler
from virtual_rollouts import Rollouts, now, on_virtual_time, prompt_ids, table

import april
from april.core.sampling import SamplingParams
from april.core.types import DropReason, OnDataEnd, OnStale, Prompt, Refill
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.engines.simulated.response_lengths import LognormalLengths
from april.errors import DataExhausted, RolloutError

pytestmark = on_virtual_time

LENGTHS = LognormalLengths(15, 0.6, 0.6, seed=8)


def group_of(responses: list[Response]) -> int:
    return responses[0].sample_id.group


def only(accepted: Callable[[int], bool]) -> Callable[..., Awaitable[bool]]:
    """A filter by group number."""

    async def verdict(prompt: Prompt, responses: list[Response]) -> bool:
        return accepted(group_of(responses))

    return verdict


# ---------------------------------------------------------------- rejected, replaced, never counted


@pytest.mark.parametrize("refill", list(Refill))
@pytest.mark.parametrize("over", [3, 6, 2], ids=["N' = N", "N' = 2N", "portions"])
async def test_rejected_groups_are_replaced_and_never_counted(refill: Refill, over: int) -> None:
    """Every batch has N accepted groups; what was rejected is counted per step, by name, with all its tokens."""
    rollouts = Rollouts(LENGTHS.sample, n=3, samples=2, over=over, refill=refill, filter=only(lambda g: g % 3 != 1))
    dropped = 0
    delivered: list[int] = []
    for _ in range(6):
        batch = await rollouts.step()
        assert batch.group_sizes == (2, 2, 2)
        dropped += int(batch.metrics["groups_dropped_filtered"])
        delivered += batch.group_ids[::2].tolist()
    assert all(group % 3 != 1 for group in delivered)
    assert len(set(delivered)) == 18
    core = rollouts.core
    assert core.prompts.dropped[DropReason.FILTERED] >= dropped > 4
    assert rollouts.dropped == {
        DropReason.FILTERED: sum(
            LENGTHS.sample(g, i) for g in range(core.context.groups_drawn) for i in range(2)
            if g % 3 == 1 and g not in core.buffer.groups
        )
    }  # fmt: skip


async def test_what_a_filter_sees() -> None:
    """The prompt with its data, and every response with its reward and what the rollout function returned."""
    seen: list[Any] = []

    async def rollout(prompt: Prompt, llm: LLM) -> str:
        await llm.generate()
        return f"output of {llm.sample_id}"

    async def verdict(prompt: Prompt, responses: list[Response]) -> bool:
        seen.append((prompt.data["answer"], [(r.sample_id, r.output, r.reward, len(r.tokens)) for r in responses]))
        for r in responses:  # what it writes harms nobody
            r.tokens[:] = 0
            r.logprobs[:] = 9
        return True

    async def length(prompt: Prompt, response: Response) -> float:
        return float(len(response.tokens))

    prompts = [{"token_ids": prompt_ids(i), "answer": 10 * i} for i in range(2)]
    rollouts = Rollouts(
        table({(0, 1): 8}), n=2, samples=2, prompts=prompts, rollout=rollout, reward=length, filter=verdict
    )
    await rollouts.step()
    assert sorted(seen) == [
        (0, [((0, 0), "output of g0.s0", 5.0, 5), ((0, 1), "output of g0.s1", 8.0, 8)]),
        (10, [((1, 0), "output of g1.s0", 5.0, 5), ((1, 1), "output of g1.s1", 5.0, 5)]),
    ]


async def test_generation_goes_on_while_a_filter_thinks() -> None:
    """A slow filter holds up its group only: others are generated, judged and delivered meanwhile."""

    async def slow(prompt: Prompt, responses: list[Response]) -> bool:
        await asyncio.sleep(100 if group_of(responses) == 0 else 2)
        return True

    rollouts = Rollouts(table({(1, 0): 30, (2, 0): 40}), n=1, over=3, filter=slow)
    batch = await rollouts.step()
    assert batch.group_ids.tolist() == [1]
    assert now() == pytest.approx(32, abs=1e-6)
    assert len(rollouts.sample(2, 0).tape) == 32
    await asyncio.sleep(200)  # the trainer trains; the filter has spoken meanwhile
    assert rollouts.core.monitor.ready == 1
    batch = await rollouts.step()
    assert batch.group_ids.tolist() == [0]
    assert now() == pytest.approx(232, abs=1e-6)


async def test_a_verdict_on_a_group_that_began_again_is_late() -> None:
    """on_stale: restart takes a sample out of a group that is being judged: that verdict counts for nothing."""
    asked: list[int] = []

    async def verdict(prompt: Prompt, responses: list[Response]) -> bool:
        group = group_of(responses)
        asked.append(group)
        await asyncio.sleep(50 if asked.count(group) == 1 and group == 0 else 0)
        return asked.count(0) > 1 or group != 0

    rollouts = Rollouts(table({(0, 0): 4}, 6), n=1, over=2, filter=verdict, max_staleness=0, on_stale=OnStale.RESTART)
    assert (await rollouts.step()).group_ids.tolist() == [1]  # the update makes group 0 too old while it is judged
    batch = await rollouts.step()
    assert batch.group_ids.tolist() == [0]
    assert asked.count(0) == 2
    await asyncio.sleep(100)
    assert rollouts.core.counters["late_events"] == 1
    assert rollouts.dropped == {DropReason.STALE: 4 + 4}  # group 0, and group 2 after the next update


async def test_evaluations_are_not_filtered() -> None:
    """The filter is for training."""
    rollouts = Rollouts(table({}), n=1, samples=2, filter=only(lambda g: pytest.fail("not training")))
    result = await rollouts.driver.evaluate([Prompt(prompt_ids(1))], 2, SamplingParams(max_tokens=9), 0)
    assert result.rewards.shape == (1, 2)


# ---------------------------------------------------------------- filters that fail


async def test_a_filter_that_rejects_everything_ends_the_step_with_a_reason() -> None:
    """After max_filtered_groups in a row; everything is accounted for, and the next step begins a new count."""
    strict = [True]

    rollouts = Rollouts(table({}), n=2, samples=2, filter=only(lambda g: not strict[0]), max_filtered_groups=7)
    for total in (7, 14):
        with pytest.raises(RolloutError, match=r"the filter rejected 7 groups in a row; are the prompts too easy"):
            await rollouts.driver.next_batch()
        rollouts.check_ledger()
        assert rollouts.core.prompts.dropped[DropReason.FILTERED] in (total, total + 1)
    strict[0] = False
    await rollouts.step()


# ---------------------------------------------------------------- the end of the data


@pytest.mark.parametrize("end", [OnDataEnd.SHORT, OnDataEnd.WAIT])
@pytest.mark.parametrize("over", [3, 6])
async def test_the_end_of_the_data_with_rejections(end: OnDataEnd, over: int) -> None:
    """20 prompts, every third rejected: 13 are delivered as 3 + 3 + 3 + 3 and a rest of 1, or the rest waits."""
    rollouts = Rollouts(
        LENGTHS.sample, n=3, samples=2, over=over, prompts=20, on_data_end=end, filter=only(lambda g: g % 3 != 1)
    )
    sizes, groups = [], []
    for _ in range(4 if end is OnDataEnd.WAIT else 5):
        batch = await rollouts.step()
        sizes.append(len(batch.group_sizes))
        groups += batch.group_ids[::2].tolist()
    words = "complete groups that wait for more prompts: 1"
    words = words if end is OnDataEnd.WAIT else r"every prompt is settled \(dropped so far: \{'filtered': 7\}\)"
    for _ in range(2):
        with pytest.raises(DataExhausted, match=words):
            await rollouts.driver.next_batch()
    assert sizes == [3, 3, 3, 3, 1][: len(sizes)]
    held = [g.id for g in rollouts.core.buffer]
    assert sorted(groups + held) == [g for g in range(20) if g % 3 != 1]
    assert rollouts.core.prompts.as_dict() == {
        "observed": 20, "delivered": len(groups), "held": len(held), "dropped": {"filtered": 7},
    }  # fmt: skip


async def test_data_of_which_nothing_is_accepted() -> None:
    """No empty batch, no waiting for ever: the data has ended."""
    rollouts = Rollouts(table({}), n=2, samples=2, over=3, prompts=5, filter=only(lambda g: False))
    with pytest.raises(DataExhausted, match="every prompt is settled"):
        await rollouts.driver.next_batch()
    assert rollouts.core.prompts.as_dict()["dropped"] == {"filtered": 5}


async def test_the_end_of_the_data_waits_for_a_filter_that_thinks() -> None:
    """The last group is neither forgotten nor delivered before its verdict."""

    async def slow(prompt: Prompt, responses: list[Response]) -> bool:
        await asyncio.sleep(60)
        return True

    rollouts = Rollouts(table({}), n=4, prompts=3, filter=slow)
    batch = await rollouts.step()
    assert sorted(batch.group_ids.tolist()) == [0, 1, 2]
    assert now() == pytest.approx(65, abs=1e-6)


# ---------------------------------------------------------------- through the scheduler


def test_the_filter_of_dapo_by_its_public_name() -> None:
    """april.rewards_differ needs nothing else."""

    async def alternating(prompt: april.Prompt, response: Response) -> float:
        return float(response.sample_id.index * (response.sample_id.group % 2)) + 0 * await reward(prompt, response)

    with scheduler(reward=alternating, filter=april.rewards_differ, config=config(refill="group")) as rollouts:
        for _ in range(3):
            batch = rollouts.next_batch()
            assert all(g % 2 for g in batch.group_ids)
            assert batch.rewards.tolist() == [0.0, 1.0] * 3
            rollouts.weight_update()
    assert_nothing_is_left()
