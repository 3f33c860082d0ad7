"""The reward function of the test runs, as OpenRLHF loads one: the share of vowels in the response."""

from __future__ import annotations

from typing import Any

import torch


def reward_func(queries: list[str], prompts: list[str], labels: list[Any]) -> dict[str, Any]:
    shares = []
    for query, prompt in zip(queries, prompts, strict=True):
        assert query.startswith(prompt), (query, prompt)
        response = query[len(prompt) :].removesuffix("<eos>").lower()
        shares.append(sum(letter in "aeiou" for letter in response) / max(1, len(response)))
    rewards = torch.tensor(shares)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"vowels": rewards}}
