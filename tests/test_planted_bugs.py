"""Planted bugs: each table of tests/planted/*.toml breaks one promise, and the tests that it names must notice.

A suite that stays green with one of them has stopped testing something. `pytest tests/test_planted_bugs.py -k NAME`
plants those whose names match. A bug is a replacement of one text by another in one file; the text must stand there
exactly once, so that a reader can tell what is broken without line numbers, and a change elsewhere does not touch it.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "planted"
ROOT = FOLDER.parent.parent


@dataclass(frozen=True)
class Change:
    file: str
    text: str
    replacement: str


@dataclass(frozen=True)
class PlantedBug:
    """A sentence that says what goes wrong, the tests that must fail because of it, and the changes that cause it."""

    name: str
    sentence: str
    caught_by: tuple[str, ...]
    changes: tuple[Change, ...]


def planted_bugs() -> list[PlantedBug]:
    """Every bug, by name; tables below ``NAME.also`` are further changes of the same bug."""
    tables = {n: t for path in sorted(FOLDER.glob("*.toml")) for n, t in tomllib.loads(path.read_text("utf-8")).items()}
    return [
        PlantedBug(
            name,
            table["bug"],
            tuple(table["caught_by"]),
            tuple(Change(t["file"], t["text"], t["replacement"]) for t in (table, *table.get("also", ()))),
        )
        for name, table in sorted(tables.items())
    ]


def changed(bug: PlantedBug, tree: Path) -> dict[Path, str]:
    """What files of ``tree`` would hold with the bug; raises AssertionError, with advice, where a text has moved."""
    files: dict[Path, str] = {}
    for change in bug.changes:
        path = tree / change.file
        before = files[path] if path in files else path.read_text("utf-8") if path.exists() else ""
        times = before.count(change.text)
        assert times == 1, (
            f"planted bug {bug.name}: its text stands {times} times in {change.file}, and must stand there once.\n"
            f"{change.text}\n{_advice(change, times, tree)}"
        )
        files[path] = before.replace(change.text, change.replacement)
    return files


@contextmanager
def applied(bug: PlantedBug, tree: Path) -> Iterator[None]:
    """The bug is in ``tree``, and afterwards it is not."""
    files = changed(bug, tree)
    before = {path: path.read_bytes() for path in files}
    for path, text in files.items():
        path.write_text(text, "utf-8")
    try:
        yield
    finally:
        for path, content in before.items():
            path.write_bytes(content)


def _advice(change: Change, times: int, tree: Path) -> str:
    if times:
        return "Give it more of the lines around it."
    elsewhere = [path for path in sorted((tree / "april").rglob("*.py")) if change.text in path.read_text("utf-8")]
    if elsewhere:
        return "It stands in " + ", ".join(str(path.relative_to(tree)) for path in elsewhere) + ": correct `file`."
    return "Find the code that it was about, and take `text` and `replacement` from there."


BUGS = planted_bugs()


class Runner:
    """Runs named tests on the april of a tree; starting pytest anew for each took half of the time of all bugs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, tree: Path, tests: list[str], within: Path) -> tuple[int, str]:
        """Exit code and what was printed; examples that hypothesis keeps are of this bug alone."""
        asked = {
            "directory": str(tree),
            # native tracebacks: for its own, pytest parses files, at which Python 3.11 fails while threads do the same
            "arguments": ["-q", "-x", "--tb=native", "-p", "no:cacheprovider", *tests],
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
    command = [sys.executable, str(ROOT / "tests" / "warm_pytest.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Runner(process)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """april, its benchmarks, tests and their configuration; the pages that some of them read are those of here.

    One for all bugs of this process. Its bytecode goes by what stands in a file, not by when that was written: no file
    is taken for what it was with another bug.
    """
    target = tmp_path_factory.mktemp("planted")
    for name in ("april", "benchmarks", "tests"):
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
