"""TensorRT-LLM behind the engine ``openai``, by a stand-in with its payloads: what asking does not show is known."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from fake_servers.base import uncut
from fake_servers.openai import PAUSED, VERSION, FakeTrtllmServer
from real_schedulers import assert_nothing_is_left
from responses import chunks_of, openai_reader
from server_fixtures import PROMPT, ServerThread, listening, read, request, served, settings, until, update
from test_server_schedulers import check, hand_over, scheduler_over

from april.config.settings import Config
from april.core.sampling import LogprobKind
from april.core.versions import PolicyVersion
from april.doctor.examine import TimeLimits, examine_config, examine_urls
from april.doctor.findings import Level, Report
from april.engines.http.http_client import failure_of
from april.engines.http.response_reader import ReadProgress
from april.engines.protocol import EngineFinish, EngineLoad
from april.errors import EngineBusy, EngineError, RequestRefused

EXCHANGE = (
    b'{"id":"cmpl-1","object":"text_completion","created":1795342166,"model":"tiny","choices":[{"index":0,"text":"",'
    b'"token_ids":[217],"logprobs":{"text_offset":[0],"token_logprobs":[-2.6949213948],"tokens":["<217>"],'
    b'"top_logprobs":[{"<217>":-2.6949213948}]},"finish_reason":null,"stop_reason":null,'
    b'"avg_decoded_tokens_per_iter":null}],"usage":null}',
    b'{"id":"cmpl-1","object":"text_completion","created":1795342166,"model":"tiny","choices":[{"index":0,"text":"",'
    b'"token_ids":[482],"logprobs":{"text_offset":[0],"token_logprobs":[-0.5],"tokens":["<482>"],'
    b'"top_logprobs":[{"<482>":-0.5}]},"finish_reason":"length","stop_reason":null,'
    b'"avg_decoded_tokens_per_iter":null}],"usage":null}',
    b'{"id":"cmpl-1","object":"text_completion","created":1795342166,"model":"tiny","choices":[],"usage":'
    b'{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0}}}',
    b"[DONE]",
)


def test_its_exchange_is_read() -> None:
    """Word by word as its route writes it."""
    reader = openai_reader([1, 4, 7])
    for payload in EXCHANGE:
        reader.read([payload])
    chunks = reader.take(last=True)
    assert np.concatenate([chunk.tokens for chunk in chunks]).tolist() == [217, 482]
    logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
    assert logprobs.tolist() == np.array([-2.6949213948, -0.5], np.float32).tolist()
    assert (chunks[-1].finish, reader.progress) == (EngineFinish.LENGTH, ReadProgress.DONE)


def trtllm(**options: Any) -> Any:
    return served("openai", server=FakeTrtllmServer(**options))


async def test_it_is_recognised_and_asked_nothing_that_it_refuses() -> None:
    """One way of token ids, no key that it does not know, no seed that it would not keep, and never /metrics."""
    async with trtllm() as (server, engine):
        assert engine.facts.software == f"TensorRT-LLM {VERSION}"
        assert engine.capabilities.logprob_kind is LogprobKind.RAW
        got = await read(engine, request())
        assert (got.tokens, got.logprobs) == uncut(PROMPT)
        await update(engine, PolicyVersion(0, 1))
        health = await engine.health()
        assert (health.ok, health.load) == (True, None)
        assert server.refused == []
        assert (server.asked["/metrics"], server.asked["/prometheus/metrics"]) == (0, 1)


async def test_its_prometheus_page_is_used_where_it_is() -> None:
    """Once it was there at the start."""
    async with trtllm(prometheus=True) as (server, engine):
        assert (await engine.health()).load == EngineLoad(0, 1, 0.5)
        assert server.asked["/metrics"] == 0


async def test_its_seeds_count_as_not_honoured() -> None:
    """Alone it keeps them, so that asking would say yes; together it does not. A note says what that means."""
    async with trtllm(mean_length=10**6) as (server, engine):
        asked = {"temperature": 1.0, "seed": 7, "max_tokens": 20}
        alone = [(await read(engine, request(**asked))).tokens for _ in range(2)]
        assert alone[0] == alone[1]
        server.limit(1)
        beside = asyncio.create_task(read(engine, request([9, 9], 20)))
        await until(lambda: server.stopped == 1)
        together = asyncio.create_task(read(engine, request(**asked)))
        await until(lambda: server.stopped == 2)
        server.limit()
        assert (await together).tokens != alone[0]
        await beside
        assert not engine.capabilities.honours_seeds
        (note,) = [n for n in engine.capabilities.notes if "seed" in n]
        assert "only while no other request runs, so runs cannot be repeated exactly" in note
        assert "without speculative decoding" in note


async def test_a_paused_engine_is_busy_and_its_requests_are_not_refused() -> None:
    """It answers 400, as to a wrong request; nothing was begun, and the request is answered when it goes on."""
    async with trtllm() as (server, engine):
        server.paused = True
        got = await read(engine, request())
        assert isinstance(got.error, EngineBusy)
        assert PAUSED in str(got.error)
        server.paused = False
        assert (await read(engine, request())).tokens == uncut(PROMPT)[0]


@pytest.mark.parametrize(
    ("status", "said", "error"),
    [
        (400, PAUSED, EngineBusy),
        (400, "the engine is asleep; wake it up", EngineBusy),
        (500, "LLM is sleeping", EngineBusy),
        (400, "min_tokens must not be negative", RequestRefused),
        (400, "this paused me", RequestRefused),
        (401, "your account is paused", EngineError),
        (422, PAUSED, RequestRefused),
    ],
)
def test_what_counts_as_at_rest(status: int, said: str, error: type[EngineError]) -> None:
    """The server's words, under a status that it uses for them."""
    assert type(failure_of(status, said)) is error


