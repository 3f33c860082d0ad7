"""The fenced blocks of README.md and docs/*.md, and what kind of thing each of them is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^( *)```(\w*)[^\n`]*\n(.*?)^ *``` *$", re.S | re.M)
COMMANDS, PYTHON, YAML = ("", "bash"), ("python",), ("yaml",)
"""Languages by what is done with a block: run its lines, run it, load it. All others show something."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block, the indentation of a list item taken off."""

    page: str
    """Name of its file."""
    number: int
    """On its page, from 0."""
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


@cache
def blocks_of(page: Path) -> tuple[Block, ...]:
    """All blocks of a page, in order."""
    found = FENCE.findall(page.read_text("utf-8"))
    return tuple(
        Block(page.name, number, language, re.sub(rf"^{indent}", "", text, flags=re.M))
        for number, (indent, language, text) in enumerate(found)
    )


def blocks(*languages: str) -> list[Block]:
    """Those of all pages that are in one of the languages; without languages all."""
    return [b for page in PAGES for b in blocks_of(page) if not languages or b.language in languages]


def block(page: str, word: str) -> Block:
    """The one block of a page, given by the name of its file, that has a word."""
    (found,) = [b for b in blocks() if b.page == page and word in b.text]
    return found


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of every command: lines that end with a backslash go on; comments, variables and <...> go away."""
    for line in re.sub(r"\\\n *|<[^>]*>", " ", text).splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=\S*", words[0]):
            del words[0]
        if words:
            yield words
