"""Before a server is used it is asked: what it offers is recorded, what it lacks is said, and what would be wrong is
refused with a sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from fake_servers.openai import MODEL, FakeOpenAIServer, serving_openai
from openai_servers import config_for

from april.core.sampling import LogprobKind
from april.engines.http.http_client import HttpClient
from april.engines.openai.probe import OpenAIFacts, probe_openai
from april.engines.openai.wire import TokenShape
from april.errors import ConfigError


def probed(server: FakeOpenAIServer, **changes: Any) -> OpenAIFacts:
    async def probe() -> OpenAIFacts:
        async with asyncio.timeout(20), serving_openai(server) as url:
            client = HttpClient(url, name="s0")
            try:
                return await probe_openai(client, config_for(url, **changes))
            finally:
                await client.close()

    coroutine: Coroutine[Any, Any, OpenAIFacts] = probe()
    return asyncio.run(coroutine)


@pytest.mark.parametrize("shape", list(TokenShape))
def test_the_shape_is_found(shape: TokenShape) -> None:
    """Each server is asked in its own way from then on; one that refuses unknown keys included."""
    facts = probed(FakeOpenAIServer(shape))
    assert facts.token_shape is shape
    assert facts.model == MODEL
    assert facts.keeps_eos
    can = facts.capabilities
    assert can.honours_seeds
    assert (can.max_context, can.vocab_size, can.eos_token_ids) == (4096, 512, (2,))


@pytest.mark.parametrize("kind", [LogprobKind.RAW, LogprobKind.TEMPERATURE, LogprobKind.PROCESSED])
def test_the_kind_of_log_probabilities_is_found(kind: LogprobKind) -> None:
    """By one-token requests; the user's word goes before."""
    facts = probed(FakeOpenAIServer(kind=kind))
    assert facts.capabilities.logprob_kind is kind
    assert any("raw logits" in note for note in facts.capabilities.notes) == (kind is LogprobKind.RAW)
    facts = probed(FakeOpenAIServer(kind=kind), logprobs="temperature")
    assert facts.capabilities.logprob_kind is LogprobKind.TEMPERATURE


def test_seeds_that_are_not_honoured_are_noted() -> None:
    """Not refused: only exact repetition is lost."""
    facts = probed(FakeOpenAIServer(honours_seeds=False))
    assert not facts.capabilities.honours_seeds
    assert any("does not repeat a response for the same seed" in note for note in facts.capabilities.notes)


def test_without_known_eos_a_note_says_what_that_means() -> None:
    """The server cannot be asked for EOS if nobody knows it."""
    facts = probed(FakeOpenAIServer(), eos_token_ids=None)
    assert facts.keeps_eos is None
    assert facts.capabilities.eos_token_ids == ()
    assert any("engine.eos_token_ids is not set" in note for note in facts.capabilities.notes)


def test_an_id_that_ends_nothing_leaves_eos_open() -> None:
    """It is then checked with every response."""
    facts = probed(FakeOpenAIServer(), eos_token_ids=(5,))
    assert facts.keeps_eos is None
    assert any("one without it fails" in note for note in facts.capabilities.notes)


@pytest.mark.parametrize(
    ("server", "changes", "message"),
    [
        (FakeOpenAIServer(None), {}, "gives no token ids with log-probabilities, which april cannot do without"),
        (FakeOpenAIServer(strips=frozenset({2})), {}, r"keeps EOS \(2\) back"),
        (FakeOpenAIServer(strips=frozenset(range(512))), {}, "keeps the stop token back"),
        (FakeOpenAIServer(), {"vocab_size": None}, r"engine.vocab_size: .* vocab_size of the model's config.json"),
        (FakeOpenAIServer(TokenShape.DETOKENIZE), {"max_len": None}, r"engine.max_len: .* does not tell its context"),
        (FakeOpenAIServer(max_context=2048), {}, "engine.max_len=4096 is more than the context .* 2048 tokens"),
        (FakeOpenAIServer(), {"model": "other"}, "has no model 'other'; it serves: fake"),
    ],
)
def test_what_cannot_be_used_is_refused(server: FakeOpenAIServer, changes: dict[str, Any], message: str) -> None:
    """One sentence that says what is wrong and what to do."""
    with pytest.raises(ConfigError, match=message):
        probed(server, **changes)


def test_the_context_is_asked_where_it_is_told() -> None:
    """Both ways, vLLM's list of models says it."""
    assert probed(FakeOpenAIServer(max_context=2048), max_len=None).capabilities.max_context == 2048
    assert probed(FakeOpenAIServer(max_context=2048), max_len=1000).capabilities.max_context == 1000


@pytest.mark.parametrize("counted", [True, False])
def test_events_that_repeat_the_tokens_before_them_are_refused(counted: bool) -> None:
    """Cumulative streams, with and without a count at their end: of a stream that april closes nobody would notice."""

    class Cumulative(FakeOpenAIServer):
        def token_event(self, record: Any, token: int, reason: str | None, number: int) -> dict[str, Any]:
            event = super().token_event(record, token, reason, number)
            (choice,) = event["choices"]
            so_far = record.made[: record.sent + 1]
            choice["token_ids"] = so_far
            choice["logprobs"]["token_logprobs"] = [-1.0] * len(so_far)
            return event

        def usage_event(self, record: Any, said: int) -> dict[str, Any]:
            return super().usage_event(record, said) if counted else {"choices": []}

    with pytest.raises(ConfigError, match="do its events repeat the tokens before them"):
        probed(Cumulative(mean_len=10**6))
