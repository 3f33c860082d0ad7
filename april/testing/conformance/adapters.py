"""Adapters (LoRA) as versions of the policy, loaded while requests run."""

from __future__ import annotations

from itertools import chain

from april.testing.conformance.bench import Bench, check
from april.testing.conformance.subject import Broken, Figures, NotOffered, NotTested
from april.testing.conformance.weights import FEW, LENGTH, all_of, greedy_under


@check("While an adapter is loaded requests go on under the weights that they began with; those that come then, and "
       "responses that are resumed, are of the adapter.")  # fmt: skip
async def adapter_versions(bench: Bench) -> Figures:
    can, adapters = bench.engine.capabilities, bench.subject.adapters
    if can.adapters is None:
        raise NotOffered(can.adapters_need or "the engine takes no adapters")
    if len(adapters) < 2:
        raise NotTested("no two adapters were given")
    versions, weights = [bench.version], [bench.weights]
    running = [[bench.start(bench.request(i)) for i in range(FEW)]]
    await bench.caught(running[0])
    for given in adapters[:2]:
        await bench.next_version(given)  # and nothing is paused
        versions.append(bench.version)
        weights.append(given)
        running.append([bench.start(bench.request(i)) for i in range(FEW)])
        await bench.caught(running[-1])
    alive = sum(any(not reading.task.done() for reading in readings) for readings in running)
    cut = running[0][: FEW // 2]
    await bench.end(cut)
    resumed = await bench.whole(
        bench.request(i, reading.count + LENGTH, response=reading.tokens, forced=False)
        for i, reading in enumerate(cut)
        if reading.count < reading.request.sampling.max_tokens
    )
    for readings in running:
        await bench.ended(readings)
        bench.no_error(readings)
    for version, readings in zip(versions, running, strict=True):
        all_of(readings, version, f"tokens of requests that were sent under version {version}")
    all_of(resumed, bench.version, "tokens of a response that was resumed after two adapters")
    if bench.subject.greedy_repeats:
        for of, readings in zip(weights, running, strict=True):
            for reading in readings:
                greedy_under(bench, reading, of, f"request {reading.id} beside the load of an adapter")
        for reading in resumed:
            greedy_under(bench, reading, weights[-1], f"request {reading.id}, resumed")
    if len({tuple(readings[-1].tokens[: LENGTH // 2].tolist()) for readings in running}) < len(running):
        raise Broken("requests under different adapters say the same: nothing was loaded")
    if alive < len(running):
        raise NotTested("all requests of a version were complete before the next one; raise Subject.long_tokens")
    compared = bench.compared([*chain.from_iterable(running), *resumed])
    return {"versions at the same time": alive, "resumed": len(resumed)} | compared
