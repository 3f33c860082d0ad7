"""The simulated engine keeps the engine contract, on virtual time."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from virtual_rollouts import on_virtual_time

from april.core.sampling import SamplingParams
from april.engines.protocol import Chunk, Request
from april.engines.simulated.decode_cost import DecodeCost, roofline
from april.engines.simulated.engine import SimulatedEngine, by_sample_key, synthetic_response
from april.engines.simulated.response_lengths import LognormalLengths, TraceLengths
from april.errors import EngineError
from april.testing.virtual_clock import VirtualDeadlock, run_virtual

SECOND = DecodeCost(1.0, 0.0, 0.0)  # one step takes one second
PROMPT = np.array([11, 12, 13], dtype=np.int32)


def make_engine(length: int = 10, cost: DecodeCost = SECOND, **options: Any) -> SimulatedEngine:
    options = {"max_running": 4, "vocab_size": 100, **options}
    return SimulatedEngine("sim", cost, by_sample_key(LognormalLengths(length, 0.0, 0.0)), **options)


def make_request(
    name: str = "a", key: tuple[int, int] = (0, 0), held: np.ndarray[Any, Any] | None = None, **sampling: Any
) -> Request:
    tokens = PROMPT if held is None else np.concatenate([PROMPT, held])
    params = SamplingParams(**{"max_tokens": 1000, **sampling})
    return Request(
        attempt_id=name, token_ids=tokens, sampling=params, sample_key=key, response_offset=len(tokens) - len(PROMPT)
    )


async def read(engine: SimulatedEngine, request: Request) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


def start(engine: SimulatedEngine, request: Request) -> asyncio.Task[list[Chunk]]:
    return asyncio.create_task(read(engine, request))


def now() -> float:
    return asyncio.get_running_loop().time()


@settings(derandomize=True, deadline=None)
@given(st.integers(2, 400), st.lists(st.integers(0, 400), max_size=5), st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_synthetic_tokens_are_valid(vocab_size: int, stop_ids: list[int], key: tuple[int, int]) -> None:
    """Tokens lie in the vocabulary and are no stop ids; log-probabilities are finite and <= 0; positions are stable."""
    if len({i for i in stop_ids if i < vocab_size}) == vocab_size:
        return
    tokens, logprobs = synthetic_response(PROMPT, key, 0, 300, vocab_size, stop_ids)
    part, part_logprobs = synthetic_response(PROMPT, key, 100, 150, vocab_size, stop_ids)

    assert tokens.min() >= 0
    assert tokens.max() < vocab_size
    assert not np.isin(tokens, stop_ids).any()
    assert np.isfinite(logprobs).all()
    assert logprobs.max() <= 0
    assert part.tolist() == tokens[100:150].tolist()
    assert part_logprobs.tolist() == logprobs[100:150].tolist()


@on_virtual_time
async def test_requests_of_one_instant_share_a_step() -> None:
    """Requests that arrive at the same virtual time, after however many loop turns, decode together."""
    engine = make_engine(cost=DecodeCost(1.0, 0.25, 0.0), max_running=8)

    async def late(turns: int) -> float:
        for _ in range(turns):
            await asyncio.sleep(0)
        await read(engine, make_request(f"r{turns}", (0, turns)))
        return now()

    assert set(await asyncio.gather(*(late(turns) for turns in range(8)))) == {10 * (1.0 + 8 * 0.25)}


@on_virtual_time
async def test_pause_stops_time_and_admission() -> None:
    """pause returns at the end of the step; until resume no token comes, new requests wait, and aborts still work."""
    engine = make_engine()
    first = start(engine, make_request("a"))
    await asyncio.sleep(3.5)
    await engine.pause()
    assert now() == 4.0
    second, third = start(engine, make_request("b", (0, 1))), start(engine, make_request("c", (0, 2)))
    await asyncio.sleep(96.0)
    assert engine.decoder.tokens_of("a") == 4
    assert engine.decoder.running == 1
    await engine.abort(["c"])
    assert len((await third)[-1].tokens) == 0
    await engine.resume()
    await first
    assert now() == 106.0
    await second
    assert now() == 110.0
    assert engine.decoder.counters().busy_time_s == pytest.approx(14.0)


@on_virtual_time
async def test_abort_during_pause_still_lets_the_step_end() -> None:
    """pause waits for the step in progress even if its last request is aborted meanwhile."""
    engine = make_engine()
    task = start(engine, make_request())
    await asyncio.sleep(1.25)
    pausing = asyncio.create_task(engine.pause())
    await asyncio.sleep(0.25)
    await engine.abort()
    await pausing
    assert now() == 2.0
    assert len((await task)[-1].tokens) == 1


@on_virtual_time
async def test_impossible_requests_are_refused() -> None:
    """What cannot be served is an EngineError that says why, and leaves no trace."""
    engine = make_engine(max_context=20)
    good = synthetic_response(PROMPT, (0, 0), 0, 10, 100, (0,))[0]
    wrong = good[:4].copy()
    wrong[2] = (wrong[2] + 1) % 100
    bad = {
        "response token 2 of 4": make_request(held=wrong),
        "the response is complete": make_request(held=good),
        "outside its": replace(make_request(), response_offset=4),
        "max_tokens 0": make_request(max_tokens=0),
        "20 tokens of context": replace(make_request(), token_ids=np.arange(20, dtype=np.int32)),
        "no sample_key": replace(make_request(), sample_key=None),
    }
    for message, request in bad.items():
        with pytest.raises(EngineError, match=message):
            await read(engine, request)
    assert engine.decoder.counters().requests == 0
    assert len((await read(engine, make_request(held=good[:4])))[-1].tokens) == 6
    assert len((await read(make_engine(check_prefix=False), make_request(held=wrong)))[-1].tokens) == 6
    for options in ({"vocab_size": 1}, {"stream_interval_s": 0.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            make_engine(**options)


def test_a_paused_engine_keeps_no_loop_alive() -> None:
    """Waiting for a paused engine for ever is a deadlock that the virtual clock can see, streaming or not."""

    async def main() -> None:
        engine = make_engine(stream_interval_s=0.5)
        task = start(engine, make_request())
        await asyncio.sleep(2.0)
        await engine.pause()
        await task

    with pytest.raises(VirtualDeadlock, match="nothing is scheduled"):
        run_virtual(main())


async def digest() -> str:
    """Times, tokens and log-probabilities of 64 requests on two engines, of which some are aborted."""
    found, loop = hashlib.sha256(), asyncio.get_running_loop()
    length_of = by_sample_key(LognormalLengths(300, 0.4, 0.7, seed=4))
    engines = [SimulatedEngine(f"e{k}", roofline("qwen3-4b", "h100"), length_of, max_running=16) for k in range(2)]

    async def one(group: int, index: int) -> None:
        prompt = np.arange(group, group + 50, dtype=np.int32)
        sampling, key = SamplingParams(max_tokens=2000), (group, index)
        request = Request(attempt_id=f"{group}/{index}", token_ids=prompt, sampling=sampling, sample_key=key)
        async for chunk in engines[group % 2].generate(request):
            note = f"{loop.time()!r} {group} {index} {chunk.finish} {chunk.version}".encode()
            found.update(note + chunk.tokens.tobytes() + chunk.logprobs.tobytes())

    tasks = {asyncio.create_task(one(g, i)) for g in range(8) for i in range(8)}
    await asyncio.sleep(5.0)
    await asyncio.gather(*(engine.abort() for engine in engines))
    await asyncio.gather(*tasks)
    return found.hexdigest()


def lengths() -> list[list[int]]:
    kinds = [LognormalLengths(2500, 0.4, 0.7, 16384, 1), TraceLengths([5, 6, 7, 1000], seed=2)]
    return [kind.group(g, 3).tolist() for kind in kinds for g in (0, 12345678901)]


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_runs_are_identical_in_every_process(seed: str) -> None:
    """The digest and the lengths are one and the same whatever PYTHONHASHSEED, Python and platform (pinned)."""
    program = "import test_simulated_engine as t; print(t.lengths(), t.run_virtual(t.digest()))"
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=Path(__file__).parent,
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert run.stdout.strip() == (
        "[[677, 1601, 2593], [4427, 1165, 1846], [6, 7, 7], [5, 1000, 1000]] "
        "e8fc446ce57aa33ca1d97e1caac24b787589385f65b39454d2631ee446fb6367"
    )
