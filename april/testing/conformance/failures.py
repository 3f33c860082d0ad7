"""Clients that leave, and servers that die."""

from __future__ import annotations

import asyncio

from april.errors import EngineError
from april.testing.conformance.bench import Bench, Reading, equal, same
from april.testing.conformance.check import check
from april.testing.conformance.outcomes import Broken, NotTested
from april.testing.conformance.verdicts import Figures
from april.testing.conformance.with_april import failover

FEW = 8


@check("A request whose reader leaves is given up by the engine too, and its neighbours go on.")
async def disconnect(bench: Bench) -> Figures:
    stays = bench.start(bench.request(0, bench.subject.long_tokens // 4))
    leaves = [bench.start(bench.request(1 + i)) for i in range(FEW)]
    await bench.caught(leaves)
    running = sum(not r.task.done() for r in leaves)
    for reading in leaves:
        reading.task.cancel()
    await asyncio.wait([r.task for r in leaves], timeout=bench.subject.patience_s)
    if hanging := sum(not r.task.done() for r in leaves):
        raise Broken(f"{hanging} of {FEW} readers could not leave")
    await bench.ended([stays])
    bench.no_error([stays])
    left = await bench.idle()
    if bench.subject.greedy_repeats:
        (uncut,) = await bench.whole([bench.again(stays.request)])
        equal(stays.tokens, uncut.tokens, "the request that stayed")
    await bench.well()
    if not running:
        raise NotTested("all requests were complete before their readers left; raise Subject.long_tokens")
    return {"left": running, "still on the engine": left}


@check("When the server is killed, every stream fails with an EngineError and what was read is kept; if there is "
       "another server, all responses finish there.")  # fmt: skip
async def server_killed(bench: Bench) -> Figures:
    kill = bench.subject.kill
    if kill is None:
        raise NotTested("nothing was given to kill the server with")
    uncut: list[Reading] = []
    if bench.subject.greedy_repeats:
        uncut = await bench.whole(bench.request(i) for i in range(FEW))
    readings: list[Reading] = []

    async def death() -> None:
        readings.extend(bench.start(bench.request(i)) for i in range(FEW))
        await bench.caught(readings)
        bench.killed = True
        await kill()

    figures: Figures = {}
    if bench.subject.second is None:
        await death()
    else:
        figures = await failover(bench, death)
    await bench.ended(readings)
    broken = [r for r in readings if r.error is not None]
    for reading in readings:
        if reading.error is None and reading.count < reading.request.sampling.max_tokens:
            raise Broken(f"a stream of the dead server ended with {reading.finish} after {reading.count} tokens")
    for reading in broken:
        if not isinstance(reading.error, EngineError):
            raise Broken(f"a stream raised {type(reading.error).__name__} ({reading.error}) instead of an EngineError")
    for reading, whole in zip(readings, uncut, strict=False):
        same(reading.tokens, whole.tokens, f"request {reading.id}, read before the death")
    after = bench.start(bench.request(0, 4))
    await bench.ended([after])
    if not isinstance(after.error, EngineError):
        raise Broken(f"a request to the dead server ended with {after.finish} and {after.error!r}")
    if (await bench.within(bench.engine.health(), "health")).ok:
        raise Broken("the dead engine calls itself well")
    if not broken:
        raise NotTested("all requests were complete before the server died; raise Subject.long_tokens")
    return {"broken off": len(broken), "tokens read before": sum(r.count for r in broken)} | figures
