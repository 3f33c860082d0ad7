"""The README is true: its loop runs as it stands, and every command in it is run by CI."""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import april

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str, page: str = README) -> list[str]:
    """Fenced blocks of one language, indentation of list items taken off."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", page, re.S | re.M)
    return [re.sub(rf"^{indent}", "", text, flags=re.M) for indent, text in found]


def block(word: str, page: str = README) -> str:
    """The one Python block that contains ``word``."""
    (found,) = [b for b in blocks("python", page) if word in b]
    return found


def test_the_first_program_runs_as_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    """Copied from the README, into a file of its own: a tiny model learns, on tokens of which some are older."""
    space: dict[str, Any] = {}
    exec(compile(block("RolloutScheduler"), "README.md", "exec"), space)  # noqa: S102 - this is what the test is about
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    rewards = [float(re.findall(r"reward ([\d.]+)", line)[0]) for line in lines]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.2
    assert space["batch"].metrics["staleness_max"] >= 1


def test_the_readme_is_short() -> None:
    """A reader in a hurry: at most 1,200 words."""
    assert len(README.split()) <= 1200


def test_the_pages_are_short() -> None:
    """A page for a trainer has at most 900 words, all pages together at most 30,000."""
    pages = {page.stem: len(page.read_text("utf-8").split()) for page in (ROOT / "docs").glob("*.md")}
    assert max(pages[trainer] for trainer in ("areal", "openrlhf", "slime", "trl", "verl")) <= 900
    assert len(README.split()) + sum(pages.values()) <= 30_000


def test_the_flags_in_the_docs_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argparse lines, copied from docs/settings.md, with a command line."""
    page = (ROOT / "docs" / "settings.md").read_text("utf-8")
    space: dict[str, Any] = {"april": april, "argparse": argparse}
    flags = ["--rollout-batch-size", "4", "--over-sampling-batch-size", "6", "--max-response-len", "9"]
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])

    exec(compile(block("add_april_arguments", page), "settings.md", "exec"), space)  # noqa: S102 - this is what the test is about

    assert space["config"] == april.Config(rollout_batch_size=4, over_sampling_batch_size=6, max_response_len=9)


def test_the_engine_field_in_the_readme_is_one() -> None:
    """The lines for servers, copied from the README, make a configuration with two engines, of each kind it names."""
    code = block('"kind": "vllm"')
    for kind in ("vllm", "sglang", "openai"):
        assert f'"{kind}"' in code
        space: dict[str, Any] = {"april": april}
        exec(compile(code.replace('"vllm"', f'"{kind}"', 1), "README.md", "exec"), space)  # noqa: S102 - as above
        assert (space["config"].engine.kind, len(space["config"].engine.urls)) == (kind, 2)


def test_the_extras_in_the_readme_are_those_of_the_package() -> None:
    """Every extra has a row with the packages that it brings; so has the base install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = {"(none)": project["dependencies"], **project["optional-dependencies"]}
    rows = dict(re.findall(r"^\| `?([\w()]+)`? \| [^|]+ \|([^|]*)\|$", README, re.M))

    for name, packages in wanted.items():
        named = [re.split(r"[>=<\[]", package)[0] for package in packages]
        assert rows[name].strip() == ("" if named == ["april-rl"] else ", ".join(named)), name


def test_every_command_in_the_readme_is_run_by_ci() -> None:
    """A command that nobody runs stops being true one day."""
    ci = (ROOT / ".ci" / "run").read_text("utf-8")
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]

    assert commands
    assert [c for c in commands if c not in ci] == []


def test_links_in_the_documents_lead_somewhere() -> None:
    """Relative links of README, docs and contributing notes."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def anchors(page: str) -> set[str]:
    """Of the headings of a page, as forges make them."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.S | re.M)
    plain = (re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in re.findall(r"^#+ (.*)$", text, re.M))
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in plain}


def test_anchors_in_the_documents_are_headings() -> None:
    """Links into a page, or within it, name a heading that is there."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text("utf-8")):
            there = anchors((page.parent / target if target else page).read_text("utf-8"))
            assert anchor in there, f"{page.name}: {target}#{anchor}"


def test_the_servers_on_the_page_are_started_as_the_suite_starts_them() -> None:
    """docs/servers.md has, for a CPU, the flags with which the real servers are run, and names those that are more."""
    page = (ROOT / "docs" / "servers.md").read_text("utf-8")
    commands = (ROOT / "tests" / "real_engines" / "commands.py").read_text("utf-8")
    vllm, sglang, router = (
        part.partition("return Server(")[0] for part in re.split(r"^def \w+_server\(", commands, flags=re.M)[1:]
    )

    def flags(text: str) -> set[str]:
        return set(re.findall(r"--[a-z][a-z-]+[a-z]", text))

    def shown(word: str) -> set[str]:
        (found,) = [b for b in re.findall(r"^```\w*\n(.*?)^```$", page, re.S | re.M) if word in b]
        return flags(found)

    assert shown("VLLM_CPU_KVCACHE_SPACE") - {"--logprobs-mode", "--scheduling-policy"} == (
        flags(vllm) - {"--served-model-name"}
    )
    assert shown("SGLANG_USE_CPU_ENGINE") == flags(sglang) - {"--enable-metrics"}
    assert shown("launch_router") == flags(router) - {"--prometheus-port"}
