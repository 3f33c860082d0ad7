"""The distance of a recorded run from the limit of its engines, see :mod:`april.driver.limit`."""

from __future__ import annotations

import numpy as np

from april.core.request_log import Brought
from april.driver.limit import GROUPS, Distance, distance_of, idle_of
from april.report.run_data import RunData


def distance(run: RunData, since: float, until: float) -> Distance | None:
    """Over the time between two deliveries; None where the cost of an engine is not known."""
    used = [name for number, name in enumerate(run.engines) if (run.engine == number).any()]
    if any(name not in run.costs for name in used):
        return None
    inside = (run.ended_s > since) & (run.ended_s <= until) & (run.generated > 0) & ~run.evaluation
    brought = []
    for number, name in enumerate(run.engines):
        rows = inside & (run.engine == number)
        context, count = run.context[rows], run.generated[rows]
        resident = float(np.sum(context * count + count * count / 2))
        brought.append((run.costs[name].cost, Brought(int(count.sum()), int(context.sum()), resident)))
    batches = [batch.metrics for batch in run.batches if since < batch.time_s <= until]
    idle = dict.fromkeys(GROUPS, 0.0)
    for metrics in batches:
        for name, place_s in idle_of(metrics, run.places).items():
            idle[name] += place_s
    again = sum(metrics.get("reprefill_tokens", 0.0) for metrics in batches)
    return distance_of(brought, places=run.places, seconds=until - since, again=again, idle=idle)
