"""Computes advantages for the losses of GRPO and related methods.

**One formula for all groups.** A response with reward r is compared with k - 1 siblings, the other responses of its
group that finished first (:func:`first_others`). If groups are delivered whole, k is the size of the group. With a
``group_quorum`` below 1, k is the number of responses that must finish before a part of the group is delivered. Let b
be the mean of the siblings' rewards, and S the siblings' rewards together with r:

=========  ==================================  =========================================================================
method     advantage                           paper
=========  ==================================  =========================================================================
`grpo`     (k - 1) / k (r - b) / (std(S) + e)  GRPO, arXiv 2402.03300: (r - mean(S)) / std(S)
`dr_grpo`  (k - 1) / k (r - b)                 Dr. GRPO, arXiv 2503.20783: r - mean(S)
`rloo`     r - b                               RLOO, arXiv 2402.14740: r - mean of the others
`dapo`     as `grpo`                           DAPO, arXiv 2503.14476; only the weight of a token differs
`gspo`     as `grpo`                           GSPO, arXiv 2507.18071; only the ratio differs: each response has one,
                                               the geometric mean of its tokens' ratios
=========  ==================================  =========================================================================

(k - 1) / k (r - b) equals r - mean(S): the papers' means include the sample itself.

**Why these siblings.** Neither the response nor its length influences which siblings it is compared with, so b is
independent of the response: the gradient of `rloo` is unbiased, and the gradient of `dr_grpo` is unbiased up to the
factor (k - 1) / k. If instead a late response were compared with all siblings, its baseline would depend on its length.
Division by the standard deviation is biased even with whole groups, as std(S) depends on the response's own reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from april.corrections.arguments import array_of, number

if TYPE_CHECKING:
    import torch


Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

Method = Literal["grpo", "dr_grpo", "rloo", "dapo", "gspo"]
METHODS: tuple[str, ...] = get_args(Method)
Cohort = tuple[tuple[int, float], ...]
"""(index in the group, reward) of the first k samples of a group to finish, in the order in which they finished."""


def first_others(indices: ArrayLike, cohort_indices: ArrayLike, cohort_rewards: ArrayLike) -> Float64:
    """Return the rewards with which each sample is compared: float64 [B, K], padded with NaN.

    A sample among the first k of its group to finish is compared with the other k - 1 of them; a later sample is
    compared with the first k - 1.

    Args:
        indices: index of each sample in its group, int [B].
        cohort_indices: indices of the first k samples to finish, in that order, padded with -1; int [B, K].
        cohort_rewards: rewards of these samples, float [B, K]; values in the padding are ignored.
    """
    own, cohort = np.asarray(indices), np.asarray(cohort_indices)
    if not cohort.shape[1]:
        return np.empty(cohort.shape, np.float64)
    among = cohort == own[:, None]
    there = cohort >= 0
    left_out = np.where(among.any(1), among.argmax(1), there.sum(1) - 1)
    there &= np.arange(cohort.shape[1]) != left_out[:, None]
    return np.where(there, cohort_rewards, np.nan)


def first_others_of(indices: ArrayLike, cohorts: Sequence[Cohort]) -> Float64:
    """Return the same as :func:`first_others` for B cohorts of different sizes, as delivered samples have them."""
    widest = max((len(cohort) for cohort in cohorts), default=0)
    filled = [(*cohort, *((-1, 0.0),) * (widest - len(cohort))) for cohort in cohorts]
    table = np.array(filled, np.float64).reshape(len(cohorts), widest, 2)
    return first_others(indices, table[..., 0].astype(np.int64), table[..., 1])


@overload
def group_advantages(
    rewards: torch.Tensor, baseline_rewards: Any, method: Method = ..., *, epsilon: float = ..., ddof: int = ...
) -> torch.Tensor: ...
@overload
def group_advantages(
    rewards: ArrayLike, baseline_rewards: Any, method: Method = ..., *, epsilon: float = ..., ddof: int = ...
) -> Float32: ...
def group_advantages(
    rewards: Any, baseline_rewards: Any, method: Method = "grpo", *, epsilon: float = 1e-6, ddof: int = 0
) -> Any:
    """Compute the advantages of B responses, each compared with its siblings: float32 [B].

    The result is a tensor if ``rewards`` is a tensor. Rewards are rounded to float32, as in batches. An advantage is
    exactly 0 if the response's reward equals all the rewards with which it is compared.

    Args:
        rewards: rewards of the responses, float array or tensor [B] on any device; the result has no gradient.
        baseline_rewards: rewards with which each response is compared, without its own: B arrays of any lengths
            (``sample.baseline_rewards``), or one array or tensor [B, K] padded with NaN.
        method: one of ``grpo``, ``dr_grpo``, ``rloo``, ``dapo``, ``gspo``; the table is at the top of this module.
        epsilon: number added to the standard deviation, in methods that divide by it.
        ddof: 0 to divide the variance by k, or 1 to divide it by k - 1 as torch, TRL, verl and slime do.

    Raises ValueError for an unknown method, shapes that do not match, rewards that are not finite, a response without
    siblings for ``rloo``, and values that are no numbers.
    """
    check_method(method)
    check_deviation(epsilon, ddof)
    own = _float32(np.asarray(array_of("group_advantages", "rewards", rewards), np.float64))
    others = _float32(_rectangle(baseline_rewards))
    if own.ndim != 1 or others.ndim != 2 or len(others) != len(own):
        raise ValueError(
            f"group_advantages: rewards have the shape {list(own.shape)} and baseline_rewards {list(others.shape)}; "
            "give one reward and one row of siblings' rewards per response"
        )
    finite = np.isfinite(own) & ~np.isinf(others).any(1)
    if not finite.all():
        row = int(np.argmin(finite))
        raise ValueError(
            f"group_advantages: response {row} has the reward {own[row]} among {others[row]}; give finite numbers"
        )

    there = ~np.isnan(others)
    size = there.sum(1)
    ahead = np.where(there, own[:, None] - others, 0.0)
    if method == "rloo":
        if not size.all():
            raise ValueError(
                f"group_advantages: response {int(np.argmin(size))} has no sibling, and rloo compares with the others "
                "only; set n_samples_per_prompt (and min_group_size, if failed responses shrink groups) to at least 2"
            )
        advantages = ahead.sum(1) / size
    else:
        k = size + 1
        advantages = ahead.sum(1) / k
        if method != "dr_grpo":
            squares = advantages**2 + (np.where(there, advantages[:, None] - ahead, 0.0) ** 2).sum(1)
            std = np.sqrt(squares / np.maximum(k - ddof, 1))
            advantages = np.divide(advantages, std + epsilon, out=np.zeros_like(own), where=std + epsilon > 0)
    return same_kind(rewards, advantages.astype(np.float32))


def process_advantages(own: ArrayLike, others: ArrayLike, *, epsilon: float = 1e-6, ddof: int = 0) -> Float64:
    """Return the advantage of each turn (or step) of one response from rewards per turn: float64 [turns].

    GRPO with process rewards (DeepSeekMath, arXiv 2402.03300, section 4.1.3): each reward is reduced by the mean of all
    turns' rewards of the group and divided by their standard deviation. The advantage of a turn is the sum of these
    numbers over the turn and all later turns of the response.

    Args:
        own: rewards of the response's turns, [turns].
        others: rewards of all turns of the responses with which it is compared, [any number].
        epsilon: number added to the standard deviation.
        ddof: 0 to divide the variance by the number of rewards, 1 to divide it by this number minus 1.

    Raises ValueError if ``ddof`` is neither 0 nor 1, or ``epsilon`` is negative or infinite.
    """
    check_deviation(epsilon, ddof)
    rewards = np.asarray(own, np.float64)
    every = np.concatenate((rewards, np.asarray(others, np.float64)))
    if not len(rewards) or every.min() == every.max():  # exactly 0; with a rounded mean it would be nearly 0
        return np.zeros(len(rewards), np.float64)
    std = np.sqrt(((every - every.mean()) ** 2).sum() / max(len(every) - ddof, 1))
    found: Float64 = np.cumsum(((rewards - every.mean()) / (std + epsilon))[::-1])[::-1]
    return found


def check_method(method: str) -> None:
    """Raise ValueError for an unknown method."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")


