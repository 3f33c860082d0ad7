"""A training that was cut and resumed from OpenRLHF's checkpoint: nothing lost, nothing trained twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import short_runs
from training import ALL, differences, report

SAVED, KILLED = 3, 4


MODES: dict[str, dict[str, Any]] = {
    "sync": {}, "async": {"train__async_enable": True},
    "continuous": {"train__async_enable": True, "april__generation": "continuous"},
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_training(mode: str, tmp_path: Path) -> None:
    """Killed one step after the checkpoint; partials cross the restart, and log-probabilities still agree."""
    files = short_runs.prepare(tmp_path)
    words = short_runs.flags(files, tmp_path, ckpt__save_steps=SAVED, **MODES[mode])
    before = short_runs.run(tmp_path / "before", words, killed_after=KILLED)
    assert before.status != 0
    assert len(before.trained) >= KILLED

    after = short_runs.run(tmp_path / "after", [*words, "--ckpt.load_enable"])

    assert after.status == 0, after.output[-4000:]
    kept = before.trained[:SAVED]
    trained = Counter(row["label"] for rows in kept + after.trained for row in rows)
    assert trained == ALL
    # tokens of the first process in responses that the second one finished; continuous, or that it only delivered, for
    # running requests hand theirs over when they end, so the state has what was cut by a broadcast or had ended
    carried = [s for b in after.batches for s in b["samples"] if s["versions"][0][0] == 0]
    if mode != "continuous":
        carried = [s for s in carried if s["versions"][-1][0] == 1]
    assert carried
    assert after.ledger["prompts"]["delivered"] == short_runs.ROWS
    assert after.ledger["prompts"]["held"] == 0
    assert after.batches[0]["version"] == [1, SAVED]
    present, older = differences(after, (1, SAVED))
    report(f"{mode}, resumed, {len(carried)} responses continued over the restart", after, present, older)
    assert max(present, default=0.0) <= 1e-3
