"""Summarises how far off-policy the tokens of a run were when they were trained, by age, from the trainer's reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from april.view.run_data import RecordedReport, RunData

DRIFT = 0.02
"""Mean ``kl_k3`` of the latest batches above which a run drifts; also the default limit of ``DriftGuard``."""
LATEST_BATCHES = 3
"""Number of latest batches over which the mean ``kl_k3`` is taken."""
_AGE = re.compile(r"age_(\d{1,6})")


@dataclass(frozen=True, slots=True)
class TokenClassMeans:
    """Mean figures of a class of tokens over all reports; a figure is None if no report has it.

    Attributes:
        name: name of the class of tokens, for people.
        tokens: number of tokens with loss.
        kl: KL(q || p) in nats per token, by the k3 estimator.
        ess: effective sample size, as a share of the tokens.
        clipped: share of the tokens whose importance weight is clipped.
    """

    name: str
    tokens: float
    kl: float | None
    ess: float | None
    clipped: float | None


@dataclass(frozen=True, slots=True)
class OffPolicySummary:
    """Summary of how far off-policy a run's trained tokens were.

    Attributes:
        batches: number of batches with a report.
        rows: figures of all tokens, then of each age, then of tokens whose KV cache was kept through a weight update.
        latest: mean ``kl_k3`` of the latest batches.
    """

    batches: int
    rows: list[TokenClassMeans]
    latest: float

    @property
    def drifts(self) -> bool:
        """True if ``latest`` is above :data:`DRIFT`."""
        return self.latest > DRIFT


def off_policy_summary(run: RunData) -> OffPolicySummary | None:
    """Summarise the reports of a run; None if it has no reports."""
    reports = [report for report in run.reports if report.report.get("tokens")]
    if not reports:
        return None
    prefixes = {name.rpartition("/")[0] for report in reports for name in report.report}
    ages = sorted(int(found[1]) for prefix in prefixes if (found := _AGE.fullmatch(prefix)))
    rows = [_figures("all", "", reports), *(_figures(_age(age), f"age_{age}/", reports) for age in ages)]
    if "kept" in prefixes:
        rows.append(_figures("kept over an update", "kept/", reports))
    ids = dict.fromkeys(report.id for report in reports)
    last = list(ids)[-LATEST_BATCHES:]
    latest = _figures("", "", [report for report in reports if report.id in last]).kl
    return OffPolicySummary(len(ids), rows, latest or 0.0)


def _age(age: int) -> str:
    return "of the present weights" if age == 0 else f"{age} update{'s' if age > 1 else ''} old"


def _figures(name: str, prefix: str, reports: Sequence[RecordedReport]) -> TokenClassMeans:
    figures = [report.report for report in reports]

    def mean(of: str) -> float | None:
        pairs = [(r[prefix + of], r.get(f"{prefix}tokens", 0.0)) for r in figures if prefix + of in r]
        values, weights = np.array(pairs, np.float64).reshape(-1, 2).T
        return float(np.average(values, weights=weights)) if weights.sum() > 0 else None

    tokens = sum(report.get(f"{prefix}tokens", 0.0) for report in figures)
    return TokenClassMeans(name, tokens, mean("kl_k3"), mean("ess_token"), mean("clip_share"))
