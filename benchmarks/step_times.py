"""How long a decode step takes, by the number in flight and what they hold.

Two waves of equal requests, short and long: the difference is decoding alone. The same two waves with long prompts:
what the tokens in the cache cost.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from statistics import median

import msgspec
import numpy as np

from april.core.sampling import SamplingParams
from april.engines.protocol import Engine, EngineFinish, Request
from april.engines.simulated.decode_cost import DecodeCost

POINTS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
SHORT, LONG = 50, 250
"""Tokens of the two waves."""
LONG_PROMPT = 1_000
HOLDING = 32
"""In flight when the cost of what they hold is measured."""
_numbers = itertools.count()


def attempt_id(kind: str) -> str:
    """A fresh id of fixed length."""
    return f"bench-{kind:>6}-{next(_numbers):010d}".replace(" ", "-")


def prompt(length: int, seed: int, vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Token ids [length] int32, the first ones different for every seed, so that no prefix is cached."""
    return np.random.default_rng(seed).integers(3, vocab_size, length, dtype=np.int32)


async def run_to_end(engine: Engine, request: Request) -> int:
    """Tokens of one request; raises RuntimeError when it did not use its whole budget."""
    count, finish = 0, None
    async with aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            count, finish = count + len(chunk.tokens), chunk.finish
    if finish is not EngineFinish.LENGTH or count != request.sampling.max_tokens:
        raise RuntimeError(f"a request ended by {finish} after {count} of {request.sampling.max_tokens} tokens")
    return count


async def wave_s(engine: Engine, count: int, tokens: int, prompt_len: int) -> float:
    """Wall seconds of ``count`` requests of ``tokens`` tokens that start together."""
    requests = []
    for _ in range(count):
        name = attempt_id("wave")
        ids = prompt(prompt_len, int(name[-10:]), engine.capabilities.vocab_size)
        requests.append(Request(attempt_id=name, token_ids=ids, sampling=SamplingParams(tokens, seed=int(name[-10:]))))
    start = time.perf_counter()
    await asyncio.gather(*(run_to_end(engine, r) for r in requests))
    return time.perf_counter() - start


async def _step_s(engine: Engine, count: int, prompt_len: int) -> float:
    """Seconds of one decode step between SHORT and LONG tokens."""
    short, long = await wave_s(engine, count, SHORT, prompt_len), await wave_s(engine, count, LONG, prompt_len)
    return (long - short) / (LONG - SHORT)


class StepTimes(msgspec.Struct):
    """Medians over all measurements so far."""

    samples: dict[int, list[float]] = {}
    """In flight -> seconds per decode step."""
    prefill: list[float] = []
    """Seconds per prompt token beyond the short prompt."""
    held: list[float] = []
    """Seconds per decode step and token in the cache."""

    async def measure(self, engine: Engine, prompt_len: int, points: Sequence[int] = POINTS) -> None:
        """One more measurement at each point."""
        for n in points:
            self.samples.setdefault(n, []).append(await _step_s(engine, n, prompt_len))
        if HOLDING in points:
            more = await _step_s(engine, HOLDING, LONG_PROMPT) - self.samples[HOLDING][-1]
            self.held.append(more / (HOLDING * (LONG_PROMPT - prompt_len)))
        long_prompts = await wave_s(engine, 8, 2, LONG_PROMPT) - await wave_s(engine, 8, 2, prompt_len)
        self.prefill.append(long_prompts / (8 * (LONG_PROMPT - prompt_len)))

    def curve(self) -> dict[int, float]:
        """In flight -> seconds per step."""
        return {n: median(values) for n, values in sorted(self.samples.items())}


@dataclass(frozen=True, slots=True)
class MeasuredCost(DecodeCost):
    """The measured curve as the cost of a simulated engine: nothing but decode steps costs time."""

    points: tuple[tuple[int, float], ...] = ()
    held_each: float = 0.0
    """Tokens in the cache per request when the points were measured."""

    @classmethod
    def of(cls, times: StepTimes, prompt_len: int) -> MeasuredCost:
        """Between the points the curve is a straight line, beyond the last one too."""
        curve = times.curve()
        if len(curve) < 2:
            raise ValueError("a curve needs two points")
        per_token = max(median(times.held), 0.0) if times.held else 0.0
        return cls(1e-9, 0.0, per_token, points=tuple(sorted(curve.items())), held_each=prompt_len + (SHORT + LONG) / 2)

    def step_s(self, n: int, kv_tokens: int) -> float:
        """Seconds of a step with ``n`` in flight that hold ``kv_tokens`` tokens."""
        numbers = [p[0] for p in self.points]
        at = min(max(bisect_left(numbers, n), 1), len(numbers) - 1)
        (a, low), (b, high) = self.points[at - 1], self.points[at]
        line = low + (high - low) * (n - a) / (b - a)
        return max(line + self.per_kv_token_s * (kv_tokens - n * self.held_each), 1e-9)
