"""Mistakes that people make on the first day: each answer is one sentence, and a mistake is said once, not flooded.

What runs and is probably not meant is warned of, once, and not for those who mean it. ``test_refusals.py`` has
what is refused.
"""

from __future__ import annotations

import logging
import re
import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from real_schedulers import config, engine, scheduler
from tiny_models import tiny_model

import april
from april.core import batch as batches
from april.core.sampling import SamplingParams
from april.core.types import Prompt
from april.core.versions import PolicyVersion
from april.driver import prompt_source
from april.driver.rewards import checked_reward
from april.engines.fit import warnings_of
from april.engines.protocol import Chunk, Request
from april.engines.transformers import model_support
from april.engines.transformers.engine import TransformersEngine
from april.engines.transformers.model_support import generation_mode
from april.errors import ConfigError, DataExhausted, RolloutError
from april.testing import FakeEngine, rollouts, run_virtual


def test_a_call_that_cannot_be_is_one_line_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    """april's own sentence says what is wrong; the log adds where it was asked for, and no lines of april's."""

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        await llm.generate("hello")  # type: ignore[arg-type]

    failure = pytest.raises(RolloutError, match=r"^g\d+\.s\d: the rollout function failed: llm.generate: token_ids")
    with scheduler(rollout=rollout, config=config()) as rollouts, caplog.at_level(logging.WARNING, "april"), failure:
        rollouts.next_batch()
    assert len(caplog.records) == 1
    assert re.search(r"of new text \(line \d+ of test_user_mistakes.py\)$", caplog.messages[0])
    assert not caplog.records[0].exc_info


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda b: april.to_torch(b), r"takes the arrays of batch.padded\(\) or batch.ragged\(\), got Batch"),
        (lambda b: b.padded(pad_id=None), "padded: pad_id must be a token id, got None"),
        (lambda b: b.padded(pad_id="<pad>"), "padded: pad_id must be a token id, got '<pad>'"),
    ],
)
def test_a_batch_in_the_wrong_place(call: Callable[[april.Batch], Any], sentence: str) -> None:
    """Many tokenizers have the pad_token_id None."""
    with scheduler() as rollouts:
        batch = rollouts.next_batch()
    with pytest.raises(TypeError, match=sentence):
        call(batch)


def test_a_reward_that_is_a_coroutine() -> None:
    """A forgotten await is called that."""

    async def score() -> float:
        return 1.0

    forgotten = score()
    with pytest.raises(RolloutError, match=r"the reward of g0.s1 is a coroutine that was not awaited"):
        checked_reward(forgotten, april.SampleId(0, 1))
    forgotten.close()


def test_a_model_that_is_none() -> None:
    """The name of a model, and a module that is no language model."""
    with pytest.raises(ConfigError, match=(
        "model is of type str, which has no config: to load a model by its directory or hub name"
    )):
        TransformersEngine("Qwen/Qwen3-4B")
    with pytest.raises(ConfigError, match="model is of type Linear, which has no config: pass a Hugging Face causal"):
        TransformersEngine(torch.nn.Linear(2, 2))


async def test_weights_written_without_weight_update(caplog: pytest.LogCaptureFixture) -> None:
    """Generating goes on, with a warning once per version: the stamp on the tokens would be wrong."""
    model = tiny_model()
    engine = TransformersEngine(model, slots=4, max_len=64, check=False)

    async def generate(name: str) -> None:
        request = Request(
            attempt_id=name, token_ids=np.array([5, 6, 7], np.int32), sampling=SamplingParams(max_tokens=4, seed=1)
        )
        chunks: list[Chunk] = [chunk async for chunk in engine.generate(request)]
        assert chunks
        await engine.pause()  # until it is idle
        await engine.resume()

    def train() -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.01)

    warning = "the model's weights were changed, but the policy version is still"
    await generate("a")
    train()
    await engine.update_weights(PolicyVersion(0, 1))
    await generate("b")
    assert not caplog.records
    for version, names in enumerate((("c", "d"), ("e", "f")), 1):
        for name in names:
            train()
            await generate(name)
        assert [warning in m for m in caplog.messages] == [True] * version
        await engine.update_weights(PolicyVersion(0, version + 1))
    await engine.close()


def small_config(**changes: Any) -> april.Config:
    return april.Config(**({"rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_len": 20} | changes))


