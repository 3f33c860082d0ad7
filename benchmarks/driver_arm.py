"""The whole of april: ``RolloutScheduler`` over ``HttpGenerateEngine``, one ``next_batch`` per round.

Every round asks for exactly the requests of the other arms: no over-sampling and no reward, so that a step
submits all its samples at once and ends when the last one is finished.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import april
from benchmarks.arm_result import ArmResult, Round, measured
from benchmarks.bare_client import Kept, check_kept
from benchmarks.generate_wire import make_prompts
from benchmarks.http_engine import HttpGenerateEngine


def run_driver(
    url: str, n_requests: int, prompt_len: int, response_tokens: int, rounds: int, samples_per_prompt: int = 1
) -> ArmResult:
    """Send ``n_requests`` at once, ``rounds`` times; raises RuntimeError when an array differs from what was sent."""
    if n_requests % samples_per_prompt:
        raise ValueError(f"{n_requests} requests are no whole number of groups of {samples_per_prompt}")
    groups = n_requests // samples_per_prompt
    config = april.Config(
        rollout_batch_size=groups,
        n_samples_per_prompt=samples_per_prompt,
        max_response_len=response_tokens,
    )
    costs: list[Round] = []
    total = 0
    scheduler = april.RolloutScheduler(
        config,
        prompts=_prompts(n_requests, prompt_len, samples_per_prompt, rounds),
        reward=None,
        engines=[HttpGenerateEngine(url)],
    )
    try:
        for number in range(rounds):
            if number:
                scheduler.weight_update()  # commits the batch before; not measured
            gc.collect()
            with measured(costs):
                batch = scheduler.next_batch()
            total += _check_batch(batch, n_requests, response_tokens)
            del batch
    finally:
        scheduler.close()
    return ArmResult("driver", n_requests, response_tokens, prompt_len, costs, total)


def _prompts(n_requests: int, prompt_len: int, samples_per_prompt: int, rounds: int) -> Iterator[april.Prompt]:
    arrays = make_prompts(n_requests, prompt_len, samples_per_prompt)[::samples_per_prompt]
    for _ in range(rounds):
        for token_ids in arrays:
            yield april.Prompt(token_ids=token_ids)


def _check_batch(batch: april.Batch, n_requests: int, response_tokens: int) -> int:
    if len(batch.samples) != n_requests:
        raise RuntimeError(f"the batch has {len(batch.samples)} samples, not {n_requests}")
    kept: Kept = [(sample.tokens, sample.logprobs) for sample in batch.samples]
    return check_kept([sample.prompt.token_ids for sample in batch.samples], kept, response_tokens)
