"""README.md and docs/*.md: their fenced blocks, which are all executed, and the tables of docs/settings.md.

``python tests/pages.py`` writes those tables anew, from the settings themselves.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from april.config.agents import AgentsConfig
from april.config.engines import (
    AprilEngineConfig,
    ServerEngineConfig,
    SglangEngineConfig,
    SimulatedEngineConfig,
    TransformersEngineConfig,
    VllmEngineConfig,
)
from april.config.flags import Setting, choices, settings_of
from april.config.images import ImagesConfig
from april.config.settings import Config, SamplingConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
COMMANDS, YAML = ("", "bash"), ("yaml",)
"""Languages of blocks that test_page_commands.py takes as they come; every other block has a test by its name."""
EXECUTED: set[str] = set()
"""Names of the blocks that a test runs; filled as the tests are imported."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; the indentation of a list item is taken off."""

    page: str
    """Name of its file."""
    number: int
    """Number on its page, from 0."""
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"

    def run(self, space: dict[str, Any]) -> dict[str, Any]:
        """Execute it with what the reader of the page has; return that, and what the block has made."""
        exec(compile(self.text, str(self), "exec"), space)  # noqa: S102 - this is what tests of pages are about
        return space


def text_of(page: str) -> str:
    """Return a page by the name of its file."""
    return (DOCS if (DOCS / page).exists() else ROOT).joinpath(page).read_text("utf-8")


@cache
def blocks_of(page: str) -> tuple[Block, ...]:
    found = re.findall(r"^( *)```(\w*)[^\n`]*\n(.*?)^ *``` *$", text_of(page), re.S | re.M)
    return tuple(
        Block(page, number, language, re.sub(rf"^{indent}", "", text, flags=re.M))
        for number, (indent, language, text) in enumerate(found)
    )


def blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages that are in one of the languages; without languages all."""
    return [b for page in PAGES for b in blocks_of(page.name) if not languages or b.language in languages]


def executes(*names: str) -> pytest.MarkDecorator:
    """Mark the test that runs these blocks (``api.md-0``); it gets them as ``code``."""
    EXECUTED.update(names)
    parts = [name.rpartition("-") for name in names]
    return pytest.mark.parametrize("code", [[blocks_of(page)[int(n)] for page, _, n in parts]], ids=["+".join(names)])


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the words of every command: a line that ends with a backslash goes on; comments, variables, <...> go."""
    for line in re.sub(r"\\\n *|<[^>]*>", " ", text).splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=\S*", words[0]):
            del words[0]
        if words:
            yield words


# ---------------------------------------------------------------- the tables of docs/settings.md

BEGIN, END = "<!-- made by tests/pages.py: begin -->", "<!-- end -->"


def settings_page() -> str:
    """Return docs/settings.md with its tables made anew: all settings, by section, in the order of the code."""
    shared = {s.path for s in settings_of(ServerEngineConfig)}
    tables = "\n\n".join([
        _table(s for s in settings_of(Config) if "." not in s.path),
        "## sampling", _table(settings_of(SamplingConfig)),
        "## images", _table(settings_of(ImagesConfig)),
        "## agents: [other machines and containers](agents.md#containers-and-other-machines)",
        _table(settings_of(AgentsConfig)),
        "## engine",
        "`kind` is `transformers`, `simulated`, `vllm`, `sglang`, `openai` or `april`, and decides on the others. "
        "Without `engine` it is `transformers`, as among flags; a mapping must name it, "
        "unless a trainer's adapter does.",
        "### transformers: [the embedded engine](embedded.md)", _table(_without_kind(TransformersEngineConfig)),
        "### vllm, sglang, openai: [servers](servers.md)", _table(settings_of(ServerEngineConfig)),
        "`api_key` is the key itself, and no flag. On `vllm` also:",
        _table(s for s in _without_kind(VllmEngineConfig) if s.path not in shared),
        "On `sglang` also:", _table(s for s in _without_kind(SglangEngineConfig) if s.path not in shared),
        "### april: [engines of other processes](processes.md#engines-in-other-processes)",
        _table(_without_kind(AprilEngineConfig)),
        "### simulated: [for planning and tests](simulate.md)", _table(_without_kind(SimulatedEngineConfig)),
    ])  # fmt: skip
    text = text_of("settings.md")
    return f"{text.partition(BEGIN)[0]}{BEGIN}\n\n{tables}\n\n{END}{text.partition(END)[2]}"


def _without_kind(model: type[BaseModel]) -> list[Setting]:
    return [s for s in settings_of(model) if s.path != "kind"]


def _table(settings: Iterable[Setting]) -> str:
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *map(_row, settings)])


def _row(setting: Setting) -> str:
    found = re.fullmatch(r"(.*) \((?:default: (.*)|(required))\)", setting.help)
    assert found is not None, setting
    default = f"`{found[2]}`" if found[2] else "required"
    of = choices(setting.annotation)
    others = f" (of {', '.join(of)})" if of else ""
    meaning = found[1].replace("_", "\\_").replace("*", "\\*").rstrip(".")
    return f"| `{setting.path}` | {default}{others} | {meaning} |"


if __name__ == "__main__":
    (DOCS / "settings.md").write_text(settings_page(), "utf-8")
