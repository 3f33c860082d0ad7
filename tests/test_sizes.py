"""The house keeps its size: lines of Python per package, as tests/sizes.toml allows them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests" / "sizes.toml"
MOST = tomllib.loads(TABLE.read_text("utf-8"))
SLACK = 0.1
"""Part of a limit that may be unused before the limit must be lowered."""


def lines_in(folder: str) -> int:
    """Lines of all Python files below a folder; those beside its packages for "folder/*.py"."""
    files = ROOT.glob(folder) if folder.endswith(".py") else (ROOT / folder).rglob("*.py")
    return sum(len(path.read_text("utf-8").splitlines()) for path in files)


@pytest.mark.parametrize("folder", MOST)
def test_a_package_is_no_larger_than_was_decided(folder: str) -> None:
    """Whoever needs more raises the number and says why in the same line; whoever removes code lowers it."""
    lines, most = lines_in(folder), MOST[folder]
    assert lines <= most, f"{folder} has {lines} lines, {most} are allowed: make it shorter, or say in {TABLE} why not"
    assert lines >= (1 - SLACK) * most, f"{folder} has {lines} lines: lower its {most} in {TABLE}"


def test_every_package_has_a_size_and_every_size_a_reason() -> None:
    """No package is forgotten, and each number is followed by a comment."""
    rooms = {f"april/{path.parent.name}" for path in (ROOT / "april").glob("*/__init__.py")}
    assert rooms | {"april", "april/*.py", "tests", "benchmarks", "examples"} == set(MOST)
    assert len(re.findall(r"^\S+ = \d+  # \S", TABLE.read_text("utf-8"), re.MULTILINE)) == len(MOST)
