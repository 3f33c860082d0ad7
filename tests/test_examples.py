"""The examples use what is public, and the loop of one's own is whole: it imports april and learns."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from april.record.replay import replay

EXAMPLES = Path(__file__).parent.parent / "examples"
FILES = sorted(EXAMPLES.rglob("*.py"))
ADAPTERS = {f"april.adapters.{trainer}" for trainer in ("areal", "openrlhf", "slime", "trl", "verl")}
OF_THE_DEMO = {"trl/tiny.py": {"april.demo", "april.demo.warmup"}}
"""The same task as that of `april demo`, to be compared with it."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_examples_import_from_april_only(path: Path) -> None:
    """What a reader copies comes from `april`, or from the adapter of a trainer."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    ours = {name for name in modules if name.split(".")[0] == "april"}

    assert ours <= {"april"} | ADAPTERS | OF_THE_DEMO.get(str(path.relative_to(EXAMPLES)), set())


def test_the_loop_of_ones_own_learns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps of examples/own_loop.py on tokens of which most are from older weights: the reward rises."""
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLES / "own_loop.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    monkeypatch.chdir(tmp_path)  # it leaves a record of its run

    assert example.main(["--steps", "10"]) > 0.7
    assert replay(tmp_path / "runs" / "own_loop.jsonl").core.context.batches == 10
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o700
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 0: reward 0.5")
    assert len([line for line in lines if line.startswith("step ")]) == 10
