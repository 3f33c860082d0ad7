"""How far a run was from the limit of its engines, and which cause took the rest.

The limit is the time that the tokens of these requests, each at its place in its response, take on the same engines,
by their fitted cost, when all places are busy all the time and nothing is prefilled twice. Re-prefill costs what its
tokens cost. What is left of the time is shared out among the causes that kept places empty, by how long they did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from april.core.idle import Idle
from april.report.run_data import Batch, RunData

GROUPS: dict[str, tuple[Idle, ...]] = {
    "bubble": (Idle.OVER_SAMPLING, Idle.PROMPTS, Idle.FUNCTIONS),
    "boundary": (Idle.TRAINER, Idle.STOP),
    "weight updates": (Idle.UPDATE, Idle.PAUSE),
    "evaluation": (Idle.EVALUATION,),
    "admission": (Idle.BOUND, Idle.HELD, Idle.ENGINES),
}
"""The causes of empty places, as the report names them."""
LITTLE_EMPTY = 0.02
"""Share of empty places below which they do not explain what is missing."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Shares of the time, which add up to 1 unless the fitted cost is too high.

    Attributes:
        at_limit: what the limit takes.
        reprefill: prefilling again what was cut.
        causes: the rest, by what kept places empty.
        unexplained: what is missing while places were full.
    """

    at_limit: float
    reprefill: float
    causes: dict[str, float]
    unexplained: float


def distance(run: RunData, since: float, until: float) -> Distance | None:
    """Over the time between two deliveries; None where the cost of an engine is not known."""
    used = [name for number, name in enumerate(run.engines) if (run.engine == number).any()]
    if not used or any(name not in run.costs for name in used) or until <= since:
        return None
    inside = (run.ended_s > since) & (run.ended_s <= until) & (run.generated > 0) & ~run.evaluation
    limit_s = reprefill_s = 0.0
    per_engine = max(1.0, run.places / len(used))
    for number, name in enumerate(run.engines):
        rows, cost = inside & (run.engine == number), run.costs[name].cost
        context, count = run.context[rows], run.generated[rows]
        limit_s += cost.base_s * float(count.sum()) / per_engine + cost.per_sequence_s * float(count.sum())
        limit_s += cost.per_kv_token_s * float((context * count + count * count / 2).sum())
    batches = [batch for batch in run.batches if since < batch.time_s <= until]
    mean_cost = float(np.mean([run.costs[name].cost.per_prefill_token_s for name in used]))
    again = sum(batch.metrics.get("reprefill_tokens", 0.0) for batch in batches)
    reprefill_s = mean_cost * again
    limit_s += mean_cost * max(0.0, float(run.context[inside].sum()) - again)
    whole = (until - since) * len(used)
    return _split(limit_s / whole, reprefill_s / whole, batches_idle(batches))


def batches_idle(batches: Sequence[Batch]) -> dict[str, float]:
    """Place-seconds that stood empty, by the report's names of the causes; and all of them under ``all``."""
    out = dict.fromkeys(GROUPS, 0.0)
    whole = 0.0
    for batch in batches:
        metrics = batch.metrics
        step_s = metrics.get("step_s", 0.0)
        whole += step_s
        for name, causes in GROUPS.items():
            out[name] += step_s * sum(metrics.get(f"idle_{cause}", 0.0) for cause in causes)
    return {**out, "all": whole}


def _split(at_limit: float, reprefill: float, idle: dict[str, float]) -> Distance:
    rest, whole = max(0.0, 1.0 - at_limit - reprefill), idle.pop("all")
    empty = sum(idle.values())
    if whole <= 0.0 or empty < LITTLE_EMPTY * whole:
        return Distance(at_limit, reprefill, {}, rest)
    return Distance(at_limit, reprefill, {name: rest * of / empty for name, of in idle.items() if of > 0.0}, 0.0)
