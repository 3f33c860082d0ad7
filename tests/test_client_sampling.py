"""Who decides how an agent's tokens are sampled: the plan, whatever the agent's client asks for."""

from __future__ import annotations

import logging
from typing import Any

import aiohttp
import pytest

import april
from april.testing import FakeEngine
from tests.gateway_suite.script import EOS, TOKENIZER, VOCAB

renderers = pytest.importorskip("renderers")
GO = [{"role": "user", "content": "go"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": GO}, "/completions": {"prompt": [20, 21]}, "/responses": {"input": GO},
    "/messages": {"messages": GO, "max_tokens": 50},
}  # fmt: skip
ASKED: dict[str, Any] = {"temperature": 0.3, "top_p": 0.5}
MORE: dict[str, dict[str, Any]] = {
    "/chat/completions": {"top_k": 5, "logit_bias": {"7": 5}, "frequency_penalty": 1, "seed": 3},
    "/completions": {"min_p": 0.1, "repetition_penalty": 1.2}, "/responses": {}, "/messages": {"top_k": 40},
}  # fmt: skip


def scheduler(engine: FakeEngine, route: str, asked: dict[str, Any]) -> april.RolloutScheduler:
    """Samples of one request each, by a client that asks for ``asked``."""

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        async with (
            aiohttp.ClientSession(headers={"x-api-key": llm.api_key}) as client,
            client.post(llm.base_url + route, json=ROUTES[route] | asked) as response,
        ):
            text = await response.text()  # an answer that nobody reads is not trained
            assert response.status == 200, text

    return april.RolloutScheduler(
        april.Config(rollout_batch_size=2, n_samples_per_prompt=1, max_response_len=60, over_sampling_batch_size=2),
        prompts=[{"token_ids": [20 + i]} for i in range(6)], rollout=rollout, reward=lambda p, r: 1.0, engines=[engine],
        tokenizer=TOKENIZER, renderer=renderers.Qwen3RendererConfig(enable_thinking=False), progress=False,
    )  # fmt: skip


def engine() -> FakeEngine:
    """One whose tokens a tokenizer reads."""
    return FakeEngine("e", vocab_size=VOCAB, eos_token_id=EOS, seconds_per_token=1e-4)


@pytest.mark.parametrize("route", ROUTES)
def test_a_client_does_not_change_how_training_samples(route: str, caplog: pytest.LogCaptureFixture) -> None:
    """In every dialect the configured sampling counts: one warning for the run, and a metric per step."""
    e = engine()
    with caplog.at_level(logging.WARNING, "april"), scheduler(e, route, ASKED | MORE[route]) as run:
        batches = [run.next_batch(), run.next_batch()]
    assert {(a.request.sampling.temperature, a.request.sampling.top_p) for a in e.attempts.values()} == {(1.0, 1.0)}
    assert [b.metrics["overridden_requests"] for b in batches] == [2, 2]
    (said,) = [r.getMessage() for r in caplog.records if "llm.base_url asks for" in r.getMessage()]
    assert all(f"{name}=" in said for name in (*ASKED, *MORE[route]))


def test_a_client_does_not_undo_a_greedy_evaluation() -> None:
    """What evaluate was given counts there."""
    e = engine()
    with scheduler(e, "/chat/completions", {"temperature": 1}) as run:
        run.evaluate([{"token_ids": [20 + i]} for i in range(3)], temperature=0)
    assert {a.request.sampling.temperature for a in e.attempts.values() if a.evaluation} == {0}


def test_what_changes_nothing_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    """The configured values, values that are no change, and lengths and stop strings, which are the client's."""
    e = engine()
    asked = {"temperature": 1, "top_p": 1.0, "top_k": -1, "frequency_penalty": 0, "max_tokens": 3, "stop": ["~"]}
    with caplog.at_level(logging.WARNING, "april"), scheduler(e, "/chat/completions", asked) as run:
        batch = run.next_batch()
    assert batch.metrics["overridden_requests"] == 0
    assert not caplog.records
    assert max(len(s.tokens) for s in batch.samples) <= 3
