"""Finds requests that the embedded engine's model cannot serve, and converts the others for the slot decoder."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from april.core.attachments import Placed
from april.engines.protocol import EngineFinish, Float32, Int32, Request
from april.engines.transformers.vision import ProcessedImages
from april.errors import AttachmentError


@dataclass(slots=True, eq=False)
class SlotRequest:
    """A request as the decoder needs it: ``max_tokens`` fits into the context, ``stop_ids`` includes the EOS ids."""

    attempt_id: str
    tokens: Int32
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    stop_ids: tuple[int, ...]
    seed: int
    priority: int = 0
    stream_interval: int | None = None
    """Number of tokens after which a chunk is handed out; None means one chunk at the end."""
    banned_ids: tuple[int, ...] = ()
    attached: tuple[Placed, ...] = ()
    seen: ProcessedImages | None = None
    """Processed images of ``attached``; set only during admission."""
    slot: int = -1
    """Slot of the request; -1 while it is not active."""
    taken: int = 0
    """Number of generated tokens that were already handed out."""


@dataclass(frozen=True, slots=True)
class SlotOutput:
    """The tokens that a request has generated since its last output; tokens [k], log-probabilities [k]."""

    request: SlotRequest
    tokens: Int32
    logprobs: Float32
    finish: EngineFinish | None
    unsound: int = 0
    """Number of further tokens that were dropped because the weights changed while they were sampled."""
    refused: AttachmentError | None = None
    """Error because of which this request was refused while others continue; None if it was not refused."""


def wrong_request(request: Request, vocab_size: int, max_len: int, eos: tuple[int, ...]) -> str | None:
    """Explain why the model cannot serve a request and what to do; None if it can."""
    sampling, tokens = request.sampling, request.token_ids
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.size:
        return (
            f"token id {outside[0]} is outside the vocabulary of {vocab_size}: encode prompts with this "
            "model's tokenizer"
        )
    if tokens.size >= max_len:
        return f"{tokens.size} tokens leave no room below max_len {max_len}: shorten it or raise max_len"
    banned = {i for i in sampling.banned_ids if 0 <= i < vocab_size}
    if len(banned) >= vocab_size:
        return "every token of the vocabulary is banned, so none can be sampled"
    if sampling.min_tokens and len(banned.union(_stops(request, eos))) >= vocab_size:
        return "every token of the vocabulary is a stop token, or banned, so min_tokens cannot be kept"
    return None


def slot_request(
    request: Request, max_len: int, eos: tuple[int, ...], seeds: random.Random, stream_interval: int | None
) -> SlotRequest:
    """Convert a valid request for the decoder; ``seeds`` supplies a seed if the request has none."""
    sampling, tokens = request.sampling, request.token_ids
    return SlotRequest(
        attempt_id=request.attempt_id,
        tokens=tokens.astype(np.int32),
        max_tokens=min(sampling.max_tokens, max_len - tokens.size),
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop_ids=_stops(request, eos),
        seed=seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
        priority=request.priority,
        stream_interval=stream_interval,
        banned_ids=sampling.banned_ids,
        attached=request.attached,
    )


def _stops(request: Request, eos: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*request.sampling.stop_token_ids, *eos}))
