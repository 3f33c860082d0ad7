"""A record replays whatever kind of number the reader's code gave: the examples themselves write ``temperature=0``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import april
from april.record.replay import replay

NUMBERS: list[dict[str, Any]] = [
    {"temperature": 1},
    {"temperature": np.float32(0.7), "max_tokens": np.int64(9)},
    {"top_p": 1},
    {"stop_token_ids": np.array([7])},
]


def recorded(path: Path, rollout: Any, evaluation: dict[str, Any]) -> None:
    """Two batches and an evaluation between them, on a simulated engine."""
    config = april.Config(
        rollout_batch_size=2, n_samples_per_prompt=4, max_response_len=60,
        engine={"kind": "simulated", "median_len": 20},
    )  # fmt: skip
    prompts = [[1, 2 + i] for i in range(20)]
    with april.RolloutScheduler(
        config, prompts=prompts, reward=lambda prompt, response: 1, rollout=rollout, record=str(path), progress=False
    ) as rollouts:
        rollouts.next_batch()
        rollouts.weight_update()
        rollouts.evaluate([[1, 5], [1, 6]], **evaluation)
        rollouts.next_batch()


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_numbers_of_a_call_are_replayed(numbers: dict[str, Any], tmp_path: Path) -> None:
    """``llm.generate(temperature=1)``, an int for a float: the replay decides as the run did."""

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        await llm.generate(**numbers)

    recorded(tmp_path / "record.jsonl", rollout, {})
    replay(tmp_path / "record.jsonl")


@pytest.mark.parametrize("temperature", [0, 1, np.float32(0.5)])
def test_numbers_of_an_evaluation_are_replayed(temperature: Any, tmp_path: Path) -> None:
    """``evaluate(..., temperature=0)``, as the API page has it."""

    async def rollout(prompt: april.Prompt, llm: april.LLM) -> None:
        await llm.generate()

    recorded(tmp_path / "record.jsonl", rollout, {"temperature": temperature, "top_p": 1})
    replay(tmp_path / "record.jsonl")