def test_a_context_that_is_smaller_than_was_said_refuses_the_request() -> None:
    """By the code that newer servers have for it; the same request would be refused again."""
    reader = openai_reader(PROMPT)
    said = {"message": "This model's maximum context length is 100 tokens", "code": "context_length_exceeded"}
    with pytest.raises(RequestRefused, match="maximum context length is 100"):
        chunks_of(reader, json.dumps({"error": said}).encode())


def report_of(server: FakeTrtllmServer, *, configured: bool) -> Report:
    async def program() -> Report:
        patience = TimeLimits(10.0, 3.0)
        async with listening(server) as url:
            if not configured:
                return await examine_urls([url], None, patience)
            config = Config(rollout_batch_size=2, max_response_len=99, engine=settings("openai", url))
            return await examine_config(config, patience)

    return asyncio.run(program())


def test_the_doctor_recognises_it() -> None:
    """By its address, and in full with a configuration."""
    server = FakeTrtllmServer()
    (found,) = report_of(server, configured=False).servers
    assert (found.kind, found.version) == ("openai", f"TensorRT-LLM {VERSION}")
    assert "engine.vocab_size" in found.findings[0].sentence
    (found,) = report_of(server, configured=True).servers
    assert found.version == f"TensorRT-LLM {VERSION}"
    assert [f.subject for f in found.findings if f.level is Level.REMARK] == ["in flight", "seeds"]
    assert any("without speculative decoding" in limit.sentence for limit in found.limits)
    assert any("up to 1 s after april has closed its stream" in limit.sentence for limit in found.limits)
    assert server.asked["/metrics"] == 0


def test_the_doctor_says_that_it_is_paused() -> None:
    """Not that it cannot be used."""
    server = FakeTrtllmServer()
    server.paused = True
    (found,) = report_of(server, configured=True).servers
    (finding,) = found.findings
    assert finding.subject == "busy"
    assert PAUSED in finding.sentence
    assert "resume_generation()" in finding.advice


def test_a_pause_in_a_step_costs_no_group() -> None:
    """Requests wait and go on; every token has the log-probability of the weights that its version stands for."""
    server = FakeTrtllmServer(max_running=6, turns=5, seeds_alone=False)
    with ServerThread(server), scheduler_over("openai", [server], {}) as rollouts:
        refusals = 0.0
        for step in range(4):
            # what the first step has left may fill the second one without a request
            server.paused, server.resumes_after = step > 0, 7
            batch = rollouts.next_batch()
            refusals += batch.metrics["busy_refusals"]
            check(batch)
            rollouts.weight_update(transfer=lambda step=step: hand_over([server], f"w{step + 1}"))
        books = rollouts.ledger()
        assert refusals >= 1
        assert not books["prompts"].dropped.total()
        assert not books["tokens"].dropped.total()
        assert server.asked["/metrics"] == 0
    assert_nothing_is_left()


def test_a_stop_before_min_tokens_is_not_believed() -> None:
    """It holds back its tokenizer's EOS and no other id: such answers are dropped by name, and asked for again."""
    server, stops, fewest = FakeTrtllmServer(mean_length=10**6, seeds_alone=False), tuple(range(100, 110)), 20
    sampling = {"min_tokens": fewest, "stop_token_ids": stops}
    changes: dict[str, Any] = {"sampling": sampling, "allow_mismatch": True, "max_attempt_failures": 50}
    with ServerThread(server), scheduler_over("openai", [server], {}, **changes) as rollouts:
        for step in range(3):
            for sample in rollouts.next_batch().samples:
                assert len(sample.tokens) >= fewest
                assert not {*sample.tokens[: fewest - 1].tolist()} & {*stops}
            rollouts.weight_update(transfer=lambda step=step: hand_over([server], f"w{step + 1}"))
        books = rollouts.ledger()
        assert books["tokens"].balanced
        assert books["tokens"].dropped["corrupt"] > 0
        assert not books["prompts"].dropped.total()
    assert_nothing_is_left()
