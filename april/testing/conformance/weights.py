"""Weight updates and pauses: every token carries the version of the weights that made it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from april.core.sampling import LogprobKind
from april.engines.protocol import EngineFinish, Float32
from april.testing.conformance.bench import Bench, Reading, check
from april.testing.conformance.subject import Broken, Figures, NotOffered, NotTested, Weights
from april.testing.conformance.tokens import expected

FEW = 6
LENGTH = 40
QUIET_S = 0.5
NEAR_TIE = 1e-3
"""Logits nearer than this may change places by rounding."""


def other_weights(bench: Bench) -> Weights:
    """Return the other weights; raises NotOffered or NotTested where there is no way to them."""
    if not bench.engine.capabilities.updates_from_disk:
        why = bench.engine.capabilities.cause("updates_from_disk")
        raise NotOffered("the engine does not load weights from disk" if why is None else why.sentence)
    if bench.subject.other is None:
        raise NotTested("no second set of weights was given")
    return bench.subject.other


def greedy_under(
    bench: Bench, reading: Reading, weights: Weights, what: str, start: int = 0, end: int | None = None
) -> None:
    """Raise Broken unless tokens ``start`` to ``end`` are the greedy ones under ``weights``."""
    tokens, forbidden = reading.tokens[:end], list(bench.engine.capabilities.eos_token_ids)
    if weights.reference is None or len(tokens) <= start:
        return
    logits: Float32 = weights.reference(reading.request.token_ids.tolist(), tokens.tolist()).copy()
    logits[: reading.request.sampling.min_tokens, forbidden] = -np.inf
    logits, mine = logits[start:], tokens[start:]
    short = logits.max(axis=1) - logits[np.arange(len(mine)), mine]
    wrong = np.flatnonzero(short > NEAR_TIE)
    if wrong.size:
        raise Broken(
            f"{what}: token {start + int(wrong[0])} of {len(tokens)} is not the greedy one of these weights "
            f"({float(short[wrong[0]]):.3g} below it); other weights, or the cache of others, have made it"
        )


def all_of(readings: Sequence[Reading], version: object, what: str) -> None:
    """Raise Broken unless all their tokens carry this version."""
    for reading in readings:
        strange = {str(v) for v in reading.versions if v != version}
        if strange:
            raise Broken(f"{what} carry version {', '.join(sorted(strange))} instead of {version}")


@check("Tokens of before an update carry the old version; those of after it carry the new one, come from the new "
       "weights, and from no cache of the old ones.")  # fmt: skip
async def version_exactness(bench: Bench) -> Figures:
    other, before, first_weights = other_weights(bench), bench.version, bench.weights
    # the same prompts before and after: what is left of them in a cache must not be used
    old = await bench.whole(bench.request(i, LENGTH, forced=False) for i in range(FEW))
    cut = [bench.start(bench.request(i)) for i in range(FEW)]
    await bench.caught(cut)
    await bench.end(cut)
    bench.no_error(cut)
    await bench.within(bench.engine.pause(), "pause")
    waiting = [bench.start(bench.request(i, LENGTH, forced=False)) for i in range(FEW)]
    await asyncio.sleep(0)
    await bench.next_version(other)
    await bench.within(bench.engine.resume(), "resume")
    await bench.ended(waiting)
    bench.no_error(waiting)
    all_of([*old, *cut], before, "tokens of before the update")
    all_of(waiting, bench.version, "tokens of after the update")
    resumed = await bench.whole(
        bench.request(i, len(r.tokens) + LENGTH, response=r.tokens, forced=False)
        for i, r in enumerate(cut)
        if r.finish is EngineFinish.ABORT
    )
    all_of(resumed, bench.version, "tokens of a resumed response after the update")
    changed = sum(not np.array_equal(a.tokens, b.tokens) for a, b in zip(old, waiting, strict=True))
    difference = 0.0
    if bench.subject.greedy_repeats:
        for reading in [*old, *cut]:
            greedy_under(bench, reading, first_weights, "before the update")
        for reading in [*waiting, *resumed]:
            greedy_under(bench, reading, other, "after the update")
    if other.reference is not None:
        if not changed:
            raise Broken("all greedy responses are the same under both weights: nothing was loaded")
        difference = await _difference_under(bench, other)
    figures: Figures = {"responses changed": changed, "of": FEW, "resumed over it": len(resumed)}
    if other.reference is not None:
        figures["largest difference to the new weights"] = difference
    return figures


async def _difference_under(bench: Bench, weights: Weights) -> float:
    """Sampled responses after the update have the log-probabilities of the new weights."""
    assert weights.reference is not None
    kind = bench.engine.capabilities.logprob_kind
    asked = LogprobKind.RAW if kind is LogprobKind.UNKNOWN else kind
    readings = await bench.whole(bench.request(i, LENGTH, forced=False, temperature=1.0) for i in range(FEW))
    worst = 0.0
    for r in readings:
        logits = weights.reference(r.request.token_ids.tolist(), r.tokens.tolist())
        worst = max(worst, float(np.abs(expected(asked, logits, r.tokens, 1.0, 1.0)[0] - r.logprobs).max(initial=0.0)))
    if not worst <= bench.subject.tolerance:
        raise Broken(f"after the update log-probabilities differ from the new weights by up to {worst:.3g} nats")
    return worst


@check("Weights that are sent from the trainer's process are whole and in use afterwards: tokens carry the new "
       "version, come from the new weights, and from no cache of the old ones.")  # fmt: skip
async def sent_weights(bench: Bench) -> Figures:
    can = bench.engine.capabilities
    if not (can.collective or can.takes_tensors):
        raise NotOffered("no weights can be sent to the engine from the trainer's process")
    other = bench.subject.other
    if other is None or other.path is None:
        raise NotTested("no second set of weights was given")
    old = await bench.whole(bench.request(i, LENGTH, forced=False) for i in range(FEW))
    await bench.send_weights(other)
    new = await bench.whole(bench.request(i, LENGTH, forced=False) for i in range(FEW))
    all_of(new, bench.version, "tokens of after the transfer")
    if bench.subject.greedy_repeats:
        for reading in new:
            greedy_under(bench, reading, other, "after the transfer")
    changed = sum(not np.array_equal(a.tokens, b.tokens) for a, b in zip(old, new, strict=True))
    figures: Figures = {"responses changed": changed, "of": FEW}
    if other.reference is not None:
        if not changed:
            raise Broken("all greedy responses are the same under both weights: nothing was loaded")
        figures["largest difference to the new weights"] = await _difference_under(bench, other)
    return figures


@check("A request that is running when weights are updated ends with its old tokens, or goes on with exact versions.")
async def update_under_way(bench: Bench) -> Figures:
    other, before, first_weights = other_weights(bench), bench.version, bench.weights
    if bench.engine.capabilities.shares_weights:
        raise NotOffered("the engine generates from the trainer's parameters: requests are aborted before they change")
    readings = [bench.start(bench.request(i)) for i in range(FEW)]
    await bench.caught(readings)
    await bench.within(bench.engine.pause(), "pause")
    await bench.next_version(other)
    await bench.within(bench.engine.resume(), "resume")
    await bench.ended(readings)
    bench.no_error(readings)
    ended = lived = 0
    for reading in readings:
        versions = reading.versions
        old = sum(v == before for v in versions)
        if versions[:old] != [before] * old or versions[old:] != [bench.version] * (len(versions) - old):
            raise Broken(f"request {reading.id} carries versions {sorted(set(map(str, versions)))} in another order")
        ended += reading.finish is EngineFinish.ABORT
        lived += old < len(versions) and old > 0
        if bench.subject.greedy_repeats:
            greedy_under(bench, reading, first_weights, f"request {reading.id} before the update", 0, old)
            greedy_under(bench, reading, other, f"request {reading.id} behind the update", old)
    figures = bench.compared(readings)
    if lived == 0 and ended == 0 and all(set(r.versions) == {before} for r in readings):
        raise NotTested("all requests were complete before the update; raise Subject.long_tokens")
    return {"ended": ended, "lived through it": lived} | figures


@check("While the engine is paused no token comes and new requests wait; after resume all complete.")
async def pause_and_resume(bench: Bench) -> Figures:
    running = [bench.start(bench.request(i)) for i in range(FEW)]
    await bench.caught(running)
    await bench.within(bench.engine.pause(), "pause")
    late = [bench.start(bench.request(FEW + i, 16)) for i in range(FEW)]
    await asyncio.sleep(QUIET_S)  # what was on its way arrives
    then = [r.count for r in running]
    await asyncio.sleep(QUIET_S)
    grown = sum(r.count for r in running) - sum(then)
    if grown:
        raise Broken(f"{grown} tokens came {QUIET_S} s and more after pause had returned")
    came = sum(r.count for r in late)
    if came or any(r.task.done() for r in late):
        raise Broken(f"requests sent while the engine was paused got {came} tokens, or ended")
    # one of those that wait is given up meanwhile
    given_up = late.pop()
    await bench.end([given_up])
    kept = sum(not r.task.done() for r in running)
    await bench.within(bench.engine.resume(), "resume")
    await bench.ended([*running, *late])
    bench.no_error([*running, *late, given_up])
    if given_up.count:
        raise Broken("a request that was aborted while the engine was paused has tokens")
    for reading in late:
        if reading.count != reading.request.sampling.max_tokens:
            raise Broken(f"a request that waited ended with {reading.finish} after {reading.count} tokens")
    if bench.subject.greedy_repeats:
        uncut = await bench.whole(bench.again(r.request) for r in running)
        for reading, whole in zip(running, uncut, strict=True):
            if not np.array_equal(reading.tokens, whole.tokens[: reading.count]):
                raise Broken(f"request {reading.id} is not the uncut response around a pause")
            if reading.finish is not EngineFinish.ABORT and reading.count != whole.count:
                raise Broken(f"request {reading.id} ended with {reading.finish} after {reading.count} tokens")
    figures: Figures = {"kept over the pause": kept, "ended by it": FEW - kept, "waited": len(late)}
    return figures | bench.compared([*running, *late])
