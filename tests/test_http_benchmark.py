"""The benchmark over loopback measures what it says: really so many in flight, and every token kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from april.core.sampling import SamplingParams
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.protocol import Chunk, Engine, EngineFinish, Request
from april.errors import EngineError, WireError
from benchmarks.arm_result import ArmResult, Round
from benchmarks.bare_client import check_kept, run_bare
from benchmarks.driver_arm import run_driver
from benchmarks.engine_arm import run_engine
from benchmarks.fake_generate_server import FakeGenerateServer, ServerConfig, encoded_answer, serving
from benchmarks.generate_wire import VOCAB_SIZE, ServerStats, answer_logprobs, answer_tokens, make_prompts
from benchmarks.http_engine import HttpGenerateEngine, parse_chunk
from benchmarks.requests_in_flight import Cell, summarize
from benchmarks.server_process import server_process, server_stats

PATIENCE_S = 60.0
"""Only reached when a test fails: turns a hang into an error."""


@asynccontextmanager
async def held_server(config: ServerConfig) -> AsyncIterator[tuple[FakeGenerateServer, HttpGenerateEngine]]:
    server = FakeGenerateServer(config)
    async with asyncio.timeout(PATIENCE_S), serving(server) as port:
        engine = HttpGenerateEngine(f"http://127.0.0.1:{port}")
        try:
            yield server, engine
        finally:
            await engine.close()


async def drain(engine: HttpGenerateEngine, attempt_id: str, first: int = 5, max_tokens: int = 64) -> Chunk:
    """The only chunk of a request."""
    request = Request(
        attempt_id=attempt_id, token_ids=np.array([first, 7, 9], np.int32), sampling=SamplingParams(max_tokens)
    )
    chunks = [chunk async for chunk in engine.generate(request)]
    assert len(chunks) == 1
    return chunks[0]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until it holds; the server's time limit ends a wait in vain."""
    while not condition():  # noqa: ASYNC110 - counters of two sides, neither of which has an event for a test
        await asyncio.sleep(0)


async def until_held(server: FakeGenerateServer, count: int) -> None:
    await until(lambda: len(server.held) == count)


@pytest.mark.parametrize("run", [run_bare, run_engine, run_driver])
def test_32_requests_are_really_in_flight_and_every_token_is_kept(run: Callable[..., ArmResult]) -> None:
    """Peak in flight is what was asked for, once per round; the arms check each array against what was sent."""
    with server_process(release_at=32, response_tokens=48) as url:
        result = run(url, 32, 16, 48, 2, 8)
        stats = server_stats(url)

    assert result.tokens_kept == 32 * 48 * 2
    assert len(result.rounds) == 2
    assert stats == ServerStats(
        in_flight=0, peak_in_flight=32, requests=64, answers=64, aborts=0, releases=2, tokens=32 * 48 * 2
    )


def test_a_changed_token_or_logprob_is_noticed() -> None:
    """The check inside the arms can fail: one wrong value, or one answer too few, is an error."""
    prompts = make_prompts(2, 4)
    kept = [(answer_tokens(int(p[0]), 8).copy(), answer_logprobs(int(p[0]), 8).copy()) for p in prompts]
    assert check_kept(prompts, kept, 8) == 16

    with pytest.raises(RuntimeError, match="1 answers are kept for 2"):
        check_kept(prompts, kept[:1], 8)
    kept[1][1][3] -= 0.5
    with pytest.raises(RuntimeError, match="request 1: the log-probabilities"):
        check_kept(prompts, kept, 8)
    kept[0][0][7] += 1
    with pytest.raises(RuntimeError, match="request 0: the tokens"):
        check_kept(prompts, kept, 8)


@pytest.mark.asyncio
async def test_abort_by_id_ends_that_request_with_its_partial() -> None:
    """An abort returns what was generated, ends no other request, and an unknown id is ignored."""
    async with held_server(ServerConfig(release_at=3, response_tokens=64, abort_tokens=16)) as (server, engine):
        assert isinstance(engine, Engine)
        first = asyncio.create_task(drain(engine, "a1"))
        second = asyncio.create_task(drain(engine, "b1"))
        await until_held(server, 2)
        await engine.abort(["a1", "no-such-id"])
        cut = await first

        assert cut.finish is EngineFinish.ABORT
        np.testing.assert_array_equal(cut.tokens, answer_tokens(5, 16))
        np.testing.assert_array_equal(cut.logprobs, answer_logprobs(5, 16))
        assert not second.done()
        assert (server.in_flight, server.peak_in_flight, server.aborts) == (1, 2, 1)

        await engine.abort()
        assert (await second).finish is EngineFinish.ABORT
        assert server.in_flight == 0


@pytest.mark.asyncio
async def test_answers_wait_for_the_release_and_say_why_they_end() -> None:
    """Nothing leaves before N wait; a budget below the answer's length cuts it, one above lets it stop."""
    async with held_server(ServerConfig(release_at=2, response_tokens=40)) as (server, engine):
        short = asyncio.create_task(drain(engine, "a1", max_tokens=30))
        await until_held(server, 1)
        assert server.answers == 0
        full = await drain(engine, "b1", first=6, max_tokens=41)

        assert (await short).finish is EngineFinish.LENGTH
        np.testing.assert_array_equal((await short).tokens, answer_tokens(5, 30))
        assert full.finish is EngineFinish.STOP
        np.testing.assert_array_equal(full.tokens, answer_tokens(6, 40))
        assert (server.peak_in_flight, server.releases) == (2, 1)


