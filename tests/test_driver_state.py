"""state_dict and load_state_dict through the driver: what was observed goes on exactly, whenever it was saved."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from saved_rollouts import LENGTHS, by_torch, check, in_a_step, new, observed, plain, seen_of
from virtual_rollouts import RecordingEngine, Rollouts, on_virtual_time, prompt_ids, table

from april.core.tape import SegmentKind
from april.core.types import DropReason, OnDataEnd, Prompt, SampleId
from april.core.versions import PolicyVersion
from april.driver.llm import LLM
from april.driver.rewards import Response
from april.errors import CheckpointError, DataExhausted

pytestmark = on_virtual_time

# ---------------------------------------------------------------- going on


@pytest.mark.parametrize("at", [0.0, 4.0, 9.5, 20.0, 1000.0])
async def test_what_was_observed_goes_on_exactly(at: float) -> None:
    """Whenever the state is taken in a step: each token is kept bit for bit, sent to an engine, never made again."""
    old = new()
    await old.step()
    await old.step()
    waiter = asyncio.create_task(old.driver.next_batch())
    await asyncio.sleep(at)
    before = observed(old)
    state = plain(old.driver.state_dict(None))
    assert state == plain(old.driver.state_dict(None))  # taking it changes nothing
    leased = {s.id.group for samples in old.core.leased.values() for s in samples}
    total = sum(e.tokens for e in old.engines)
    old.check(await waiter)
    await old.close()

    again = new()
    assert await again.driver.load_state_dict(state) == PolicyVersion(1, 2)
    assert {i: t for i, t in observed(again).items() if i.group not in leased} == before
    for _ in range(4):
        batch = await again.driver.next_batch()
        check(batch)
        for s in batch.samples:
            tokens, logprobs, versions = before.get(s.id, ([], [], []))
            assert s.tokens.tolist()[: len(tokens)] == tokens
            assert s.logprobs.tolist()[: len(tokens)] == logprobs
            assert [tuple(v) for v in s.versions.tolist()[: len(tokens)]] == versions
        books = again.core.tokens
        running = sum(a.tape.count for a in again.core.attempts.values())
        assert books.observed + running == total + sum(e.tokens for e in again.engines)
        await again.driver.update_weights()
    first = {r.sample_key: r for e in again.engines for r in reversed(list(e.requests.values()))}
    for sample_id, (tokens, _, _) in before.items():
        if sample_id in first:
            assert first[sample_id].token_ids[3:].tolist() == tokens
            assert first[sample_id].response_offset == len(tokens)


async def test_a_batch_that_was_not_trained_is_delivered_again() -> None:
    """Leased batches come again, equal and under their numbers; those that were trained on do not."""
    old = new()
    batches = []
    for _ in range(2):
        batches.append(await old.driver.next_batch())
        await old.driver.update_weights()
    batches.append(await old.driver.next_batch())
    states = {through: plain(old.driver.state_dict(through)) for through in (None, 1, 2)}
    with pytest.raises(CheckpointError, match=r"trained_through=0, but batch 1 was committed by a weight update"):
        old.driver.state_dict(0)
    for wrong in (3, -2):
        with pytest.raises(CheckpointError, match=rf"trained_through={wrong} .* delivered so far are 0 to 2"):
            old.driver.state_dict(wrong)
    await old.close()

    assert states[None] == states[1]
    for through, state in states.items():
        again = new()
        await again.driver.load_state_dict(state)
        batch = await again.driver.next_batch()
        assert batch.id == (3 if through == 2 else 2)
        assert (seen_of(batch) == seen_of(batches[2])) is (through != 2)
        check(batch)
        await again.driver.update_weights()
        delivered = [s.id for s in batch.samples]
        for _ in range(3):
            batch = await again.driver.next_batch()
            delivered += [s.id for s in batch.samples]
            await again.driver.update_weights()
        kept = batches[: 3 if through == 2 else 2]
        assert len(set(delivered)) == len(delivered)
        assert not set(delivered) & {s.id for b in kept for s in b.samples}
        await again.close()


async def test_a_state_may_be_loaded_while_nothing_else_can_begin() -> None:
    """A batch asked for during the load is refused with a sentence, and comes afterwards."""
    old = new()
    await old.step()
    state = plain(old.driver.state_dict(None))
    await old.close()
    engines = [RecordingEngine(LENGTHS.sample, f"e{i}", weight_update_s=5.0) for i in range(2)]
    again = new(engines=engines)
    load = asyncio.create_task(again.driver.load_state_dict(state))
    await asyncio.sleep(2)
    with pytest.raises(CheckpointError, match="a state is being loaded; ask for the batch after load_state_dict"):
        await again.driver.next_batch()
    assert await load == PolicyVersion(1, 1)
    check(await again.driver.next_batch())


# ---------------------------------------------------------------- the prompts


async def test_responses_that_wait_for_more_prompts_with_a_quorum() -> None:
    """Of three groups a batch takes eight responses, four wait, and another prompt brings them to a full batch."""
    run = Rollouts(
        table({(2, 3): 40}), n=2, samples=4, prompts=3, group_quorum=0.75, on_data_end=OnDataEnd.WAIT, over=3
    )
    batch = await run.step()
    assert batch.group_sizes == (4, 4)
    with pytest.raises(DataExhausted, match="finished responses that wait for more prompts: 4"):
        await run.driver.next_batch()
    run.driver.extend([prompt_ids(77)])
    assert len(await run.driver.next_batch()) == 8


async def with_output(prompt: Prompt, llm: LLM) -> Any:
    done = await llm.generate()
    if llm.sample_id.group == 4:
        return object()
    said = {"tokens": torch.tensor(done.tokens), "none": torch.zeros(0, 2, dtype=torch.bfloat16), "at": (1, None)}
    return said | {"logprobs": done.logprobs, "half": np.float16(0.5)}


@pytest.mark.parametrize("judged", [True, False])
async def test_what_functions_have_returned_survives(judged: bool) -> None:
    """With a batch that is delivered again, and with what was finished: as plain values in the state, with their types
    afterwards. What is no plain value is gone. A filter sees the outputs of all of its group.
    """
    seen: list[Any] = []

    async def keep(prompt: Prompt, responses: list[Response]) -> bool:
        seen.extend(response.output for response in responses)
        return True

    lengths = table({(2, 0): 16}, 9)
    given = {"rollout": with_output, "filter": keep if judged else None}
    old = Rollouts(lengths, n=2, samples=2, over=5, **given)
    first = await old.driver.next_batch()
    assert [s.id.group for s in first.samples] == [0, 0, 1, 1]
    old.driver.handed_out = first.id
    await old.driver.update_weights()
    second = await old.driver.next_batch()
    state = by_torch(old.driver.state_dict(first.id))
    kept = {SampleId(*name[:2]) for name in state["outputs"]}
    assert {s.id for s in second.samples if s.id.group != 4} <= kept
    assert ((2, 1) in kept) is not judged  # the functions of a group that waits for the filter run again
    await old.close()

    again = Rollouts(lengths, n=2, samples=2, over=5, **given)
    await again.driver.load_state_dict(state)
    batches = [await again.driver.next_batch() for _ in range(3)]
    assert seen_of(batches[0]) == seen_of(second)
    assert any(s.id.group == 2 for batch in batches for s in batch.samples)
    for batch in (second, *batches):
        for s in batch.samples:
            if s.id.group == 4:
                assert (s.output is None) is (batch is not second)
                continue
            assert s.output["tokens"].tolist() == s.tokens.tolist()
            assert s.output["logprobs"].tolist() == s.logprobs.tolist()
            assert (s.output["none"].shape, s.output["none"].dtype) == ((0, 2), torch.bfloat16)
            assert (s.output["half"], list(s.output["at"])) == (0.5, [1, None])
    assert None not in seen


# ---------------------------------------------------------------- several turns


class Agent:
    """Three calls with a tool between them; keeps what happened."""

    def __init__(self, change: str = "") -> None:
        self.change = change
        self.tools: list[tuple[SampleId, int]] = []
        self.completions: dict[tuple[SampleId, int], list[int]] = {}

    async def __call__(self, prompt: Prompt, llm: LLM) -> str:
        conversation = np.array(prompt.token_ids)
        for turn in range(3):
            if self.change == "returns early" and turn == 1 and llm.sample_id == (0, 0):
                return "early"
            done = await llm.generate(conversation, max_tokens=6)
            self.completions[llm.sample_id, turn] = done.tokens.tolist()
            await asyncio.sleep(1.0)
            self.tools.append((llm.sample_id, turn))
            odd = self.change == "another tool result" and turn == 0 and llm.sample_id == (0, 0)
            conversation = np.append(done.conversation, [99 if odd else 50 + turn])
        return "done"


async def test_several_turns_are_replayed() -> None:
    """Functions begin again: finished calls are answered at once from the state, tools run again, the rest goes on."""
    first, second = Agent(), Agent()
    lengths = table({}, 400)

    old = Rollouts(lengths, n=1, samples=2, over=2, rollout=first)
    async with in_a_step(old, 6 + 1 + 3.5):  # in the second call
        state = plain(old.driver.state_dict(None))
        tokens = sum(a.tape.count for a in old.core.attempts.values()) + old.core.tokens.observed

    again = Rollouts(lengths, n=1, samples=2, over=2, rollout=second)
    await again.driver.load_state_dict(state)
    batch = await again.driver.next_batch()
    for s in batch.samples:
        kinds = [g.kind for g in s.segments]
        assert kinds.count(SegmentKind.ENVIRONMENT) == 2
        assert s.tokens[[6, 13]].tolist() == [50, 51]
        again_said = [second.completions[s.id, turn] for turn in range(3)]
        assert again_said[0] == first.completions[s.id, 0]
        assert s.tokens.tolist() == [*again_said[0], 50, *again_said[1], 51, *again_said[2]]
        assert s.versions[:6].tolist() == [[0, 0]] * 6
        assert second.tools.count((s.id, 0)) == 1
    made = sum(e.tokens for e in again.engines)
    assert again.core.tokens.observed == tokens + made  # nothing that was kept is made again
    assert not again.dropped
    again.core.validate()


@pytest.mark.parametrize("change", ["another tool result", "returns early"])
async def test_a_function_that_does_otherwise_begins_again(change: str) -> None:
    """Its tokens belong to another conversation: dropped by name, the sample is made anew, the others go on."""
    lengths = table({}, 400)

    old = Rollouts(lengths, n=1, samples=2, over=2, rollout=Agent())
    async with in_a_step(old, 6 + 1 + 3.5), old.driver.paused():  # so that partials are on the tapes
        held = {s.id: s.chains[0].tape.generated for s in old.core.buffer.samples()}
        state = plain(old.driver.state_dict(None))

    agent = Agent(change)
    again = Rollouts(lengths, n=1, samples=2, over=2, rollout=agent)
    await again.driver.load_state_dict(state)
    delivered: list[Any] = []
    while not any(s.id == (0, 0) for s in delivered):
        delivered += (await again.driver.next_batch()).samples
        await again.driver.update_weights()
    assert again.dropped == {DropReason.REPLAY_DIVERGED: held[SampleId(0, 0)]}
    assert again.core.counters["replays_diverged"] == 1
    sample = next(s for s in delivered if s.id == (0, 0))
    assert {s.version.incarnation for s in sample.segments} == {1}
    sibling = next(s for s in delivered if s.id == (0, 1))
    assert sibling.segments[0].version == (0, 0)
    again.core.validate()
