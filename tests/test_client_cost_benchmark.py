"""The benchmarks of april's own cost run, and both of their clients make and keep what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import abort_latency, client_cost


def test_both_clients_make_every_request_and_keep_every_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each turn checks every array against what was sent, and the server's count of requests; all four cases run."""
    out = tmp_path / "rows.json"

    assert client_cost.main(["--quick", "--json", str(out)]) == 0

    rows = json.loads(out.read_text("utf-8"))
    assert [(r["case"]["kind"], r["case"]["stream"]) for r in rows] == [
        ("vllm", False), ("vllm", True), ("sglang", False), ("sglang", True),
    ]  # fmt: skip
    assert all(r["case"]["in_flight"] == 16 and r["bare_us"] > 0 and r["april_us"] > 0 for r in rows)
    assert capsys.readouterr().out.count("\n| ") == 4


def test_both_clients_hold_every_partial_after_an_abort(capsys: pytest.CaptureFixture[str]) -> None:
    """Every turn counts its tokens against what the server sends, by one call and by one call per request."""
    assert abort_latency.main(["--quick"]) == 0
    assert capsys.readouterr().out.count("\n| ") == 2
