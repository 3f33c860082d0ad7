"""A reward that some responses get more of than others."""

from __future__ import annotations

from collections import Counter
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Share of ones among the letters."""
    return solution_str.count("1") / max(1, len(solution_str))


failed: Counter[str] = Counter()


def fails_at_first(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """For every fourth prompt raises ten times: three times at least for one of its four responses."""
    if int(ground_truth) % 4 == 1 and failed[ground_truth] < 10:
        failed[ground_truth] += 1
        raise ValueError("the judge cannot read this")
    return compute_score(data_source, solution_str, ground_truth)


def same_for_every_third(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """For every third prompt a reward that teaches nothing."""
    return 0.5 if int(ground_truth) % 3 == 0 else compute_score(data_source, solution_str, ground_truth)
