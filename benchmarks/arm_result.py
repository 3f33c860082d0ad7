"""What one arm of the benchmark reports, and how its rounds are measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec


class Round(msgspec.Struct, frozen=True):
    """One round: every request sent once. CPU of the whole process, all threads, in seconds; wall in seconds."""

    cpu_s: float
    wall_s: float


class ArmResult(msgspec.Struct, frozen=True):
    """One client process: its first round opens the connections, the others use them again."""

    arm: str
    requests: int
    response_tokens: int
    prompt_len: int
    rounds: list[Round]
    tokens_kept: int
    """Over all rounds, each token checked against what the server sends."""

    @property
    def opening_us(self) -> float:
        """CPU per request of the first round, microseconds."""
        return self._us(self.rounds[0])

    @property
    def pooled_us(self) -> list[float]:
        """CPU per request of each later round, microseconds."""
        return [self._us(one) for one in self.rounds[1:]]

    def _us(self, one: Round) -> float:
        return one.cpu_s / self.requests * 1e6


@contextmanager
def measured(rounds: list[Round]) -> Iterator[None]:
    """Append the cost of the block to ``rounds``."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    rounds.append(Round(time.process_time() - cpu, time.perf_counter() - wall))
