"""Schedulers on real loops with engines that cost next to nothing, and the check of what they deliver."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import april
from april.core.types import FinishReason
from april.driver.rewards import Response
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine, by_sample_key, synthetic_response
from april.engines.simulated.response_lengths import LognormalLengths

LENGTHS = LognormalLengths(20, 0.7, 0.7, seed=5)
FAST = DecodeCost(1e-5, 0.0, 0.0)
VOCAB = 1000


def engine(name: str = "e0", kind: type[SimulatedEngine] = SimulatedEngine, **options: Any) -> Any:
    """A simulated engine of this kind on real time, 10 microseconds a token."""
    return kind(name, FAST, by_sample_key(LENGTHS), **({"max_running": 64, "vocab_size": VOCAB} | options))


def config(**changes: Any) -> april.Config:
    """N = 3, N' = 5, n = 2."""
    values: dict[str, Any] = {
        "rollout_batch_size": 3,
        "n_samples_per_prompt": 2,
        "over_sampling_batch_size": 5,
        "max_response_len": 100,
        "seed": 1,
    }
    return april.Config(**(values | changes))


def endless() -> Iterator[list[int]]:
    """Prompts without end, no two in 900 equal."""
    number = 0
    while True:
        number += 1
        yield [number % 900 + 1, 7]


async def reward(prompt: april.Prompt, response: Response) -> float:
    return float(len(response.tokens))


def scheduler(**changes: Any) -> april.RolloutScheduler:
    """A scheduler over two engines that checks its books after every event."""
    arguments: dict[str, Any] = {
        "config": config(),
        "prompts": endless(),
        "reward": reward,
        "engines": [engine("e0"), engine("e1", stream_interval_s=1e-4)],
        "check": True,
    }
    return april.RolloutScheduler(**(arguments | changes))


def check(batch: april.Batch) -> None:
    """Every sample of a batch of :func:`scheduler` is its uncut synthetic response."""
    for s in batch.samples:
        count = min(LENGTHS.sample(*s.id), 100)
        tokens, logprobs = synthetic_response(s.prompt.token_ids, s.id, 0, count, VOCAB, (0,))
        if s.finish is FinishReason.STOP:
            tokens[-1] = 0
        assert s.tokens.tolist() == tokens.tolist()
        assert s.logprobs.tolist() == logprobs.tolist()
        assert s.reward == count


def assert_nothing_is_left() -> None:
    """No loop thread lives on, and nothing young was forgotten: a task, loop or coroutine would complain now."""
    gc.collect(1)
    assert not [t.name for t in threading.enumerate() if t.name == "april-loop"]
