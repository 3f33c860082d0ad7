"""How long the responses are: the first thing to know, because the tail is what over-sampling pays for."""

from __future__ import annotations

from typing import Any

import numpy as np

from april.simulate.workload import Workload

BINS = 64
PERCENTILES = (10, 25, 50, 75, 90, 95, 99, 99.9)


def length_statistics(workload: Workload) -> dict[str, Any]:
    """Figures and a histogram of the workload's response lengths (tokens, cut at max_response_len)."""
    rows = workload.length_sample
    flat = rows.ravel()
    steps = len(rows) // workload.groups
    longest = rows[: steps * workload.groups].reshape(steps, -1).max(axis=1)
    median, mean = float(np.median(flat)), float(flat.mean())
    log = np.log(rows)
    between = float(np.var(log.mean(axis=1))) if workload.samples > 1 else 0.0
    within = float(log.var(axis=1, ddof=1).mean()) if workload.samples > 1 else 0.0
    # the variance of the group means holds a share 1/n of the variance within groups
    between = max(0.0, between - within / workload.samples)
    slowest = np.sort(flat)[-max(1, flat.size // 20) :]
    counts, edges = np.histogram(flat, bins=BINS, range=(0, int(flat.max())))
    return {
        "samples": int(flat.size),
        "mean": mean,
        "median": median,
        "longest": int(flat.max()),
        "longest_over_median": float(flat.max()) / median,
        "longest_of_a_step_mean": float(longest.mean()),
        "longest_of_a_step_over_median": float(longest.mean()) / median,
        "percentiles": {f"p{p:g}": float(np.percentile(flat, p)) for p in PERCENTILES},
        "share_at_the_cap": float((flat == workload.max_response_len).mean()),
        "token_share_of_the_longest_5_percent": float(slowest.sum() / flat.sum()),
        "share_of_log_variance_between_prompts": between / (between + within) if between + within > 0 else 0.0,
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }
