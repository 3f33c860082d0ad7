"""Which numbers can be true: token ids, log-probabilities and rewards, wherever they come from."""

from __future__ import annotations

import math

import numpy as np

from april.core.tape import Float32, Int32

LOGPROB_EPS = 1e-3
"""float16 and bfloat16 engines round log-probabilities of near-certain tokens to slightly above 0."""
LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Rewards are handed over as float32."""


def wrong_ids(tokens: Int32, vocab_size: int) -> str | None:
    """What is wrong with token ids int32 [T], or None."""
    # as unsigned numbers, negative ones are too large as well
    if len(tokens) == 0 or tokens.view(np.uint32).max() < vocab_size:
        return None
    bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
    return f"token id {bad} is outside the vocabulary of {vocab_size}"


def wrong_logprobs(logprobs: Float32) -> str | None:
    """What is wrong with log-probabilities float32 [T] in nats, or None."""
    # written so that NaN, which is the largest and the smallest of all, fails as well
    if len(logprobs) == 0 or (logprobs.max() <= LOGPROB_EPS and logprobs.min() > -np.inf):
        return None
    bad = logprobs[~(np.isfinite(logprobs) & (logprobs <= LOGPROB_EPS))][0]
    return f"log-probability {bad} is not a finite number <= 0"


def wrong_reward(reward: float) -> str | None:
    """What is wrong with a reward, or None."""
    if not math.isfinite(reward):
        return f"{reward}; expected a finite number"
    if abs(reward) > LARGEST_REWARD:
        return f"{reward:g}, which no float32 holds; expected a number of at most {LARGEST_REWARD:.3g}"
    return None
