"""Evaluations through the scheduler: own sampling, no trace in training, named errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from real_schedulers import LENGTHS, check, config, engine, scheduler

import april
from april.core.types import FinishReason
from april.driver.rewards import Response
from april.engines.protocol import Request
from april.engines.simulated.engine import SimulatedEngine
from april.errors import RolloutError

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_evaluation_touches_nothing_and_repeats_exactly() -> None:
    """Between and during steps: same result, no carry and no count of training changed."""
    held_out = [[i, 8] for i in range(1, 6)]

    def books(r: april.RolloutScheduler) -> Any:
        return r.ledger(), r.version, repr(r)

    with scheduler() as rollouts:
        first = rollouts.evaluate(held_out, n_samples=3)
        rollouts.next_batch()
        before = books(rollouts)
        second = rollouts.evaluate(held_out, n_samples=3)
        assert books(rollouts) == before
        rollouts.weight_update()
        third = rollouts.evaluate(iter(held_out), n_samples=3)
        check(rollouts.next_batch())

    assert first.rewards.shape == (5, 3)
    assert first.rewards.tolist() == [[min(100, LENGTHS.sample(g, i)) for i in range(3)] for g in range(5)]
    for other in (second, third):
        assert other.rewards.tolist() == first.rewards.tolist()
        assert [[r.tokens.tolist() for r in row] for row in other.responses] == [
            [r.tokens.tolist() for r in row] for row in first.responses
        ]
    assert first.reward_mean == first.rewards.mean()
    means = first.rewards.mean(axis=1)
    assert first.reward_standard_error == pytest.approx(means.std(ddof=1) / np.sqrt(5))


def test_evaluation_has_its_own_sampling() -> None:
    """temperature, top_p, max_tokens and seed of the call reach the engine; the rest is that of training."""
    seen: list[Request] = []

    class Spy(SimulatedEngine):
        def generate(self, request: Request) -> Any:
            seen.append(request)
            return super().generate(request)

    settings = config(sampling={"stop_token_ids": [9], "min_tokens": 2}, allow_mismatch=True)
    with scheduler(engines=[engine(kind=Spy)], config=settings) as rollouts:
        rollouts.next_batch()
        training = {r.attempt_id for r in seen}
        seen.clear()
        rollouts.evaluate([[1]], temperature=0.0, top_p=0.5, max_tokens=11, seed=3)
        rollouts.evaluate([[1]], seed=4)
    first, second = (r.sampling for r in seen)
    assert (first.temperature, first.top_p, first.max_tokens, first.min_tokens) == (0.0, 0.5, 11, 2)
    assert (second.temperature, second.top_p, second.max_tokens, second.min_tokens) == (1.0, 1.0, 100, 2)
    assert first.stop_token_ids == second.stop_token_ids == (9,)
    assert first.seed != second.seed
    ids = {r.attempt_id for r in seen}
    assert len(ids) == 2
    assert not ids & training
    assert len({len(i) for i in ids | training}) == 1


def test_evaluation_of_several_turns() -> None:
    """The same rollout function; a call without room ends with LENGTH as in training; group rewards work too."""

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> int:
        done = await llm.generate()
        done = await llm.generate([*done.conversation, 901, 902])
        done = await llm.generate([*done.conversation, *range(400, 500)])
        assert done.finish is FinishReason.LENGTH
        return len(done.conversation)

    async def group_reward(prompt: april.Prompt, responses: list[Response]) -> list[float]:
        assert all(r.output == 101 == 1 + len(r.tokens) for r in responses)
        assert all(r.loss_mask.sum() < len(r.tokens) for r in responses)
        return [1.0, 2.0]

    with scheduler(rollout=rollout, reward=None, group_reward=group_reward) as rollouts:
        assert rollouts.evaluate([[1], [2]], n_samples=2).rewards.tolist() == [[1.0, 2.0]] * 2


def test_evaluations_that_fail_name_the_prompt() -> None:
    """Whatever a function raises comes out as RolloutError with its cause, and training goes on."""

    def judge(prompt: april.Prompt, response: Response) -> float:
        if prompt.token_ids[0] == 2:
            raise LookupError("no answer key")
        if prompt.token_ids[0] == 3:
            raise SystemExit(1)
        return float("nan") if prompt.token_ids[0] == 4 else float(len(response.tokens))

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        if prompt.token_ids[0] == 5:
            return
        if prompt.token_ids[0] == 6:
            raise SystemExit(1)
        done = await llm.generate()
        if prompt.token_ids[0] == 8:
            await llm.generate(done.conversation[1:])

    long = [1] * 200
    prompts = (april.Prompt(np.array([7, i + 100], np.int32)) for i in range(1000))
    engines = [engine(max_context=150)]
    with scheduler(reward=judge, rollout=rollout, prompts=prompts, engines=engines) as rollouts:
        for bad, words in (
            ([2], "evaluation prompt 1: the reward function raised LookupError: no answer key"),
            ([3], "evaluation prompt 1: the reward function raised SystemExit: 1"),
            ([4], "evaluation prompt 1: the reward of g1.s0 is nan"),
            ([5], "evaluation prompt 1: the rollout function returned without awaiting a call"),
            ([6], "evaluation prompt 1: the rollout function raised SystemExit: 1"),
            ([8], "evaluation prompt 1: llm.generate was given tokens that do not begin"),
            (long, "evaluation prompt 1: it has 200 tokens, so there is no room"),
        ):
            with pytest.raises(RolloutError) as caught:
                rollouts.evaluate([[1], bad, [9]])
            assert words in str(caught.value)
            if bad == [2]:
                assert isinstance(caught.value.__cause__, LookupError)
        check(rollouts.next_batch())
    with scheduler(reward=None) as rollouts, pytest.raises(RolloutError, match="needs a reward function"):
        rollouts.evaluate([[1]])
