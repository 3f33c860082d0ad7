"""The reward of the mathematical workloads: is the boxed answer the right one? By OpenRLHF's own grader."""

from __future__ import annotations

from typing import Any

import torch


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """1 or 0 for each query, which is a prompt and its response."""
    from openrlhf.utils.math_utils import extract_boxed_answer, grade_answer

    right = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        # the text may differ from the prompt in spaces where a tokenizer's decoding does
        response = query[len(prompt) :] if query.startswith(prompt) else query
        answer = extract_boxed_answer(response)
        right.append(float(answer is not None and grade_answer(answer, str(label))))
    rewards = torch.tensor(right)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"right": rewards}}
