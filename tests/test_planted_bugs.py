"""Planted bugs: each patch under tests/planted breaks one promise, and the tests it names must notice.

A suite that stays green with one of them has stopped testing something.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATCHES = sorted((ROOT / "tests" / "planted").glob("*.patch"))


def run_tests(tree: Path, tests: list[str], examples: Path) -> subprocess.CompletedProcess[str]:
    """The named tests on the april of ``tree``; examples that hypothesis keeps are of this bug alone."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "HYPOTHESIS_STORAGE_DIRECTORY": str(examples)},
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """april, its tests and their configuration; the pages that some of them read are those of here.

    One for all bugs of this process. Its bytecode goes by what stands in a file, not by when that was written: no file
    is taken for what it was with another bug.
    """
    target = tmp_path_factory.mktemp("planted")
    for name in ("april", "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "planted"))
    shutil.copy(ROOT / "pyproject.toml", target)
    (target / "docs").symlink_to(ROOT / "docs")
    compiling = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode=checked-hash", "april", "tests"]
    subprocess.run(compiling, cwd=target, check=True)
    return target


@contextmanager
def applied(patch: Path, tree: Path) -> Iterator[None]:
    """The bug is in ``tree``, and afterwards it is not."""
    subprocess.run(["git", "apply", str(patch)], cwd=tree, check=True)
    try:
        yield
    finally:
        subprocess.run(["git", "apply", "--reverse", str(patch)], cwd=tree, check=True)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_planted_bug_is_caught(patch: Path, tree: Path, tmp_path: Path) -> None:
    """The bug applies, and the tests that it names fail because of it."""
    caught_by = next(line for line in patch.read_text("utf-8").splitlines() if line.startswith("Caught by: "))
    tests = caught_by.removeprefix("Caught by: ").split()

    with applied(patch, tree):
        result = run_tests(tree, tests, tmp_path)

    assert result.returncode == 1, result.stdout[-2000:] + result.stderr[-2000:]
    assert "failed" in result.stdout


def test_there_are_planted_bugs() -> None:
    """The patches are found, and each says why it matters."""
    assert len(PATCHES) >= 10
    assert all(p.read_text("utf-8").splitlines()[0].endswith(".") for p in PATCHES)
