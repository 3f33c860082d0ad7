"""Stop strings on the embedded engine: a real model, real tokenizers, real loops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from real_schedulers import assert_nothing_is_left
from tiny_models import tiny_model
from tiny_tokenizers import ids_of, tokenizer

import april
from april.core.types import FinishReason
from april.driver.rewards import Response
from april.engines.protocol import Chunk, EngineFinish, Request
from april.engines.transformers.engine import STREAM_INTERVAL, TransformersEngine
from april.errors import ConfigError

KIND = "text"
PROMPT = ids_of(KIND, "The answer is")
LENGTH = 60


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    assert_nothing_is_left()


class CutsAt(TransformersEngine):
    """Hands the first attempt of a response over as if it had been aborted after ``cut`` tokens."""

    cut = 0

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, slots=4, max_len=256, eos_token_ids=(), check=False, **options)
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        first = self.cut and not request.response_offset
        if first:
            request = replace(request, sampling=replace(request.sampling, max_tokens=self.cut))
        async for chunk in super().generate(request):
            yield replace(chunk, finish=EngineFinish.ABORT if first and chunk.finish else chunk.finish)


def model() -> Any:
    return tiny_model(vocab_size=tokenizer(KIND).get_vocab_size())


def rollouts(engine: TransformersEngine, stop: list[str], **arguments: Any) -> april.RolloutScheduler:
    config = april.Config(
        rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=LENGTH, allow_mismatch=True,
        sampling={"temperature": 0.0, "stop": stop},
    )  # fmt: skip
    defaults = {"tokenizer": tokenizer(KIND), "prompts": iter(lambda: PROMPT, None), "check": True}
    return april.RolloutScheduler(config, engines=[engine], **(defaults | arguments))


def generated(engine: CutsAt, stop: list[str]) -> april.DeliveredSample:
    with rollouts(engine, stop) as scheduler:
        batch = scheduler.next_batch()
        books = scheduler.ledger()["tokens"]
        assert books.balanced
        assert books.observed == len(batch.samples[0].tokens) + sum(books.dropped.values())
        return batch.samples[0]


def test_greedy_with_a_stop_string_is_greedy_up_to_it_at_every_cut() -> None:
    """Cut at every inner token and resumed, the response is the uncut greedy one up to the string's last token."""
    decode, network = tokenizer(KIND).decode, model()
    uncut = generated(CutsAt(network), []).tokens.tolist()
    assert len(uncut) == LENGTH
    texts = [decode(uncut[:n], skip_special_tokens=False) for n in range(LENGTH + 1)]
    # the text of tokens 10 to 14 but for its last character, which appears nowhere before
    stop = texts[14][len(texts[9]) : -1]
    expected = next(n for n in range(LENGTH + 1) if stop in texts[n])
    assert len(stop) > 5
    assert expected == 14
    honoured = 0

    for cut in range(1, expected):
        engine = CutsAt(network)
        engine.cut = cut
        sample = generated(engine, ["never said", stop])
        assert sample.finish is FinishReason.STOP
        assert [s.count for s in sample.segments] == [cut, expected - cut]
        honoured += sample.tokens.tolist() == uncut[:expected]
        assert all(r.stream and r.sampling.stop == () for r in engine.requests)
    assert honoured == expected - 1


@pytest.mark.parametrize(("tokens", "characters"), [(20, 5), (2, 1)])
def test_the_engine_streams_and_ends_soon_after_the_string(tokens: int, characters: int) -> None:
    """Without a configured interval tokens come in chunks of two, the first ones too, and the request ends after it."""
    network = model()
    uncut = generated(CutsAt(network), []).tokens.tolist()
    stop = tokenizer(KIND).decode(uncut[:tokens], skip_special_tokens=False)[-characters:]
    config = {"temperature": 0.0, "stop": [stop]}
    engine = CutsAt(network)
    with april.RolloutScheduler(
        april.Config(
            rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=200, allow_mismatch=True, sampling=config
        ),
        engines=[engine], tokenizer=tokenizer(KIND), prompts=[PROMPT], check=True,
    ) as scheduler:  # fmt: skip
        batch = scheduler.next_batch()
        wasted = scheduler.ledger()["tokens"].dropped["after_stop"]  # type: ignore[index]
    kept = len(batch.samples[0].tokens)
    assert kept < 40
    assert 0 <= wasted <= 8 * STREAM_INTERVAL < 20
    assert batch.metrics["after_stop_tokens"] == wasted


def test_the_configuration_needs_a_tokenizer_for_stop_strings() -> None:
    """Refused before anything starts; without stop strings no tokenizer is needed."""
    with pytest.raises(ConfigError, match=r"sampling.stop: stop strings are matched on text; give the scheduler token"):
        rollouts(CutsAt(model()), ["x"], tokenizer=None)
    with rollouts(CutsAt(model()), [], tokenizer=None) as scheduler:
        assert len(scheduler.next_batch().samples[0].tokens) == LENGTH


def test_hugging_face_tokenizers_fit_and_rewards_see_text() -> None:
    """A fast tokenizer as trainers hold it: stop strings of the configuration, text in rewards and evaluations."""
    from transformers import PreTrainedTokenizerFast

    network, fast = model(), PreTrainedTokenizerFast(tokenizer_object=tokenizer(KIND))
    uncut = generated(CutsAt(network), []).tokens.tolist()
    stop = fast.decode(uncut[:30], skip_special_tokens=False)[-5:]
    seen: list[str] = []

    def reward(prompt: april.Prompt, response: Response) -> float:
        seen.append(response.text(special_tokens=True))
        return float(stop in seen[-1])

    with rollouts(CutsAt(network), [stop], tokenizer=fast, reward=reward) as scheduler:
        (sample,) = scheduler.next_batch().samples
        result = scheduler.evaluate([PROMPT])
    assert seen[0] == fast.decode(sample.tokens.tolist(), skip_special_tokens=False)
    assert seen[0] == seen[1] == result.responses[0][0].text(special_tokens=True)
    assert np.array_equal(result.responses[0][0].tokens, sample.tokens)
    assert sample.tokens.tolist() == uncut[: len(sample.tokens)]
    assert result.reward_mean == sample.reward == 1.0