def run(steps: int = 1, **changes: Any) -> list[april.Batch]:
    found: list[april.Batch] = []

    async def program() -> None:
        values: dict[str, Any] = {
            "config": small_config(), "engines": [FakeEngine("e", lengths=5)],
            "prompts": [[1, i] for i in range(2, 40)],
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
    monkeypatch.setattr(batches, "_warned_of", set())
    caplog.set_level(logging.WARNING, "april")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"config": small_config(n_samples_per_prompt=1)}, "alone in its group.*raise n_samples_per_prompt$"),
        ({"reward": None}, "all rewards are 0; give reward= or group_reward="),
        ({"reward": lambda prompt, response: 0.5}, "equal; filter=april.rewards_differ replaces such groups"),
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
    assert caplog.messages[0].startswith("all advantages of batch 0 are 0, so the model learns nothing from it: ")
    assert re.search(why, caplog.messages[0])
    run()[0].advantages()
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"over_sampling_batch_size": 1}, "so april starts 1 groups at a time until 2 are in work"),
        ({"over_sampling_batch_size": 4, "max_staleness": 0, "on_stale": "mask"}, "allows 2 groups in work at most"),
    ],
)
def test_doubtful_settings(changes: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    """They work, and the scheduler says once what they mean; others are not spoken of."""
    run(2, config=small_config(**changes))
    assert [said in message for message in caplog.messages] == [True]
    assert not list(warnings_of(small_config()))
    assert not list(warnings_of(small_config(over_sampling_batch_size=4)))


def test_too_few_prompts_for_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    """One prompt where a batch has two: said once, with what repeats it; the end is no failure of april's."""
    with pytest.raises(DataExhausted, match="the prompt source has ended"):
        run(3, prompts=[[1, 2]])
    with pytest.raises(DataExhausted, match="prompts= contains no prompts"):
        run(prompts=[])
    (said,) = caplog.messages
    assert said.startswith("batch 0 has only 1 of 2 groups because the prompts have ended; to repeat them set epochs")


@pytest.mark.parametrize(
    ("lengths", "steps", "warned"),
    [(99, 4, 1), (99, 9, 1), (99, 3, 0), (lambda asked: 99 if asked.sample_key[0] % 2 else 9, 9, 0)],
    ids=["all", "warning appears only once", "too few to tell", "some end"],
)
def test_a_model_that_never_ends(
    lengths: Any, steps: int, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Once 16 responses have all come to their limit, it is said once, with april's end-of-sequence tokens."""
    run(steps, engines=[FakeEngine("e", lengths=lengths)])
    assert len(caplog.messages) == warned
    for said in caplog.messages:
        assert said.startswith("all 16 responses so far have max_response_len=20 tokens: none of them contains an end-")
        assert "token ([0]);" in said
        assert "sampling.stop_token_ids" in said


def test_dropout_in_training_mode(caplog: pytest.LogCaptureFixture) -> None:
    """Once per model, when it is first seen so; not in eval mode, nor without dropout."""
    plain, dropping = tiny_model(), tiny_model(attention_dropout=0.1)
    for model in (plain.train(), dropping.eval(), dropping.train(), dropping):
        with generation_mode(model):
            assert not any(module.training for module in model.modules())
    (said,) = caplog.messages
    assert said.startswith("the model is in training mode with dropout of 0.1, but ")
    assert dropping in model_support._checked_for_dropout


def test_an_alarm_in_a_reward_fails_at_once() -> None:
    """Signals are the main thread's: the error says so, and what to use."""

    def reward(prompt: april.Prompt, response: april.Response) -> float:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return 1.0

    scheduler = april.RolloutScheduler(
        small_config(), prompts=[[1, i] for i in range(2, 40)], reward=reward, engines=[FakeEngine("e", lengths=5)]
    )
    with scheduler, pytest.raises(RolloutError, match="in threads, where signals do not work: set function_time"):
        scheduler.next_batch()


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({}, True),
        ({"reward": None}, False),
        ({"reward": lambda prompt, response: 1.0}, False),
        ({"group_reward": lambda prompt, responses: [1.0, 1.0]}, False),
    ],
    ids=["nothing", "reward=None", "reward", "group_reward"],
)
def test_no_reward_function(given: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    """All rewards are 0 then; reward=None says that the trainer has its own."""
    with april.RolloutScheduler(config(), prompts=[[1], [2], [3]], engines=[engine()], **given) as rollouts:
        batch = rollouts.next_batch()
    assert ("no reward function is given" in caplog.text) is warned
    assert batch.rewards.any() == any(given.values())


class Store:
    """What the ranks of torch.distributed meet at."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, key: str, count: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + count
        return self.counts[key]


def as_rank(monkeypatch: pytest.MonkeyPatch, store: Store | None, world_size: int = 2, *, ready: bool = True) -> None:
    """From here on this process is a rank of its own."""

    def default_store() -> Store:
        if store is None:
            raise ValueError("no default group")
        return store

    distributed = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: ready, get_world_size=lambda: world_size,
        distributed_c10d=SimpleNamespace(_get_default_store=default_store),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    monkeypatch.setattr(prompt_source, "_compared", set())


def look(seed: int, *token_ids: int) -> bool:
    """Whether there was something to look up; it has been when this returns."""
    thread = prompt_source.warn_of_equal_rollouts(seed, Prompt(np.array(token_ids, np.int32)))
    if thread is not None:
        thread.join(30)
    return thread is not None


def test_ranks_with_one_seed_and_the_same_prompts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second one that comes is warned; other seeds, other prompts and a second scheduler of one rank are not."""
    store = Store()
    for seed, prompt in ((0, 5), (0, 6), (1, 5)):
        as_rank(monkeypatch, store)
        assert look(seed, prompt, 7)
        assert not look(seed, prompt, 7)  # the same rank's next scheduler
    assert not caplog.text
    as_rank(monkeypatch, store)
    assert look(1, 5, 7)
    assert "another rank of this trainer began with the same prompt and seed=1" in caplog.text
