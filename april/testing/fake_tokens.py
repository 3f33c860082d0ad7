"""What a fake engine says: tokens by (conversation, sample, position), log-probabilities by (token, version).

So every token that april delivers can be computed again by a test, and a log-probability that was kept beside the wrong
token, or under the wrong version, shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from april.core.versions import PolicyVersion
from april.engines.protocol import Float32, Int32, Request
from april.engines.simulated.engine import synthetic_response

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_LOWEST = 4.0


def conversation(request: Request) -> Int32:
    """Everything that was said before the response which ``request`` begins or continues; int32 [P]."""
    return request.token_ids[: len(request.token_ids) - request.response_offset]


def fake_response(
    conversation_ids: Sequence[int] | Int32,
    sample_key: tuple[int, int] | None,
    length: int,
    vocab_size: int = 1000,
    eos_token_id: int = 0,
    stop_token_ids: Sequence[int] = (),
) -> Int32:
    """The response int32 [length] that a :class:`FakeEngine` gives to a conversation; the last token is the stop."""
    if length < 1:
        raise ValueError(f"a response has at least one token, got length {length}")
    stops = {eos_token_id, *stop_token_ids}
    tokens, _ = synthetic_response(np.asarray(conversation_ids, np.int32), sample_key, 0, length, vocab_size, [*stops])
    tokens[-1] = (*stop_token_ids, eos_token_id)[0]
    return tokens


def fake_logprobs(tokens: Sequence[int] | Int32, version: PolicyVersion) -> Float32:
    """Log-probabilities float32 [T] in (-4, 0] of ``tokens`` [T] under ``version``; the same on every platform."""
    # splitmix64; unsigned arithmetic of arrays wraps
    weights = np.array([(version.incarnation << 32) ^ (version.n & 0xFFFFFFFF)], np.uint64) * _MIX1
    x = (np.asarray(tokens, np.int64).astype(np.uint64) + np.uint64(1)) * _STEP + weights
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    x = x ^ (x >> np.uint64(31))
    logprobs: Float32 = (x >> np.uint64(40)).astype(np.float32) * np.float32(-_LOWEST / 2**24)
    return logprobs
