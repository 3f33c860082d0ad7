"""Estimates over matched seeds: paired means with Student's t, and medians where some pairs have no number.

A seed is one training pair; nothing within a training (prompts, tokens, evaluations) counts as more of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate from n pairs.

    Attributes:
        mean: of the pairs; a median where some are censored.
        low, high: two-sided interval at LEVEL; -inf or inf where the pairs do not bound it.
        lower, upper: one-sided bounds at LEVEL.
        n: pairs.
        sd: standard deviation over pairs; NaN with fewer than two, or where some are censored.
        censored: pairs that never got there, as if at +inf.
    """

    mean: float
    low: float
    high: float
    lower: float
    upper: float
    n: int
    sd: float
    censored: int = 0

    @property
    def half_width(self) -> float:
        """Half of the two-sided interval."""
        return (self.high - self.low) / 2


def paired(differences: Sequence[float]) -> Estimate:
    """Return the mean of finite differences with its t intervals."""
    n, mean = len(differences), float(np.mean(differences)) if differences else math.nan
    if n < 2:
        return Estimate(mean, -math.inf, math.inf, -math.inf, math.inf, n, math.nan)
    sd = float(np.std(differences, ddof=1))
    error = sd / math.sqrt(n)
    both, one = t_quantile(0.5 + LEVEL / 2, n - 1) * error, t_quantile(LEVEL, n - 1) * error
    return Estimate(mean, mean - both, mean + both, mean - one, mean + one, n, sd)


def with_censored(values: Sequence[float]) -> Estimate:
    """Return :func:`paired` if all values are finite; else their median, with order statistics as its interval.

    A value of +inf is one that was never reached. The interval of the median needs no shape of the distribution: for
    B ~ binomial(n, 1/2), the k-th smallest value bounds it from below with probability P(B >= k).
    """
    censored = sum(math.isinf(value) for value in values)
    if not censored:
        return paired(values)
    ordered, n = sorted(values), len(values)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    two, one = _rank(n, (1 - LEVEL) / 2), _rank(n, 1 - LEVEL)

    def bounds(rank: int) -> tuple[float, float]:
        return (ordered[rank - 1], ordered[n - rank]) if rank else (-math.inf, math.inf)

    low, high = bounds(two)
    lower, upper = bounds(one)
    return Estimate(middle, low, high, lower, upper, n, math.nan, censored)


def share_interval(count: int, of: int) -> tuple[float, float]:
    """Return Wilson's two-sided interval at LEVEL of a share of independent trials."""
    z = 1.959964
    share, narrowing = count / of, z * z / of
    middle = (share + narrowing / 2) / (1 + narrowing)
    half = z / (1 + narrowing) * math.sqrt(share * (1 - share) / of + narrowing / (4 * of))
    return middle - half, middle + half


def _rank(n: int, tail: float) -> int:
    """Return the largest k with P(binomial(n, 1/2) < k) <= tail; 0 if there is none."""
    total, k = 0.0, 0
    while (total := total + math.comb(n, k) / 2**n) <= tail:
        k += 1
    return k


def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t above its median, by bisection."""
    low, high = 0.0, 1e3
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def t_cdf(t: float, degrees: int) -> float:
    """Return P(T <= t) for t >= 0: Abramowitz and Stegun, 26.7.3 and 26.7.4, exact for whole degrees."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    if degrees % 2:
        term, total = cosine, 0.0
        for k in range(1, degrees - 1, 2):
            total += term
            term *= cosine * cosine * (k + 1) / (k + 2)
        inside = 2 / math.pi * (angle + sine * total)
    else:
        term, total = 1.0, 0.0
        for k in range(0, degrees - 1, 2):
            total += term
            term *= cosine * cosine * (k + 1) / (k + 2)
        inside = sine * total
    return 0.5 + inside / 2
