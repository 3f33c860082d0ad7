"""The tables of docs/settings.md, made from the settings themselves: ``python tests/settings_page.py`` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel

from april.config.engines import (
    ServerEngineConfig,
    SglangEngineConfig,
    SimulatedEngineConfig,
    TransformersEngineConfig,
    VllmEngineConfig,
)
from april.config.flags import Setting, choices, settings_of
from april.config.settings import Config, SamplingConfig

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
BEGIN, END = "<!-- made by tests/settings_page.py: begin -->", "<!-- end -->"


def tables() -> str:
    """Markdown: all settings, by section, in the order of the code."""
    shared = {s.path for s in settings_of(ServerEngineConfig)}
    return "\n\n".join([
        _table(s for s in settings_of(Config) if "." not in s.path),
        "## sampling", _table(settings_of(SamplingConfig)),
        "## engine",
        "`kind` is `transformers` (default), `simulated`, `vllm`, `sglang` or `openai`, and decides on the others.",
        "### transformers: [the embedded engine](embedded.md)", _table(_without_kind(TransformersEngineConfig)),
        "### vllm, sglang, openai: [servers](servers.md)", _table(settings_of(ServerEngineConfig)),
        "`api_key` is the key itself, and no flag. On `vllm` and `openai` also:",
        _table(s for s in _without_kind(VllmEngineConfig) if s.path not in shared),
        "On `sglang` also:", _table(s for s in _without_kind(SglangEngineConfig) if s.path not in shared),
        "### simulated: [for planning and tests](simulate.md)", _table(_without_kind(SimulatedEngineConfig)),
    ])  # fmt: skip


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


def page() -> str:
    """The whole page, with its tables made anew."""
    text = PAGE.read_text("utf-8")
    return f"{text.partition(BEGIN)[0]}{BEGIN}\n\n{tables()}\n\n{END}{text.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
