"""What a fake engine writes down: each request, each chunk that left it, each abort, with the time on the loop's clock.

Invariant: a record holds copies. Nothing that happens to a chunk after it left the engine changes what is written here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from april.core.attempt_book import EVALUATION_MARK
from april.engines.protocol import Chunk, Float32, Int32, Request


@dataclass(frozen=True, slots=True)
class AbortRecord:
    """One call of ``abort``; ``attempt_ids`` None: everything."""

    at_s: float
    attempt_ids: tuple[str, ...] | None


class HandedOver:
    """What was handed over for one request: the arrays of its chunks."""

    __slots__ = ()

    chunks: list[Chunk]

    @property
    def count(self) -> int:
        """Tokens handed over."""
        return sum(len(c.tokens) for c in self.chunks)

    @property
    def tokens(self) -> Int32:
        """Tokens handed over, int32 [T]."""
        return np.concatenate([np.empty(0, np.int32), *(c.tokens for c in self.chunks)])

    @property
    def logprobs(self) -> Float32:
        """Log-probabilities handed over, float32 [T]."""
        return np.concatenate([np.empty(0, np.float32), *(c.logprobs for c in self.chunks)])


@dataclass(slots=True, kw_only=True)
class AttemptRecord(HandedOver):
    """One request, and what was handed over for it."""

    engine: str
    request: Request
    started_s: float
    chunks: list[Chunk] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """When each chunk left the engine."""
    ended_s: float | None = None
    end: str = ""
    """How it ended: a finish reason, an error, or that the caller left. Empty: it has not."""
    wrong: str = ""
    """Kind of the fault that made one of its chunks impossible; april must not deliver any token of it."""
    withheld: int = 0
    """Tokens that were generated and never handed over."""
    repeated: int = 0
    """Tokens that were handed over twice."""

    @property
    def attempt_id(self) -> str:
        """Id of the request."""
        return self.request.attempt_id

    @property
    def evaluation(self) -> bool:
        """Whether it belongs to an evaluation, and so to no batch."""
        return is_evaluation(self.request.attempt_id)

    @property
    def versions(self) -> Int32:
        """(incarnation, n) of each token, int32 [T, 2]."""
        rows = [np.tile(np.array(c.version, np.int32), (len(c.tokens), 1)) for c in self.chunks]
        return np.concatenate([np.empty((0, 2), np.int32), *rows])


def is_evaluation(attempt_id: str) -> bool:
    """Whether an attempt id is one of april's evaluations (their numbers have nothing to do with training's)."""
    return len(attempt_id) == 32 and attempt_id[16:20] == f"{EVALUATION_MARK:04x}"
