"""Checks numbers from engines, users and snapshots: token ids, log-probabilities and rewards."""

from __future__ import annotations

import math

import numpy as np

from april.core.tape import Float32, Int32

LOGPROB_EPS = float(np.float32(1e-3))
"""Largest accepted log-probability: engines in float16 or bfloat16 round values close to 0 to just above 0."""
LEAST_LOGPROB = -744.5
"""Smallest accepted log-probability: below it exp() is 0 even in 64 bits, so no sampler can have drawn the token.
Engines sample in float32, where exp() is 0 below -103.3. For minus infinity, vLLM and TensorRT-LLM write -9999, and
SGLang writes the smallest number of the type; all of these are refused."""
LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Largest absolute value of a reward, as batches hold rewards as float32."""


def wrong_ids(tokens: Int32, vocab_size: int) -> str | None:
    """Describe what is wrong with token ids int32 [T]; None if they are valid."""
    # argmin and argmax take a third of the time of min and max
    if len(tokens) == 0 or 0 <= tokens.item(tokens.argmin()) <= tokens.item(tokens.argmax()) < vocab_size:
        return None
    bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
    return f"token id {bad} is outside the vocabulary of {vocab_size}"


def wrong_logprobs(logprobs: Float32) -> str | None:
    """Describe what is wrong with log-probabilities float32 [T] in nats; None if they are valid."""
    # argmin and argmax return the position of a NaN, which then fails the comparison
    if len(logprobs) == 0 or (
        LEAST_LOGPROB <= logprobs.item(logprobs.argmin()) <= logprobs.item(logprobs.argmax()) <= LOGPROB_EPS
    ):
        return None
    bad = float(logprobs[~((logprobs >= LEAST_LOGPROB) & (logprobs <= LOGPROB_EPS))][0])
    if -math.inf < bad < 0:
        return (
            f"log-probability {bad:g} stands for minus infinity: the engine returned a token that it cannot have "
            "sampled (speculative decoding on CPUs does that)"
        )
    return f"log-probability {bad:g} is not a finite number <= 0"


def wrong_reward(reward: float) -> str | None:
    """Describe what is wrong with a reward; None if it is valid."""
    if not math.isfinite(reward):
        return f"{reward}; expected a finite number"
    if abs(reward) > LARGEST_REWARD:
        return f"{reward:g}, which does not fit in a float32; expected a number of at most {LARGEST_REWARD:.3g}"
    return None


def float32_reward(reward: float) -> float:
    """Return a valid reward rounded to float32, as batches hold it; filters and baselines use this number, too."""
    return float(np.float32(reward))