@pytest.mark.asyncio
async def test_a_paused_engine_sends_nothing_and_stamps_the_new_version_afterwards() -> None:
    """While paused new requests wait, an abort ends them empty, and the version changes only then."""
    version = PolicyVersion(0, 1)
    async with held_server(ServerConfig()) as (server, engine):
        assert (await drain(engine, "a1")).version == FIRST_VERSION
        with pytest.raises(EngineError, match="pause it first"):
            await engine.update_weights(version)
        await engine.pause()
        dropped, waiting = (asyncio.create_task(drain(engine, attempt)) for attempt in ("b1", "c1"))
        await until(lambda: len(engine._queued) == 2)
        await engine.abort(["b1"])
        empty = await dropped
        await engine.update_weights(version)
        assert (empty.finish, len(empty.tokens), server.requests) == (EngineFinish.ABORT, 0, 1)

        await engine.resume()
        assert (await waiting).version == version
        assert server.requests == 2


@pytest.mark.asyncio
async def test_a_client_that_hangs_up_is_no_longer_in_flight() -> None:
    """The peak counts live requests: a cancelled one leaves the server's count."""
    async with held_server(ServerConfig(release_at=2)) as (server, engine):
        task = asyncio.create_task(drain(engine, "a1"))
        await until_held(server, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.in_flight == 0)
        assert not server.held


@pytest.mark.asyncio
async def test_a_refused_or_dead_server_is_an_engine_error() -> None:
    """Bad requests and broken connections surface as EngineError; health reports instead of raising."""
    async with held_server(ServerConfig(release_at=2)) as (server, engine):
        assert (await engine.health()).counters["in_flight"] == 0
        task = asyncio.create_task(drain(engine, "a1"))
        await until_held(server, 1)
        with pytest.raises(EngineError, match=r"answered 400.*in flight already"):
            await drain(engine, "a1")
        await engine.close()
        with pytest.raises(EngineError):
            await task
        with pytest.raises(EngineError, match="closed"):
            await drain(engine, "b1")
    gone = HttpGenerateEngine("http://127.0.0.1:9")
    assert not (await gone.health()).ok
    await gone.close()


def reply(ids: Sequence[object], logprobs: Sequence[object], count: int | None = None, finish: str = "stop") -> bytes:
    body = {
        "output_ids": ids,
        "output_logprobs": logprobs,
        "finish_reason": {"type": finish},
        "meta": {"answer": 0, "completion_tokens": len(ids) if count is None else count},
    }
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    "raw",
    [
        reply([1, 2], [-0.5]),
        reply([1, 2], [-0.5, -0.5], count=3),
        reply([1], [float("nan")]),
        reply([1], [float("-inf")]),
        reply([1], [None]),
        reply([1], [0.5]),
        reply([1], [-1e300]),
        reply([VOCAB_SIZE], [-0.5]),
        reply([-1], [-0.5]),
        reply([2**40], [-0.5]),
        reply([1.5], [-0.5]),
        reply([1], [-0.5], finish="tired"),
        encoded_answer(0, 4, EngineFinish.STOP)[:-1],
        b"",
    ],
)
def test_numbers_that_cannot_be_true_are_a_wire_error(raw: bytes) -> None:
    """No chunk is made of an answer with wrong lengths, ids out of range or log-probabilities that are no such."""
    with pytest.raises(WireError, match="here"):
        parse_chunk(raw, FIRST_VERSION, where="here")


def test_a_good_answer_becomes_packed_arrays() -> None:
    """int32 and float32, and the float32 values survive the decimal text bit for bit."""
    chunk = parse_chunk(encoded_answer(3, 100, EngineFinish.LENGTH), FIRST_VERSION, where="here")

    assert chunk.tokens.dtype == np.int32
    assert chunk.logprobs.dtype == np.float32
    assert chunk.finish is EngineFinish.LENGTH
    np.testing.assert_array_equal(chunk.tokens, answer_tokens(3, 100))
    np.testing.assert_array_equal(chunk.logprobs, answer_logprobs(3, 100))


def test_ratios_are_taken_within_a_repeat() -> None:
    """A repeat in which the whole machine is slow changes no ratio."""

    def cell(arm: str, repeat: int, cpu_s: float) -> Cell:
        rounds = [Round(9.0, 9.0), Round(cpu_s, 1.0)]
        return Cell(repeat, "default", 10, ArmResult(arm, 10, 4, 4, rounds, 80))

    cells = [cell("bare", 0, 0.1), cell("engine", 0, 0.15), cell("engine", 1, 0.75), cell("bare", 1, 0.5)]
    bare, engine = summarize(cells, ["bare", "engine"])

    assert (bare.ratio_min, bare.ratio_max) == (1.0, 1.0)
    assert engine.ratio == engine.ratio_min == engine.ratio_max == pytest.approx(1.5)
    assert bare.pooled_us == pytest.approx(30_000)
    assert bare.opening_us == pytest.approx(900_000)
