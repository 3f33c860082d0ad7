"""No number from an engine is believed before it was looked at."""

from __future__ import annotations

import numpy as np

from april.engines.protocol import Chunk
from april.errors import WireError

LOGPROB_EPS = 1e-3
"""float16 and bfloat16 engines round log-probabilities of near-certain tokens to slightly above 0."""


def check_chunk(chunk: Chunk, vocab_size: int, room: int) -> None:
    """Raise WireError unless the chunk can be true: lengths, token ids, finite log-probabilities <= 0, budget."""
    tokens, logprobs = chunk.tokens, chunk.logprobs
    count = len(tokens)
    if len(logprobs) != count:
        raise WireError(f"{count} tokens came with {len(logprobs)} log-probabilities")
    if count > room:
        raise WireError(f"{count} tokens came where {room} were left of the budget")
    if count == 0:
        return
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise WireError(f"token id {bad} is outside the vocabulary of {vocab_size}")
    # written so that NaN fails as well
    if not (np.isfinite(logprobs).all() and logprobs.max() <= LOGPROB_EPS):
        bad_value = logprobs[~(np.isfinite(logprobs) & (logprobs <= LOGPROB_EPS))][0]
        raise WireError(f"log-probability {bad_value} is not a finite number <= 0")
