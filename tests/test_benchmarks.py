"""Benchmarks in small: models by hand and beside the core, timed servers, what each command prints and writes."""

from __future__ import annotations

import pytest

from benchmarks import long_agent
from benchmarks.frontier import Case, core, frontier
from benchmarks.tape_memory import PACKED_BYTES, most_bytes_per_token


@pytest.mark.parametrize(
    "case",
    [
        Case("none", 1.0, 64, 512, 8), Case("none", 0.5, 48, 384, 8), Case("none", 0.75, 56, 448, 8),
        Case("sample", 0.5, 32, 256, 8), Case("sample", 1.0, 32, 256, 8),
    ],
    ids=lambda case: f"{case.name}, quorum {case.quorum:g}",
)  # fmt: skip
def test_the_core_is_where_the_model_says(case: Case) -> None:
    """Speed over sync within 2 %, ages within 0.03 of a token share and 0.1 updates, on the reference workload."""
    (row,) = frontier([case], seeds=1, steps=24, ramp=8)

    assert row["core"]["speed"] == pytest.approx(row["model"]["speed"], rel=0.02)
    assert row["core"]["off_policy"] == pytest.approx(row["model"]["off_policy"], abs=0.03)
    assert row["core"]["staleness"] == pytest.approx(row["model"]["staleness"], abs=0.1)
    assert row["core"]["staleness_max"] <= case.bound


def test_a_quorum_takes_younger_tokens_to_the_same_speed() -> None:
    """What april promises: with half of a group as the quorum, N' = 1.4 N is as fast as 2 N whole groups."""
    part, whole = (core(case, 1, 50, 15) for case in (Case("none", 0.5, 45, 360, 8), Case("none", 1.0, 64, 512, 8)))

    assert part["tokens_per_s"] >= 0.98 * whole["tokens_per_s"]
    assert part["off_policy"] <= 0.65 * whole["off_policy"]
    assert part["staleness"] <= 0.5 * whole["staleness"]


@pytest.mark.parametrize("per_chunk", [1, 2, 16, 33, 500])
def test_chunks_take_little_more_memory_than_packed_tokens(per_chunk: int) -> None:
    """From 6,000 tokens on, an attempt in flight holds at most 1.5 times the bytes of its packed tokens."""
    assert most_bytes_per_token(8192, per_chunk, 6000) <= 1.5 * PACKED_BYTES


@pytest.mark.parametrize("renderer", long_agent.RENDERERS)
def test_a_turn_of_a_long_conversation_costs_what_an_early_one_does(renderer: str) -> None:
    """The endpoint calls as many Python functions in turn 57 as in turn 15, and the conversation stays one row."""
    costs, rows = long_agent.measure(renderer, 60)
    calls = [cost["calls"] for cost in costs if "calls" in cost]
    assert (len(costs), len(calls), rows) == (60, 10, 1)
    assert calls[-1] < 1.15 * calls[2]
