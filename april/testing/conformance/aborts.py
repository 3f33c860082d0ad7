"""Checks of aborts, disconnects and dying servers: each request ends once, with exactly its own tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np

from april.engines.protocol import EngineFinish, Int32
from april.errors import EngineError
from april.testing.conformance.bench import Bench, ReadRequest, check, require_equal, require_prefix
from april.testing.conformance.subject import Broken, Figures, NotTested

FEW = 8
BURST = 300
ROUNDS = 12
LONG_PROMPT = 2000


def _count_ends(readings: Sequence[ReadRequest]) -> Figures:
    counts = Counter(str(r.finish) for r in readings)
    cut = [r for r in readings if r.finish is EngineFinish.ABORT]
    return {
        "aborted": counts.pop("abort", 0),
        "without a token": sum(r.count == 0 for r in cut),
        "ended before": sum(counts.values()),
    }


async def _require_accounted(bench: Bench, readings: Sequence[ReadRequest]) -> Figures:
    """Check that each request ended without error and with exactly the tokens that a recording proxy (if any) has seen.

    If the engine's greedy responses are reproducible, a request's tokens must also be a prefix of the response that the
    same request gets without an abort.
    """
    bench.require_no_errors(readings)
    figures = _count_ends(readings) | bench.compare_with_wire(readings)
    if bench.subject.greedy_repeats:
        for reading in readings:
            if reading.finish is not EngineFinish.ABORT and reading.count < reading.request.sampling.min_tokens:
                raise Broken(f"request {reading.id} ended with {reading.finish} after {reading.count} tokens")
        longest: dict[int, ReadRequest] = {}
        for reading in readings:
            number = _prompt_number(reading)
            if number not in longest or longest[number].count < reading.count:
                longest[number] = reading
        cut = {number: r for number, r in longest.items() if r.count}
        copies = await bench.run_complete(bench.copy_of(r.request, r.count) for r in cut.values())
        uncut = dict(zip(cut, copies, strict=True))
        for r in readings:
            if r.count:
                require_prefix(r.tokens, uncut[_prompt_number(r)].tokens, f"the partial of request {r.id}")
    return figures


def _prompt_number(reading: ReadRequest) -> int:
    assert reading.request.sample_key is not None
    return reading.request.sample_key[0]


@check("A request that is aborted while it runs ends with ABORT, and has every token generated for it exactly once.")
async def abort_running(bench: Bench) -> Figures:
    # several rounds, because an engine that sends no token before a request's end does not show that the request runs
    readings: list[ReadRequest] = []
    for _ in range(ROUNDS):
        some = await bench.start_and_wait(bench.request(i) for i in range(FEW))
        await bench.abort_until_ended(some)
        readings += some
        if sum(r.finish is EngineFinish.ABORT and r.count > 0 for r in readings) >= FEW:
            break
    figures = await _require_accounted(bench, readings)
    if not any(r.finish is EngineFinish.ABORT and r.count for r in readings):
        if all(r.finish is not EngineFinish.ABORT for r in readings):
            raise NotTested(
                f"all {len(readings)} requests were complete before their abort; raise Subject.long_tokens"
            )
        raise Broken(f"no aborted request had a token: {figures}")
    return figures


@check("A request that is aborted before the engine begins it ends with ABORT and no token; other requests go on.")
async def abort_queued(bench: Bench) -> Figures:
    slots = bench.engine.capabilities.max_in_flight
    ahead = min(slots or BURST, BURST)
    first = [bench.start(bench.request(i)) for i in range(ahead)]
    waiting = [bench.start(bench.request(ahead + i)) for i in range(FEW)]
    await asyncio.sleep(0)
    await bench.abort_until_ended(waiting)
    figures = await _require_accounted(bench, waiting)
    others = sum(r.finish is EngineFinish.ABORT for r in first)
    if others:
        raise Broken(f"{others} of {ahead} requests ended with ABORT, although nobody had aborted them")
    await bench.abort_until_ended(first)
    bench.require_no_errors(first)
    return figures | {"ahead of them": ahead}


@check("A request that is aborted at any moment of its prefill ends with ABORT, and has the tokens made until then.")
async def abort_prefilling(bench: Bench) -> Figures:
    room = bench.engine.capabilities.max_context
    length = max(4, min(LONG_PROMPT, room // 2, room - bench.subject.long_tokens - 1))
    readings = []
    for moment in range(ROUNDS):
        prompt = np.resize(np.roll(bench.prompt(), moment), length)
        budget = min(bench.subject.long_tokens, room - length)
        reading = bench.start(bench.request(moment, budget, prompt=prompt))
        for _ in range(4 * moment):
            await asyncio.sleep(0)
        await bench.abort_until_ended([reading])
        readings.append(reading)
    return await _require_accounted(bench, readings) | {"prompt tokens": length}


@check("An abort of a request that is complete does not change its response; an abort of an unknown id has no effect.")
async def abort_just_finished(bench: Bench) -> Figures:
    unknown, bystander = bench.new_id(), bench.start(bench.request(0, 24))
    await bench.with_timeout(bench.engine.abort([unknown]), "abort of an unknown id")
    readings = []
    for budget in (1, 2, 3, 5, 8, 13, 21, 24):
        reading = bench.start(bench.request(budget, budget))
        while not reading.count and not reading.task.done():
            await asyncio.wait([reading.task], timeout=0.01)
        await bench.abort_until_ended([reading])
        await bench.with_timeout(bench.engine.abort([reading.id]), "abort of an ended request")
        readings.append(reading)
    await bench.wait_for_ends([bystander])
    figures = await _require_accounted(bench, [*readings, bystander])
    if bystander.finish is EngineFinish.ABORT:
        raise Broken("a request ended with ABORT, although only others had been aborted")
    (later,) = await bench.run_complete([bench.request(0, 8, attempt_id=unknown)])
    if later.finish is EngineFinish.ABORT:
        raise Broken("an id was aborted before it was used, but the request that came later ended with ABORT")
    return figures


@check("An abort ends only the requests with the given ids, not a request whose id merely begins with a given id.")
async def prefix_free_ids(bench: Bench) -> Figures:
    refused = 0
    for stem in (bench.new_id()[:-1] + "-", "short"):
        ids = [f"{stem}1", f"{stem}10", f"{stem}11", stem]
        length = bench.subject.long_tokens // 2
        readings = await bench.start_and_wait(bench.request(i, length, attempt_id=id) for i, id in enumerate(ids))
        started = [r for r in readings if not isinstance(r.error, EngineError)]
        refused += len(readings) - len(started)
        target = next((r for r in started if r.id == ids[0]), None)
        if target is None:
            continue
        await bench.abort_until_ended([target])
        others = [r for r in started if r is not target]
        await bench.wait_for_ends(others)
        for other in others:
            if other.finish is EngineFinish.ABORT:
                raise Broken(f"the abort of {target.id} ended {other.id} after {other.count} tokens")
        bench.require_no_errors(started)
        if bench.subject.greedy_repeats:
            fresh = await bench.run_complete(bench.copy_of(r.request) for r in others)
            for other, uncut in zip(others, fresh, strict=True):
                require_equal(other.tokens, uncut.tokens, f"request {other.id}, while another request was aborted")
    return {"refused as ids": refused}


@check("300 requests that are aborted in one burst all end, none stays on the engine, and the engine still serves.")
async def abort_burst(bench: Bench) -> Figures:
    figures: Figures = {}
    for everything in (False, True):
        readings = [bench.start(bench.request(i)) for i in range(BURST)]
        await asyncio.sleep(0)
        if everything:
            await bench.wait_for_tokens(readings, every=False)
        asked_for = sum(not r.task.done() for r in readings)
        await bench.abort_until_ended(readings, everything)
        bench.require_no_errors(readings)
        if asked_for >= BURST // 2 and not any(r.finish is EngineFinish.ABORT for r in readings):
            raise Broken(f"an abort of {'all' if everything else 'their ids'} ended none of {asked_for} requests")
        for name, value in (_count_ends(readings) | bench.compare_with_wire(readings)).items():
            figures[name] = int(figures.get(name, 0)) + int(value)
        figures["left on the engine"] = await bench.wait_until_idle()
    await bench.require_healthy()
    return figures


@check("Many concurrent greedy responses that are aborted and resumed equal the responses without aborts.")
async def cut_and_resume(bench: Bench) -> Figures:
    bench.require_greedy_repeats()
    count, length = bench.subject.in_flight, bench.subject.long_tokens // 2
    uncut = await bench.run_complete([bench.request(i, length) for i in range(count)])
    have: list[Int32] = [np.empty(0, np.int32)] * count
    open_ones, cuts, attempts = list(range(count)), 0, 0
    # requests are aborted only in the first rounds
    for round in range(4 * FEW):
        readings = {i: bench.start(bench.request(i, length, response=have[i])) for i in open_ones}
        attempts += len(readings)
        if round < FEW:
            await bench.wait_for_tokens(list(readings.values()), every=round % 2 == 0)
            await bench.abort_until_ended(list(readings.values()))
        await bench.wait_for_success(list(readings.values()))
        bench.compare_with_wire(readings.values())
        for i, reading in readings.items():
            have[i] = np.concatenate((have[i], reading.tokens))
            require_prefix(have[i], uncut[i].tokens, f"response {i}, cut {attempts} times")
            cuts += reading.finish is EngineFinish.ABORT
        open_ones = [
            i for i, r in readings.items()
            if r.finish is EngineFinish.ABORT and r.count < r.request.sampling.max_tokens
        ]  # fmt: skip
        if not open_ones:
            break
    for i in range(count):
        require_equal(have[i], uncut[i].tokens, f"response {i}")
    if not cuts:
        raise NotTested("all requests were complete before their abort; raise Subject.long_tokens")
    return {"responses": count, "cuts": cuts, "tokens": sum(map(len, have))}


@check("If the reader of a request leaves, the engine drops the request too, and other requests go on.")
async def disconnect(bench: Bench) -> Figures:
    stays = bench.start(bench.request(0, bench.subject.long_tokens // 4))
    leaves = await bench.start_and_wait(bench.request(1 + i) for i in range(FEW))
    running = sum(not r.task.done() for r in leaves)
    for reading in leaves:
        reading.task.cancel()
    await asyncio.wait([r.task for r in leaves], timeout=bench.subject.patience_s)
    if hanging := sum(not r.task.done() for r in leaves):
        raise Broken(f"{hanging} of {FEW} readers could not leave")
    await bench.wait_for_success([stays])
    left = await bench.wait_until_idle()
    if bench.subject.greedy_repeats:
        (uncut,) = await bench.run_complete([bench.copy_of(stays.request)])
        require_equal(stays.tokens, uncut.tokens, "the request that stayed")
    await bench.require_healthy()
    if not running:
        raise NotTested("all requests were complete before their readers left; raise Subject.long_tokens")
    return {"left": running, "still on the engine": left}


@check("When the server is killed, every open stream raises an EngineError; the tokens before the error are correct.")
async def server_killed(bench: Bench) -> Figures:
    kill = bench.subject.kill
    if kill is None:
        raise NotTested("no function that kills the server was given (Subject.kill)")
    uncut: list[ReadRequest] = []
    if bench.subject.greedy_repeats:
        uncut = await bench.run_complete(bench.request(i) for i in range(FEW))
    readings = await bench.start_and_wait(bench.request(i) for i in range(FEW))
    await kill()
    await bench.wait_for_ends(readings)
    broken = [r for r in readings if r.error is not None]
    for reading in readings:
        if reading.error is None and reading.count < reading.request.sampling.max_tokens:
            raise Broken(f"a stream of the dead server ended with {reading.finish} after {reading.count} tokens")
    for reading in broken:
        if not isinstance(reading.error, EngineError):
            raise Broken(f"a stream raised {type(reading.error).__name__} ({reading.error}) instead of an EngineError")
    for reading, whole in zip(readings, uncut, strict=False):
        require_prefix(reading.tokens, whole.tokens, f"request {reading.id}, read before the server died")
    after = bench.start(bench.request(0, 4))
    await bench.wait_for_ends([after])
    if not isinstance(after.error, EngineError):
        raise Broken(f"a request to the dead server ended with {after.finish} and {after.error!r}")
    if (await bench.with_timeout(bench.engine.health(), "health")).ok:
        raise Broken("the dead engine reports that it is healthy")
    if not broken:
        raise NotTested("all requests were complete before the server died; raise Subject.long_tokens")
    return {"broken off": len(broken), "tokens read before": sum(r.count for r in broken)}
