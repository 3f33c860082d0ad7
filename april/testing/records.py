"""Generates the tokens of fake engines, and defines their records of requests, chunks and aborts.

Tokens depend on (conversation, sample, position), log-probabilities on (token, version). So a test can recompute every
delivered token, and notices a log-probability that belongs to another token or another version.

Invariant: a record holds copies. Changes to a chunk after it left the engine do not change the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from april.core.attempt_book import EVALUATION_MARK
from april.core.versions import PolicyVersion
from april.engines.protocol import Chunk, Float32, Int32, Request
from april.engines.random_bits import MIX1, STEP, splitmix64
from april.engines.simulated.engine import synthetic_logprobs, synthetic_response


def conversation(request: Request) -> Int32:
    """Return the tokens before the response that ``request`` begins or continues; int32 [P]."""
    return request.token_ids[: len(request.token_ids) - request.response_offset]


def with_attachment_ids(request: Request) -> Int32:
    """Return the conversation int32 [P], with attachments (such as images) replaced by ids made from their digests."""
    ids = conversation(request).copy()
    for placed in request.attached:
        first = int(placed.attachment.digest[:7], 16)
        ids[placed.at : placed.end] = first + np.arange(len(ids[placed.at : placed.end]), dtype=np.int32)
    return ids


def fake_response(
    conversation_ids: Sequence[int] | Int32,
    sample_key: tuple[int, int] | None,
    length: int,
    vocab_size: int = 1000,
    eos_token_id: int = 0,
    stop_token_ids: Sequence[int] = (),
    banned_ids: Sequence[int] = (),
) -> Int32:
    """Return the response int32 [length] of a :class:`FakeEngine` to a conversation.

    The last token is the stop token, and no other token is a stop token or one of ``banned_ids``.
    """
    if length < 1:
        raise ValueError(f"a response has at least one token, got length {length}")
    stops = {eos_token_id, *stop_token_ids}
    ids, never = np.asarray(conversation_ids, np.int32), [*stops, *banned_ids]
    tokens, _ = synthetic_response(ids, sample_key, 0, length, vocab_size, never)
    tokens[-1] = (*stop_token_ids, eos_token_id)[0]
    return tokens


def fake_logprobs(tokens: Sequence[int] | Int32, version: PolicyVersion) -> Float32:
    """Return deterministic log-probabilities float32 [T] in (-4, 0] of ``tokens`` [T] under ``version``."""
    weights = np.array([(version.incarnation << 32) ^ (version.n & 0xFFFFFFFF)], np.uint64) * MIX1
    counter = (np.asarray(tokens, np.int64).astype(np.uint64) + np.uint64(1)) * STEP
    return synthetic_logprobs(splitmix64(counter + weights))


class AbortRecord(NamedTuple):
    """A recorded call of ``abort``; ``attempt_ids`` None means all requests."""

    at_s: float
    attempt_ids: tuple[str, ...] | None


class YieldedChunks:
    """The chunks that an engine yielded for one request, and their arrays."""

    __slots__ = ()

    chunks: list[Chunk]

    @property
    def count(self) -> int:
        """Number of tokens yielded."""
        return sum(len(c.tokens) for c in self.chunks)

    @property
    def tokens(self) -> Int32:
        """Tokens yielded, int32 [T]."""
        return np.concatenate([np.empty(0, np.int32), *(c.tokens for c in self.chunks)])

    @property
    def logprobs(self) -> Float32:
        """Log-probabilities yielded, float32 [T]."""
        return np.concatenate([np.empty(0, np.float32), *(c.logprobs for c in self.chunks)])


@dataclass(slots=True, kw_only=True)
class AttemptRecord(YieldedChunks):
    """An attempt (a request for a response or the rest of it) and its answer, as recorded by the engine."""

    engine: str
    request: Request
    started_s: float
    chunks: list[Chunk] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """Time at which each chunk left the engine."""
    ended_s: float | None = None
    end: str = ""
    """End of the request: a finish reason, an error, or that the caller stopped reading; empty while it runs."""
    wrong: str = ""
    """Kind of the fault that made a chunk invalid; april must not deliver any token of this attempt."""
    withheld: int = 0
    """Number of tokens that were generated but not yielded."""

    @property
    def attempt_id(self) -> str:
        """Id of the request."""
        return self.request.attempt_id

    @property
    def evaluation(self) -> bool:
        """True if the request belongs to an evaluation; no batch has its tokens."""
        return is_evaluation(self.request.attempt_id)

    @property
    def versions(self) -> Int32:
        """(incarnation, n) of each token, int32 [T, 2]."""
        rows = [np.tile(np.array(c.version, np.int32), (len(c.tokens), 1)) for c in self.chunks]
        return np.concatenate([np.empty((0, 2), np.int32), *rows])


def is_evaluation(attempt_id: str) -> bool:
    """Return True if an attempt id belongs to an evaluation, whose samples are numbered separately from training's."""
    return len(attempt_id) == 32 and attempt_id[16:20] == f"{EVALUATION_MARK:04x}"
