"""Planted bugs: each table of tests/planted/*.toml breaks one promise, and the tests that it names must notice.

A suite that stays green with one of them has stopped testing something. `pytest tests/test_planted_bugs.py -k NAME`
plants those whose names match; a new bug is a new table, and planted_bugs.py says what stands in it.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from planted_bugs import FOLDER, ROOT, PlantedBug, applied, changed, planted_bugs

BUGS = planted_bugs()


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
    compiling = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode=checked-hash", "april"]
    subprocess.run(compiling, cwd=target, check=True)
    return target


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_caught(bug: PlantedBug, tree: Path, runner: Runner, tmp_path: Path) -> None:
    """The tests that it names fail because of it."""
    with applied(bug, tree):
        code, printed = runner.run(tree, list(bug.caught_by), tmp_path)

    assert code == 1, printed[-4000:]
    assert "failed" in printed


def test_every_planted_bug_applies() -> None:
    """Its text stands once in its file, the replacement is another text, and the file is still Python."""
    for bug in BUGS:
        for path, text in changed(bug, ROOT).items():
            assert text != path.read_text("utf-8"), bug.name
            ast.parse(text, f"{path} with {bug.name}")


def test_every_planted_bug_says_what_it_is() -> None:
    """A name of its own, a sentence, and tests that exist."""
    tables = "".join(path.read_text("utf-8") for path in FOLDER.glob("*.toml"))
    assert len(BUGS) == len(re.findall(r"^bug = ", tables, re.MULTILINE)) >= 10
    for bug in BUGS:
        assert bug.sentence.endswith("."), bug.name
        assert bug.caught_by, bug.name
        for test in bug.caught_by:
            path, _, name = test.partition("::")
            name = name.rpartition("::")[2].partition("[")[0]
            assert f"def {name}" in (ROOT / path).read_text("utf-8"), f"{bug.name}: there is no {test}"
