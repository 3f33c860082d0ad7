"""The distance of a recorded run from the limit of its engines, see :mod:`april.driver.limit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from april.core.idle import Idle
from april.core.request_log import Brought
from april.driver.limit import Distance, distance_of
from april.engines.simulated.fitted_cost import FittedCost, fit
from april.report.run_data import FITTED, RunData, mean_busy

SURE = 0.1
"""Mean error of a request's duration, and difference of the limits by two halves, up to which a limit is stated."""
NEARLY = 0.9
"""Share of the places that were busy at some time from which on the cost of full places was seen."""
SPREAD = 1.5
"""Most over fewest busy places from which on what a place more costs was seen; at least half of them must have been."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A distance, and how far to believe it.

    Attributes:
        distance: by the cost that was fitted to all requests.
        halves: share of the time that the limit takes, by the cost fitted to the first half of the requests and to the
            second.
        doubt: why it is a guess; empty where it is not.
    """

    distance: Distance
    halves: tuple[float, float] | None
    doubt: str


def limit_of(run: RunData) -> Limit | None:
    """Between the first delivery and the last; None where nothing is known of what engines cost."""
    if len(run.batches) < 2:
        return None
    since, until = run.batches[0].time_s, run.batches[-1].time_s
    found = distance(run, since, until)
    if found is None:
        return None
    halves = [distance(run, since, until, costs) for costs in _costs_of_halves(run)]
    first, second = halves if len(halves) == 2 else (None, None)
    both = None if first is None or second is None else (first.at_limit, second.at_limit)
    return Limit(found, both, _doubt(run, since, until, both))


def _costs_of_halves(run: RunData) -> list[dict[str, FittedCost]]:
    out: list[dict[str, FittedCost]] = [{}, {}]
    for number, name in enumerate(run.engines):
        requests = run.requests_of(number, FITTED)
        middle = len(requests) // 2
        for costs, half in zip(out, (slice(0, middle), slice(middle, None)), strict=True):
            if (cost := fit(requests[half])) is not None:
                costs[name] = cost
    return out


def _doubt(run: RunData, since: float, until: float, halves: tuple[float, float] | None) -> str:
    error = max(cost.error for cost in run.costs.values())
    if error > SURE:
        return f"the fitted cost misses the duration of a request by {error:.0%} on average"
    edges = np.linspace(since, until, 201)
    busy = mean_busy(run.began_s, run.ended_s, edges) / max(1, run.places)
    few, many = np.quantile(busy, [0.1, 0.95])
    if many < NEARLY and (many < 0.5 or many < SPREAD * few):
        return (
            f"between {few:.0%} and {many:.0%} of the places were busy, which does not tell what decoding costs when "
            "all of them are"
        )
    if halves is None:
        return "too few requests ended to compare two halves of them"
    if abs(halves[0] - halves[1]) > SURE * max(halves):
        return (
            f"by the first half of the requests the limit takes {halves[0]:.0%} of the time, by the second half "
            f"{halves[1]:.0%}"
        )
    return ""


def distance(
    run: RunData, since: float, until: float, costs: Mapping[str, FittedCost] | None = None
) -> Distance | None:
    """Over the time between two deliveries, by ``costs`` or else those of the run; None where nothing is known of them.

    What is lost is split up by :class:`.idle.Idle`. An engine whose own cost is not known, as it ended few requests,
    counts with that of another one.
    """
    costs = run.costs if costs is None else costs
    inside = (run.ended_s > since) & (run.ended_s <= until) & (run.generated > 0) & ~run.evaluation
    engine_s = run.there.engine_s(since, until)
    if not costs or not inside.any() or engine_s <= 0.0:
        return None
    others = next(iter(costs.values()))
    brought = []
    for number, name in enumerate(run.engines):
        rows = inside & (run.engine == number)
        if not rows.any():
            continue
        context, count = run.context[rows], run.generated[rows]
        resident = float(np.sum(context * count + count * count / 2))
        cost = costs.get(name, others).cost
        brought.append((cost, Brought(int(count.sum()), int(context.sum()), resident)))
    batches = [(batch.time_s, batch.metrics) for batch in run.batches if since < batch.time_s <= until]
    idle = dict.fromkeys(Idle, 0.0)
    for time_s, metrics in batches:
        step_s = metrics["step_s"]
        places = run.there.place_s(time_s - step_s, time_s) / step_s if step_s > 0.0 else 0.0
        for cause in Idle:
            idle[cause] += places * step_s * metrics.get(f"idle_{cause}", 0.0)
    again = sum(metrics.get("reprefill_tokens", 0.0) for _, metrics in batches)
    # engines come and go: so many that were there all the time have the same engine-seconds and place-seconds
    seconds = engine_s / len(brought)
    places = run.there.place_s(since, until) / seconds
    return distance_of(
        brought, places=places, seconds=seconds, again=again,
        idle={str(cause): place_s for cause, place_s in idle.items()},
    )  # fmt: skip
