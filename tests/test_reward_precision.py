"""Rewards are held as float32 by batches, so everything that decides on rewards sees them rounded so, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from real_schedulers import config
from virtual_rollouts import on_virtual_time

import april
from april.core import function_results
from april.corrections.advantages import METHODS
from april.driver.rewards import Response
from april.engines.protocol import Request
from april.errors import RolloutError
from april.testing import FakeEngine, rollouts, run_virtual

SAME: dict[str, tuple[Any, Any]] = {
    "sums of floats": (0.1 + 0.2, 0.3),
    "numpy": (np.float64(0.1) + np.float64(0.2), np.float32(0.3)),
    "torch": (torch.tensor([0.1, 0.2], dtype=torch.float64).sum(), torch.tensor(0.3)),
    "decimals": (Decimal("0.3"), 0.3),
    "truth": (True, 1.0 + 1e-12),
    "integers": (2**24 + 1, 2**24),
    "too small": (1e-46, 0),
    "zeros": (-0.0, 0.0),
}
"""Rewards that no float32 tells apart."""


def alternating(pair: tuple[Any, Any]) -> Callable[[april.Prompt, Response], Any]:
    return lambda prompt, response: pair[response.sample_id.index % 2]


def run(steps: int = 1, **changes: Any) -> list[april.Batch]:
    """Batches of N = 2 groups of 4."""
    batches: list[april.Batch] = []

    async def program() -> None:
        settings = april.Config(
            rollout_batch_size=2, n_samples_per_prompt=4, max_response_len=50, max_filtered_groups=6,
            **changes.pop("settings", {}),
        )  # fmt: skip
        options: dict[str, Any] = {
            "engines": [FakeEngine("e", lengths=5)], "prompts": [[1, i] for i in range(2, 99)],
        } | changes  # fmt: skip
        async with rollouts(settings, **options) as scheduler:
            for _ in range(steps):
                batches.append(await scheduler.next_batch())
                await scheduler.weight_update()

    run_virtual(program())
    return batches


@pytest.mark.parametrize("kind", SAME)
def test_equal_rewards_teach_nothing(kind: str) -> None:
    """Of every type that is a number, by every method: advantages are 0, without an epsilon as well."""
    (batch,) = run(reward=alternating(SAME[kind]))
    assert len(set(batch.rewards.tolist())) == 1
    for method in METHODS:
        assert not batch.advantages(method, epsilon=0.0).any()  # type: ignore[arg-type]
    for sample in batch.samples:
        assert np.float32(sample.reward) == sample.reward == sample.baseline_rewards[0]


@pytest.mark.parametrize("kind", SAME)
def test_a_group_of_equal_rewards_is_filtered(kind: str) -> None:
    """Dynamic sampling rejects what the batch could not tell apart, with rewards of samples and of groups."""
    pair = SAME[kind]
    with pytest.raises(RolloutError, match="filtered"):
        run(reward=alternating(pair), filter=april.rewards_differ)

    def group_reward(prompt: april.Prompt, responses: Sequence[Response]) -> list[Any]:
        return [*pair, *pair]

    with pytest.raises(RolloutError, match="filtered"):
        run(group_reward=group_reward, filter=april.rewards_differ)


def test_filters_see_the_rewards_of_the_batch() -> None:
    """A user's filter is given the same number that is trained; rewards that float32 tells apart stay apart."""
    seen: dict[april.SampleId, float | None] = {}

    def keep(prompt: april.Prompt, responses: Sequence[Response]) -> bool:
        seen.update({r.sample_id: r.reward for r in responses})
        return april.rewards_differ(prompt, responses)

    (batch,) = run(reward=lambda prompt, response: 0.1 + 1e-7 * response.sample_id.index, filter=keep)
    assert [seen[s.id] for s in batch.samples] == batch.rewards.tolist()
    assert len(set(batch.rewards.tolist())) == 4
    assert batch.metrics["reward_mean"] == batch.rewards.astype(np.float64).mean()


def test_baselines_of_a_quorum_are_those_of_the_batch() -> None:
    """Stragglers are compared with a cohort that was delivered before."""
    for batch in run(3, reward=alternating(SAME["sums of floats"]), settings={"group_quorum": 0.75}):
        assert not batch.advantages("rloo", epsilon=0.0).any()


@on_virtual_time
async def test_evaluations_are_rounded_alike() -> None:
    """What a training reward is, an evaluation's is."""
    async with rollouts(
        config(), engines=[FakeEngine("e", lengths=5)], prompts=[[1, 2]] * 9, reward=lambda p, r: 0.1
    ) as scheduler:
        result = await scheduler.evaluate([[1, 2]], n_samples=2)
    assert result.rewards.tolist() == [[float(np.float32(0.1))] * 2]


@on_virtual_time
async def test_states_with_other_rewards_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished samples and cohorts of a state that was saved with more digits."""

    def length(request: Request) -> int:
        group, index = request.sample_key or (0, 0)
        return 3 + 5 * index * (group % 2)

    def options() -> dict[str, Any]:
        engine = FakeEngine("e", lengths=length)
        return {
            "config": config(
                rollout_batch_size=2, n_samples_per_prompt=4, over_sampling_batch_size=4, group_quorum=0.75
            ),
            "engines": [engine], "prompts": [[1, i] for i in range(2, 60)],
            "reward": alternating(SAME["sums of floats"]),
        }  # fmt: skip

    with monkeypatch.context() as before:
        before.setattr(function_results, "float32_reward", float)
        async with rollouts(**options()) as scheduler:
            batch = await scheduler.next_batch()
            state = scheduler.state_dict(trained_through=batch.id)
    assert repr(0.1 + 0.2) in repr(state)
    async with rollouts(**options()) as scheduler:
        await scheduler.load_state_dict(state)
        for _ in range(3):
            batch = await scheduler.next_batch()
            assert not batch.advantages("rloo", epsilon=0.0).any()
            await scheduler.weight_update()


def test_the_formula_alone_reads_rewards_as_a_batch_holds_them() -> None:
    """Lists of a user's own, of any precision."""
    rewards = [0.1 + 0.2, 0.3]
    for method in METHODS:
        assert april.group_advantages(rewards, [[0.3], [0.1 + 0.2]], method, epsilon=0.0).tolist() == [0.0, 0.0]  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="give finite numbers"):
        april.group_advantages([1e39, 0.0], [[0.0], [1e39]])
