"""The fake engine keeps the engine protocol, does what its script says, and writes everything down."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from virtual_rollouts import on_virtual_time

from april.core.sampling import SamplingParams
from april.core.versions import PolicyVersion
from april.engines.protocol import Chunk, Engine, EngineFinish, Request
from april.errors import EngineError
from april.testing import FakeEngine, Fault, FaultScript, conversation, fake_logprobs, fake_response

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
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
async def test_lengths_and_responses() -> None:
    """A number, a table, a function of the request, or the very tokens to say, cut at the first stop."""
    by_function = FakeEngine(lengths=lambda r: int(conversation(r)[0]) - 3)
    assert len(tokens_of((await read(by_function, ask()))[0])) == 4
    says = FakeEngine(responses=lambda r: [5, 6, *conversation(r)[:1]])
    assert tokens_of((await read(says, ask()))[0]) == [5, 6, 7, 0]
    assert tokens_of((await read(says, ask(1, held=[5, 6])))[0]) == [7, 0]
    assert tokens_of((await read(says, ask(2, stop_token_ids=(6,))))[0]) == [5, 6]
    long = tokens_of((await read(says, ask(3, min_tokens=9)))[0])
    assert (len(long), long[:3], long[-1], 0 in long[:-1]) == (9, [5, 6, 7], 0, False)
    with pytest.raises(EngineError, match=r"the table of lengths has no entry for sample \(0, 0\)"):
        await read(FakeEngine(lengths={(1, 0): 3}), ask())


@on_virtual_time
async def test_chunks_places_and_the_context() -> None:
    """Chunks of the size asked for; requests beyond max_running wait their turn; the context ends a response."""
    engine = FakeEngine(lengths=7, chunk_tokens=3, max_running=1, max_context=8)
    (first, ended), (second, later) = await asyncio.gather(
        read(engine, ask(0, max_tokens=4)), read(engine, ask(1, key=(0, 1)))
    )
    assert [len(c.tokens) for c in first] == [3, 1]
    assert [len(c.tokens) for c in second] == [3, 2]  # 3 of prompt, 8 of context
    assert second[-1].finish is EngineFinish.LENGTH
    assert (ended, later) == (4.0, 9.0)


@pytest.mark.parametrize("prefix", [False, True])
@on_virtual_time
async def test_an_abort_ends_with_what_was_generated(prefix: bool) -> None:
    """One, all, by prefix where asked for; running and waiting requests end; unknown ids are ignored."""
    engine = FakeEngine(lengths=20, max_running=2, prefix_abort=prefix)
    tasks = [asyncio.create_task(read(engine, ask(i, key=(i, 0)))) for i in range(3)]
    await asyncio.sleep(5)
    await engine.abort(["00000000", "unknown", "0000000"])
    if not prefix:
        await asyncio.sleep(1)
        await engine.abort()
    ends = [await task for task in tasks]
    assert [len(tokens_of(chunks)) for chunks, _ in ends] == ([5, 5, 0] if prefix else [5, 6, 1])
    assert {chunks[-1].finish for chunks, _ in ends} == {EngineFinish.ABORT}
    assert [a.attempt_ids for a in engine.aborts][1:] == ([] if prefix else [None])
    assert engine.open_streams == 0


@on_virtual_time
async def test_a_pause_hands_over_under_the_old_version() -> None:
    """While paused nothing is generated and nothing begins; tokens made before it carry the version that made them."""
    engine = FakeEngine(lengths=10, weight_update_s=2.0)
    with pytest.raises(EngineError, match="only while it is paused"):
        await engine.update_weights(V1)
    task = asyncio.create_task(read(engine, ask()))
    await asyncio.sleep(4)
    await engine.pause()
    await engine.update_weights(V1, "/weights")
    late = asyncio.create_task(read(engine, ask(1)))
    await asyncio.sleep(10)
    await engine.resume()
    chunks, ended = await task
    assert [(len(c.tokens), c.version) for c in chunks] == [(4, V0), (6, V1)]
    assert chunks[1].logprobs.tolist() == fake_logprobs(chunks[1].tokens, V1).tolist()
    assert ended == 4 + 2 + 2 + 10 + 6
    assert (await late)[0][0].version == V1
    assert engine.updates == [(8.0, V1, "/weights")]


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


@on_virtual_time
async def test_a_dead_engine_refuses_everything_until_it_is_revived() -> None:
    """At its time all streams break; requests, aborts, pauses and updates raise, a probe says so; then all is well."""
    script = FaultScript(Fault("engine_dies", from_s=5.0, seconds=10.0))
    engine = FakeEngine(lengths=8, chunk_tokens=2, faults=script)
    with pytest.raises(EngineError, match="died"):
        await read(engine, ask())
    assert engine.attempts["00000000"].count == 4
    assert engine.attempts["00000000"].withheld == 1
    update = partial(engine.update_weights, V1)
    for call in (partial(read, engine, ask(1)), engine.abort, engine.pause, engine.resume, update):
        with pytest.raises(EngineError, match="is dead"):
            await call()
    assert not (await engine.health()).ok
    await asyncio.sleep(10)
    assert (await engine.health()).ok
    assert len(tokens_of((await read(engine, ask(2)))[0])) == 8
    assert [(f.at_s, f.engine) for f in script.fired] == [(5.0, "fake")]


@on_virtual_time
async def test_close_ends_everything() -> None:
    """Streams that are open raise, later requests are refused, timers are gone."""
    engine = FakeEngine(lengths=8, faults=FaultScript(Fault("engine_dies", from_s=1e6)))
    task = asyncio.create_task(read(engine, ask()))
    await asyncio.sleep(2)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError, match="was closed"):
        await task
    with pytest.raises(EngineError, match="is closed"):
        await read(engine, ask(1))
    assert not (await engine.health()).ok
    assert engine.attempts["00000000"].withheld == 2


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
        (Fault("abort_repeats"), [5.0], 6, 5.0, EngineFinish.ABORT),
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
    assert record.repeated == (1 if fault.kind == "abort_repeats" else 0)
    whole = fake_response(PROMPT, (0, 0), 30).tolist()
    said = tokens_of(chunks)
    assert said == ([*whole[:5], whole[4]] if record.repeated else whole[:tokens])


@pytest.mark.parametrize("after", [0, 3, 8])
@on_virtual_time
async def test_a_stream_breaks_off_after_exactly_so_many_tokens(after: int) -> None:
    """None, some, or all of them: behind the last token the finish is missing."""
    engine = FakeEngine(lengths=8, faults=FaultScript(Fault("break_off", after_tokens=after)))
    with pytest.raises(EngineError, match=f"breaks the stream off after {after} tokens"):
        await read(engine, ask())
    record = engine.attempts["00000000"]
    assert (record.count, [c.finish for c in record.chunks if c.finish]) == (after, [])
    chunks, _ = await read(engine, ask(1))
    assert len(tokens_of(chunks)) == 8


WRONG: dict[str, Callable[[list[Chunk]], bool]] = {
    "nan_logprob": lambda chunks: bool(np.isnan(chunks[1].logprobs).any()),
    "positive_logprob": lambda chunks: bool(chunks[1].logprobs.max() > 0.1),
    "unknown_token": lambda chunks: int(chunks[1].tokens.max()) >= 1000,
    "lengths_differ": lambda chunks: len(chunks[1].tokens) != len(chunks[1].logprobs),
    "too_many_tokens": lambda chunks: len(tokens_of(chunks[:2])) > 100,
    "future_version": lambda chunks: chunks[1].version == V1,
    "older_version": lambda chunks: chunks[1].version < chunks[0].version,
    "chunk_after_finish": lambda chunks: [c.finish for c in chunks[-2:]] == [EngineFinish.STOP] * 2,
}


@pytest.mark.parametrize("kind", list(WRONG))
@on_virtual_time
async def test_wrong_chunks(kind: str) -> None:
    """Each is wrong in the way that its name says, once, from the asked token on; the record is marked."""
    script = FaultScript(Fault(kind, after_tokens=2))  # type: ignore[arg-type]  # by name, as users may
    engine = FakeEngine(lengths=8, faults=script)
    chunks, _ = await read(engine, ask())
    assert WRONG[kind](chunks)
    assert engine.attempts["00000000"].wrong == kind
    assert script.count(kind) == 1
    chunks, _ = await read(engine, ask(1))
    assert not engine.attempts["00000001"].wrong
    assert tokens_of(chunks) == fake_response(PROMPT, (0, 0), 8).tolist()


@on_virtual_time
async def test_probes_and_updates_fail_as_often_as_asked() -> None:
    """sick_probe and failed_update count calls, on the engine they name."""
    script = FaultScript(Fault("sick_probe", times=2), Fault("failed_update", engine="b", times=2))
    a, b = FakeEngine("a", faults=script), FakeEngine("b", faults=script)
    assert [(await a.health()).ok for _ in range(4)] == [False, False, True, True]
    for engine in (a, b):
        await engine.pause()
    await a.update_weights(V1)
    for _ in range(2):
        with pytest.raises(EngineError, match="makes this weight update fail"):
            await b.update_weights(V1)
    await b.update_weights(V1)
    assert (a.version, b.version) == (V1, V1)
    assert not script.unfired


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
