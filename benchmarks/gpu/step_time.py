"""t(batch, KV): seconds of a decode step by the number of sequences and the tokens that each of them holds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from april.engines.simulated.decode_cost import DecodeCost
from april.engines.transformers.model_support import generation_mode
from april.engines.transformers.slot_batch import SlotDecoder
from april.engines.transformers.slot_requests import SlotRequest
from april.engines.transformers.stats import EngineStats
from benchmarks.gpu.device import free_bytes, synchronize
from benchmarks.gpu.record import NO_TIME, Deadline
from benchmarks.gpu.shapes import EOS, Shape, Traffic

WARM_UP, STEPS = 4, 32
MEMORY_SHARE = 0.6
"""Of the free memory, for keys and values: attention makes copies of them, and logits want room."""

Grid = tuple[Sequence[int], Sequence[int]]
"""Numbers of sequences, and tokens that each of them holds."""
GRID: Grid = ((1, 8, 32, 64, 128, 256), (256, 1024, 4096, 16_384))
MINIATURE_GRID: Grid = ((1, 4), (16, 64))
Point = dict[str, Any]


def measure(
    model: Any, shape: Shape, reads: Traffic, bytes_per_s: float, grid: Grid, deadline: Deadline,
    tell: Callable[[list[Point]], None],
) -> list[Point]:  # fmt: skip
    """Every point of the grid, those that cost least first; ``tell`` hears of each.

    A point has ``batch``, ``held`` (tokens per sequence in the middle of the measurement, ``asked`` those of their
    prompts), ``step_s``, the time that reading memory takes at least (``limit_s``), and their ratio; or ``skipped`` and
    why.
    """
    points: list[Point] = []
    for n, tokens in sorted(itertools.product(*grid), key=lambda p: (p[0] * p[1], p)):
        point: Point = {"batch": n, "held": tokens, "asked": tokens}
        needed = n * (tokens + WARM_UP + STEPS) * reads.kv_bytes_per_token
        if deadline.over:
            point["skipped"] = NO_TIME
        elif tokens + WARM_UP + STEPS > shape.context:
            point["skipped"] = "beyond the model's context"
        elif needed > MEMORY_SHARE * free_bytes(next(model.parameters()).device):
            point["skipped"] = f"keys and values of {needed / 1e9:.0f} GB are more than memory has room for"
        else:
            try:
                point |= _one(model, n, tokens)
            except torch.cuda.OutOfMemoryError:
                point["skipped"] = "out of memory"
            else:
                point["limit_s"] = reads.step_bytes(n, point["held"]) / bytes_per_s
                point["share_of_bandwidth"] = point["limit_s"] / point["step_s"]
        points.append(point)
        tell(points)
    return points


def _one(model: Any, batch: int, held: int) -> Point:
    """Decode steps of ``batch`` equal prompts, which are prefilled once."""
    device = next(model.parameters()).device
    vocab = int(model.config.vocab_size)
    decoder = SlotDecoder(model, batch, held + WARM_UP + STEPS + 1, stats := EngineStats())
    tokens = ((np.arange(held) * 7 + 3) % (vocab - 2) + 2).astype(np.int32)
    for i in range(batch):
        decoder.submit(SlotRequest(str(i), tokens, WARM_UP + STEPS + 1, 0, 1.0, 1.0, (EOS,), seed=i))
    with generation_mode(model):
        synchronize(device)
        start = time.perf_counter()
        decoder.tick(WARM_UP)
        synchronize(device)
        warm = time.perf_counter()
        before = stats.decode_steps
        decoder.tick(STEPS)
        synchronize(device)
        end = time.perf_counter()
    steps = stats.decode_steps - before
    decoder.abort([str(i) for i in range(batch)])
    decoder.release_memory()
    return {
        "held": held + WARM_UP + steps // 2, "steps": steps, "step_s": (end - warm) / steps, "prefill_s": warm - start
    }  # fmt: skip


def fitted(points: Sequence[Point]) -> DecodeCost | None:
    """The measured points as a + b n + g K, by least relative squares, no coefficient below 0; None: too few points."""
    known = [p for p in points if "step_s" in p]
    if len(known) < 3:
        return None
    rows = np.array([[1.0, p["batch"], p["batch"] * p["held"]] for p in known])
    times = np.array([p["step_s"] for p in known])
    best: tuple[float, DecodeCost] | None = None
    for used in ([0, 1, 2], [0, 1], [0, 2], [0]):
        solved = np.linalg.lstsq(rows[:, used] / times[:, None], np.ones(len(known)), rcond=None)[0]
        a, b, g = (float(solved[used.index(i)]) if i in used else 0.0 for i in range(3))
        if a > 0 and b >= 0 and g >= 0:
            wrong = float(np.abs(rows @ np.array([a, b, g]) / times - 1.0).mean())
            if best is None or wrong < best[0]:
                best = wrong, DecodeCost(a, b, g)
    return None if best is None else best[1]
