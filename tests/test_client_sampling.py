"""Who decides how an agent's tokens are sampled: the plan, whatever the agent's client asks for."""

from __future__ import annotations

import logging
from typing import Any

import aiohttp
import pytest
from pages import Block, executes

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


def scheduler(
    engine: FakeEngine | None, route: str, asked: dict[str, Any], model: Any = None, status: int = 200, **settings: Any
) -> april.RolloutScheduler:
    """Samples of one request each, by a client that asks for ``asked`` and for the ``data`` of its prompt."""

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        async with (
            aiohttp.ClientSession(headers={"x-api-key": llm.api_key}) as client,
            client.post(llm.base_url + route, json=ROUTES[route] | asked | prompt.data.get("asked", {})) as response,
        ):
            text = await response.text()  # an answer that nobody reads is not trained
            assert response.status == status, text
        if status != 200:
            await llm.generate([20], any_conversation=True)

    return april.RolloutScheduler(
        april.Config(
            rollout_batch_size=2, n_samples_per_prompt=1, max_response_len=60, over_sampling_batch_size=2, **settings
        ),
        prompts=[{"token_ids": [20 + i], "asked": {"temperature": 1.5} if i % 2 and model else {}} for i in range(6)],
        rollout=rollout, reward=lambda p, r: 1.0, engines=None if engine is None else [engine], model=model,
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


def test_what_changes_nothing_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    """The configured values, values that are no change, and lengths and stop strings, which are the client's."""
    e = engine()
    asked = {"temperature": 1, "top_p": 1.0, "top_k": -1, "frequency_penalty": 0, "max_tokens": 3, "stop": ["~"]}
    with caplog.at_level(logging.WARNING, "april"), scheduler(e, "/chat/completions", asked) as run:
        batch = run.next_batch()
    assert batch.metrics["overridden_requests"] == 0
    assert not caplog.records
    assert max(len(s.tokens) for s in batch.samples) <= 3


# ---------------------------------------------------------------- sampling_of_clients: client


@executes("sampling.md-1")
def test_rows_at_the_temperatures_of_clients_give_the_loss_of_what_was_sampled(code: list[Block]) -> None:
    """Logits divided by ``temperatures`` give the log-probabilities of every row, whatever its client asked for."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, eos_token_id=EOS, pad_token_id=0,
        initializer_range=0.3,
    ))  # fmt: skip
    with scheduler(None, "/chat/completions", {"temperature": 0.3}, model, sampling_of_clients="client") as run:
        batch = run.next_batch()
    assert batch.metrics["overridden_requests"] == 0
    advantages = torch.tensor([1.0, -0.5])
    space = code[0].run({"april": april, "batch": batch, "model": model, "advantages": advantages})
    rows, loss = space["rows"], float(space["loss"].detach())
    trained = rows["loss_mask"]
    assert {round(t, 6) for t in rows["temperatures"][trained].tolist()} == {0.3, 1.5}
    assert float((space["logprobs"].detach() - rows["logprobs"]).abs()[trained].max()) < 1e-4
    # if the trainer's log-probabilities are those of sampling, all ratios and weights of the loss are 1
    assert loss == pytest.approx(float(-(advantages * trained.sum(1)).sum() / trained.sum()), abs=1e-4)


@pytest.mark.parametrize(
    "asked", [{"temperature": 0}, {"top_p": 0.5}, {"top_k": 5}, {"repetition_penalty": 1.2, "min_p": 0.1}]
)
def test_what_a_trainer_could_not_recompute_is_refused_if_clients_decide(asked: dict[str, Any]) -> None:
    """Temperature 0, top_p below 1, and what april's engines do not have; ``seed`` is april's in any case."""
    e = engine()
    with scheduler(e, "/chat/completions", asked | {"seed": 3}, status=400, sampling_of_clients="client") as run:
        run.next_batch()
    assert {a.request.sampling.temperature for a in e.attempts.values()} == {1.0}


def test_evaluate_decides_also_where_clients_do() -> None:
    """A client's temperature does not undo a greedy evaluation."""
    e = engine()
    with scheduler(e, "/chat/completions", {"temperature": 0.5}, sampling_of_clients="client") as run:
        run.evaluate([{"token_ids": [20 + i]} for i in range(3)], temperature=0)
        run.next_batch()
    asked = {(a.evaluation, a.request.sampling.temperature) for a in e.attempts.values()}
    assert {temperature for evaluation, temperature in asked if evaluation} == {0}
    assert {temperature for evaluation, temperature in asked if not evaluation} == {0.5}
