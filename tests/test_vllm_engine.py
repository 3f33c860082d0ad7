"""The vLLM client against a fake server: every token once, whatever the server does with its answers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from fake_servers.base import PlannedFault, RequestFault
from fake_servers.vllm import COMPLETIONS, HARMLESS, TOKENS, FakeVllmRun, FakeVllmServer, fake_vllm_response
from sglang_fixtures import PROMPT, read, request, run, until
from vllm_fixtures import connected, served

from april.config.engines import OpenAIEngineConfig
from april.core.versions import PolicyVersion
from april.engines.http import response_stream
from april.engines.openai.engine import OpenAIEngine, connect_openai
from april.engines.protocol import AbortMeans, EngineFinish
from april.errors import EngineBusy, EngineError, EngineUnreachable, RequestRefused, WireError

MODES: list[dict[str, Any]] = [
    {},
    {"config": {"max_token_loss": 0}},
    {"developer": False},
    {"scale_out": False},
    {"scale_out": False, "config": {"max_token_loss": 0}},
    {"processes": 2},
    {"processes": 2, "scale_out": False, "config": {"max_token_loss": 0}},
    {"release": 33},
    {"release": 33, "scale_out": False},
    {"release": 33, "scale_out": False, "config": {"max_token_loss": 0}},
    {"release": 33, "processes": 2},
]
"""Servers with an abort that returns tokens."""
CLOSING: list[dict[str, Any]] = [{"developer": False, "scale_out": False}, {"developer": False, "processes": 2}]
"""Servers whose requests end only with their connection."""


@pytest.mark.parametrize("mode", [*MODES, *CLOSING], ids=str)
def test_every_token_comes_once_with_its_logprob(mode: dict[str, Any]) -> None:
    """Either route, streaming or not: 40 requests at a time are the server's own sequences, EOS included."""

    async def program() -> None:
        async with served(**mode, max_running=16) as (server, engine):
            prompts = [[*PROMPT, i] for i in range(40)]
            got = await asyncio.gather(*(read(engine, request(p)) for p in prompts))
            for prompt, g in zip(prompts, got, strict=True):
                ids, logprobs = fake_vllm_response(prompt)
                assert g.error is None
                assert g.tokens == ids
                assert g.logprobs == logprobs
                assert set(g.versions) == {PolicyVersion(0, 0)}
                assert g.finish is (EngineFinish.STOP if ids[-1] == 2 else EngineFinish.LENGTH)
            assert server.open_requests == 0

    run(program)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("steps", [0, 1, 17])
def test_cut_and_continued_equals_uncut(mode: dict[str, Any], steps: int) -> None:
    """Aborted while running, and in the queue, and continued: the sequence of the uncut request, nothing lost."""

    async def program() -> None:
        async with served(**mode, stepped=True, max_running=4, mean_length=10**6) as (server, engine):
            prompts = [[*PROMPT, i] for i in range(6)]
            asked = [request(p) for p in prompts]
            reading = [asyncio.create_task(read(engine, a)) for a in asked]
            await until(lambda: server.open_requests == 6)
            server.step(steps)
            await engine.abort([a.attempt_id for a in asked])
            cut = await asyncio.gather(*reading)
            assert sorted(len(g.tokens) for g in cut) == [0, 0, *[steps] * 4]
            assert {g.finish for g in cut} == {EngineFinish.ABORT}
            assert all(len(body["request_ids"]) == 6 for _, body in server.aborts)
            assert len(server.aborts) + len(server.pauses) == 1
            server.go_on()
            for prompt, g in zip(prompts, cut, strict=True):
                rest = await read(engine, request(prompt + g.tokens, 64 - len(g.tokens)))
                ids, logprobs = fake_vllm_response(prompt, mean_length=10**6)
                assert g.tokens + rest.tokens == ids
                assert g.logprobs + rest.logprobs == logprobs

    run(program)


@pytest.mark.parametrize("mode", CLOSING, ids=str)
def test_closing_streams_keeps_what_was_read(mode: dict[str, Any]) -> None:
    """Without any abort the end is orderly: ABORT, a true beginning of the response, and the server is rid of it."""

    async def program() -> None:
        async with served(**mode, stepped=True, mean_length=10**6) as (server, engine):
            assert isinstance(engine, OpenAIEngine)
            assert engine.capabilities.abort_means is AbortMeans.CLOSE
            asked = request()
            reading = asyncio.create_task(read(engine, asked))
            await until(lambda: server.open_requests == 1)
            server.step(5)
            await until(lambda: server.runs[0].sent == 5)
            await engine.abort([asked.attempt_id])
            got = await reading
            assert got.error is None
            assert got.finish is EngineFinish.ABORT
            assert got.tokens == fake_vllm_response(PROMPT, mean_length=10**6)[0][: len(got.tokens)]
            await until(lambda: server.open_requests == 0)

    run(program)


