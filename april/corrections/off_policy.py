"""Measures how far off-policy a batch is: effective sample size and KL divergence, for all tokens and by their age.

With w = p / q, the trainer's probability of a token divided by its probability at sampling, and n tokens:

* effective sample size (Kish): (sum of w)**2 / (n sum of w**2), in (0, 1]. If it is 0.8, the n tokens carry as much
  information as 0.8 n tokens that were sampled from the trained weights;
* KL(q || p) in nats per token (Schulman, "Approximating KL Divergence", joschu.net/blog/kl-approx.html), estimated by
  k1 = -log w and by k3 = w - 1 - log w. Both are unbiased; k3 is never negative, and has less variance if w is near 1.

The age of a token is the number of weight updates between its generation and its training. At age 0, p and q differ
only because engine and trainer compute differently. Kept tokens were sampled with a KV cache of older weights
(``on_weight_update: keep``). Their p and q differ by more at any age, as p is computed with one set of weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.corrections.arguments import number
from april.corrections.importance import LIMIT, check_logprobs, float64_logprobs, warn_if_misaligned
from april.errors import OffPolicyError

Float64 = NDArray[np.float64]

LARGEST = 300.0
"""Largest log w in k3, so that sums stay finite."""


def off_policy_report(batch: Any, logprobs: Any, *, min_effective_sample_size: float = 0.0) -> dict[str, float]:
    """Measure how far off-policy a batch is, given log-probabilities under the trained weights, and return figures:

    * ``tokens``: number of tokens with loss. If it is 0, there are no other figures. Other tokens are ignored.
    * ``ess_token``: effective sample size of the tokens' ratios w.
    * ``ess_response``: effective sample size of the responses' ratios, the products of their tokens' ratios.
    * ``weight_response``: mean of the responses' ratios, each cut at 2 as in :func:`policy_loss`.
    * ``clip_share``: share of the tokens that belong to responses with a cut ratio.
    * ``kl_k1``, ``kl_k3``: KL divergence in nats per token; ``kl_response``: mean over responses of their sum of k3.
    * ``age_<a>/`` with ``tokens``, ``ess_token``, ``clip_share``, ``kl_k1`` and ``kl_k3``: the same for tokens of each
      age a, without kept tokens.
    * ``kept/`` with ``tokens``, ``ess_token``, ``kl_k1`` and ``kl_k3``: the same for kept tokens, if there are any.
      With them come ``kept/mismatch`` and ``own/mismatch``: mean of abs(log w) for kept tokens and for all others.

    Args:
        batch: batch, an :class:`april.Batch`.
        logprobs: the trainer's log-probabilities at each token's temperature, before the first optimizer step of the
            batch: float32 or float64 array or tensor, [B, T] like ``batch.padded()["logprobs"]`` or flat like
            ``batch.ragged()``.
        min_effective_sample_size: value of ``ess_token`` below which OffPolicyError is raised; 0 means no check. The
            check finds gross mistakes. In small experiments, only :class:`DriftGuard` warned of falling rewards.

    Raises ValueError for another shape, values of tokens with loss that are no log-probability (NaN, infinite, above
    0), float16 and bfloat16, and ``min_effective_sample_size`` outside [0, 1].
    """
    least = number("off_policy_report", "min_effective_sample_size", min_effective_sample_size)
    if not 0 <= least <= 1:
        raise ValueError(
            f"off_policy_report: min_effective_sample_size must be in [0, 1], got {min_effective_sample_size!r}"
        )
    arrays = batch.ragged()
    own = _flat(float64_logprobs("off_policy_report", "logprobs", logprobs), batch.lengths)
    counted = arrays["loss_mask"] != 0
    check_logprobs("off_policy_report", "logprobs", own, counted)
    log_ratios = own[counted] - arrays["logprobs"][counted].astype(np.float64)
    ages, kept = batch.token_ages[counted], arrays["kept_mask"][counted] != 0
    # kept tokens and tokens sampled under a grammar are not compared, as their p and q differ without any mistake
    comparable = (arrays["kept_mask"] == 0) & (arrays["constrained_mask"] == 0)
    fresh, sampled = counted & (batch.token_ages == 0) & comparable, arrays["logprobs"].astype(np.float64)
    warn_if_misaligned("off_policy_report", own, sampled, fresh, fresh=True)
    report, cut = _figures(log_ratios), np.zeros(len(log_ratios), np.bool_)
    if len(log_ratios):
        rows = np.repeat(np.arange(len(batch.lengths)), batch.lengths)[counted]
        by_row = np.bincount(rows, log_ratios)
        products, cut = by_row[np.unique(rows)], by_row[rows] > math.log(LIMIT)
        report["clip_share"] = float(cut.mean())
        report["ess_response"] = effective_sample_size(products)
        report["weight_response"] = float(np.exp(np.minimum(products, math.log(LIMIT))).mean())
        report["kl_response"] = report["kl_k3"] * report["tokens"] / len(products)
    for age in np.unique(ages[~kept]):
        here = (ages == age) & ~kept
        report |= {f"age_{age}/{name}": value for name, value in _figures(log_ratios[here]).items()}
        report[f"age_{age}/clip_share"] = float(cut[here].mean())
    if kept.any():
        report |= {f"kept/{name}": value for name, value in _figures(log_ratios[kept]).items()}
        report |= {"kept/mismatch": float(np.abs(log_ratios[kept]).mean())}
        if not kept.all():
            report |= {"own/mismatch": float(np.abs(log_ratios[~kept]).mean())}
    found = report.get("ess_token", 1.0)
    if not found >= least:  # "not >=" also catches NaN
        raise OffPolicyError(_sentence(batch.id, found, least, report), report)
    return report


@dataclass(slots=True)
class DriftGuard:
    """Detects drift: :meth:`exceeded` returns True when the mean ``kl_k3`` of the latest batches is above a limit.

    Batches without trained tokens are ignored. After an alarm the guard starts over, so that the effect of your
    reaction can be seen. It also starts over after a restart, unless ``recent`` is restored from a checkpoint.

    Attributes:
        limit: largest accepted mean in nats per token, above 0.
        batches: number of latest batches over which the mean is taken; with fewer batches there is no alarm.
        recent: ``kl_k3`` of at most ``batches`` batches since the last alarm, as plain floats for a checkpoint.

    Raises ValueError unless ``limit`` is above 0 and finite, ``batches`` is a whole number of at least 1, and
    ``recent`` is a list of numbers.
    """

    limit: float = 0.02
    batches: int = 3
    recent: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        limit, batches = number("DriftGuard", "limit", self.limit), number("DriftGuard", "batches", self.batches)
        if not 0 < limit < math.inf or not 1 <= batches < math.inf or batches % 1:
            raise ValueError(
                f"DriftGuard: give a limit above 0 and a whole number of batches from 1, got {limit:g} and {batches:g}"
            )
        self.batches, self.recent = int(batches), [number("DriftGuard", "each of recent", kl) for kl in self.recent]

    def exceeded(self, report: Mapping[str, float]) -> bool:
        """Add a batch's :func:`off_policy_report`, once per batch; return True if the limit is exceeded (an alarm).

        Raises ValueError if the report lacks ``tokens``, or ``kl_k3`` although there are tokens.
        """
        figures = report if isinstance(report, Mapping) else {}
        tokens = figures.get("tokens")
        kl = figures.get("kl_k3", None if tokens else 0.0)
        if tokens is None or kl is None:
            raise ValueError("DriftGuard: give the report that april.off_policy_report returned, whole")
        if not tokens:
            return False
        self.recent = [*self.recent, number("DriftGuard", "kl_k3", kl)][-self.batches :]
        if len(self.recent) < self.batches or math.fsum(self.recent) <= self.limit * self.batches:
            return False
        self.recent = []
        return True


def effective_sample_size(log_ratios: Float64) -> float:
    """Return (sum of w)**2 / (n sum of w**2), in (0, 1], of n > 0 weights, given their logarithms."""
    w = np.exp(log_ratios - log_ratios.max())  # a common factor cancels out
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
    """Return padded or flat log-probabilities as a flat array. Raises ValueError for any other shape."""
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
    """Return the message of an OffPolicyError: the effective sample size, its values by age, and what to do."""
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
