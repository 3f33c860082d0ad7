"""What the simulated engine takes and makes: decode cost, the cost fitted to it, response lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.core.event_pump import EndedRequest, ObservedCore, RequestLog
from april.core.types import SampleId
from april.engines.simulated.decode_cost import (
    DecodeCost,
    ModelSize,
    limit_s,
    limit_tokens_per_s,
    roofline,
)
from april.engines.simulated.decoder_model import SimulatedDecoder
from april.engines.simulated.fitted_cost import Requests, fit, predicted_s
from april.engines.simulated.response_lengths import (
    LognormalLengths,
    ResponseLengths,
    TraceLengths,
)
from april.simulate.simulation import Simulation
from april.simulate.workload import Workload

costs = st.builds(
    DecodeCost,
    base_s=st.floats(1e-4, 1e-1),
    per_sequence_s=st.floats(0.0, 1e-3),
    per_kv_token_s=st.one_of(st.just(0.0), st.floats(1e-12, 1e-6)),
    speed_up=st.sampled_from([(), ((8, 2.0), (64, 1.0))]),
)


def test_speculative_decoding_divides_the_time_of_a_step() -> None:
    """By the given factors, linear between the points and constant outside; impossible points are refused."""
    plain = DecodeCost(1.0, 0.1, 0.01)
    fast = DecodeCost(1.0, 0.1, 0.01, speed_up=((8, 2.0), (64, 1.0)))
    ratios = [plain.step_s(n, 50) / fast.step_s(n, 50) for n in (1, 8, 36, 64, 100)]
    assert ratios == pytest.approx([2.0, 2.0, 1.5, 1.0, 1.0])
    assert limit_s(plain, [5, 7], 8.0, 3.0) == pytest.approx(2 * limit_s(fast, [5, 7], 8.0, 3.0))
    for points in (((8, 2.0), (4, 1.0)), ((0, 1.0),), ((8, 0.0),)):
        with pytest.raises(ValueError, match="speed_up"):
            DecodeCost(1.0, 0.1, 0.01, speed_up=points)


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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DecodeCost(0.0, 0.0, 0.0), "base_s > 0"),
        (lambda: DecodeCost(1.0, math.nan, 0.0), "finite"),
        (lambda: DecodeCost(1.0, 0.0, 0.0, 0.0, 0), "kv_capacity_tokens"),
        (lambda: roofline("qwen3-4b", "abacus"), "choose one of h100, mi300x"),
        (lambda: roofline(ModelSize(70e9, 327_680), "h100"), "leave no KV cache"),
        (lambda: roofline("qwen3-4b", "h100", tensor_parallel=0), "tensor_parallel"),
        (lambda: limit_s(DecodeCost(1.0, 0.0, 0.0), [], 1), "non-empty"),
        (lambda: limit_s(DecodeCost(1.0, 0.0, 0.0), [1], 0), "in_flight"),
        (lambda: LognormalLengths(0, 0.1, 0.1), "median >= 1"),
        (lambda: LognormalLengths(100, 0.1, 0.1, cap=0), "cap"),
        (lambda: TraceLengths([]), "empty"),
        (lambda: TraceLengths([3, 0]), "entry 2"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], words: str) -> None:
    """Impossible costs and distributions, unknown presets and weights that do not fit are errors that say so."""
    with pytest.raises(ValueError, match=words):
        make()


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


def logged(mode: str, steps: int = 10) -> tuple[Workload, RequestLog]:
    """The requests of a simulation of the reference workload."""
    workload = Workload()
    simulation = Simulation(
        workload.core_settings(workload.modes[mode]), workload.cost, workload.lengths, engines=workload.engines,
        prompt_len=workload.prompt_len,
    )  # fmt: skip
    log = RequestLog(simulation.core, lambda: simulation.now)
    simulation._pump._core = ObservedCore(simulation.core, [log])
    simulation.run(steps)
    return workload, log


@pytest.mark.parametrize("mode", ["sync", "april", "refill"])
def test_the_cost_of_a_simulated_engine_is_found(mode: str) -> None:
    """What is fitted to one engine says what the requests of its likes took, within 3 % in the mean."""
    workload, log = logged(mode)
    first, *others = (Requests.of(ended) for _, ended in log)
    assert len(others) == workload.engines - 1
    found = fit(first)
    assert found is not None
    assert found.error < 0.02
    for seen in others:
        took = seen.ended_s - seen.began_s
        assert np.abs(predicted_s(seen, found.cost) - took).sum() / took.sum() < 0.03


def test_a_step_costs_what_it_costs() -> None:
    """Where batches fill and drain: with few sequences and with many, short ones and long ones, within 5 %."""
    rng = np.random.default_rng(0)
    cost = DecodeCost(0.01, 2e-4, 5e-7, 4e-5)
    workload = [(int(rng.integers(50, 4000)), int(rng.integers(10, 2000))) for _ in range(600)]
    seen = Requests.of(decoded(cost, workload, places=48))
    found = fit(seen)
    assert found is not None
    for sequences, resident in ((2, 6_000), (12, 20_000), (24, 70_000), (48, 100_000)):
        assert found.cost.step_s(sequences, resident) == pytest.approx(cost.step_s(sequences, resident), rel=0.05)


def decoded(cost: DecodeCost, workload: list[tuple[int, int]], places: int) -> list[Any]:
    """An engine, step by step; bursts of ``places`` requests, each when the one before has ended."""
    ended, now = [], 0.0
    for at in range(0, len(workload), places):
        burst = [[context, count, context, count] for context, count in workload[at : at + places]]
        began = now
        now += cost.prefill_s(sum(context for context, *_ in burst))
        running = burst
        while running:
            now += cost.step_s(len(running), sum(r[0] for r in running))
            for r in running:
                r[0], r[1] = r[0] + 1, r[1] - 1
            for r in running:
                if not r[1]:
                    ended.append(EndedRequest("e", SampleId(0, 0), False, 0, began, now, r[2], r[3]))
            running = [r for r in running if r[1]]
    return ended


EVERY_KIND: list[ResponseLengths] = [
    LognormalLengths(7, 0.0, 0.0),
    LognormalLengths(2500, 0.4, 0.7, cap=16_384, seed=1),
    TraceLengths([5, 6, 7, 1000], seed=2),
    TraceLengths([[1, 2, 3], [40, 50], [600]], seed=2),
]


@settings(derandomize=True, deadline=None)
@given(st.sampled_from(EVERY_KIND), st.integers(0, 2**63), st.integers(1, 40), st.data())
def test_a_length_depends_on_the_key_only(
    lengths: ResponseLengths, group: int, n_samples: int, data: st.DataObject
) -> None:
    """However many samples are drawn, in whatever order, sample (group, index) has one length, >= 1."""
    index = data.draw(st.integers(0, n_samples - 1))
    whole = lengths.group(group, n_samples)
    lengths.sample(group + 1, 3)

    assert whole.dtype == np.int32
    assert whole.shape == (n_samples,)
    assert whole.min() >= 1
    assert lengths.sample(group, index) == whole[index]


def test_trace_rows_stay_together(tmp_path: Path) -> None:
    """A group of a grouped trace is one row, every sample of it once before any twice."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"lengths": [1, 2, 3]}\n\n{"lengths": [40, 50, 60]}\n')
    trace = TraceLengths.from_jsonl(path)

    groups = [sorted(trace.group(g, 3).tolist()) for g in range(40)]
    assert {tuple(g) for g in groups} == {(1, 2, 3), (40, 50, 60)}
    assert sorted(trace.group(0, 6).tolist()) == sorted(groups[0] * 2)
