"""Stop strings on the embedded engine: a real model and real tokenizers; test_conformance_engines.py cuts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from real_schedulers import assert_nothing_is_left
from tiny_models import tiny_engine, tiny_model
from tiny_tokenizers import ids_of, tokenizer

import april
from april.driver.rewards import Response
from april.engines.transformers.engine import STREAM_INTERVAL
from april.errors import ConfigError

KIND = "text"
PROMPT = ids_of(KIND, "The answer is")
LENGTH = 60


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    assert_nothing_is_left()


def model() -> Any:
    return tiny_model(vocab_size=tokenizer(KIND).get_vocab_size())


def rollouts(stop: list[str], network: Any = None, **arguments: Any) -> april.RolloutScheduler:
    config = april.Config(
        rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=arguments.pop("max_response_len", LENGTH),
        sampling={"temperature": 0.0, "stop": stop}, allow_mismatch=True,
    )  # fmt: skip
    engine = tiny_engine(network or model(), slots=4, check=False)
    defaults = {"tokenizer": tokenizer(KIND), "prompts": iter(lambda: PROMPT, None), "check": True}
    return april.RolloutScheduler(config, engines=[engine], **(defaults | arguments))


def uncut(network: Any) -> list[int]:
    with rollouts([], network) as scheduler:
        return scheduler.next_batch().samples[0].tokens.tolist()


@pytest.mark.parametrize(("tokens", "characters"), [(20, 5), (2, 1)])
def test_the_engine_streams_and_ends_soon_after_the_string(tokens: int, characters: int) -> None:
    """Without a configured interval tokens come in chunks of two, the first ones too, and the request ends after it."""
    network = model()
    stop = tokenizer(KIND).decode(uncut(network)[:tokens], skip_special_tokens=False)[-characters:]
    with rollouts([stop], network, max_response_len=200) as scheduler:
        batch = scheduler.next_batch()
        wasted = scheduler.ledger()["tokens"].dropped["after_stop"]  # type: ignore[index]
    kept = len(batch.samples[0].tokens)
    assert kept < 40
    assert 0 <= wasted <= 8 * STREAM_INTERVAL < 20
    assert batch.metrics["after_stop_tokens"] == wasted


def test_the_configuration_needs_a_tokenizer_for_stop_strings() -> None:
    """Refused before anything starts; without stop strings no tokenizer is needed."""
    with pytest.raises(ConfigError, match=r"sampling.stop: stop strings are matched on text; give the scheduler token"):
        rollouts(["x"], tokenizer=None)
    with rollouts([], tokenizer=None) as scheduler:
        assert len(scheduler.next_batch().samples[0].tokens) == LENGTH


def test_hugging_face_tokenizers_fit_and_rewards_see_text() -> None:
    """A fast tokenizer as trainers hold it: stop strings of the configuration, text in rewards and evaluations."""
    from transformers import PreTrainedTokenizerFast

    network, fast = model(), PreTrainedTokenizerFast(tokenizer_object=tokenizer(KIND))
    whole = uncut(network)
    stop = fast.decode(whole[:30], skip_special_tokens=False)[-5:]
    seen: list[str] = []

    def reward(prompt: april.Prompt, response: Response) -> float:
        seen.append(response.text(special_tokens=True))
        return float(stop in seen[-1])

    with rollouts([stop], network, tokenizer=fast, reward=reward) as scheduler:
        (sample,) = scheduler.next_batch().samples
        result = scheduler.evaluate([PROMPT])
    assert seen[0] == fast.decode(sample.tokens.tolist(), skip_special_tokens=False)
    assert seen[0] == seen[1] == result.responses[0][0].text(special_tokens=True)
    assert np.array_equal(result.responses[0][0].tokens, sample.tokens)
    assert sample.tokens.tolist() == whole[: len(sample.tokens)]
    assert result.reward_mean == sample.reward == 1.0
