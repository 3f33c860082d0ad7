"""The benchmark of work that is spread over ranks, in short."""

from __future__ import annotations

import json

import pytest

from benchmarks import ranks


def test_both_arms_keep_every_token(capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks as processes; each checks the arrays of its share, and rank 1 reads streams where that is spread."""
    assert ranks.main(["--in-flight", "16", "--response-tokens", "24", "--pairs", "1", "--rounds", "2"]) == 0
    row = json.loads(capsys.readouterr().out)
    first, spread = row["ms_per_1000_tokens"]["false"], row["ms_per_1000_tokens"]["true"]
    assert 0 < first[1] < first[0]
    assert spread[1] > first[1]
