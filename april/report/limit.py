"""The distance of a recorded run from the limit of its engines, see :mod:`april.driver.limit`."""

from __future__ import annotations

import numpy as np

from april.core.request_log import Brought
from april.driver.limit import GROUPS, Distance, distance_of, idle_of
from april.report.run_data import RunData


def distance(run: RunData, since: float, until: float) -> Distance | None:
    """Over the time between two deliveries; None where nothing is known of what engines cost.

    An engine whose own cost is not known, as it ended few requests, counts with that of another one.
    """
    inside = (run.ended_s > since) & (run.ended_s <= until) & (run.generated > 0) & ~run.evaluation
    engine_s = run.there.engine_s(since, until)
    if not run.costs or not inside.any() or engine_s <= 0.0:
        return None
    others = next(iter(run.costs.values()))
    brought = []
    for number, name in enumerate(run.engines):
        rows = inside & (run.engine == number)
        if not rows.any():
            continue
        context, count = run.context[rows], run.generated[rows]
        resident = float(np.sum(context * count + count * count / 2))
        cost = run.costs.get(name, others).cost
        brought.append((cost, Brought(int(count.sum()), int(context.sum()), resident)))
    batches = [(batch.time_s, batch.metrics) for batch in run.batches if since < batch.time_s <= until]
    idle = dict.fromkeys(GROUPS, 0.0)
    for time_s, metrics in batches:
        step_s = metrics["step_s"]
        places = run.there.place_s(time_s - step_s, time_s) / step_s if step_s > 0.0 else 0.0
        for name, place_s in idle_of(metrics, places).items():
            idle[name] += place_s
    again = sum(metrics.get("reprefill_tokens", 0.0) for _, metrics in batches)
    # engines come and go: so many that were there all the time have the same engine-seconds and place-seconds
    seconds = engine_s / len(brought)
    places = run.there.place_s(since, until) / seconds
    return distance_of(brought, places=places, seconds=seconds, again=again, idle=idle)
