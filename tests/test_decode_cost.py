"""Decode costs: closed forms, presets, and the limit of section "S_max" of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.engines.simulated.clockwork import SimulatedDecoder
from april.engines.simulated.decode_cost import (
    DecodeCost,
    GpuSpeed,
    ModelSize,
    in_flight_that_fits,
    limit_s,
    limit_tokens_per_s,
    roofline,
)
from april.engines.simulated.response_lengths import LognormalLengths

costs = st.builds(
    DecodeCost,
    base_s=st.floats(1e-4, 1e-1),
    per_sequence_s=st.floats(0.0, 1e-3),
    per_kv_token_s=st.one_of(st.just(0.0), st.floats(1e-12, 1e-6)),
)


@settings(derandomize=True, deadline=None)
@given(costs, st.integers(0, 300), st.integers(0, 200), st.integers(0, 10**6))
def test_closed_form_is_the_sum_of_single_steps(cost: DecodeCost, steps: int, n: int, kv: int) -> None:
    """k steps cost what k single steps cost, with the KV growing by n after each."""
    single = math.fsum(cost.step_s(n, kv + n * i) for i in range(steps))

    assert cost.steps_s(steps, n, kv) == pytest.approx(single, rel=1e-12)


@settings(derandomize=True, deadline=None)
@given(costs, st.floats(0.0, 1e4), st.integers(0, 4096), st.integers(0, 10**7))
def test_inverse_is_the_largest_number_of_whole_steps(cost: DecodeCost, seconds: float, n: int, kv: int) -> None:
    """steps_within is exact: that many steps fit, one more does not."""
    k = cost.steps_within(seconds, n, kv)

    assert cost.steps_s(k, n, kv) <= seconds < cost.steps_s(k + 1, n, kv)


def test_no_steps_before_the_start() -> None:
    """A negative time holds no step."""
    assert DecodeCost(1.0, 0.0, 0.0).steps_within(-1.0, 1, 1) == 0


@pytest.mark.parametrize(
    ("gpu", "model", "base_ms", "sequence_us", "kv_ns"),
    [
        ("h100", "r1-distill-1.5b", 2.7, 6.2, 11.4),
        ("h100", "qwen3-4b", 4.7, 16.3, 58.7),
        ("h100", "qwen3-8b", 8.0, 33.1, 58.7),
        ("mi300x", "r1-distill-1.5b", 2.4, 5.9, 8.3),
        ("mi300x", "qwen3-4b", 3.8, 15.4, 42.8),
        ("mi300x", "qwen3-8b", 6.3, 31.3, 42.8),
    ],
)
def test_presets_have_the_published_coefficients(
    gpu: str, model: str, base_ms: float, sequence_us: float, kv_ns: float
) -> None:
    """The presets are those of the fact sheet, to its printed digits."""
    cost = roofline(model, gpu)

    assert cost.base_s * 1e3 == pytest.approx(base_ms, abs=0.0501)
    assert cost.per_sequence_s * 1e6 == pytest.approx(sequence_us, abs=0.0501)
    assert cost.per_kv_token_s * 1e9 == pytest.approx(kv_ns, abs=0.0501)
    assert cost.per_prefill_token_s == cost.per_sequence_s


def test_kv_capacity_is_memory_left_by_the_weights() -> None:
    """Capacity grows with the memory share by memory / KV bytes, and starts where the weights end."""
    model, gpu = (
        ModelSize(1e9, 1000),
        GpuSpeed(bandwidth_bytes_per_s=1e12, flops_per_s=1e15, memory_bytes=10e9, bandwidth_share=1.0, flops_share=1.0),
    )

    assert roofline(model, gpu, memory_share=0.5).kv_capacity_tokens == 3_000_000
    assert roofline(model, gpu, memory_share=0.8).kv_capacity_tokens == 6_000_000
    assert roofline(model, gpu, tensor_parallel=2, memory_share=0.8).kv_capacity_tokens == 14_000_000


def test_tensor_parallel_divides_the_work_but_not_the_overhead() -> None:
    """Two GPUs halve every coefficient except the fixed overhead of a step."""
    one, two = roofline("qwen3-8b", "h100"), roofline("qwen3-8b", "h100", tensor_parallel=2)

    assert two.base_s - 1.5e-3 == pytest.approx((one.base_s - 1.5e-3) / 2)
    assert two.per_sequence_s == pytest.approx(one.per_sequence_s / 2)
    assert two.per_kv_token_s == pytest.approx(one.per_kv_token_s / 2)


def test_wrong_numbers_are_refused() -> None:
    """Impossible costs, unknown presets and weights that do not fit are errors that say so."""
    with pytest.raises(ValueError, match="base_s > 0"):
        DecodeCost(0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="finite"):
        DecodeCost(1.0, math.nan, 0.0)
    with pytest.raises(ValueError, match="kv_capacity_tokens"):
        DecodeCost(1.0, 0.0, 0.0, 0.0, 0)
    with pytest.raises(ValueError, match="known are h100, mi300x"):
        roofline("qwen3-4b", "abacus")
    with pytest.raises(ValueError, match="leave no KV cache"):
        roofline(ModelSize(70e9, 327_680), "h100")
    with pytest.raises(ValueError, match="tensor_parallel"):
        roofline("qwen3-4b", "h100", tensor_parallel=0)
    with pytest.raises(ValueError, match="non-empty"):
        limit_s(DecodeCost(1.0, 0.0, 0.0), [], 1)
    with pytest.raises(ValueError, match="in_flight"):
        limit_s(DecodeCost(1.0, 0.0, 0.0), [1], 0)


def synchronous_s(cost: DecodeCost, lengths: Sequence[int] | np.ndarray[Any, Any], prompt: float = 0.0) -> float:
    """Seconds until the last response ends when all start together: the work of the limit, and steps to the longest."""
    at_limit = limit_s(cost, lengths, len(lengths), prompt)
    return at_limit + cost.base_s * (float(max(lengths)) - float(sum(lengths)) / len(lengths))


@pytest.mark.parametrize(
    ("model", "gpu", "median", "sigma", "cap", "batch", "factor", "published"),
    [
        ("r1-distill-1.5b", "h100", 2500, 0.8, 16_384, 64, 1, 2.67),
        ("r1-distill-1.5b", "h100", 2500, 0.8, 16_384, 64, 2, 3.62),
        ("qwen3-4b", "h100", 2500, 0.8, 16_384, 128, 1, 1.60),
        ("qwen3-8b", "mi300x", 4000, 0.9, 32_768, 32, 1, 2.35),
    ],
)
def test_s_max_reproduces_the_published_table(
    model: str, gpu: str, median: float, sigma: float, cap: int, batch: int, factor: int, published: float
) -> None:
    """Mean of 300 draws, within the 0.06 that two random streams were found to differ."""
    cost, lengths = roofline(model, gpu), LognormalLengths(median, 0.0, sigma, cap)

    draws = [lengths.group(draw, batch) for draw in range(300)]
    mean = np.mean([synchronous_s(cost, draw) / limit_s(cost, draw, factor * batch) for draw in draws])

    assert mean == pytest.approx(published, abs=0.06)


def test_synchronous_formula_matches_the_simulated_engine() -> None:
    """The closed form for a synchronous batch is what the discrete-event engine takes, to a thousandth."""
    cost, lengths = roofline("qwen3-4b", "h100"), LognormalLengths(2500, 0.4, 0.7, 16_384, seed=3).group(0, 64)
    decoder = SimulatedDecoder(cost, max_running=64)
    for index, length in enumerate(lengths):
        decoder.add(str(index), 150, int(length))

    end = decoder.advance(1e6)[-1].at_s

    assert end == pytest.approx(synchronous_s(cost, lengths, 150), rel=1e-3)


def test_limit_formula_matches_a_full_simulated_engine() -> None:
    """An engine that is always full and never paused makes the limit's tokens per second, to one percent."""
    cost = roofline("r1-distill-1.5b", "mi300x")
    groups = LognormalLengths(2500, 0.4, 0.7, 16_384, seed=5)
    lengths = np.concatenate([groups.group(g, 8) for g in range(2000)])
    decoder = SimulatedDecoder(cost, max_running=64)
    for index, length in enumerate(lengths):
        decoder.add(str(index), 150, int(length))

    while decoder.waiting:
        decoder.advance(decoder.next_event_time())

    rate = decoder.counters().generated_tokens / decoder.now
    assert rate == pytest.approx(limit_tokens_per_s(cost, lengths, 64, prompt_tokens=150), rel=0.01)


def test_in_flight_that_fits() -> None:
    """The KV cache holds capacity / (prompt + half a response) sequences; long ones are met more often."""
    cost = DecodeCost(1.0, 0.0, 0.0, 0.0, kv_capacity_tokens=10_000)

    assert in_flight_that_fits(cost, [800, 800], prompt_tokens=100) == pytest.approx(10_000 / 500)
    assert in_flight_that_fits(cost, [100, 900]) == pytest.approx(10_000 / (0.1 * 50 + 0.9 * 450))
    assert in_flight_that_fits(DecodeCost(1.0, 0.0, 0.0), [1]) == math.inf
