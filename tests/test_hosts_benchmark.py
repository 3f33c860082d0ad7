"""The benchmark of hosts in processes of their own, in short."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import hosts


@pytest.mark.skipif(sys.platform != "linux", reason="CPU of other processes is read from /proc")
def test_both_arms_make_every_request_and_keep_every_token(capsys: pytest.CaptureFixture[str]) -> None:
    """Two hosts with a canned server each, beside one process with both; each array is as it was sent."""
    assert hosts.main(["--in-flight", "16", "--response-tokens", "24", "--pairs", "1", "--rounds", "2"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["core_us_per_request"] > 0
    assert row["requests_per_cpu_s_ratio"][0] > 0
    assert 3 <= row["messages_per_request"] <= 4.5
    assert row["messages_per_frame"] >= 2
    assert row["bytes_per_request"] > 24 * 8 + 256 * 4 / 8  # its response, and its share of the prompt
