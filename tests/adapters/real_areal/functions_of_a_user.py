"""What a user of AReaL writes besides the configuration; AReaL's pool of reward processes imports it by name."""

from __future__ import annotations

from typing import Any


def ids_of(data: Any, tokenizer: Any, enable_thinking: bool) -> list[int]:
    """The prompt is token ids already."""
    return list(data)


def share_of_even(prompt: Any, completions: Any, prompt_ids: Any, completion_ids: Any, **row: Any) -> float:
    """Of the response's tokens."""
    return sum(token % 2 == 0 for token in completion_ids) / max(1, len(completion_ids))


def differs(trajectory: Any) -> bool:
    """A filter: the rewards of the group lie apart."""
    rewards = trajectory["rewards"]
    return float(rewards.max() - rewards.min()) > 0.15
