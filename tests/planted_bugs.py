"""The planted bugs: ``tests/planted/*.toml``, one table for each.

A bug is a replacement of one text by another in one file. The text must stand in that file exactly once, so that a
reader can tell what is broken without line numbers, and a change elsewhere in the file does not touch the bug.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "planted"
ROOT = FOLDER.parent.parent


@dataclass(frozen=True)
class Change:
    """One replacement."""

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
