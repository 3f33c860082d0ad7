"""Rollout functions of several turns with tools are partial rollouts too, with no change to their code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from virtual_rollouts import EOS, VOCAB, Rollouts, on_virtual_time, table

from april.core.batch import DeliveredSample
from april.core.tape import SegmentKind
from april.core.types import FinishReason, Prompt, SampleId
from april.driver.llm import LLM, Completion
from april.driver.rewards import Response
from april.driver.sample_functions import MAX_EMPTY_CALLS
from april.engines.simulated.engine import synthetic_response
from april.engines.simulated.response_lengths import LognormalLengths
from april.errors import RolloutError

LENGTHS = LognormalLengths(14, 0.5, 0.5, seed=8)


def tool_answer(sample: SampleId, turn: int) -> list[int]:
    """What the tool says: turn + 1 tokens."""
    return [900 + turn, *([sample.group % 50 + 1] * turn)]


class Agent:
    """``turns`` generate calls with a slow tool in between; keeps the completions for the test."""

    def __init__(self, turns: int = 3, tool_s: float = 2.0, **call: Any) -> None:
        self.turns, self.tool_s, self.call = turns, tool_s, call
        self.completions: dict[SampleId, list[Completion]] = {}

    async def __call__(self, prompt: Prompt, llm: LLM) -> int:
        seen = self.completions[llm.sample_id] = []
        conversation: list[int] | None = None
        for turn in range(self.turns):
            seen.append(await llm.generate(conversation, **self.call))
            if turn + 1 < self.turns:
                await asyncio.sleep(self.tool_s)
                conversation = [*seen[-1].conversation.tolist(), *tool_answer(llm.sample_id, turn)]
        return len(seen)


def check_transcript(sample: DeliveredSample, length: int, turns: int) -> None:
    """Every call's tokens are the uncut synthetic sequence that its conversation leads to."""
    conversation = sample.prompt.token_ids.tolist()
    mask: list[int] = []
    for turn in range(turns):
        tokens, _ = synthetic_response(np.array(conversation, np.int32), sample.id, 0, length, VOCAB, (EOS,))
        conversation += [*tokens[:-1].tolist(), EOS]
        mask += [1] * length
        if turn + 1 < turns:
            conversation += tool_answer(sample.id, turn)
            mask += [0] * (turn + 1)
    assert sample.tokens.tolist() == conversation[len(sample.prompt.token_ids) :]
    assert sample.loss_mask.tolist() == mask


@on_virtual_time
async def test_parked_functions_cross_step_boundaries() -> None:
    """Three calls and two tools over many weight updates: transcripts are those of an uncut run, tools are no loss."""
    agent = Agent()

    async def reward(prompt: Prompt, response: Response) -> float:
        assert response.output == 3
        return float(response.loss_mask.sum())

    rollouts = Rollouts(LENGTHS.sample, n=2, samples=2, over=4, rollout=agent, reward=reward)
    crossed = 0
    for _ in range(10):
        batch = await rollouts.driver.next_batch()
        for sample in batch.samples:
            length = LENGTHS.sample(*sample.id)
            check_transcript(sample, length, 3)
            rollouts.check_provenance(sample)
            environment = [s for s in sample.segments if s.kind is SegmentKind.ENVIRONMENT]
            assert [s.count for s in environment] == [1, 2]
            assert all(s.engine == s.attempt_id == "" for s in environment)
            assert sample.logprobs[sample.loss_mask == 0].tolist() == [0.0] * 3
            assert sample.reward == 3 * length
            crossed += len({s.version for s in sample.segments}) > 2
            calls = agent.completions[sample.id]
            assert len(calls) == 3
            assert [len(c.tokens) for c in calls] == [length] * 3
            assert all(c.finish is FinishReason.STOP for c in calls)
            joined = np.concatenate([c.versions for c in calls])
            assert joined.tolist() == sample.versions[sample.loss_mask == 1].tolist()
        rollouts.check_ledger()
        await rollouts.driver.update_weights()
    assert crossed > 5


@on_virtual_time
async def test_max_tokens_per_call() -> None:
    """A call ends with LENGTH at its own max_tokens, however often it was cut; the next call goes on."""
    agent = Agent(turns=3, max_tokens=7)

    rollouts = Rollouts(table({}, 100), n=1, samples=1, over=3, rollout=agent, max_in_flight=3)
    for _ in range(4):
        batch = await rollouts.driver.next_batch()
        (sample,) = batch.samples
        assert [len(c.tokens) for c in agent.completions[sample.id]] == [7, 7, 7]
        assert all(c.finish is FinishReason.LENGTH for c in agent.completions[sample.id])
        assert len(sample.tokens) == 21 + 3
        rollouts.check_provenance(sample)
        await rollouts.driver.update_weights()
    for request in rollouts.engines[0].requests.values():
        assert request.sampling.max_tokens == 7 - request.response_offset


@on_virtual_time
async def test_a_function_that_asks_on_and_on_behind_its_budget_is_told() -> None:
    """Whoever never looks at ``finish`` gets an error that names the cause, and everybody else goes on meanwhile."""
    raised: list[BaseException] = []

    async def goes_round(prompt: Prompt, llm: LLM) -> None:
        try:
            for _ in range(3 * MAX_EMPTY_CALLS):
                await llm.generate(max_tokens=3)
        except RolloutError as error:
            raised.append(error)
            for _ in range(3):  # an "except Exception" around the call
                with pytest.raises(RolloutError):
                    await llm.generate(max_tokens=3)

    rollouts = Rollouts(table({}, 12), rollout=goes_round, max_response_len=30)
    batch = await rollouts.driver.next_batch()
    assert len(batch.samples[0].tokens) == 30
    assert "calls of llm.generate returned no tokens" in str(raised[0])


@on_virtual_time
async def test_conversation_as_it_stands_or_spelled_out() -> None:
    """generate(), generate(prompt ids) and generate(conversation as list or array of any int type) are the same."""
    forms: list[Callable[[Prompt], Any]] = [
        lambda p: None,
        lambda p: p.token_ids,
        lambda p: p.token_ids.tolist(),
        lambda p: tuple(p.token_ids.astype(np.int64)),
        lambda p: p.token_ids.astype(np.uint16),
    ]

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        done = await llm.generate(forms[llm.sample_id.index](prompt))
        assert done.conversation.tolist() == [*prompt.token_ids.tolist(), *done.tokens.tolist()]
        assert done.tokens.dtype == done.conversation.dtype == np.int32

    rollouts = Rollouts(table({}), n=1, samples=len(forms), rollout=rollout)
    rollouts.check(await rollouts.driver.next_batch())


@on_virtual_time
async def test_sampling_of_a_call_overrides_the_configuration() -> None:
    """temperature and stop ids of one call reach the engine, are recorded per segment, and end with the call."""

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        done = await llm.generate(temperature=0.5, stop_token_ids=[17], max_tokens=40)
        assert done.tokens[-1] == 17
        await llm.generate()

    rollouts = Rollouts(table({}, 10), n=1, rollout=rollout)
    batch = await rollouts.driver.next_batch()
    assert [s.temperature for s in batch.samples[0].segments] == [0.5, 1.0]
    first, second = rollouts.engines[0].requests.values()
    assert (first.sampling.temperature, first.sampling.stop_token_ids) == (0.5, (17,))
    assert (second.sampling.temperature, second.sampling.stop_token_ids) == (1.0, ())
