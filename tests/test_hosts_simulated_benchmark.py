"""The benchmark of hosts on virtual time, in short."""

from __future__ import annotations

import json

import pytest

from benchmarks import hosts_simulated


def test_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    """All figures that the pages quote, and hardly less throughput."""
    assert hosts_simulated.main(["--engines", "12", "--each", "8", "--hosts", "3", "--steps", "2"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["throughput_ratio"] >= 0.97
    assert row["cpu_us_per_request"] > 0
    assert 3 < row["messages_per_request"] < 8
    assert row["bytes_per_request"] > 400
