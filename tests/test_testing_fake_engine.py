"""The fake engine keeps the engine protocol, does what its script says, and writes everything down."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from virtual_rollouts import on_virtual_time

from april.core.sampling import SamplingParams
from april.core.versions import PolicyVersion
from april.engines.protocol import Chunk, Engine, EngineFinish, Request
from april.errors import EngineError
from april.testing import FakeEngine, Fault, FaultScript, fake_logprobs, fake_response

V0 = PolicyVersion(0, 0)
PROMPT = [7, 8, 9]


def ask(
    number: int = 0, held: Any = (), max_tokens: int = 100, key: tuple[int, int] = (0, 0), **sampling: Any
) -> Request:
    """The ``number``-th request: continue ``PROMPT`` and the ``held`` response tokens."""
    ids = np.array([*PROMPT, *held], np.int32)
    return Request(
        attempt_id=f"{number:08d}",
        token_ids=ids,
        sampling=SamplingParams(max_tokens, **sampling),
        priority=0,
        sample_key=key,
        response_offset=len(held),
    )


async def read(engine: FakeEngine, request: Request) -> tuple[list[Chunk], float]:
    """All chunks of a request, and the time at which it ended."""
    async with aclosing(engine.generate(request)) as chunks:
        return [chunk async for chunk in chunks], asyncio.get_running_loop().time()


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [int(t) for chunk in chunks for t in chunk.tokens]


@on_virtual_time
async def test_a_response_can_be_computed_by_hand() -> None:
    """Tokens, log-probabilities, version, time and finish of an undisturbed request; the engine keeps the protocol."""
    engine = FakeEngine(lengths=8, seconds_per_token=0.5)
    assert isinstance(engine, Engine)
    chunks, ended = await read(engine, ask())
    (chunk,) = chunks
    assert chunk.tokens.tolist() == fake_response(PROMPT, (0, 0), 8).tolist()
    assert chunk.tokens.dtype == np.int32
    assert chunk.logprobs.tolist() == fake_logprobs(chunk.tokens, V0).tolist()
    assert chunk.logprobs.dtype == np.float32
    assert (chunk.version, chunk.finish, ended) == (V0, EngineFinish.STOP, 4.0)
    assert chunk.tokens[-1] == engine.capabilities.eos_token_ids[0]
    record = engine.attempts["00000000"]
    assert (record.count, record.end, record.started_s, record.ended_s, record.withheld) == (8, "stop", 0.0, 4.0, 0)
    assert record.versions.tolist() == [[0, 0]] * 8


def test_log_probabilities_tell_the_version_and_the_token() -> None:
    """200 tokens x 20 versions: no token has one log-probability under two versions; 24 bits seldom collide at all."""
    seen = [fake_logprobs(range(200), PolicyVersion(i, n)) for i in range(2) for n in range(-1, 9)]
    values = np.concatenate(seen)
    assert len(np.unique(values)) > 3990
    assert all(len(set(column)) == 20 for column in zip(*seen, strict=True))
    assert -4 < values.min() < values.max() <= 0


@on_virtual_time
async def test_what_must_not_be_asked_is_refused_and_written_down() -> None:
    """An id twice, a prefix of an id, a response behind its end, an empty budget: each is a violation by name."""
    engine = FakeEngine(lengths=4)
    await read(engine, ask())
    for request, what in (
        (ask(), "used before"),
        (replace(ask(), attempt_id="0000"), "prefix"),
        (replace(ask(), attempt_id=""), "empty"),
        (ask(2, held=[5, 0]), "has already ended with a stop token"),
        (ask(3, max_tokens=0), "no token may be generated"),
        (replace(ask(4), response_offset=3), "leaves no prompt"),
    ):
        with pytest.raises(EngineError, match=what):
            await read(engine, request)
        assert what in engine.violations[-1]
    assert len(engine.violations) == 6


@on_virtual_time
async def test_the_record_does_not_change_with_the_chunk() -> None:
    """Whoever writes into a delivered array writes into no record: the audit could not see it otherwise."""
    engine = FakeEngine(lengths=3)
    request = ask()
    chunks, _ = await read(engine, request)
    before = chunks[0].tokens.tolist(), chunks[0].logprobs.tolist(), request.token_ids.tolist()
    chunks[0].tokens[:] = 1
    chunks[0].logprobs[:] = 1
    request.token_ids[:] = 1
    (record,) = engine.attempts_of((0, 0))
    assert (record.tokens.tolist(), record.logprobs.tolist(), record.request.token_ids.tolist()) == before


async def _aborted(fault: Fault, abort_after: list[float], length: int = 30) -> tuple[FakeEngine, list[Chunk], float]:
    """One request under ``fault``, with aborts at these times."""
    engine = FakeEngine(lengths=length, chunk_tokens=2, faults=FaultScript(fault))
    task = asyncio.create_task(read(engine, ask()))
    for at in abort_after:
        await asyncio.sleep(at - asyncio.get_running_loop().time())
        await engine.abort(["00000000"])
    chunks, ended = await task
    assert not engine.faults.unfired
    return engine, chunks, ended


@pytest.mark.parametrize(
    ("fault", "aborts", "tokens", "ended", "finish"),
    [
        (Fault("abort_ignored"), [5.0, 7.0], 30, 30.0, EngineFinish.STOP),
        (Fault("abort_late", seconds=4.0), [5.0, 6.0], 9, 9.0, EngineFinish.ABORT),
        (Fault("abort_hangs", seconds=4.0), [5.0, 6.0], 5, 9.0, EngineFinish.ABORT),
        (Fault("abort_missed", seconds=3.0), [1.0, 2.0, 5.0], 5, 5.0, EngineFinish.ABORT),
        (Fault("abort_empty"), [5.0], 4, 5.0, EngineFinish.ABORT),
        (Fault("stall", after_tokens=3), [9.0], 3, 9.0, EngineFinish.ABORT),
        (Fault("stall", after_tokens=3, seconds=10.0), [], 30, 40.0, EngineFinish.STOP),
    ],
    ids=lambda value: repr(value) if isinstance(value, Fault) else "",
)
@on_virtual_time
async def test_aborts_and_stalls(
    fault: Fault, aborts: list[float], tokens: int, ended: float, finish: EngineFinish
) -> None:
    """Each way in which an abort goes wrong, to the token and the second."""
    engine, chunks, at = await _aborted(fault, aborts)
    assert (len(tokens_of(chunks)), at, chunks[-1].finish) == (tokens, ended, finish)
    record = engine.attempts["00000000"]
    assert record.withheld == (1 if fault.kind == "abort_empty" else 0)
    assert tokens_of(chunks) == fake_response(PROMPT, (0, 0), 30).tolist()[:tokens]


def test_unusable_engines_are_refused() -> None:
    """One sentence each."""
    for options, what in (
        ({"seconds_per_token": 0.0}, "seconds_per_token=0.0"),
        ({"seconds_per_token": math.inf}, "seconds_per_token=inf"),
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"max_running": 0}, "max_running=0"),
        ({"eos_token_id": 1000}, "eos_token_id=1000"),
    ):
        with pytest.raises(ValueError, match=f"{what} is out of range"):
            FakeEngine(**options)  # type: ignore[arg-type]


@on_virtual_time
async def test_a_fault_after_k_tokens_is_exact_for_a_slow_reader() -> None:
    """Tokens that a late reader finds waiting never reach beyond the point at which a fault is due."""
    engine = FakeEngine(lengths=20, chunk_tokens=2, faults=FaultScript(Fault("break_off", after_tokens=3)))
    counts: list[int] = []

    async def slowly() -> None:
        async for chunk in engine.generate(ask()):
            counts.append(len(chunk.tokens))
            await asyncio.sleep(7)
            await engine.pause()
            await engine.resume()

    with pytest.raises(EngineError, match="after 3 tokens"):
        await slowly()
    assert counts == [2, 1]
