"""The house: floors import downwards only, the core is pure, nothing unsafe is imported, files stay small."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "april"
FILES = sorted(PACKAGE.rglob("*.py"))
FLOORS = ("core", "engines", "driver", "desk")
"""From the ground up; scheduler, simulation, simulate, demo, doctor and cli are above them all."""
CLOCKS_AND_CHANCE = {"time", "datetime", "random", "secrets"}
IMPURE = {"asyncio", "aiohttp", "socket", "threading", "torch", "os", "pathlib"} | CLOCKS_AND_CHANCE
UNSAFE = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def imports(path: Path) -> Iterator[str]:
    """Every module imported anywhere in a file, those for type checking left out."""
    tree = ast.parse(path.read_text("utf-8"))
    skipped = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and isinstance(branch.test, ast.Name) and branch.test.id == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_the_core_is_pure() -> None:
    """No asyncio, network, disk, clock, randomness or torch in april/core."""
    for path in (PACKAGE / "core").glob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & IMPURE, path.name


@pytest.mark.parametrize("floor", range(len(FLOORS)))
def test_floors_import_only_what_is_below(floor: int) -> None:
    """core < engines < driver < desk; none of them knows the scheduler, the demo or the command line."""
    top = ("scheduler", "simulation", "simulate", "demo", "doctor", "engine_fit", "cli", "adapters")
    above = {f"april.{name}" for name in (*FLOORS[floor + 1 :], *top)}
    for path in (PACKAGE / FLOORS[floor]).glob("*.py"):
        for name in imports(path):
            assert not any(name == a or name.startswith(a + ".") for a in above), f"{path.name} imports {name}"


def test_no_engine_is_decided_on_by_name_above_the_engines() -> None:
    """Decide by capabilities: engine kinds are named in engines/ and in the configuration's types only."""
    kinds = ('"transformers"', '"simulated"', '"vllm"', '"sglang"', '"openai"')
    for path in FILES:
        if path.is_relative_to(PACKAGE / "engines") or path.name == "config.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Compare):
                assert not any(kind in ast.unparse(node).replace("'", '"') for kind in kinds), path.name


def test_nothing_unsafe_is_imported() -> None:
    """No pickle and its kin, in the package, the benchmarks or the examples."""
    for path in [*FILES, *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")]:
        assert not {name.split(".")[0] for name in imports(path)} & UNSAFE, path.name


def test_wall_clock_is_not_read_in_the_library() -> None:
    """Nothing depends on the wall clock: ``time.time`` appears nowhere in april."""
    for path in FILES:
        assert "time.time(" not in path.read_text("utf-8"), path.name


def test_files_stay_small() -> None:
    """At most 600 lines a file, tests included; half of the package's files have at most 200."""
    ours = [*FILES, *(p for name in ("tests", "benchmarks", "examples") for p in (ROOT / name).rglob("*.py"))]
    sizes = {path: len(path.read_text("utf-8").splitlines()) for path in ours}
    assert {path.name: size for path, size in sizes.items() if size > 600} == {}
    assert statistics.median(sizes[path] for path in FILES) <= 200
