"""The reward function of the test runs, as OpenRLHF loads one: the share of even words in the response."""

from __future__ import annotations

from typing import Any

import torch


def reward_func(queries: list[str], prompts: list[str], labels: list[Any]) -> dict[str, Any]:
    shares = []
    for query, prompt in zip(queries, prompts, strict=True):
        assert query.startswith(prompt), (query, prompt)
        words = [word for word in query[len(prompt) :].split() if word[1:].isdigit()]
        shares.append(sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words)))
    rewards = torch.tensor(shares)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"even": rewards}}
