"""The distance of a batch from the weights that are trained on it: effective sample size and KL, in all and by age.

With w = p / q, the trainer's probability of a token over the one it was sampled with, and n tokens:

* effective sample size (Kish): (sum of w)**2 / (n sum of w**2), in (0, 1]: the share of the tokens that would do as
  well, were they of the trained weights;
* KL(q || p) in nats per token (Schulman, "Approximating KL Divergence", joschu.net/blog/kl-approx.html): k1 = -log w,
  unbiased, and k3 = w - 1 - log w, unbiased, never negative and of less variance where w is near 1.

The age of a token is the number of weight updates between it and its training. At age 0 p and q differ only by what the
engine computes otherwise than the trainer. Kept tokens (``on_weight_update: keep``) differ by more at any age: they
were sampled over keys that older weights wrote, and p is computed over those of one set of weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.corrections.importance import LIMIT, check_logprobs, float64_logprobs
from april.errors import OffPolicyError

Float64 = NDArray[np.float64]

LARGEST = 300.0
"""exp of more is cut in k3, so that sums stay finite."""


def off_policy_report(batch: Any, logprobs: Any, *, min_effective_sample_size: float = 0.0) -> dict[str, float]:
    """Report on a batch, given the log-probabilities under the weights that are trained.

    ``ess_token`` (of the tokens' ratios), ``ess_response`` (of the products over each response), ``weight_response``
    (mean of these products, each at most 2: what a response weighs in :func:`policy_loss`), ``kl_k1`` and ``kl_k3``
    (nats per token), ``tokens``; and for each age that occurs ``age_<a>/ess_token``, ``age_<a>/kl_k1``,
    ``age_<a>/kl_k3`` and ``age_<a>/tokens``. Kept tokens are in none of the ages: where there are any,
    ``kept/ess_token``, ``kept/kl_k1``, ``kept/kl_k3``, ``kept/tokens``, and ``kept/mismatch``, the mean of abs(log w),
    beside ``own/mismatch``, that of the others. Only tokens with loss count; without any, ``tokens`` is all there is.

    Args:
        batch: a :class:`april.Batch`.
        logprobs: the trainer's, float32 or float64 array or tensor, [B, T] as ``batch.padded()["logprobs"]`` or flat as
            ``batch.ragged()["logprobs"]``; of the temperature of the batch, before its first optimizer step.
        min_effective_sample_size: with an ``ess_token`` below, OffPolicyError is raised; 0: never. It finds gross
            mistakes and gave no warning of falling rewards in small experiments; :class:`DriftGuard` did.

    Raises ValueError for another shape, numbers that are no log-probabilities (NaN, infinite, above 0) where there is
    loss, float16 and bfloat16, and a limit outside [0, 1].
    """
    if not 0 <= min_effective_sample_size <= 1:
        raise ValueError(
            f"off_policy_report: min_effective_sample_size must be in [0, 1], got {min_effective_sample_size!r}"
        )
    arrays = batch.ragged()
    own = _flat(float64_logprobs("off_policy_report", "logprobs", logprobs), batch.lengths)
    counted = arrays["loss_mask"] != 0
    check_logprobs("off_policy_report", "logprobs", own, counted)
    log_ratios = own[counted] - arrays["logprobs"][counted].astype(np.float64)
    ages, kept = batch.token_ages[counted], arrays["kept_mask"][counted] != 0
    report = _figures(log_ratios)
    if len(log_ratios):
        rows = np.repeat(np.arange(len(batch.lengths)), batch.lengths)[counted]
        products = np.bincount(rows, log_ratios)[np.unique(rows)]
        report["ess_response"] = effective_sample_size(products)
        report["weight_response"] = float(np.exp(np.minimum(products, math.log(LIMIT))).mean())
    for age in np.unique(ages[~kept]):
        here = (ages == age) & ~kept
        report |= {f"age_{age}/{name}": value for name, value in _figures(log_ratios[here]).items()}
    if kept.any():
        report |= {f"kept/{name}": value for name, value in _figures(log_ratios[kept]).items()}
        report |= {"kept/mismatch": float(np.abs(log_ratios[kept]).mean())}
        if not kept.all():
            report |= {"own/mismatch": float(np.abs(log_ratios[~kept]).mean())}
    found = report.get("ess_token", 1.0)
    if not found >= min_effective_sample_size:  # which NaN is not, either
        raise OffPolicyError(_sentence(batch.id, found, min_effective_sample_size, report), report)
    return report


@dataclass(slots=True)
class DriftGuard:
    """An alarm on ``kl_k3``: its mean over some batches is above a limit.

    A batch without trained tokens does not count. After an alarm the guard begins anew, so that what you did about it
    can show. So does a new one after a restart, unless it gets the ``recent`` of the old one.

    Attributes:
        limit: largest mean, in nats per token, above 0.
        batches: number of batches that the mean is over; before so many there is no alarm.
        recent: ``kl_k3`` of the latest batches since the last alarm; plain floats, for a checkpoint.

    Raises ValueError for a limit that is not above 0, and fewer than one batch.
    """

    limit: float = 0.02
    batches: int = 3
    recent: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 < self.limit < math.inf or self.batches < 1:
            raise ValueError(f"DriftGuard: give a limit above 0 and at least 1 batch, got {self.limit}, {self.batches}")

    def exceeded(self, report: Mapping[str, float]) -> bool:
        """Count what :func:`off_policy_report` said of a batch, once per batch, and return whether this is an alarm.

        Raises ValueError for a mapping without the report's ``tokens``.
        """
        tokens = report.get("tokens")
        if tokens is None:
            raise ValueError("DriftGuard: give the report that april.off_policy_report returned, whole")
        if not tokens:
            return False
        self.recent = [*self.recent, report["kl_k3"]][-self.batches :]
        if len(self.recent) < self.batches or math.fsum(self.recent) <= self.limit * self.batches:
            return False
        self.recent = []
        return True


def effective_sample_size(log_ratios: Float64) -> float:
    """(sum of w)**2 / (n sum of w**2) of n > 0 weights, from their logarithms: in (0, 1]."""
    w = np.exp(log_ratios - log_ratios.max())  # a factor that all have cancels
    return float(w.sum() ** 2 / (len(w) * (w**2).sum()))


def _figures(log_ratios: Float64) -> dict[str, float]:
    if not len(log_ratios):
        return {"tokens": 0.0}
    k3 = np.expm1(np.minimum(log_ratios, LARGEST)) - log_ratios
    return {
        "ess_token": effective_sample_size(log_ratios),
        "kl_k1": float(-log_ratios.mean()),
        "kl_k3": float(k3.mean()),
        "tokens": float(len(log_ratios)),
    }


def _flat(logprobs: Float64, lengths: NDArray[np.int32]) -> Float64:
    """Padded or flat, as flat."""
    padded = len(lengths), int(lengths.max(initial=0))
    if logprobs.shape == padded:
        flat: Float64 = logprobs[np.arange(padded[1]) < lengths[:, None]]
        return flat
    if logprobs.shape == (int(lengths.sum()),):
        return logprobs
    raise ValueError(
        f"off_policy_report: logprobs have the shape {list(logprobs.shape)}; give {list(padded)} as "
        f'batch.padded()["logprobs"], or [{int(lengths.sum())}] as batch.ragged()["logprobs"]'
    )


def _sentence(batch: int, found: float, limit: float, report: dict[str, float]) -> str:
    """Say what is wrong, by age, and what to do."""
    by_age = ", ".join(
        f"{value:.3f} at age {name.removeprefix('age_').partition('/')[0]}"
        for name, value in report.items()
        if name.startswith("age_") and name.endswith("/ess_token")
    )
    return (
        f"batch {batch} has an effective sample size of {found:.3f} of its tokens, below min_effective_sample_size="
        f"{limit:g} ({by_age}); if old tokens are the low ones, lower max_staleness; if those of age 0 are, engine and "
        "trainer compute different log-probabilities"
    )
