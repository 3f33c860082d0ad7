"""Requests that live through weight updates, in each way that an engine offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from april.engines.protocol import EngineFinish, KeepsRequests, OnWeightUpdate
from april.testing.conformance.bench import Bench, Reading, check
from april.testing.conformance.subject import Broken, Figures, NotOffered, NotTested
from april.testing.conformance.weights import FEW, LENGTH, all_of, greedy_under, other_weights


@check("A request that an engine keeps over a weight update goes on under the new weights, its end names the versions, "
       "and a new request meets no keys of the old ones.")  # fmt: skip
async def kept_over_an_update(bench: Bench) -> Figures:
    modes = bench.engine.capabilities.in_flight_updates
    if not modes:
        raise NotOffered("requests are cut at a weight update")
    engine = bench.engine
    if not isinstance(engine, KeepsRequests):
        raise Broken(f"it declares {', '.join(modes)} and has no pause_in_flight")
    figures: Figures = {}
    for mode in modes:
        new, before, old = other_weights(bench), bench.version, bench.weights
        if bench.weights is new:
            new = bench.subject.now
        readings = [bench.start(replace(bench.request(i), in_flight=mode)) for i in range(FEW)]
        await bench.caught(readings)
        await bench.within(engine.pause_in_flight(mode), "pause_in_flight")
        silent = [r for r in readings if not r.count]
        if mode is OnWeightUpdate.KEEP:
            await bench.end(silent)  # as april does: their prompts would meet keys of the old weights
        await bench.next_version(new)
        await bench.within(bench.engine.resume(), "resume")
        fresh = [bench.start(replace(bench.request(i, LENGTH, forced=False), in_flight=mode)) for i in range(FEW)]
        await bench.ended([*readings, *fresh])
        bench.no_error([*readings, *fresh])
        all_of(fresh, bench.version, f"{mode}: tokens of requests from after the update")
        lived = [r for r in readings if before in r.versions and bench.version in r.versions]
        _in_order(readings, before, bench.version, mode)
        if not lived:
            raise NotTested("all requests were complete before the update; raise Subject.long_tokens")
        if bench.subject.greedy_repeats:
            for reading in fresh:
                greedy_under(bench, reading, new, f"{mode}: request {reading.id} from after the update")
            for reading in lived:
                at = reading.versions.index(bench.version)
                greedy_under(bench, reading, old, f"{mode}: request {reading.id} before the update", 0, at)
                if mode is OnWeightUpdate.RECOMPUTE:
                    greedy_under(bench, reading, new, f"{mode}: request {reading.id} behind the update", at)
        figures[f"{mode}: lived through it"] = len(lived)
    return figures


def _in_order(readings: Sequence[Reading], before: object, after: object, mode: OnWeightUpdate) -> None:
    for reading in readings:
        versions = reading.versions
        old = sum(version == before for version in versions)
        if versions != [before] * old + [after] * (len(versions) - old):
            raise Broken(f"{mode}: request {reading.id} carries {sorted(set(map(str, versions)))} in another order")
        whole = reading.finish is EngineFinish.ABORT or reading.count == reading.request.sampling.max_tokens
        if not whole:
            raise Broken(f"{mode}: request {reading.id} ended with {reading.finish} after {reading.count} tokens")
