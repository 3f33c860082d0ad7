"""The model of ``benchmarks.frontier`` and the core: two accounts of quorum and over-sampling that share no code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.frontier import QUORUMS, Case, cases, core, frontier, main, table
from benchmarks.quorum_model import EngineCost, QuorumModel

ROOT = Path(__file__).parent.parent
UNIT = EngineCost(step=1.0, sequence=0.0, resident=0.0, prefill=0.0)


def test_the_model_by_hand() -> None:
    """Two groups of four, a token a second: with a quorum of 3 the batch is there at 4 s, else at 6 s."""
    lengths = {0: (1, 2, 3, 10), 1: (4, 4, 4, 6)}

    def first(quorum: float) -> tuple[float, float]:
        model = QuorumModel(
            UNIT, lambda group: lengths.get(group, (5, 5, 5, 5)), quorum=quorum, over=2, slots=8, bound=5, groups=1,
            n=4, engines=2,
        )  # fmt: skip
        model.run(1)
        return model.delivered[0][:2]

    assert first(0.75) == (pytest.approx(4.0), pytest.approx(1 + 2 + 3 + 4))
    assert first(1.0) == (pytest.approx(6.0), pytest.approx(4 + 4 + 4 + 6))


def test_the_model_counts_older_tokens_by_hand() -> None:
    """One group of four at a time, two in work: what the first delivery cuts at 4 s is old in the second batch."""
    model = QuorumModel(
        UNIT, lambda group: (4, 4, 4, 4) if group == 0 else (6, 6, 6, 6), quorum=0.75, over=2, slots=8, bound=5,
        groups=1, n=4, engines=1,
    )  # fmt: skip
    model.run(2)

    (_, _, old, mean, most), (at, tokens, second_old, second_mean, second_most) = model.delivered
    assert (old, mean, most) == (0.0, 0.0, 0)
    assert (at, tokens) == (pytest.approx(6.0), pytest.approx(24.0))
    assert (second_old, second_mean, second_most) == (pytest.approx(16.0), 1.0, 1)


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


@pytest.mark.parametrize("quorum", [1.0, 0.5])
def test_where_the_bound_binds_the_core_is_ahead_of_the_model(quorum: float) -> None:
    """What is due goes first in the core and not in the model: at least as fast, with younger tokens."""
    (row,) = frontier([Case("sample", quorum, 32, 256, 2)], seeds=1, steps=24, ramp=8)

    assert row["core"]["speed"] >= 0.98 * row["model"]["speed"]
    assert row["core"]["staleness"] <= row["model"]["staleness"]
    assert row["core"]["staleness_max"] == row["model"]["staleness_max"] == 2


def test_a_quorum_takes_younger_tokens_to_the_same_speed() -> None:
    """What april promises: with half of a group as the quorum, N' = 1.4 N is as fast as 2 N whole groups."""
    part, whole = (core(case, 1, 50, 15) for case in (Case("none", 0.5, 45, 360, 8), Case("none", 1.0, 64, 512, 8)))

    assert part["tokens_per_s"] >= 0.98 * whole["tokens_per_s"]
    assert part["off_policy"] <= 0.65 * whole["off_policy"]
    assert part["staleness"] <= 0.5 * whole["staleness"]


def test_the_page_has_cases() -> None:
    """Rows of the page are ways to schedule that are run, each with a cell for each quorum."""
    page = (ROOT / "docs" / "measurements.md").read_text("utf-8").partition("\n## Quorum\n")[2].partition("\n### ")[0]
    rows = [line for line in page.splitlines() if line.startswith("| ") and "x " in line]
    assert {row.split(" | ")[0].removeprefix("| ") for row in rows} <= {case.name for case in cases()}
    assert rows
    assert all(row.count("x ") == len(QUORUMS) for row in rows)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of one kind, two seeds: rows with their errors, the picture; ``--draw`` prints the same table."""
    files = ["--rows", str(tmp_path / "rows.json"), "--picture", str(tmp_path / "rows.png")]
    few = ["--steps", "5", "--ramp", "2", "--seeds", "2", "--processes", "1", "--kinds", "group"]
    main([*few, "--quorums", "1", "0.5", *files])
    first = capsys.readouterr().out
    main(["--draw", *files])

    rows = json.loads((tmp_path / "rows.json").read_text("utf-8"))
    assert first.endswith(table(rows) + "\n")
    assert capsys.readouterr().out == table(rows) + "\n"
    assert {row["quorum"] for row in rows} == {1.0, 0.5}
    assert all(row["core"]["speed_error"] > 0 for row in rows)
    assert (tmp_path / "rows.png").stat().st_size > 1000