def test_requests_of_others_are_not_hit() -> None:
    """Aborting all ends what is inside this engine only: by ids, never by the server's own "all"."""

    async def program() -> None:
        async with served(stepped=True, mean_length=10**6) as (server, engine):
            other = await connected(server)
            readings = [asyncio.create_task(read(e, request())) for e in (engine, other)]
            await until(lambda: server.open_requests == 2)
            await engine.abort(None)
            assert (await readings[0]).finish is EngineFinish.ABORT
            assert server.open_requests == 1
            server.go_on()
            assert (await readings[1]).finish is EngineFinish.LENGTH
            await other.close()

    run(program)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
def test_swept_along_is_sent_again(stream: bool) -> None:
    """With several processes one abort pauses all: a request that nobody wanted ended, without tokens, goes on."""

    async def program() -> None:
        config = {"max_token_loss": 0} if stream else {}
        async with served(processes=2, stepped=True, max_running=1, config=config) as (server, engine):
            assert engine.capabilities.abort_means is AbortMeans.PAUSE
            asked = [request(), request([*PROMPT, 9])]
            readings = [asyncio.create_task(read(engine, a)) for a in asked]
            await until(lambda: server.open_requests == 2)
            await engine.abort([asked[0].attempt_id])
            assert (await readings[0]).finish is EngineFinish.ABORT
            server.go_on()
            assert (await readings[1]).tokens == fake_vllm_response([*PROMPT, 9])[0]

    run(program)


class HandedOver(FakeVllmServer):
    """Requests reach its engine once it is paused, and it goes on once the two that do have been refused."""

    refused = 2
    """Set to 0 to begin."""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        while self.refused < 2 and self.pause_mode is None:
            await self._wait()
        return await super()._generate(request)

    async def _pause(self, request: web.Request) -> web.Response:
        answer = await super()._pause(request)
        self._changed.set()
        return answer

    async def _paused_answer(self, request: web.Request, run: FakeVllmRun) -> web.StreamResponse:
        answer = await super()._paused_answer(request, run)
        self.refused += 1
        self._changed.set()
        return answer

    async def _resume(self, request: web.Request) -> web.Response:
        while self.refused < 2:
            await self._wait()
        return await super()._resume(request)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
