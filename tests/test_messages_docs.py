"""docs/troubleshooting.md quotes april: its messages are in the code, and docs/cli.md names options that there are."""

from __future__ import annotations

import ast
import re

import pytest
import typer
from page_blocks import ROOT

from april.cli import app

MESSAGES = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8").partition("## By message")[2]
ROWS = re.findall(r"^\| (`.*?) \|", MESSAGES.partition("\n\n| what you see")[0], re.M)
OPTIONS = re.findall(r"^\| (`--.*?) \| `(\w+)` \|", (ROOT / "docs" / "cli.md").read_text("utf-8"), re.M)


def texts() -> list[str]:
    """All texts in april's code, adjacent ones as one."""
    trees = (ast.parse(path.read_text("utf-8")) for path in (ROOT / "april").rglob("*.py"))
    return [
        node.value for tree in trees for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]  # fmt: skip


def test_messages_are_quoted() -> None:
    """Each is a part of a text in the code."""
    quoted = [words for row in ROWS for words in re.findall(r"`(.*?)`", row)]
    known = texts()
    assert len(quoted) > 15
    assert [words for words in quoted if not any(words in text for text in known)] == []


@pytest.mark.parametrize(("options", "command"), OPTIONS)
def test_options_are_those_of_the_command(options: str, command: str) -> None:
    """As its help has them."""
    there = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    known = {name for parameter in there for name in (*parameter.opts, *parameter.secondary_opts)}
    assert set(re.findall(r"--[a-z-]+", options)) <= known
