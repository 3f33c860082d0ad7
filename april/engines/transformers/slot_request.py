"""A request of the protocol in the decoder's terms, after a look at whether it makes sense."""

from __future__ import annotations

import math
import random

import numpy as np

from april.engines.protocol import Request
from april.engines.transformers.slot_batch import SlotRequest


def wrong_request(request: Request, vocab_size: int, max_len: int, eos: tuple[int, ...]) -> str | None:
    """Why it cannot be served, and what to do; None: it can."""
    sampling, tokens = request.sampling, np.asarray(request.token_ids)
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)] if tokens.dtype.kind in "iu" else tokens[:0]
    if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
        return f"token_ids has shape {tokens.shape} and dtype {tokens.dtype}: send a non-empty row of integers"
    if outside.size:
        return (
            f"token id {outside[0]} is outside the vocabulary of {vocab_size}: encode prompts with this "
            "model's tokenizer"
        )
    if tokens.size >= max_len:
        return f"{tokens.size} tokens leave no room below max_len {max_len}: shorten it or raise max_len"
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}: at least 1 token must be allowed"
    if sampling.min_tokens < 0:
        return f"min_tokens is {sampling.min_tokens}: it must not be negative"
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0.0):
        return f"temperature is {sampling.temperature}: use a finite number, 0 for greedy"
    if not 0.0 < sampling.top_p <= 1.0:
        return f"top_p is {sampling.top_p}: use a number in (0, 1]"
    if sampling.min_tokens and len(_stops(request, eos)) >= vocab_size:
        return "every token of the vocabulary is a stop token, so min_tokens cannot be kept"
    return None


def slot_request(
    request: Request, max_len: int, eos: tuple[int, ...], seeds: random.Random, stream_interval: int | None
) -> SlotRequest:
    """One that was found right; ``seeds`` gives it a seed if it has none."""
    sampling, tokens = request.sampling, np.asarray(request.token_ids)
    return SlotRequest(
        attempt_id=request.attempt_id,
        tokens=tokens.astype(np.int32),
        max_tokens=min(sampling.max_tokens, max_len - tokens.size),
        min_tokens=sampling.min_tokens,
        temperature=float(sampling.temperature),
        top_p=float(sampling.top_p),
        stop_ids=_stops(request, eos),
        seed=seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
        priority=request.priority,
        stream_interval=stream_interval,
    )


def _stops(request: Request, eos: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*request.sampling.stop_token_ids, *eos}))
