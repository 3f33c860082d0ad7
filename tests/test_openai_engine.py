"""An OpenAI-compatible server as an engine: every token once, with log-probability and version, whatever happens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from fake_servers.base import PlannedFault, RequestFault
from fake_servers.openai import FakeOpenAIServer
from openai_servers import PROMPT, ask, connected, greedy, logprobs_of
from responses import chunks_of, openai_reader

from april.core.sampling import SamplingParams
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.openai.wire import TokenShape
from april.engines.protocol import AbortMeans, EngineFinish, Request
from april.errors import EngineBusy, EngineError, EngineUnreachable, RequestRefused, WireError

SHAPES = list(TokenShape)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


@pytest.mark.parametrize("shape", SHAPES)
async def test_every_shape_gives_all_tokens_with_their_log_probabilities(shape: TokenShape) -> None:
    """What the server made is what comes out, EOS with its log-probability included, under the present version."""
    server = FakeOpenAIServer(shape)
    async with connected(server) as engine:
        for number in range(20):
            prompt = [*PROMPT, number + 3]
            answer = await ask(engine, f"a{number}", prompt)
            expected = greedy(server, prompt, 50)
            assert answer.tokens == expected
            assert answer.logprobs == logprobs_of(server, expected)
            assert answer.finish is (EngineFinish.STOP if expected[-1] == server.eos else EngineFinish.LENGTH)
            assert answer.versions == {FIRST_VERSION}
    assert {r.end for r in server.records} == {"stop", "length"}


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_cut_response_goes_on_where_it_stood(shape: TokenShape) -> None:
    """Closed again and again, and continued from what came: the whole equals the uncut response, token by token."""
    server = FakeOpenAIServer(shape, mean_len=10_000)
    async with connected(server) as engine:
        whole, attempt = greedy(server, PROMPT, 40), 0
        held: list[int] = []
        while len(held) < 40:
            step = 1 + attempt % 4
            server.hold(step)
            task = asyncio.create_task(ask(engine, f"a{attempt:03}", PROMPT + held, 40 - len(held)))
            sends = min(step, 40 - len(held))
            if sends == step and len(held) + step < 40:
                await server.until_sent(step, 1)
                await engine.abort([f"a{attempt:03}"])
            answer = await task
            assert answer.error is None
            held += answer.tokens
            attempt += 1
            await server.until_closed()
        assert held == whole
        # what the server had written and april had not read when it closed the stream is made again, and counted
        assert sum(len(r.made) for r in server.records) >= 40


async def test_an_abort_keeps_what_came_and_ends_at_once() -> None:
    """Silent streams end too; one that was not begun, or has ended, is not touched; unread tokens have a name."""
    server = FakeOpenAIServer(mean_len=10_000, tokens_ahead=3)
    async with connected(server) as engine:
        server.hold(5)
        tasks = [asyncio.create_task(ask(engine, f"a{i:02}", [*PROMPT, i + 3])) for i in range(30)]
        await server.until_sent(5, 30)
        await engine.abort(["a00", "unknown"])
        first = await tasks[0]
        assert first.finish is EngineFinish.ABORT
        assert not any(task.done() for task in tasks[1:])
        await engine.abort()
        answers = [first, *await asyncio.gather(*tasks[1:])]
        await server.until_closed()
    for i, answer in enumerate(answers):
        assert answer.finish is EngineFinish.ABORT
        assert answer.tokens == greedy(server, [*PROMPT, i + 3], 50)[: len(answer.tokens)]
    assert server.unread_tokens == 30 * 3
    assert {r.end for r in server.records} == {"closed"}


async def test_the_way_of_ending_is_declared() -> None:
    """Capabilities and notes say what this engine cannot promise."""
    async with connected(FakeOpenAIServer()) as engine:
        capabilities = engine.capabilities
        assert capabilities.abort_means is AbortMeans.CLOSE
        assert not capabilities.version_spans
        assert capabilities.streams
        assert capabilities.honours_seeds
        assert not capabilities.updates_from_disk
        assert any("had made and not sent" in note for note in capabilities.notes)


async def test_no_request_lives_through_a_weight_update() -> None:
    """pause ends all streams and holds new requests back; what comes after resume has the new version and weights."""
    server = FakeOpenAIServer(mean_len=10_000)
    async with connected(server) as engine:
        server.hold(4)
        running = [asyncio.create_task(ask(engine, f"a{i}", [*PROMPT, i + 3])) for i in range(5)]
        await server.until_sent(4, 5)
        await engine.pause()
        assert not engine._endpoint.open
        late, unwanted = asyncio.create_task(ask(engine, "b0")), asyncio.create_task(ask(engine, "b1"))
        await asyncio.sleep(0)
        await engine.abort(["b1"])
        refused = await unwanted
        assert (refused.tokens, refused.finish) == ([], EngineFinish.ABORT)
        server.weights = 1
        await engine.update_weights(PolicyVersion(0, 1))
        server.release()
        assert len(server.records) == 5
        await engine.resume()
        new = await late
        old = await asyncio.gather(*running)
    assert {a.finish for a in old} == {EngineFinish.ABORT}
    assert {version for a in old for version in a.versions or ()} == {FIRST_VERSION}
    assert new.versions == {PolicyVersion(0, 1)}
    assert new.logprobs == logprobs_of(server, new.tokens, weights=1)


async def test_weights_from_disk_are_refused() -> None:
    """There is no such route; and never while requests run."""
    server = FakeOpenAIServer(mean_len=10_000)
    async with connected(server) as engine:
        with pytest.raises(EngineError, match=r"no route that loads weights from disk.*transfer="):
            await engine.update_weights(PolicyVersion(0, 1), "weights")
        server.hold(1)
        task = asyncio.create_task(ask(engine))
        await server.until_sent(1, 1)
        with pytest.raises(EngineError, match="pause it first"):
            await engine.update_weights(PolicyVersion(0, 1))
        await engine.abort()
        await task


@pytest.mark.parametrize(
    ("kind", "error", "kept"),
    [
        (RequestFault.BREAK_OFF, EngineUnreachable, None),
        (RequestFault.TRUNCATED, WireError, 6),
        (RequestFault.NAN_LOGPROB, WireError, 6),
        (RequestFault.NULL_LOGPROB, WireError, 6),
        (RequestFault.EXTRA_LOGPROBS, WireError, 6),
        (RequestFault.OTHER_PROMPT, WireError, 0),
        (RequestFault.WRONG_COUNT, WireError, 50),
        (RequestFault.ENDS_TWICE, WireError, 50),
        (RequestFault.EARLY_STOP, WireError, 7),
        (RequestFault.NO_FINISH, EngineUnreachable, 50),
        (RequestFault.NO_DONE, EngineUnreachable, 50),
        (RequestFault.ENGINE_DIES, EngineError, 6),
        (RequestFault.EARLY_LENGTH, WireError, 7),
        (RequestFault.REDIRECT, EngineError, 0),
        (RequestFault.FAILS, EngineError, 0),
    ],
)
async def test_a_fault_raises_after_the_tokens_before_it(kind: RequestFault, error: type, kept: int | None) -> None:
    """Nothing that came is lost, nothing false gets through, and the next request is answered as ever."""
    server = FakeOpenAIServer(mean_len=10_000)
    async with connected(server) as engine:
        server.faults.append(PlannedFault(kind, 0, after_tokens=6))
        answer = await ask(engine)
        whole = greedy(server, PROMPT, 50)
        assert type(answer.error) is error, answer.error
        # a reset may overtake what was sent before it
        assert len(answer.tokens) == kept if kept is not None else len(answer.tokens) <= 6
        assert answer.tokens == whole[: len(answer.tokens)]
        assert answer.finish is None
        assert (await ask(engine, "a2")).tokens == whole


async def test_a_silent_server_can_be_left() -> None:
    """An abort ends a request that the server has forgotten, with what had come."""
    server = FakeOpenAIServer(mean_len=10_000)
    async with connected(server) as engine:
        server.faults.append(PlannedFault(RequestFault.SILENCE, 0, after_tokens=3))
        task = asyncio.create_task(ask(engine))
        await server.until_sent(3, 1)
        await engine.abort()
        answer = await task
        assert answer.finish is EngineFinish.ABORT
        assert answer.tokens == greedy(server, PROMPT, 50)[: len(answer.tokens)]


async def test_a_stop_without_its_token_is_refused() -> None:
    """A server that ends by an id that april does not know as an end is not believed."""
    server = FakeOpenAIServer()
    async with connected(server) as engine:
        server.eos = 300
        answer = await ask(engine, max_tokens=2000)
        assert answer.tokens[-1] == 300
        assert isinstance(answer.error, WireError)
        assert "(300) is neither EOS nor a stop token" in str(answer.error)


async def test_an_abort_skips_no_check_of_an_answer_that_has_ended() -> None:
    """The server's end was read before the abort closed the stream: it is handed over, and must be as true as without
    the abort."""
    server = FakeOpenAIServer(mean_len=30)
    async with connected(server) as engine:
        server.eos = 300
        params = SamplingParams(2000, temperature=0.0)
        chunks = engine.generate(Request(attempt_id="a1", token_ids=np.array(PROMPT, np.int32), sampling=params))
        server.hold(1)
        tokens = (await anext(chunks)).tokens.tolist()
        server.release()
        await server.until_closed()
        content = engine._endpoint.open["a1"]._body._response.content
        while not content.is_eof():  # noqa: ASYNC110 - on this loop, by its turns
            await asyncio.sleep(0)
        await engine.abort()
        rest = [chunk async for chunk in chunks]
        tokens += [token for chunk in rest for token in chunk.tokens.tolist()]
        assert tokens[-1] == 300
        assert rest[-1].finish is EngineFinish.STOP


@pytest.mark.parametrize(
    ("code", "error"),
    [(400, RequestRefused), (413, RequestRefused), (422, RequestRefused), (429, EngineBusy), (503, EngineBusy),
     (401, EngineError), (404, EngineError), (500, EngineError), (None, EngineError)],
)  # fmt: skip
def test_an_error_inside_of_a_stream_has_its_type(code: int | None, error: type[EngineError]) -> None:
    """By its code, as a status has; only 400, 413 and 422 are the request's own fault."""
    reader = openai_reader(TokenShape.RETURN_TOKEN_IDS, PROMPT)
    said = {"message": "said so"} | ({} if code is None else {"code": code})
    with pytest.raises(EngineError, match="said so") as caught:
        chunks_of(reader, json.dumps({"error": said}).encode())
    assert type(caught.value) is error


async def test_cancelled_requests_leave_nothing_open() -> None:
    """Cancelling the reader at any time closes the connection and frees its place, so that pause can return."""
    server = FakeOpenAIServer(mean_len=10_000)
    async with connected(server) as engine:
        server.hold(2)
        for turns in range(12):
            task = asyncio.create_task(ask(engine, f"a{turns:02}"))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await engine.pause()
        await server.until_closed()


async def test_health_tells_load_restarts_and_death() -> None:
    """The load is the server's word; another process start means other weights until the next update; no answer is not
    well."""
    server = FakeOpenAIServer()
    async with connected(server) as engine:
        health = await engine.health()
        assert health.ok
        assert health.current
        assert health.load is not None
        assert (health.load.running, health.load.kv_usage, health.load.preemptions) == (0, 0.25, 3)
        server.started_s += 60
        assert not (await engine.health()).current
        await engine.update_weights(PolicyVersion(0, 1))
        assert (await engine.health()).current
        server.metrics = False
        health = await engine.health()
        assert (health.ok, health.current, health.load) == (False, True, None)
        assert "do not say" in health.detail
        server.metrics, server.well = True, False
        assert not (await engine.health()).ok
    assert not (await engine.health()).ok
