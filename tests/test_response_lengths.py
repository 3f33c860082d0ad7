"""Response lengths: what they are distributed like, and that a sample's length depends on nothing but its key."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.engines.simulated.response_lengths import (
    ConstantLengths,
    LognormalLengths,
    ResponseLengths,
    TraceLengths,
)

EVERY_KIND: list[ResponseLengths] = [
    ConstantLengths(7),
    LognormalLengths.split(2500, 0.8, 0.25, cap=16_384, seed=1),
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


def test_lengths_do_not_depend_on_the_process() -> None:
    """PYTHONHASHSEED changes nothing, and the numbers are the same on every Python and platform (pinned)."""
    program = (
        "from april.engines.simulated.response_lengths import *\n"
        "kinds = [LognormalLengths(2500, 0.4, 0.7, 16384, 1), TraceLengths([5, 6, 7, 1000], seed=2)]\n"
        "print([k.group(g, 3).tolist() for k in kinds for g in (0, 12345678901)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parent.parent,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("0", "1", "2")
    }

    lognormal = "[677, 1601, 2593], [4427, 1165, 1846]"
    assert outputs == {f"[{lognormal}, [6, 7, 7], [5, 1000, 1000]]"}


def test_lognormal_has_the_stated_median_spread_and_split() -> None:
    """Median, total sigma and the share of variance between prompts are those asked for."""
    lengths = LognormalLengths.split(2500, 0.8, between_share=0.25)
    logs = np.log(np.stack([lengths.group(g, 8) for g in range(20_000)]))

    within = logs.var(axis=1, ddof=1).mean()
    between = logs.mean(axis=1).var(ddof=1) - within / 8
    assert math.exp(float(np.median(logs))) == pytest.approx(2500, rel=0.02)
    assert between == pytest.approx(0.25 * 0.64, rel=0.05)  # 3.3 standard errors
    assert within == pytest.approx(0.75 * 0.64, rel=0.03)


def test_lognormal_at_the_reference_workload() -> None:
    """Median 2500, sigma 0.8, cap 16k: mean 3393 and 0.9 % at the cap, as published."""
    lengths = LognormalLengths(2500, 0.0, 0.8, cap=16_384)
    drawn = np.concatenate([lengths.group(g, 8) for g in range(20_000)])

    assert drawn.mean() == pytest.approx(3393, rel=0.01)
    assert (drawn == 16_384).mean() == pytest.approx(0.009, abs=0.001)
    assert drawn.max() == 16_384


def test_seeds_and_indices_are_independent() -> None:
    """Another seed gives other lengths; neighbouring samples and groups are uncorrelated when they should be."""
    first, second = LognormalLengths(2500, 0.0, 0.8, seed=0), LognormalLengths(2500, 0.0, 0.8, seed=1)
    a = np.log(np.stack([first.group(g, 8) for g in range(3000)]))
    b = np.log(np.stack([second.group(g, 8) for g in range(3000)]))

    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(a[:, 0], a[:, 1])[0, 1]) < 0.06
    assert abs(np.corrcoef(a[:-1].ravel(), a[1:].ravel())[0, 1]) < 0.03


def test_trace_rows_stay_together(tmp_path: Path) -> None:
    """A group of a grouped trace is one row, every sample of it once before any twice."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"lengths": [1, 2, 3]}\n\n{"lengths": [40, 50, 60]}\n')
    trace = TraceLengths.from_jsonl(path)

    groups = [sorted(trace.group(g, 3).tolist()) for g in range(40)]
    assert {tuple(g) for g in groups} == {(1, 2, 3), (40, 50, 60)}
    assert sorted(trace.group(0, 6).tolist()) == sorted(groups[0] * 2)


def test_trace_of_plain_numbers_is_drawn_evenly(tmp_path: Path) -> None:
    """Every number of a flat trace comes up equally often, capped."""
    path = tmp_path / "trace.jsonl"
    path.write_text("10\n20\n30\n4000\n")
    trace = TraceLengths.from_jsonl(str(path), cap=100)

    values, counts = np.unique(np.concatenate([trace.group(g, 8) for g in range(2000)]), return_counts=True)
    assert values.tolist() == [10, 20, 30, 100]
    assert counts / counts.sum() == pytest.approx(0.25, abs=0.02)


BAD_LINES = ["ten", "0", "1.5", "true", '{"length": [1]}', '{"lengths": []}', '{"lengths": [1, -2]}']


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_trace_lines_are_named(tmp_path: Path, line: str) -> None:
    """A line that is no length is refused with file and line number."""
    path = tmp_path / "trace.jsonl"
    path.write_text(f"5\n{line}\n")

    with pytest.raises(ValueError, match=r"trace\.jsonl, line 2"):
        TraceLengths.from_jsonl(path)


def test_impossible_distributions_are_refused() -> None:
    """Parameters that make no distribution over token counts are errors."""
    with pytest.raises(ValueError, match="at least 1 token"):
        ConstantLengths(0)
    with pytest.raises(ValueError, match="median >= 1"):
        LognormalLengths(0, 0.1, 0.1)
    with pytest.raises(ValueError, match="between_share"):
        LognormalLengths.split(100, 0.8, 1.5)
    with pytest.raises(ValueError, match="cap"):
        LognormalLengths(100, 0.1, 0.1, cap=0)
    with pytest.raises(ValueError, match="empty"):
        TraceLengths([])
    with pytest.raises(ValueError, match="entry 2"):
        TraceLengths([3, 0])
