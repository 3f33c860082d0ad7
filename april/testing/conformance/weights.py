"""Checks of weight updates, pauses and adapters (LoRA): every token carries the version of the weights that made it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain

import numpy as np
from msgspec.structs import replace

from april.engines.protocol import EngineFinish, Float32, KeepsRequests, OnWeightUpdate
from april.testing.conformance.bench import Bench, ReadRequest, check
from april.testing.conformance.subject import Broken, Figures, NotOffered, NotTested, Weights
from april.testing.conformance.tokens import declared_kind, largest_difference

FEW = 6
LENGTH = 40
QUIET_S = 0.5
NEAR_TIE = 1e-3
"""Difference of logits below which rounding may change their order."""


def other_weights(bench: Bench) -> Weights:
    """Return a second set of weights for the engine; raises NotTested without one, NotOffered if it loads none."""
    bench.offered("updates_from_disk")
    if bench.subject.other is None:
        raise NotTested("no second set of weights was given")
    return bench.subject.other


def require_greedy(
    bench: Bench, reading: ReadRequest, weights: Weights, what: str, start: int = 0, end: int | None = None
) -> None:
    """Raise Broken unless tokens ``start`` to ``end`` are the greedy choice under ``weights``.

    Does nothing without reference logits, or if the engine's greedy responses are not reproducible.
    """
    tokens, forbidden = reading.tokens[:end], list(bench.engine.capabilities.eos_token_ids)
    if weights.reference is None or len(tokens) <= start or not bench.subject.greedy_repeats:
        return
    logits: Float32 = weights.reference(reading.request.token_ids.tolist(), tokens.tolist()).copy()
    logits[: reading.request.sampling.min_tokens, forbidden] = -np.inf
    logits, mine = logits[start:], tokens[start:]
    deficit = logits.max(axis=1) - logits[np.arange(len(mine)), mine]
    wrong = np.flatnonzero(deficit > NEAR_TIE)
    if wrong.size:
        raise Broken(
            f"{what}: token {start + int(wrong[0])} of {len(tokens)} is not the greedy one of these weights "
            f"({float(deficit[wrong[0]]):.3g} below it); other weights, or their cache, made it"
        )


def require_version(readings: Sequence[ReadRequest], version: object, what: str) -> None:
    """Raise Broken unless all tokens of these requests carry this version."""
    for reading in readings:
        strange = {str(v) for v in reading.versions if v != version}
        if strange:
            raise Broken(f"{what} carry version {', '.join(sorted(strange))} instead of {version}")


def require_version_order(readings: Sequence[ReadRequest], before: object, after: object, what: str = "") -> int:
    """Raise Broken unless each request has tokens of ``before``, then of ``after``; return how many have both."""
    both = 0
    for reading in readings:
        versions = reading.versions
        old = versions.count(before)  # type: ignore[arg-type]
        if versions != [before] * old + [after] * (len(versions) - old):
            raise Broken(f"{what}request {reading.id} carries {sorted(set(map(str, versions)))} in another order")
        if reading.finish is not EngineFinish.ABORT and reading.count != reading.request.sampling.max_tokens:
            raise Broken(f"{what}request {reading.id} ended with {reading.finish} after {reading.count} tokens")
        both += 0 < old < len(versions)
    return both


@check("Tokens from before a weight update carry the old version; later tokens carry the new version and come from the "
       "new weights, not from a cache of the old weights.")  # fmt: skip
async def version_exactness(bench: Bench) -> Figures:
    other, before, first_weights = other_weights(bench), bench.version, bench.weights
    # the prompts are the same before and after the update, so that a stale prefix cache would be noticed
    old = await bench.run_complete(bench.request(i, LENGTH, forced=False) for i in range(FEW))
    cut = await bench.start_and_wait(bench.request(i) for i in range(FEW))
    await bench.abort_until_ended(cut)
    bench.require_no_errors(cut)
    await bench.with_timeout(bench.engine.pause(), "pause")
    waiting = [bench.start(bench.request(i, LENGTH, forced=False)) for i in range(FEW)]
    await asyncio.sleep(0)
    await bench.next_version(other)
    await bench.with_timeout(bench.engine.resume(), "resume")
    await bench.wait_for_success(waiting)
    require_version([*old, *cut], before, "tokens from before the update")
    require_version(waiting, bench.version, "tokens from after the update")
    resumed = await bench.run_complete(
        bench.request(i, len(r.tokens) + LENGTH, response=r.tokens, forced=False)
        for i, r in enumerate(cut)
        if r.finish is EngineFinish.ABORT
    )
    require_version(resumed, bench.version, "tokens of a resumed response after the update")
    for reading in [*old, *cut]:
        require_greedy(bench, reading, first_weights, "before the update")
    for reading in [*waiting, *resumed]:
        require_greedy(bench, reading, other, "after the update")
    return await _new_weights_in_use(bench, other, old, waiting) | {"resumed over it": len(resumed)}


async def _new_weights_in_use(
    bench: Bench, weights: Weights, old: Sequence[ReadRequest], new: Sequence[ReadRequest]
) -> Figures:
    """Check that responses changed, and that log-probabilities of sampled tokens are those of the new weights."""
    changed = sum(not np.array_equal(a.tokens, b.tokens) for a, b in zip(old, new, strict=True))
    figures: Figures = {"responses changed": changed, "of": FEW}
    if weights.reference is None:
        return figures
    if not changed:
        raise Broken("all greedy responses are the same under both weights: nothing was loaded")
    readings = await bench.run_complete(bench.request(i, LENGTH, forced=False, temperature=1.0) for i in range(FEW))
    worst = max(largest_difference(declared_kind(bench), weights.reference, r, 1.0) for r in readings)
    if not worst <= bench.subject.tolerance:
        raise Broken(f"after the update log-probabilities differ from the new weights by up to {worst:.3g} nats")
    return figures | {"largest difference to the new weights": worst}


@check("After weights were sent from the trainer's process, tokens carry the new version and come from the new "
       "weights, not from a cache of the old weights.")  # fmt: skip
async def sent_weights(bench: Bench) -> Figures:
    can = bench.engine.capabilities
    if not (can.collective or can.takes_tensors):
        raise NotOffered(can.lack("collective"))
    other = bench.subject.other
    if other is None or other.path is None:
        raise NotTested("no second set of weights was given")
    old = await bench.run_complete(bench.request(i, LENGTH, forced=False) for i in range(FEW))
    await bench.send_weights(other)
    new = await bench.run_complete(bench.request(i, LENGTH, forced=False) for i in range(FEW))
    require_version(new, bench.version, "tokens from after the transfer")
    for reading in new:
        require_greedy(bench, reading, other, "after the transfer")
    return await _new_weights_in_use(bench, other, old, new)


@check("A request that runs during a weight update ends with its old tokens, or goes on with exact token versions.")
async def update_under_way(bench: Bench) -> Figures:
    other, before, first_weights = other_weights(bench), bench.version, bench.weights
    if bench.engine.capabilities.shares_weights:
        raise NotOffered("the engine generates from the trainer's parameters: requests are aborted before they change")
    readings = await bench.start_and_wait(bench.request(i) for i in range(FEW))
    await bench.load_weights(other)
    await bench.wait_for_success(readings)
    lived = require_version_order(readings, before, bench.version)
    ended = sum(reading.finish is EngineFinish.ABORT for reading in readings)
    for reading in readings:
        old = reading.versions.count(before)
        require_greedy(bench, reading, first_weights, f"request {reading.id} before the update", 0, old)
        require_greedy(bench, reading, other, f"request {reading.id} after the update", old)
    figures = bench.compare_with_wire(readings)
    if lived == 0 and ended == 0 and all(set(r.versions) == {before} for r in readings):
        raise NotTested("all requests were complete before the update; raise Subject.long_tokens")
    return {"ended": ended, "lived through it": lived} | figures


@check("While the engine is paused it generates no token and new requests wait; after resume all requests complete.")
async def pause_and_resume(bench: Bench) -> Figures:
    running = await bench.start_and_wait(bench.request(i) for i in range(FEW))
    await bench.with_timeout(bench.engine.pause(), "pause")
    late = [bench.start(bench.request(FEW + i, 16)) for i in range(FEW)]
    await asyncio.sleep(QUIET_S)  # until tokens that were sent before the pause have arrived
    then = [r.count for r in running]
    await asyncio.sleep(QUIET_S)
    grown = sum(r.count for r in running) - sum(then)
    if grown:
        raise Broken(f"{grown} tokens arrived {QUIET_S} s or more after pause had returned")
    came = sum(r.count for r in late)
    if came or any(r.task.done() for r in late):
        raise Broken(f"requests sent while the engine was paused got {came} tokens, or ended")
    # abort one of the waiting requests during the pause
    given_up = late.pop()
    await bench.abort_until_ended([given_up])
    kept = sum(not r.task.done() for r in running)
    await bench.with_timeout(bench.engine.resume(), "resume")
    await bench.wait_for_ends([*running, *late])
    bench.require_no_errors([*running, *late, given_up])
    if given_up.count:
        raise Broken("a request that was aborted while the engine was paused has tokens")
    for reading in late:
        if reading.count != reading.request.sampling.max_tokens:
            raise Broken(f"a request that waited ended with {reading.finish} after {reading.count} tokens")
    if bench.subject.greedy_repeats:
        uncut = await bench.run_complete(bench.copy_of(r.request) for r in running)
        for reading, whole in zip(running, uncut, strict=True):
            if not np.array_equal(reading.tokens, whole.tokens[: reading.count]):
                raise Broken(f"request {reading.id} has other tokens than the same request without a pause")
            if reading.finish is not EngineFinish.ABORT and reading.count != whole.count:
                raise Broken(f"request {reading.id} ended with {reading.finish} after {reading.count} tokens")
    figures: Figures = {"kept over the pause": kept, "ended by it": FEW - kept, "waited": len(late)}
    return figures | bench.compare_with_wire([*running, *late])


@check("A request that an engine keeps over a weight update goes on under the new weights, its last chunk names the "
       "versions, and new requests use no KV cache of the old weights.")  # fmt: skip
async def kept_over_an_update(bench: Bench) -> Figures:
    modes, engine = bench.offered("in_flight_updates"), bench.engine
    if not isinstance(engine, KeepsRequests):
        raise Broken(f"it declares {', '.join(modes)} but has no pause_in_flight")
    figures: Figures = {}
    for mode in modes:
        new, before, old = other_weights(bench), bench.version, bench.weights
        if bench.weights is new:
            new = bench.subject.now
        readings = await bench.start_and_wait(replace(bench.request(i), in_flight=mode) for i in range(FEW))
        await bench.with_timeout(engine.pause_in_flight(mode), "pause_in_flight")
        silent = [r for r in readings if not r.count]
        if mode is OnWeightUpdate.KEEP:
            await bench.abort_until_ended(silent)  # as april does, because their prompts were read by the old weights
        await bench.next_version(new)
        await bench.with_timeout(bench.engine.resume(), "resume")
        fresh = [bench.start(replace(bench.request(i, LENGTH, forced=False), in_flight=mode)) for i in range(FEW)]
        await bench.wait_for_success([*readings, *fresh])
        require_version(fresh, bench.version, f"{mode}: tokens of requests from after the update")
        lived = [r for r in readings if before in r.versions and bench.version in r.versions]
        require_version_order(readings, before, bench.version, f"{mode}: ")
        if not lived:
            raise NotTested("all requests were complete before the update; raise Subject.long_tokens")
        for reading in fresh:
            require_greedy(bench, reading, new, f"{mode}: request {reading.id} from after the update")
        for reading in lived:
            at = reading.versions.index(bench.version)
            require_greedy(bench, reading, old, f"{mode}: request {reading.id} before the update", 0, at)
            if mode is OnWeightUpdate.RECOMPUTE:
                require_greedy(bench, reading, new, f"{mode}: request {reading.id} after the update", at)
        figures[f"{mode}: lived through it"] = len(lived)
    return figures


@check("While an adapter is loaded, running requests go on under the weights with which they began; new requests and "
       "resumed responses use the adapter.")  # fmt: skip
async def adapter_versions(bench: Bench) -> Figures:
    bench.offered("adapters")
    adapters = bench.subject.adapters
    if len(adapters) < 2:
        raise NotTested("no two adapters were given")
    versions, weights = [bench.version], [bench.weights]
    running = [await bench.start_and_wait(bench.request(i) for i in range(FEW))]
    for given in adapters[:2]:
        await bench.next_version(given)  # without a pause
        versions.append(bench.version)
        weights.append(given)
        running.append(await bench.start_and_wait(bench.request(i) for i in range(FEW)))
    alive = sum(any(not reading.task.done() for reading in readings) for readings in running)
    cut = running[0][: FEW // 2]
    await bench.abort_until_ended(cut)
    resumed = await bench.run_complete(
        bench.request(i, reading.count + LENGTH, response=reading.tokens, forced=False)
        for i, reading in enumerate(cut)
        if reading.count < reading.request.sampling.max_tokens
    )
    for readings in running:
        await bench.wait_for_success(readings)
    for version, readings in zip(versions, running, strict=True):
        require_version(readings, version, f"tokens of requests that were sent under version {version}")
    require_version(resumed, bench.version, "tokens of a response that was resumed after two adapters")
    for of, readings in zip(weights, running, strict=True):
        for reading in readings:
            require_greedy(bench, reading, of, f"request {reading.id} beside the load of an adapter")
    for reading in resumed:
        require_greedy(bench, reading, weights[-1], f"request {reading.id}, resumed")
    if len({tuple(readings[-1].tokens[: LENGTH // 2].tolist()) for readings in running}) < len(running):
        raise Broken("requests under different adapters get the same responses: nothing was loaded")
    if alive < len(running):
        raise NotTested("all requests of a version were complete before the next one; raise Subject.long_tokens")
    compared = bench.compare_with_wire([*chain.from_iterable(running), *resumed])
    return {"versions at the same time": alive, "resumed": len(resumed)} | compared
