"""What a newcomer does in the first hour: a warning for what may not be meant, and messages that name the help."""

from __future__ import annotations

import logging
import re
import signal
from typing import Any

import numpy as np
import pytest
from tiny_models import tiny_model

import april
from april.config.engine_fit import doubts_of
from april.core import batch as batches
from april.driver.prompt_source import as_prompt
from april.engines.transformers import model_support
from april.engines.transformers.model_support import generation_mode
from april.errors import ConfigError, DataExhausted, RolloutError
from april.testing import FakeEngine, rollouts, run_virtual


def config(**changes: Any) -> april.Config:
    return april.Config(**({"rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_len": 20} | changes))


def run(steps: int = 1, **changes: Any) -> list[april.Batch]:
    """Batches, each trained on."""
    found: list[april.Batch] = []

    async def program() -> None:
        values: dict[str, Any] = {
            "config": config(), "engines": [FakeEngine("e", lengths=5)], "prompts": [[1, i] for i in range(2, 40)],
            "reward": lambda prompt, response: float(response.sample_id.index),
        }  # fmt: skip
        async with rollouts(**(values | changes)) as scheduler:
            for _ in range(steps):
                found.append(await scheduler.next_batch())
                await scheduler.weight_update()

    run_virtual(program())
    return found


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(batches, "_told", set())
    caplog.set_level(logging.WARNING, "april")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"config": config(n_samples_per_prompt=1)}, "alone in its group.*raise n_samples_per_prompt$"),
        ({"reward": None}, "all rewards are 0; was a reward function given"),
        ({"reward": lambda prompt, response: 0.5}, "equal; filter=april.rewards_differ draws other prompts"),
    ],
    ids=["one sample", "no reward", "equal rewards"],
)
def test_advantages_that_teach_nothing_are_told_of_once(
    changes: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the reason; advantages that are not all 0 need no word."""
    for batch in run(2, **changes):
        assert not batch.advantages().any()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("all advantages of batch 0 are 0, so it teaches nothing: ")
    assert re.search(why, caplog.messages[0])
    run()[0].advantages()
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"over_sampling_batch_size": 1}, "submitted in portions of 1 until 2 are in work"),
        ({"over_sampling_batch_size": 4, "max_staleness": 0, "on_stale": "mask"}, "limits the groups in work to 2"),
    ],
)
def test_doubtful_settings(changes: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    """They work, and the scheduler says once what they mean; others are not spoken of."""
    run(2, config=config(**changes))
    assert [said in message for message in caplog.messages] == [True]
    assert not list(doubts_of(config()))
    assert not list(doubts_of(config(over_sampling_batch_size=4)))


def test_a_bound_that_admits_no_more_says_how_many() -> None:
    """N' above what max_staleness lets april deliver is refused with the number."""
    with pytest.raises(ConfigError, match=r"over_sampling_batch_size=4 .* max_staleness=0 .* which is 2; "):
        config(over_sampling_batch_size=4, max_staleness=0)


def test_no_prompts_and_too_few() -> None:
    """None: an error that names them. Fewer than N: a warning with the first batch."""
    with pytest.raises(DataExhausted, match="there are no prompts: prompts= gave none"):
        run(prompts=[])


def test_too_few_prompts_for_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    """One prompt where a batch has two: said once, with what repeats it; the end is no failure of april's."""
    with pytest.raises(DataExhausted, match="the prompt source has ended"):
        run(3, prompts=[[1, 2]])
    (said,) = caplog.messages
    assert said.startswith("batch 0 has 1 of 2 groups, as there are no more prompts; to repeat them set epochs")


def test_dropout_in_training_mode(caplog: pytest.LogCaptureFixture) -> None:
    """Once per model, when it is first seen so; not in eval mode, nor without dropout."""
    plain, dropping = tiny_model(), tiny_model(attention_dropout=0.1)
    for model in (plain.train(), dropping.eval(), dropping.train(), dropping):
        with generation_mode(model):
            assert not any(module.training for module in model.modules())
    (said,) = caplog.messages
    assert said.startswith("the model is in training mode with dropout of 0.1: ")
    assert dropping in model_support._looked_at


CHAT = [{"role": "user", "content": "What is 2+2?"}]


@pytest.mark.parametrize("prompt", ["text", CHAT, {"prompt": CHAT}, {"prompt": "text"}, {"input_ids": "text"}])
def test_text_and_chats_as_prompts(prompt: Any) -> None:
    """The message names the call that makes token ids of them, and the page."""
    with pytest.raises(ConfigError, match=r"apply_chat_template\(messages.*docs/rollouts.md") as raised:
        as_prompt(prompt, 100, 0)
    assert ("a list of chat messages" in str(raised.value)) == (prompt is CHAT)


@pytest.mark.parametrize("ids", [["<|im_end|>"], "<|im_end|>", [5, "</s>"]])
def test_stop_tokens_as_text(ids: Any) -> None:
    """In the configuration and in a call: the tokenizer's function that gives the id."""
    with pytest.raises(ConfigError, match=r"convert_tokens_to_ids\('<.*'\)"):
        config(sampling={"stop_token_ids": ids})
    if isinstance(ids, str):
        return

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        await llm.generate(stop_token_ids=ids)

    with pytest.raises(RolloutError, match=r"convert_tokens_to_ids\('<.*'\)"):
        run(rollout=rollout)


@pytest.mark.parametrize("new", [[5], np.int32(7), np.array([-1])])
def test_numbers_added_to_a_conversation(new: Any) -> None:
    """``+`` of an array adds to every token: recognised, and told how to append."""

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        first = await llm.generate(max_tokens=3)
        await llm.generate(first.conversation + new)

    with pytest.raises(RolloutError, match=r"number added to each of its tokens.*\[\*completion.conversation, \*new\]"):
        run(rollout=rollout)


def test_an_alarm_in_a_reward_fails_at_once() -> None:
    """Signals are the main thread's: the error says so, and what to use."""

    def reward(prompt: april.Prompt, response: april.Response) -> float:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return 1.0

    scheduler = april.RolloutScheduler(
        config(), prompts=[[1, i] for i in range(2, 40)], reward=reward, engines=[FakeEngine("e", lengths=5)]
    )
    with scheduler, pytest.raises(RolloutError, match="run in threads, which have no signals: set function_timeout_s"):
        scheduler.next_batch()