def check_deviation(epsilon: float, ddof: int) -> None:
    """Raise ValueError unless ``ddof`` is 0 or 1, and ``epsilon`` is finite and at least 0."""
    if ddof not in (0, 1) or not 0 <= number("advantages", "epsilon", epsilon) < math.inf:
        raise ValueError(
            f"advantages: ddof must be 0 or 1, epsilon at least 0 and finite, got {ddof!r} and {epsilon!r}"
        )


def _rectangle(rows: Any) -> Float64:
    """Return rows of any lengths as one array, filled up with NaN on the right."""
    who, what = "group_advantages", "baseline_rewards"
    if not hasattr(rows, "__len__") or (hasattr(rows, "ndim") and rows.dtype != object):
        found = np.asarray(array_of(who, what, rows), np.float64)
        return found[:, None] if found.ndim == 1 else found
    arrays = [np.atleast_1d(np.asarray(array_of(who, what, row), np.float64)) for row in rows]
    filled = np.full((len(arrays), max((len(a) for a in arrays), default=0)), np.nan)
    for row, array in zip(filled, arrays, strict=True):
        row[: len(array)] = array
    return filled


def _float32(rewards: Float64) -> Float64:
    """Return rewards rounded to float32, as a batch holds them; infinite if float32 cannot represent them."""
    with np.errstate(over="ignore"):
        return rewards.astype(np.float32).astype(np.float64)


def same_kind(given: Any, found: Float32) -> Any:
    """Return ``found`` as a tensor on the device of ``given`` if ``given`` is a tensor, else unchanged."""
    if not hasattr(given, "detach"):
        return found
    import torch

    return torch.from_numpy(found).to(given.device)
