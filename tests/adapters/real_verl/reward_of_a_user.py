"""A reward that some responses get more of than others."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Share of ones among the letters."""
    return solution_str.count("1") / max(1, len(solution_str))
