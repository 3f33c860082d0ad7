"""Planted bugs: each patch under tests/planted breaks one promise, and the tests it names must notice.

A suite that stays green with one of them has stopped testing something.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATCHES = sorted((ROOT / "tests" / "planted").glob("*.patch"))


class Runner:
    """Runs named tests on the april of a tree; starting pytest anew for each took half of the time of all bugs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, tree: Path, tests: list[str], within: Path) -> tuple[int, str]:
        """Exit code and what was printed; examples that hypothesis keeps are of this bug alone."""
        asked = {
            "directory": str(tree),
            "arguments": ["-q", "-x", "-p", "no:cacheprovider", *tests],
            "environment": {"PYTHONPATH": str(tree), "HYPOTHESIS_STORAGE_DIRECTORY": str(within)},
            "out": str(within / "out.txt"),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        return code, (within / "out.txt").read_text("utf-8")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """One for all bugs of this process."""
    command = [sys.executable, str(ROOT / "tests" / "warm_pytest.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Runner(process)


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
def test_planted_bug_is_caught(patch: Path, tree: Path, runner: Runner, tmp_path: Path) -> None:
    """The bug applies, and the tests that it names fail because of it."""
    caught_by = next(line for line in patch.read_text("utf-8").splitlines() if line.startswith("Caught by: "))
    tests = caught_by.removeprefix("Caught by: ").split()

    with applied(patch, tree):
        code, printed = runner.run(tree, tests, tmp_path)

    assert code == 1, printed[-4000:]
    assert "failed" in printed


def test_there_are_planted_bugs() -> None:
    """The patches are found, and each says why it matters."""
    assert len(PATCHES) >= 10
    assert all(p.read_text("utf-8").splitlines()[0].endswith(".") for p in PATCHES)
