"""From outcomes to figures; every figure of the page is computed here, from the raw outcomes.

Rewards are those of held-out questions. The *end* of a training is the mean of its evaluations in the last quarter of
its steps. Curves are smoothed over three evaluations before a target is looked for, in both trainings of a pair.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.study.statistics import Estimate, paired, with_censored
from benchmarks.study.training import Outcome

Float64 = NDArray[np.float64]
Seeds = Mapping[int, Outcome]
"""Trainings that differ in nothing but their seed."""
Alarm = Callable[[Outcome], int | None]
"""The first training step at which a guard fires."""

FALL = 0.08
"""A held-out reward so far below its best is a fall."""
KL_LIMIT, KL_BATCHES = 0.02, 3
"""The guard on ``kl_k3``: its mean over so many batches is above the limit."""
RESPONSE_LIMIT = 0.5
"""The guard on the KL divergence per response: its mean over KL_BATCHES batches is above the limit, in nats."""
ESS_LIMIT = 0.3
"""The guard on the effective sample size per token: one batch is below."""


def by_arm(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, dict[int, Outcome]]]:
    """Return outcomes by task, arm and seed."""
    found: dict[str, dict[str, dict[int, Outcome]]] = defaultdict(lambda: defaultdict(dict))
    for name, outcome in outcomes.items():
        task, arm, seed = name.split("/")
        found[task][arm][int(seed)] = outcome
    return {task: dict(arms) for task, arms in found.items()}


# ---------------------------------------------------------------- one training


def series(outcome: Outcome, what: str) -> Float64:
    """Return a figure of every evaluation; NaN where it was not counted."""
    return np.array([getattr(evaluation, what) for evaluation in outcome.evaluations], np.float64)


def smoothed(rewards: Float64) -> Float64:
    """Return the means over three neighbours; the start stays, and the last one has two."""
    found = np.array([rewards[max(0, i - 1) : i + 2].mean() for i in range(len(rewards))])
    found[0] = rewards[0]
    return found


def quarter(outcome: Outcome, what: str = "reward", which: int = 4, steps: int | None = None) -> float:
    """Return the mean of the evaluations in a quarter (1 to 4) of the first ``steps`` (None: all); NaN without any."""
    last, at = outcome.settings.steps if steps is None else steps, series(outcome, "step")
    there = series(outcome, what)[(at > 0.25 * (which - 1) * last) & (at <= 0.25 * which * last)]
    return float(there.mean()) if len(there) else math.nan


def end(outcome: Outcome, what: str = "reward", steps: int | None = None) -> float:
    """Return the mean of the evaluations in the last quarter of the first ``steps`` (None means all)."""
    return quarter(outcome, what, 4, steps)


def reached(outcome: Outcome, reward: float, of: str = "decode_steps") -> float:
    """Return what had been spent when the smoothed reward first reached ``reward``; inf if it never did."""
    spent, curve = series(outcome, of), smoothed(series(outcome, "reward"))
    for i in range(len(curve)):
        if curve[i] >= reward:
            if i == 0 or curve[i] == curve[i - 1]:
                return float(spent[i])
            share = (reward - curve[i - 1]) / (curve[i] - curve[i - 1])
            return float(spent[i - 1] + share * (spent[i] - spent[i - 1]))
    return math.inf


def reward_after(outcome: Outcome, spent: float, of: str = "decode_steps") -> float:
    """Return the smoothed reward when so much had been spent."""
    return float(np.interp(spent, series(outcome, of), smoothed(series(outcome, "reward"))))


# ---------------------------------------------------------------- pairs


def pairs(arm: Seeds, other: Seeds) -> Iterator[tuple[Outcome, Outcome]]:
    """Yield the trainings of the same seeds."""
    for seed in sorted(arm.keys() & other.keys()):
        yield arm[seed], other[seed]


def common_steps(a: Outcome, b: Outcome) -> int:
    """Return the steps of the shorter training."""
    return min(a.settings.steps, b.settings.steps)


def difference(arm: Seeds, other: Seeds, what: str = "reward") -> Estimate:
    """Return the end's difference at equal training steps: those of the shorter training."""
    return paired(
        [end(a, what, steps) - end(b, what, steps) for a, b in pairs(arm, other) for steps in [common_steps(a, b)]]
    )


def ratio(arm: Seeds, sync: Seeds, step: int, of: str = "decode_steps") -> Estimate:
    """Return the log ratio of what is spent to sync's smoothed reward at ``step``; not reached is censored.

    Pairs in which it was not counted are left out.
    """
    values = [log_ratio(a, b, step, of) for a, b in pairs(arm, sync)]
    return with_censored([value for value in values if value is not None])


