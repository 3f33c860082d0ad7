"""Checks of extras, arrays with a row for each token (such as chosen experts): each row belongs to its token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from april.core.attachments import wrong_rows
from april.engines.protocol import EngineFinish, Request
from april.testing.conformance.bench import Bench, ReadRequest, check, require_prefix
from april.testing.conformance.subject import Broken, Figures, NotTested

LENGTH = 24
CUT = 9
FEW = 3
_ENOUGH = 0.9
"""Share of rows that must be equal when tokens are read again; rounding may change the experts of the others."""


def _with_extras(bench: Bench, request: Request, start: int = 0) -> Request:
    return replace(request, extras=bench.engine.capabilities.extras, extras_from=start)


def _require_rows(readings: Sequence[ReadRequest]) -> None:
    """Check that each request got all rows with its last chunk, and no rows earlier."""
    for reading in readings:
        if any(chunk.extras for chunk in reading.chunks[:-1]):
            raise Broken(f"request {reading.id}: rows arrived before the last chunk")
        if not reading.count:
            continue
        found, request = reading.chunks[-1].extras, reading.request
        if not found and reading.finish is EngineFinish.ABORT:
            continue
        if wrong := wrong_rows(found, request.extras, request.rows_wanted(reading.count)):
            raise Broken(f"request {reading.id}: its {reading.count} tokens came with {wrong}")


@check("Extras that a request asks for arrive with its last chunk, one row for each token that the model read; the "
       "rows of a resumed request continue the rows of the first part.")  # fmt: skip
async def extras(bench: Bench) -> Figures:
    names = bench.offered("extras")
    bench.require_greedy_repeats()
    uncut = await bench.run_complete(_with_extras(bench, bench.request(i, LENGTH)) for i in range(FEW))
    _require_rows(uncut)
    for reading in await bench.run_complete([bench.request(0, CUT)]):
        if any(chunk.extras for chunk in reading.chunks):
            raise Broken(f"request {reading.id}: rows arrived, although the request had not asked for them")
    worst = 1.0
    for i, whole in enumerate(uncut):
        if whole.count <= CUT:
            continue
        start = len(whole.request.token_ids) + CUT - 1
        request = bench.request(i, LENGTH, response=whole.tokens[:CUT])
        (rest,) = await bench.run_complete([_with_extras(bench, request, start)])
        _require_rows([rest])
        require_prefix(np.concatenate((whole.tokens[:CUT], rest.tokens)), whole.tokens, "a response with rows, resumed")
        for name in names:
            again, first = rest.chunks[-1].extras[name], whole.chunks[-1].extras[name][start:]
            equal = (again == first).reshape(len(first), -1).all(1).mean()
            worst = min(worst, float(equal))
            if equal < _ENOUGH:
                raise Broken(
                    f"request {rest.id} continues from token {start}, but {equal:.0%} of its rows of {name} equal "
                    "those of the same tokens in a request that was not cut: the rows belong to other tokens"
                )
    return {"rows": sum(len(r.chunks[-1].extras[names[0]]) for r in uncut), "same when read again": worst} | (
        await _check_aborted(bench)
    )


async def _check_aborted(bench: Bench) -> Figures:
    """Check that aborted requests have rows for all of their tokens, or no rows."""
    readings = await bench.start_and_wait(_with_extras(bench, bench.request(i)) for i in range(FEW))
    await bench.abort_until_ended(readings)
    bench.require_no_errors(readings)
    _require_rows(readings)
    cut = [r for r in readings if r.finish is EngineFinish.ABORT and r.count]
    if not cut:
        raise NotTested("all requests were complete before the abort; raise Subject.long_tokens")
    return {"cut": len(cut), "cut without rows": sum(not r.chunks[-1].extras for r in cut)}
