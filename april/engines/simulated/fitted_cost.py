"""Estimates the decode cost of an engine from the durations of its requests: the inverse of :class:`DecodeCost`.

A request that gets k tokens waits for k decode steps and for the prefills between them. Its duration is therefore
linear in four costs: a per step, b per step and active sequence, g per step and resident token, and p per token that is
prefilled meanwhile. The times of single steps are not observed, so the fit has several rounds: the first one assumes
evenly spaced steps, and each later one spaces the steps by the costs of the round before.

Not modelled: cached prefixes, and waiting in the engine's own queue, which makes a request look slow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.core.event_pump import EndedRequest
from april.engines.simulated.decode_cost import DecodeCost

Floats = NDArray[np.float64]
ROUNDS = 5
MIN_REQUESTS = 16
"""Smallest number of requests to fit."""
EQUAL_COST = 0.05
"""Relative spread of concurrency below which only the total cost of a step can be estimated."""
LEAST = 1e-3
"""Smallest share of a mean step that is attributed to the fixed cost."""
CHOICES = np.array([[i in some for i in range(4)] for count in range(1, 5) for some in combinations(range(4), count)])
"""Which of the four costs are above 0, bool [15, 4]: every choice of at least one cost, smaller choices first."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Finished requests of one engine, as arrays [R].

    Attributes:
        began_s, ended_s: Times at which the requests were sent and ended, in seconds of any clock.
        context: Numbers of tokens sent: the prompt, and the response tokens kept from earlier attempts.
        generated: Numbers of tokens received.
    """

    began_s: Floats
    ended_s: Floats
    context: Floats
    generated: Floats

    def __len__(self) -> int:
        return len(self.began_s)

    def __getitem__(self, rows: slice | NDArray[Any]) -> Requests:
        """Return a subset of the requests."""
        return Requests(self.began_s[rows], self.ended_s[rows], self.context[rows], self.generated[rows])

    @classmethod
    def of(cls, ended: Iterable[EndedRequest]) -> Requests:
        """Convert the requests of a :class:`april.core.event_pump.RequestLog`."""
        rows = np.array([(r.began_s, r.ended_s, r.context, r.generated) for r in ended], np.float64).reshape(-1, 4)
        return cls(*rows.T)


@dataclass(frozen=True, slots=True)
class FittedCost:
    """The result of a fit.

    Attributes:
        cost: Estimated cost of the engine.
        requests: Number of requests used.
        error: Sum of abs(fitted - real duration), divided by the sum of the real durations.
        slope_known: True if concurrency varied enough to tell what one more sequence costs.
        at_best: Cost under the assumption that the number of sequences does not change the time of a step.
    """

    cost: DecodeCost
    requests: int
    error: float
    slope_known: bool
    at_best: DecodeCost


def fit(requests: Requests) -> FittedCost | None:
    """Estimate the cost of one engine; None if the requests are too few."""
    whole = (requests.ended_s > requests.began_s) & (requests.generated > 0)
    if int(whole.sum()) < MIN_REQUESTS:
        return None
    traffic = _Traffic(requests)
    rows = np.flatnonzero(whole)
    took = requests.ended_s[rows] - requests.began_s[rows]
    costs, floor = np.zeros(4), LEAST * float((took / requests.generated[rows]).mean())
    for _ in range(ROUNDS):
        counts = traffic.counts(rows, costs)
        costs = _not_negative(counts, took, floor)
    counts = traffic.counts(rows, costs)
    error = float(np.abs(counts @ costs - took).sum() / took.sum())
    concurrency = counts[:, 1] / counts[:, 0]
    base, sequence, token, prefill = map(float, costs)
    step_s = float(took.sum() / counts[:, 0].sum())
    return FittedCost(
        DecodeCost(base, sequence, token, prefill), len(rows), error,
        slope_known=bool(concurrency.std() > EQUAL_COST * concurrency.mean()), at_best=DecodeCost(step_s, 0.0, 0.0),
    )  # fmt: skip


def predicted_s(requests: Requests, cost: DecodeCost) -> Floats:
    """Return the seconds [R] that each request would take at ``cost``, beside the other requests as observed."""
    if not len(requests):
        return np.zeros(0)
    costs = np.array([cost.base_s, cost.per_sequence_s, cost.per_kv_token_s, cost.per_prefill_token_s])
    rows = np.arange(len(requests))
    return np.asarray(_Traffic(requests).counts(rows, costs) @ costs)


class _Traffic:
    """Load of an engine (sequences, resident tokens, prefills), constant between two starts or ends of requests."""

    def __init__(self, requests: Requests) -> None:
        r = self._requests = requests
        took = np.maximum(r.ended_s - r.began_s, 1e-9)
        speed = r.generated / took
        at = np.concatenate((r.began_s, r.ended_s))
        order = np.argsort(at, kind="stable")
        self.at = at[order]
        one = np.ones(len(r))
        # resident tokens of a request at t: context + speed (t - began)
        constant = r.context - speed * r.began_s
        self.length = np.diff(self.at, append=self.at[-1])
        self.sequences = np.cumsum(np.concatenate((one, -one))[order])
        middle = self.at + self.length / 2
        self.tokens = (
            np.cumsum(np.concatenate((constant, -constant))[order])
            + np.cumsum(np.concatenate((speed, -speed))[order]) * middle
        )
        self.prefill = np.cumsum(np.concatenate((r.context, 0.0 * r.context))[order])
        self.first = np.searchsorted(self.at, r.began_s, "left")
        self.after = np.searchsorted(self.at, r.ended_s, "left")

    def counts(self, rows: NDArray[np.intp], costs: Floats) -> Floats:
        """Return counts [rows, 4] to multiply with the costs: steps, sequence-steps, token-steps, prefilled tokens."""
        per_step = costs[0] + costs[1] * self.sequences + costs[2] * self.tokens
        steps = self.length / np.maximum(per_step, 1e-9) if costs[0] > 0.0 else self.length
        first, after = self.first[rows], self.after[rows]
        mine = _between(steps, first, after)
        share = self._requests.generated[rows] / np.maximum(mine, 1e-12)
        prefilled = np.concatenate(((0.0,), self.prefill))
        return np.stack(
            (
                self._requests.generated[rows],
                _between(steps * self.sequences, first, after) * share,
                _between(steps * self.tokens, first, after) * share,
                prefilled[after] - prefilled[first],
            ),
            axis=1,
        )


def _between(values: Floats, first: NDArray[np.intp], after: NDArray[np.intp]) -> Floats:
    """Return the sum of ``values[first:after]`` for every pair (first, after)."""
    sums = np.concatenate(((0.0,), np.cumsum(values)))
    return np.asarray(sums[after] - sums[first])


def _not_negative(counts: Floats, took: Floats, floor: float) -> Floats:
    """Return the costs >= 0 with the least squared relative errors; the first cost is at least ``floor``."""
    matrix = counts / took[:, None]
    least = np.array([floor, 0.0, 0.0, 0.0])
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    # a QR decomposition reduces the thousands of rows to four, with the same solutions
    q, small = np.linalg.qr(matrix / scale)
    target = q.sum(axis=0)
    rest = float(np.square(q @ target - 1.0).sum())
    # one solution for each choice of costs that are not 0, all computed at once
    inverses = np.linalg.pinv(small * CHOICES[:, None, :], rcond=len(took) * np.finfo(np.float64).eps)
    found = np.where(CHOICES, inverses @ target, 0.0)
    costs = np.where(CHOICES, np.maximum(found / scale, least), least)
    off = rest + np.square((costs * scale) @ small.T - target).sum(axis=1)
    off[found.min(axis=1) < 0.0] = np.inf
    best = int(np.argmax(off * (1.0 - 1e-9) <= off.min()))  # the first of equally good choices has the fewest costs
    return costs[best] if np.isfinite(off[best]) else np.zeros(4)