def log_ratio(outcome: Outcome, sync: Outcome, step: int, of: str = "decode_steps") -> float | None:
    """Return the log ratio of what is spent to sync's smoothed reward at ``step``.

    It is inf if that reward is never reached, and None if sync has it from the start, or what was spent is NaN: not
    counted.
    """
    target = smoothed(series(sync, "reward"))[list(series(sync, "step")).index(step)]
    by_sync, needed = reached(sync, target, of), reached(outcome, target, of)
    if not by_sync > 0 or math.isnan(needed):
        return None
    return math.log(needed / by_sync) if math.isfinite(needed) and needed > 0 else math.inf


def at_equal(arm: Seeds, other: Seeds, of: str) -> Estimate:
    """Return the reward's difference when both have spent what the cheaper has at its last evaluation but one.

    There both curves are means over three evaluations.
    """
    values = []
    for a, b in pairs(arm, other):
        budget = min(series(a, of)[-2], series(b, of)[-2])
        values.append(reward_after(a, budget, of) - reward_after(b, budget, of))
    return paired(values)


def spent_ratio(arm: Seeds, sync: Seeds, of: str = "decode_steps") -> Estimate:
    """Return the log ratio of what is spent in as many training steps."""
    values = []
    for a, b in pairs(arm, sync):
        steps = common_steps(a, b)
        spent_a, spent_b = (series(o, of)[list(series(o, "step")).index(steps)] for o in (a, b))
        values.append(math.log(spent_a / spent_b))
    return paired(values)


def never(arm: Seeds, sync: Seeds) -> tuple[int, int]:
    """Return how many pairs never reach sync's reward of its last step, and of how many."""
    both = arm.keys() & sync.keys()
    last = [ratio({seed: arm[seed]}, {seed: sync[seed]}, sync[seed].settings.steps) for seed in both]
    return sum(one.censored for one in last), sum(one.n for one in last)


def falls(arm: Seeds) -> int:
    """Return how many trainings fell."""
    return sum(fall(outcome) is not None for outcome in arm.values())


def best_rate(rates: Mapping[float, Seeds]) -> float:
    """Return the learning rate with the highest mean end, over the seeds that all rates have."""
    common = set.intersection(*(set(seeds) for seeds in rates.values()))
    return max(rates, key=lambda rate: float(np.mean([end(rates[rate][seed]) for seed in common])))


# ---------------------------------------------------------------- the guards


def fall(outcome: Outcome) -> int | None:
    """Return the step of the first evaluation that is FALL below the best before it."""
    best = -math.inf
    for evaluation in outcome.evaluations:
        if evaluation.reward < best - FALL:
            return evaluation.step
        best = max(best, evaluation.reward)
    return None


def kl_alarm(outcome: Outcome) -> int | None:
    """Return the first training step at which the guard on ``kl_k3`` fires."""
    return _first_above(outcome.kl_k3, KL_LIMIT)


def response_alarm(outcome: Outcome) -> int | None:
    """Return the first training step at which the guard on the KL divergence per response fires."""
    return _first_above(outcome.kl_response, RESPONSE_LIMIT)


def far_alarm(outcome: Outcome) -> int | None:
    """Return the first training step at which the same guard fires, without the tokens in the dead zone."""
    return _first_above(outcome.kl_response_far, RESPONSE_LIMIT)


def _first_above(values: Sequence[float], limit: float) -> int | None:
    """Return the first training step at which the mean over the latest KL_BATCHES values is above the limit."""
    for i in range(KL_BATCHES - 1, len(values)):
        if np.mean(values[i + 1 - KL_BATCHES : i + 1]) > limit:
            return i + 1
    return None


def ess_alarm(outcome: Outcome) -> int | None:
    """Return the first training step at which the guard on the effective sample size fires."""
    return next((i + 1 for i, value in enumerate(outcome.ess_token) if value < ESS_LIMIT), None)


@dataclass(frozen=True, slots=True)
class Guard:
    """What a guard did over many trainings.

    Attributes:
        falls: trainings that fell.
        in_time: of those, with an alarm at or before the evaluation that shows the fall.
        early: of those, with an alarm before the step of that evaluation.
        sound: trainings with older tokens that did not fall; without, the guard has nothing to see.
        false: of those, with an alarm.
    """

    falls: int
    in_time: int
    early: int
    sound: int
    false: int


def guard(outcomes: Sequence[Outcome], alarm: Alarm = kl_alarm) -> Guard:
    """Return what a guard did."""
    fell = [(alarm(o), at) for o in outcomes if (at := fall(o)) is not None]
    sound = [alarm(o) for o in outcomes if fall(o) is None and o.old_share > 0]
    return Guard(
        falls=len(fell), in_time=sum(at is not None and at <= shown for at, shown in fell),
        early=sum(at is not None and at < shown for at, shown in fell), sound=len(sound),
        false=sum(at is not None for at in sound),
    )  # fmt: skip
