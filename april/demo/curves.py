"""What held-out rewards over a training say, the same for every arm: the end, and what is spent until a reward.

A curve has an entry per evaluation, the first one before any training: what had been spent until then (decode steps,
training steps, seconds) and the reward. It is smoothed over three evaluations before a reward is looked for in it, in
both trainings of a pair.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


def smoothed(rewards: Float64) -> Float64:
    """Return the means over three neighbours; the start stays, and the last one has two."""
    found = np.array([rewards[max(0, i - 1) : i + 2].mean() for i in range(len(rewards))])
    found[0] = rewards[0]
    return found


def quarter(steps: Float64, values: Float64, last: int, which: int = 4) -> float | None:
    """Return the mean of the evaluations in a quarter (1 to 4) of ``last`` training steps; None without any."""
    there = values[(steps > 0.25 * (which - 1) * last) & (steps <= 0.25 * which * last)]
    return float(there.mean()) if len(there) else None


def end(steps: Float64, values: Float64, last: int) -> float:
    """Return the mean of the evaluations in the last quarter of ``last`` training steps; the last step must be one."""
    found = quarter(steps, values, last)
    assert found is not None
    return found


def reached(spent: Float64, rewards: Float64, reward: float) -> float:
    """Return what had been spent when the smoothed rewards first reached ``reward``; inf if they never did."""
    curve = smoothed(rewards)
    for i in range(len(curve)):
        if curve[i] >= reward:
            if i == 0 or curve[i] == curve[i - 1]:
                return float(spent[i])
            share = (reward - curve[i - 1]) / (curve[i] - curve[i - 1])
            return float(spent[i - 1] + share * (spent[i] - spent[i - 1]))
    return math.inf


def log_ratio(
    spent: Float64, rewards: Float64, spent_by_sync: Float64, rewards_of_sync: Float64, at: int
) -> float | None:
    """Return the log ratio of what is spent to the smoothed reward that sync has at its evaluation ``at``.

    It is inf if that reward is never reached, and None if sync has it from the start, or what was spent is NaN: not
    counted.
    """
    target = smoothed(rewards_of_sync)[at]
    by_sync, needed = reached(spent_by_sync, rewards_of_sync, target), reached(spent, rewards, target)
    if not by_sync > 0 or math.isnan(needed):
        return None
    return math.log(needed / by_sync) if math.isfinite(needed) and needed > 0 else math.inf
