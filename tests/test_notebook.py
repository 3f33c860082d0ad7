"""The notebook of the examples runs from top to bottom, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "first_steps.ipynb"


def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each cell after those before it, as a kernel would; it learns, and tokens of older weights are shown."""
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            exec(compile(source, f"{NOTEBOOK.name}, {cell['id']}", "exec"), namespace)  # noqa: S102 - that of this repository
    plt.close("all")
    said = capsys.readouterr().out
    assert max(batch.off_policy_share for batch in namespace["partial"]) > 0.3
    assert all(batch.off_policy_share == 0 for batch in namespace["synchronous"])
    assert namespace["partial"][-1].rewards.mean() > namespace["partial"][0].rewards.mean()
    assert "of version" in said
    report = (tmp_path / "runs" / "first_steps.html").read_text("utf-8")
    assert len(report) > 10_000
    assert "effective sample size" in report
    assert "The record does not show it" not in report


def test_the_notebook_is_committed_without_outputs() -> None:
    """What it shows depends on the machine."""
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")
