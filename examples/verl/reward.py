"""The reward of the workload: 1 if the last boxed answer is the known one, by verl's own comparison, else 0."""

from __future__ import annotations

from typing import Any

LAST_CHARACTERS = 2000
"""Of a response, in which the answer is looked for."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **others: Any
) -> float:
    """For verl's ``reward.custom_reward_function``; ``ground_truth`` is a string, or a list of which one is enough."""
    from verl.utils.reward_score.math_reward import is_equiv, last_boxed_only_string, remove_boxed

    boxed = last_boxed_only_string(solution_str[-LAST_CHARACTERS:])
    if boxed is None:
        return 0.0
    try:
        answer = remove_boxed(boxed)
    except AssertionError:  # a box of another form
        return 0.0
    answers = [ground_truth] if isinstance(ground_truth, str) else ground_truth
    return float(any(is_equiv(answer, str(known)) for known in answers))
