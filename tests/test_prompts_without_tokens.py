"""Prompts that are data alone: the rollout function writes every conversation itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("renderers")
from renderers import Qwen3RendererConfig

import april
from april.driver.prompt_reader import PromptReader
from april.driver.prompt_source import PromptSource
from april.errors import CheckpointError, ConfigError, UsageError
from april.processes.rank_packing import pack_call, unpack_call
from april.record.replay import replay
from april.testing import FakeEngine, Rollouts, conversation, rollouts, run_virtual
from tests.gateway_suite.script import EOS, TOKENIZER, VOCAB, reply

PLAIN = Qwen3RendererConfig(enable_thinking=False)
SMALL: dict[str, Any] = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_len": 400}


def engine() -> FakeEngine:
    return FakeEngine(
        "e", responses=lambda request: reply(conversation(request).tolist()), vocab_size=VOCAB, eos_token_id=EOS,
        chunk_tokens=4, seconds_per_token=0.01,
    )  # fmt: skip


def tasks() -> Iterator[dict[str, Any]]:
    """Prompts without tokens."""
    return ({"task": i} for i in count())


def started(rollout: Any, **options: Any) -> Rollouts:
    """A run of this function before prompts without tokens."""
    given: dict[str, Any] = {
        "engines": [engine()], "prompts": tasks(), "tokenizer": TOKENIZER, "renderer": PLAIN, "check": True,
        "reward": lambda prompt, response: float(prompt.data["task"]),
    }  # fmt: skip
    return rollouts(april.Config(**SMALL), rollout=rollout, **given | options)


async def by_tokens(prompt: april.Prompt, llm: april.LLM) -> None:
    """Two turns of one conversation, and another one."""
    first = await llm.generate([20, 21 + prompt.data["task"] % 5], max_tokens=5)
    await llm.generate([*first.conversation, 22], max_tokens=5)
    await llm.generate([20], max_tokens=5)


async def by_messages(prompt: april.Prompt, llm: april.LLM) -> None:
    await llm.chat([{"role": "user", "content": f"task {prompt.data['task']}"}])


@pytest.mark.parametrize(("rollout", "rows"), [(by_tokens, 2), (by_messages, 1)])
def test_a_function_that_makes_every_call_needs_no_tokens(rollout: Any, rows: int, tmp_path: Path) -> None:
    """Each row's prompt is what the function wrote first; a state in the middle goes on, and the record replays."""

    async def program() -> list[april.Batch]:
        async with started(rollout, record=tmp_path / "run.jsonl") as run:
            batches = [await run.next_batch()]
            await run.weight_update()
            state = run.state_dict()
            run.audit()
        async with started(rollout, record=None) as again:
            await again.load_state_dict(state)
            batches.append(await again.next_batch())
            again.audit()
        return batches

    for batch in run_virtual(program()):
        assert len(batch.samples) == 4 * rows
        assert all(len(s.prompt.token_ids) and s.loss_mask.any() for s in batch.samples)
        assert {int(s.reward) for s in batch.samples} == {s.prompt.data["task"] for s in batch.samples}
        if rows == 2:
            long, short = batch.samples[:2]
            assert long.prompt.token_ids.tolist() == [20, 21 + long.prompt.data["task"] % 5]
            assert (22 in long.tokens[long.loss_mask == 0], short.prompt.token_ids.tolist()) == (True, [20])
    assert replay(tmp_path / "run.jsonl").checks


def test_an_evaluation_may_be_of_tasks_too() -> None:
    """The same function answers them."""

    async def program() -> Any:
        async with started(by_messages) as run:
            return await run.evaluate([{"task": 7}])

    found = run_virtual(program())
    assert found.reward_mean == 7.0


def test_a_call_without_a_conversation_names_the_keys() -> None:
    """There is nothing to continue: a function that has mistyped its prompt's key is told."""
    seen: list[str] = []

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        try:
            await llm.generate()
        except UsageError as error:
            seen.append(str(error))
        await llm.generate([20])

    async def program() -> None:
        async with started(rollout) as run:
            await run.next_batch()

    run_virtual(program())
    assert "neither messages nor token_ids (its keys are ['task'])" in seen[0]


def test_without_a_rollout_function_such_a_prompt_is_refused() -> None:
    """By name, as before: april itself would have nothing to continue."""
    refused = r"neither messages nor token_ids.*a rollout= that writes its own"
    prompts = [{"prompt": "hi"}]
    with (
        april.RolloutScheduler(april.Config(**SMALL), prompts=prompts, reward=None, engines=[engine()]) as run,
        pytest.raises(april.AprilError, match=refused),
    ):
        run.next_batch()


NO_TASKS = [{}, {"token_ids": []}, {"task": 1, "images": ["a.png"]}, [], april.Prompt(np.empty(0, np.int32))]


@pytest.mark.parametrize("item", NO_TASKS, ids=str)
def test_what_has_no_data_or_an_empty_conversation_is_refused(item: Any) -> None:
    """Only a mapping that says something is a task; images are placed in messages or tokens."""
    with pytest.raises(ConfigError, match="prompt 3"):
        PromptReader(99, data_alone=True).read(item, 3)


def test_other_tasks_after_a_restart_are_found_out() -> None:
    """What tells prompts without tokens apart is their data."""
    reader = PromptReader(99, data_alone=True)
    source = PromptSource([{"task": 1}, {"task": 2}], reader)
    source.draw(1)
    state = source.state_dict()
    for first, same in (({"task": 1}, True), ({"task": 9}, False)):
        again = PromptSource([first, {"task": 2}], reader)
        if same:
            again.load_state_dict(state)
            assert again.draw(1)[0][0].data == {"task": 2}
        else:
            with pytest.raises(CheckpointError):
                again.load_state_dict(state)


def test_tasks_travel_with_the_calls_of_ranks() -> None:
    """A rank gives them as it gives token ids; whether they may be is said where the function is known."""
    _, sent = unpack_call(pack_call("extend", {"prompts": [{"task": 1}]}), lambda: None)
    (prompt,) = sent["prompts"]
    assert PromptReader(99, data_alone=True).read(prompt, 0).data == {"task": 1}
    with pytest.raises(ConfigError, match="neither messages nor token_ids"):
        PromptReader(99).read(prompt, 0)
