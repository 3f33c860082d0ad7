"""A policy whose gradient is known exactly, in which reward and finishing order depend on the response's length.

A response is a run of tokens ``a`` and ``b``, ended by EOS or after 16 tokens; it is right (reward 1) with at least
three ``a``, which takes some length. Policy: a softmax over three logits. All responses with the same counts have the
same probability, score (gradient of the log-probability) and reward, so there are 153 different ones, and the gradient
of the mean reward is a sum over them. Shorter responses finish first; ties are broken by chance.

Nothing here knows what a baseline is: groups are drawn, and an estimate is held against the exact gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

PROBABILITIES = np.array([0.5, 0.35, 0.15])
"""Of a, b, EOS."""
LONGEST = 16
N = 8


def _responses() -> tuple[Array, Array]:
    """Counts of a, b, EOS of every kind of response, and its probability."""
    counts = [(a, b, int(a + b < LONGEST)) for a in range(LONGEST + 1) for b in range(LONGEST + 1 - a)]
    kinds = np.array(counts)
    orders = np.array([math.comb(a + b, a) for a, b, _ in counts])
    return kinds, orders * (PROBABILITIES**kinds).prod(1)


COUNTS, CHANCE = _responses()
LENGTHS = COUNTS.sum(1)
SCORES = COUNTS - LENGTHS[:, None] * PROBABILITIES
REWARDS = (COUNTS[:, 0] >= 3).astype(np.float64)
SHORT_AND_RIGHT = REWARDS - LENGTHS / (2 * LONGEST)
"""Other rewards, of many values."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """G groups of n responses; those that failed for good are not among what finishes.

    ``kinds`` int [G, n], ``finished_at`` float [G, n], inf for a failed one.
    """

    kinds: Array
    finished_at: Array
    reward_of: Array = field(default_factory=lambda: REWARDS)
    """float [kinds of responses]"""

    @property
    def gradient(self) -> Array:
        """Of the mean reward by the logits, exactly: float [3]."""
        return (CHANCE[:, None] * self.reward_of[:, None] * SCORES).sum(0)

    @property
    def rewards(self) -> Array:
        """float [G, n]."""
        return self.reward_of[self.kinds]

    @property
    def alive(self) -> Array:
        """bool [G, n]."""
        return np.isfinite(self.finished_at)

    @property
    def order(self) -> Array:
        """int [G, n]: who finished first, second, ... (failed ones last)."""
        return self.finished_at.argsort(1)

    @property
    def rank(self) -> Array:
        """int [G, n]: place of each in that order, from 0."""
        return self.order.argsort(1)

    def cohort(self, k: int) -> tuple[Array, Array]:
        """Numbers (then -1) and rewards of the first min(k, m) of the m that finish: int, float [G, k]."""
        first = self.order[:, :k]
        there = np.arange(first.shape[1]) < self.alive.sum(1)[:, None]
        return np.where(there, first, -1), np.take_along_axis(self.rewards, first, 1)


def draw(groups: int, seed: int, *, failing: Any = None, replaced: bool = False, least: int = 2) -> Groups:
    """Groups at random. ``failing(lengths)``: probability that a response of this length fails, somewhere on its way.

    A failed one is gone; with ``replaced`` a fresh one begins then in its place. Groups of which fewer than ``least``
    are left are given up.
    """
    rng = np.random.default_rng(seed)
    shape = (groups, N)
    kinds = _drawn(rng, shape)
    begun = np.zeros(shape)
    fails = np.zeros(shape, bool) if failing is None else rng.random(shape) < failing(LENGTHS[kinds])
    while replaced and fails.any():
        begun = np.where(fails, begun + rng.random(shape) * LENGTHS[kinds], begun)
        kinds = np.where(fails, _drawn(rng, shape), kinds)
        fails &= rng.random(shape) < failing(LENGTHS[kinds])
    finished_at = np.where(fails, np.inf, begun + LENGTHS[kinds] + 0.1 * rng.random(shape))
    kept = (~fails).sum(1) >= least
    return Groups(kinds=kinds[kept], finished_at=finished_at[kept])


def draw_in_places(runs: int, groups: int, places: int, seed: int) -> Groups:
    """As :func:`draw`, but so many responses are generated at a time, one group after the other; in each of ``runs``.

    Where there are several groups, those that start before any response has ended are left out.
    """
    rng = np.random.default_rng(seed)
    kinds = _drawn(rng, (runs, groups * N))
    free = np.zeros((runs, places))
    finished_at = np.empty(kinds.shape)
    run = np.arange(runs)
    for i, length in enumerate((LENGTHS[kinds] + 0.1 * rng.random(kinds.shape)).T):
        place = free.argmin(1)
        free[run, place] += length
        finished_at[:, i] = free[run, place]
    first = 0 if groups == 1 else -(-places // N)
    of_groups = (a.reshape(runs, groups, N)[:, first:].reshape(-1, N) for a in (kinds, finished_at))
    return Groups(**dict(zip(("kinds", "finished_at"), of_groups, strict=True)))


def _drawn(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    found = np.searchsorted(np.cumsum(CHANCE), rng.random(shape))
    return np.minimum(found, len(CHANCE) - 1)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Mean over samples of advantage x score, its standard error, and what it should be: float [3] each."""

    mean: Array
    error: Array
    exact: Array

    @property
    def bias(self) -> float:
        """|mean - exact| / |exact|."""
        return float(np.linalg.norm(self.mean - self.exact) / np.linalg.norm(self.exact))

    @property
    def noise(self) -> float:
        """What the bias of an unbiased estimate comes to by chance: |error| / |exact|."""
        return float(np.linalg.norm(self.error) / np.linalg.norm(self.exact))

    @property
    def errors_off(self) -> float:
        """Largest distance from the exact gradient, in standard errors."""
        return float(np.abs((self.mean - self.exact) / self.error).max())

    @property
    def bias_of_direction(self) -> float:
        """The same as ``bias``, after the estimate was scaled as fits best: a learning rate does not matter."""
        scale = self.mean @ self.exact / (self.mean @ self.mean)
        return float(np.linalg.norm(scale * self.mean - self.exact) / np.linalg.norm(self.exact))


def estimate(groups: Groups, advantages: Array, scale: float = 1.0, kept: Array | None = None) -> Estimate:
    """What a trainer gets from all delivered samples, each with the same weight. ``advantages`` float [G, n].

    It should be ``scale`` times the gradient. ``kept`` bool [G, n]: those that are delivered (all that finished).
    """
    delivered = groups.alive if kept is None else groups.alive & kept
    sums = (np.where(delivered, advantages, 0.0)[..., None] * SCORES[groups.kinds]).sum(1)
    counts = delivered.sum(1)
    mean = sums.sum(0) / counts.sum()
    error = (sums - counts[:, None] * mean).std(0) * math.sqrt(len(counts)) / counts.sum()
    return Estimate(mean=mean, error=error, exact=scale * groups.gradient)
