"""Planted bugs: each patch under tests/planted breaks one promise, and the tests it names must notice.

A suite that stays green with one of them has stopped testing something.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATCHES = sorted((ROOT / "tests" / "planted").glob("*.patch"))


def run_tests(tree: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """The named tests on the april of ``tree``."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        check=False,
        capture_output=True,
        text=True,
    )


def copy_tree(target: Path) -> None:
    """april, its tests and their configuration."""
    for name in ("april", "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "planted"))
    shutil.copy(ROOT / "pyproject.toml", target)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_planted_bug_is_caught(patch: Path, tmp_path: Path) -> None:
    """The bug applies, and the tests that it names fail because of it."""
    copy_tree(tmp_path)
    caught_by = next(line for line in patch.read_text("utf-8").splitlines() if line.startswith("Caught by: "))
    tests = caught_by.removeprefix("Caught by: ").split()
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)

    result = run_tests(tmp_path, tests)

    assert result.returncode == 1, result.stdout[-2000:] + result.stderr[-2000:]
    assert "failed" in result.stdout


def test_there_are_planted_bugs() -> None:
    """The patches are found, and each says why it matters."""
    assert len(PATCHES) >= 10
    assert all(p.read_text("utf-8").splitlines()[0].endswith(".") for p in PATCHES)