def test_what_its_own_pause_refuses_is_sent_again_or_aborted(stream: bool) -> None:
    """vLLM 0.33 refuses what is just being handed over when april pauses it to end one request: that one ends without
    a token, and the other is sent again after the pause."""

    async def program() -> None:
        server = HandedOver(processes=2, release=33, max_running=8)
        await server.start()
        engine = await connected(server, {"max_token_loss": 0 if stream else None})
        server.refused = 0
        asked = [request(), request([*PROMPT, 9])]
        readings = [asyncio.create_task(read(engine, a)) for a in asked]
        await until(lambda: len(engine._admission.inside) == 2)
        await engine.abort([asked[0].attempt_id])
        ended, other = await asyncio.gather(*readings)
        assert (ended.finish, ended.tokens, ended.error) == (EngineFinish.ABORT, [], None)
        assert (other.tokens, other.error) == (fake_vllm_response([*PROMPT, 9])[0], None)
        assert (server.refused, server.pauses) == (2, ["abort"])
        await engine.close()
        await server.close()

    run(program)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("scale_out", [True, False], ids=["tokens", "completions"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
def test_a_server_that_somebody_else_has_paused_is_busy(stream: bool, scale_out: bool, processes: int) -> None:
    """vLLM 0.33 says so with a status, or inside a stream that has begun: no failure, nothing refused for good."""

    async def program() -> None:
        config = {"max_token_loss": 0} if stream else {}
        async with served(release=33, scale_out=scale_out, processes=processes, config=config) as (server, engine):
            server.pause_mode = "abort"
            for _ in range(4):
                got = await read(engine, request())
                assert type(got.error) is EngineBusy
                assert "Generation is paused" in str(got.error)
            server.pause_mode = None
            assert (await read(engine, request())).tokens == fake_vllm_response(PROMPT)[0]

    run(program)


def test_completions_say_which_weights_made_which_token() -> None:
    """vLLM 0.33 is asked for it on the plain route too: tokens of weights that april has not put there are not kept."""

    async def program() -> None:
        async with served(release=33, scale_out=False, stepped=True, mean_length=10**6) as (server, engine):
            assert engine.capabilities.version_spans
            reading = asyncio.create_task(read(engine, request()))
            await until(lambda: server.open_requests == 1)
            server.step(3)
            server.label = "somebody's"
            server.go_on()
            assert "tokens of weights 'somebody's'" in str((await reading).error)
            assert server.runs[0].params["return_weight_versions"] is True

    run(program)


def test_as_an_openai_server_one_response_has_one_label() -> None:
    """Where april names no weights it still sees that they have changed under a request."""

    async def program() -> None:
        async with served(release=33, stepped=True, mean_length=10**6) as (server, _):
            server.stepped = False
            (engine,) = await connect_openai(
                OpenAIEngineConfig(urls=(server.url,), vocab_size=512, max_len=4096, logprobs="processed")
            )
            server.stepped = True
            reading = asyncio.create_task(read(engine, request()))
            await until(lambda: server.open_requests == 1)
            server.step(3)
            server.label = "somebody's"
            server.go_on()
            got = await reading
            assert type(got.error) is WireError
            assert "somebody's" in str(got.error)
            await engine.close()

    run(program)


TYPED: dict[RequestFault, type[EngineError]] = {
    RequestFault.SERVER_DIES: EngineUnreachable,
    RequestFault.BREAK_OFF: EngineUnreachable,
    RequestFault.ENGINE_DIES: EngineError,
    RequestFault.EXTRA_LOGPROBS: WireError,
    RequestFault.WRONG_COUNT: WireError,
    RequestFault.NULL_LOGPROB: WireError,
    RequestFault.NAN_LOGPROB: WireError,
    RequestFault.OTHER_IDS: WireError,
    RequestFault.TRUNCATED: WireError,
    RequestFault.GAP_IN_SPANS: WireError,
    RequestFault.FOREIGN_LABEL: EngineError,
    RequestFault.DOUBLED_EVENT: WireError,
    RequestFault.ENDS_TWICE: WireError,
    RequestFault.OTHER_PROMPT: WireError,
    RequestFault.NO_FINISH: EngineUnreachable,
    RequestFault.NO_DONE: EngineUnreachable,
    RequestFault.BUSY: EngineBusy,
    RequestFault.LIMITED: EngineBusy,
    RequestFault.REFUSED: RequestRefused,
    RequestFault.FAILS: EngineError,
    RequestFault.GIANT: EngineError,
    RequestFault.REDIRECT: EngineError,
}
STREAM_ONLY = (RequestFault.NO_DONE, RequestFault.ENDS_TWICE)
TOKEN_ROUTE_ONLY = (RequestFault.OTHER_IDS, RequestFault.GAP_IN_SPANS, RequestFault.FOREIGN_LABEL)


@pytest.mark.parametrize("scale_out", [True, False], ids=["tokens", "completions"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("fault", TYPED, ids=str)
def test_faults_are_typed_and_bring_no_wrong_token(fault: RequestFault, stream: bool, scale_out: bool) -> None:
    """What came before is a true beginning of the response; then the error of its kind; nothing is left open."""
    harmless = (fault in TOKEN_ROUTE_ONLY and not scale_out) or (fault in STREAM_ONLY and not stream)

    async def program() -> None:
        planned = PlannedFault(fault, after_tokens=3)
        async with served(planned, scale_out=scale_out, mean_length=10**6) as (server, engine):
            got = await read(engine, request(max_tokens=12, stream=stream))
            ids, logprobs = fake_vllm_response(PROMPT, max_tokens=12, mean_length=10**6)
            if fault is RequestFault.DOUBLED_EVENT:  # that it was one shows at the end only
                assert type(got.error) is WireError
                return
            assert got.tokens == ids[: len(got.tokens)]
            assert got.logprobs == logprobs[: len(got.tokens)]
            if harmless:
                assert got.error is None
                assert got.tokens == ids
                return
            # some were handed over before: nobody knows which of them are of other weights
            too_late = fault is RequestFault.FOREIGN_LABEL and stream
            assert type(got.error) is (WireError if too_late else TYPED[fault]), got.error
            assert got.finish is None
            assert engine._admission.inside == set()
            if fault is RequestFault.LIMITED:
                assert isinstance(got.error, EngineBusy)
                assert got.error.retry_after_s == 2.0
            if fault is RequestFault.NO_DONE:
                assert got.tokens == ids
            await until(lambda: server.open_requests == 0)

    run(program)


@pytest.mark.parametrize("scale_out", [True, False], ids=["tokens", "completions"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("fault", [*HARMLESS, RequestFault.LOST_PARTIAL, RequestFault.REPEATED_LAST], ids=str)
def test_aborts_that_go_wrong(fault: RequestFault, stream: bool, scale_out: bool) -> None:
    """Asked again where the first abort was not seen; a repeated token is refused; lost tokens are never invented."""

    async def program() -> None:
        planned = PlannedFault(fault, after_tokens=6)
        async with served(planned, scale_out=scale_out, mean_length=10**6, stepped=True) as (server, engine):
            asked = request(stream=stream)
            reading = asyncio.create_task(read(engine, asked))
            await until(lambda: server.open_requests == 1)
            server.step(6)
            while server.open_requests:
                server.step() if fault is RequestFault.UNASKED_ABORT else await engine.abort([asked.attempt_id])
            got = await reading
            ids = fake_vllm_response(PROMPT, mean_length=10**6)[0]
            assert got.tokens == ids[: len(got.tokens)]
            if fault is RequestFault.REPEATED_LAST:
                assert isinstance(got.error, WireError)
                return
            assert got.error is None
            assert got.finish is EngineFinish.ABORT
            if fault is not RequestFault.LOST_PARTIAL:
                assert len(got.tokens) == 6

    run(program)


def test_an_abort_that_never_ends_ends_with_close() -> None:
    """A request in flight breaks with an EngineError when the engine is closed."""

    async def program() -> None:
        async with served(RequestFault.ABORT_NEVER_ENDS, stepped=True) as (server, engine):
            asked = request()
            reading = asyncio.create_task(read(engine, asked))
            await until(lambda: server.open_requests == 1)
            await engine.abort([asked.attempt_id])
            await engine.close()
            got = await reading
            assert isinstance(got.error, EngineError)

    run(program)


def test_what_the_server_must_not_be_asked() -> None:
    """Too long, outside the vocabulary, empty: refused here, for the server cuts or dies without a word."""

    async def program() -> None:
        async with served(context=100) as (server, engine):
            for prompt, words in (([1] * 90, "room for 100"), ([512], "vocabulary of 512"), ([], "no token ids")):
                got = await read(engine, request(prompt, 11))
                assert isinstance(got.error, RequestRefused)
                assert words in str(got.error)
            assert not server.runs

    run(program)


@pytest.mark.parametrize("scale_out", [True, False], ids=["tokens", "completions"])
def test_what_a_request_says(scale_out: bool) -> None:
    """The route's own id, the whole range of seeds, only the sampled token's log-probability, all limits explicit."""

    async def program() -> None:
        async with served(scale_out=scale_out) as (server, engine):
            asked = request(max_tokens=9, min_tokens=3, stop_token_ids=(5, 7), seed=2**63 - 1, top_p=0.5)
            await read(engine, asked)
            (seen,) = server.runs
            assert seen.token_route is scale_out
            assert engine.facts.route == (TOKENS if scale_out else COMPLETIONS)
            name = asked.attempt_id
            assert seen.name == (f"generate-tokens-{name}" if scale_out else f"cmpl-{name}-0")
            wanted = {"max_tokens": 9, "min_tokens": 3, "stop_token_ids": [5, 7], "seed": 2**63 - 1, "top_p": 0.5,
                      "logprobs": 0, "temperature": 1.0, "ignore_eos": False}  # fmt: skip
            assert {key: seen.params[key] for key in wanted} == wanted

    run(program)


def test_more_than_a_hundred_at_a_time() -> None:
    """No hidden limit of connections: 150 requests are all at the server."""

    async def program() -> None:
        async with served(stepped=True, max_running=200) as (server, engine):
            readings = [asyncio.create_task(read(engine, request())) for _ in range(150)]
            await until(lambda: server.open_requests == 150)
            server.go_on()
            assert all(g.error is None for g in await asyncio.gather(*readings))

    run(program)


def test_an_answer_with_the_experts_of_the_prompt_is_read() -> None:
    """A server that is told to return routed experts sends those of the prompt's tokens too, a kilobyte for each."""
    prompt, layers, experts = 3_000, 94, 8

    async def program() -> None:
        async with served() as (server, engine):
            server.routed_experts = "A" * (prompt * layers * experts * 4 // 3)  # base64 of one byte each
            got = await read(engine, request([11] * prompt, max_tokens=16))
            assert got.error is None
            assert got.tokens

    run(program)


def test_a_giant_answer_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its limit an answer is an error, whatever is in it."""
    monkeypatch.setattr(response_stream, "OTHER_BYTES", 0)
    monkeypatch.setattr(response_stream, "BYTES_PER_TOKEN", 10)

    async def program() -> None:
        async with served(mean_length=10**6) as (_, engine):
            got = await read(engine, request())
            assert "april stops reading" in str(got.error)
            assert np.size(got.tokens) == 0

    run(program)
