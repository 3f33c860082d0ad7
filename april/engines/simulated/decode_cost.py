"""Models how long decoding takes on one engine (for the simulated engine), and the resulting limit of throughput.

One decode step with n active sequences and K tokens resident in the KV cache takes ``t(n, K) = a + b n + g K`` seconds;
every step adds n to K. Prefill costs a constant time per token. Speculative decoding divides the time of a step by a
factor that depends on n.

``roofline`` estimates the coefficients of known models and GPUs from weight bytes, bandwidth and FLOPS; nothing is
measured. Left out: attention FLOPs, communication between tensor-parallel ranks, activations in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_T = TypeVar("_T")
Lengths = Sequence[int] | NDArray[np.integer[Any]]
"""Response lengths in tokens, one per sample, each >= 1."""


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Cost coefficients of one engine; all times in seconds.

    Attributes:
        base_s: Fixed time of one step (a): reading the weights once, and overhead; > 0.
        per_sequence_s: Time per active sequence and step (b).
        per_kv_token_s: Time per token resident in the KV cache and step (g).
        per_prefill_token_s: Time per prefilled token.
        kv_capacity_tokens: Number of tokens that the KV cache holds; None means unlimited.
        speed_up: Gain from speculative decoding, as ascending points (active sequences, factor on tokens per second);
            interpolated linearly, constant before the first and after the last point. Empty means no speculation.
    """

    base_s: float
    per_sequence_s: float
    per_kv_token_s: float
    per_prefill_token_s: float = 0.0
    kv_capacity_tokens: int | None = None
    speed_up: tuple[tuple[int, float], ...] = ()

    @classmethod
    def mean(cls, costs: Iterable[DecodeCost]) -> DecodeCost:
        """Return a cost with the mean times of ``costs``, unlimited capacity and no speculation."""
        times = [(c.base_s, c.per_sequence_s, c.per_kv_token_s, c.per_prefill_token_s) for c in costs]
        base, sequence, token, prefill = map(fmean, zip(*times, strict=True))
        return cls(base, sequence, token, prefill)

    def __post_init__(self) -> None:
        others = (self.per_sequence_s, self.per_kv_token_s, self.per_prefill_token_s)
        if not (0.0 < self.base_s < math.inf) or not all(0.0 <= x < math.inf for x in others):
            raise ValueError(f"decode costs must be finite, base_s > 0 and the others >= 0: {self}")
        if self.kv_capacity_tokens is not None and self.kv_capacity_tokens < 1:
            raise ValueError(f"kv_capacity_tokens must be at least 1 or None, not {self.kv_capacity_tokens}")
        points = tuple((n, float(factor)) for n, factor in self.speed_up)
        numbers = [n for n, _ in points]
        whole = all(type(n) is int and n > 0 for n in numbers) and numbers == sorted(set(numbers))
        if not whole or not all(0.0 < factor < math.inf for _, factor in points):
            raise ValueError(
                f"speed_up={self.speed_up}: expected ascending numbers of sequences, at least 1, each with a positive "
                "factor, as in ((8, 2.0), (64, 1.0))"
            )
        object.__setattr__(self, "speed_up", points)  # from a file, they are lists

    def speculative_factor(self, n: float) -> float:
        """Return the factor by which speculative decoding makes a step with ``n`` sequences shorter."""
        points = self.speed_up
        return float(np.interp(n, [at for at, _ in points], [factor for _, factor in points])) if points else 1.0

    def step_s(self, n: int, kv_tokens: int) -> float:
        """Return the seconds of one step with ``n`` sequences and ``kv_tokens`` resident tokens at its start."""
        plain = self.base_s + self.per_sequence_s * n + self.per_kv_token_s * kv_tokens
        return plain / self.speculative_factor(n) if self.speed_up else plain

    def steps_s(self, steps: int, n: int, kv_tokens: int) -> float:
        """Return the seconds of ``steps`` steps with ``n`` sequences and at first ``kv_tokens`` resident tokens."""
        grown = self.per_kv_token_s * (n * (steps * (steps - 1) // 2))
        return steps * self.step_s(n, kv_tokens) + (grown / self.speculative_factor(n) if self.speed_up else grown)

    def steps_within(self, seconds: float, n: int, kv_tokens: int) -> int:
        """Return the number of steps that fit: the largest k with ``steps_s(k, n, kv_tokens) <= seconds`` (>= 0)."""
        # solves half * k**2 + slope * k == seconds, by the formula that does not subtract nearly equal numbers
        half = 0.5 * self.per_kv_token_s * n / self.speculative_factor(n)
        slope = self.step_s(n, kv_tokens) - half
        root = math.sqrt(slope * slope + 4.0 * half * seconds)
        k = int(2.0 * seconds / (slope + root) if slope > 0.0 else (root - slope) / (2.0 * half))
        while self.steps_s(k, n, kv_tokens) > seconds:
            k -= 1
        while self.steps_s(k + 1, n, kv_tokens) <= seconds:
            k += 1
        return k

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds to prefill ``tokens`` tokens."""
        return self.per_prefill_token_s * tokens


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a model: number of parameters, KV-cache bytes per token, bytes per parameter."""

    parameters: float
    kv_bytes_per_token: int
    bytes_per_parameter: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpeed:
    """Peak performance of one GPU, and the shares of it that decoding is assumed to reach."""

    bandwidth_bytes_per_s: float
    flops_per_s: float
    memory_bytes: float
    bandwidth_share: float
    flops_share: float


# Parameters and KV bytes are from the models' configurations.
MODELS: dict[str, ModelSize] = {
    "r1-distill-1.5b": ModelSize(1.54e9, 28_672),
    "qwen3-4b": ModelSize(4.02e9, 147_456),
    "qwen3-8b": ModelSize(8.19e9, 147_456),
}
# Peaks are from the vendors' data sheets (dense bf16); the shares are estimates.
GPUS: dict[str, GpuSpeed] = {
    "h100": GpuSpeed(
        bandwidth_bytes_per_s=3.35e12, flops_per_s=989e12, memory_bytes=80e9, bandwidth_share=0.75, flops_share=0.50
    ),
    "mi300x": GpuSpeed(
        bandwidth_bytes_per_s=5.3e12, flops_per_s=1307e12, memory_bytes=192e9, bandwidth_share=0.65, flops_share=0.40
    ),
}
STEP_OVERHEAD_S = 1.5e-3


def roofline(
    model: str | ModelSize, gpu: str | GpuSpeed, tensor_parallel: int = 1, memory_share: float = 0.8
) -> DecodeCost:
    """Estimate the cost of ``model`` on an engine of ``tensor_parallel`` GPUs.

    base_s = weight bytes / bandwidth + 1.5 ms; per_sequence_s = per_prefill_token_s = 2 x parameters / FLOPS;
    per_kv_token_s = KV bytes per token / bandwidth. The KV cache gets ``memory_share`` of the memory minus the weights.
    Tensor parallelism is assumed to divide all work evenly and to communicate for free, which is optimistic.

    Raises:
        ValueError: an unknown name, fewer than one GPU, or weights that do not fit.
    """
    size = _known(MODELS, model, "model") if isinstance(model, str) else model
    speed = _known(GPUS, gpu, "GPU") if isinstance(gpu, str) else gpu
    if tensor_parallel < 1:
        raise ValueError(f"tensor_parallel must be at least 1, not {tensor_parallel}")
    bandwidth = speed.bandwidth_bytes_per_s * speed.bandwidth_share * tensor_parallel
    flops = speed.flops_per_s * speed.flops_share * tensor_parallel
    weight_bytes = size.parameters * size.bytes_per_parameter
    capacity = int((memory_share * speed.memory_bytes * tensor_parallel - weight_bytes) / size.kv_bytes_per_token)
    if capacity < 1:
        raise ValueError(
            f"the weights of {model} ({weight_bytes / 1e9:.1f} GB) leave no KV cache in {memory_share:.0%} of "
            f"{tensor_parallel} x {gpu}; raise tensor_parallel or memory_share"
        )
    return DecodeCost(
        base_s=weight_bytes / bandwidth + STEP_OVERHEAD_S,
        per_sequence_s=2.0 * size.parameters / flops,
        per_kv_token_s=size.kv_bytes_per_token / bandwidth,
        per_prefill_token_s=2.0 * size.parameters / flops,
        kv_capacity_tokens=capacity,
    )


def _known(table: Mapping[str, _T], name: str, what: str) -> _T:
    try:
        return table[name]
    except KeyError:
        raise ValueError(f"unknown {what} {name!r}; choose one of {', '.join(sorted(table))}") from None


def limit_s(cost: DecodeCost, lengths: Lengths, in_flight: float, prompt_tokens: float = 0.0) -> float:
    """Return the seconds for responses of these ``lengths`` on an engine that always has ``in_flight`` sequences."""
    response = _as_float(lengths)
    if in_flight <= 0:
        raise ValueError(f"in_flight must be positive, not {in_flight}")
    decode_s = cost.base_s * float(response.sum()) / in_flight + _work_s(cost, response, prompt_tokens)
    return decode_s / cost.speculative_factor(in_flight) + cost.prefill_s(1) * prompt_tokens * response.size


def limit_tokens_per_s(cost: DecodeCost, lengths: Lengths, in_flight: float, prompt_tokens: float = 0.0) -> float:
    """Return the throughput limit: response tokens per second of one engine that is always full."""
    return float(_as_float(lengths).sum()) / limit_s(cost, lengths, in_flight, prompt_tokens)


def in_flight_that_fits(cost: DecodeCost, lengths: Lengths, prompt_tokens: float = 0.0) -> float:
    """Return the mean number of sequences that the KV cache of an always full engine holds; inf if unlimited.

    At a random time, a sequence of length L is present with probability proportional to L, and half done on average.
    """
    if cost.kv_capacity_tokens is None:
        return math.inf
    response = _as_float(lengths)
    resident = float((response * (prompt_tokens + response / 2.0)).sum() / response.sum())
    return cost.kv_capacity_tokens / resident


def _as_float(lengths: Lengths) -> NDArray[np.float64]:
    array = np.asarray(lengths, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or array.min() < 1:
        raise ValueError("lengths must be a non-empty 1-d sequence of token counts >= 1")
    return array


def _work_s(cost: DecodeCost, response: NDArray[np.float64], prompt_tokens: float) -> float:
    """Return the decoding seconds that do not depend on the schedule: compute per token, and KV reads."""
    tokens = float(response.sum())
    kv_reads = float((response * response).sum()) / 2.0 + prompt_tokens * tokens
    return cost.per_sequence_s * tokens + cost.per_kv_token_s * kv_reads
