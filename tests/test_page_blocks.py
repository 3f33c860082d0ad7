"""Every block on a page is executed: settings here, commands in test_page_commands.py, the others by a test each.

A new block of Python, and a new one that shows something, fail here until a test that runs them is named below.
"""

from __future__ import annotations

import re
from ast import FunctionDef, parse, walk
from collections import Counter
from functools import cache
from typing import Any

import page_trainers as trainers
import pytest
import yaml
from page_blocks import COMMANDS, PAGES, ROOT, YAML, Block, block, blocks

import april
from april.core.state import RolloutCore
from april.record.standing import Standing, Waits
from april.view.progress import Line

SMALLEST = {"rollout_batch_size": 8, "n_samples_per_prompt": 8, "max_response_len": 400}
"""What april.Config must be given, where a block has a part of the settings only."""


README, EXAMPLES, PYTHON = "test_readme.py", "test_page_examples.py", "test_page_python.py"
HERE, COMMAND, CONFORMANCE = "test_page_blocks.py", "test_page_commands.py", "test_conformance_docs.py"
EXECUTED_BY: dict[str, list[tuple[str, str]]] = {
    "README.md": [
        (README, "test_the_first_program_runs_as_pasted"),
        (README, "test_the_engine_field_in_the_readme_is_one"),
    ],
    "api.md": [(PYTHON, "test_the_api_in_short")] * 2,
    "architecture.md": [
        *[(HERE, "test_drawings_name_what_is_there")] * 2,
        (HERE, "test_the_rooms_of_the_house_are_there"),
    ],
    "areal.md": [(PYTHON, "test_areal")],
    "choosing.md": [(COMMAND, "test_tables_have_the_lines_of_the_page")],
    "corrections.md": [("test_off_policy_report.py", "test_corrections_as_on_the_page")] * 2,
    "embedded.md": [
        (PYTHON, "test_the_embedded_engine"),
        (PYTHON, "test_a_reward_that_asks_the_reference"),
        (PYTHON, "test_an_autocast_around_the_scheduler"),
    ],
    "engines.md": [
        (CONFORMANCE, "test_vllm_in_process_as_on_the_page"),
        (CONFORMANCE, "test_the_example_is_a_test"),
    ],
    "processes.md": [
        *[(EXAMPLES, "test_ranks_as_on_the_page")] * 5,
        *[(PYTHON, "test_hosts")] * 2,
        *[(PYTHON, "test_ray")] * 2,
    ],
    "quorum.md": [(EXAMPLES, "test_advantages_as_on_the_page")] * 2,
    "report.md": [
        (HERE, "test_the_line_is_drawn_as_on_the_page"),
        (PYTHON, "test_a_record"),
        (PYTHON, "test_exporters"),
        (PYTHON, "test_metrics_and_texts_by_hand"),
        (PYTHON, "test_metrics_and_texts_by_hand"),
    ],
    "restarts.md": [
        (PYTHON, "test_a_restart"),
        (PYTHON, "test_a_restart"),
        (PYTHON, "test_a_restart_on_servers"),
        ("test_signals_docs.py", "test_the_loop_of_the_docs"),
    ],
    "rollouts.md": [(EXAMPLES, "test_rollouts_as_on_the_page")] * 5 + [(PYTHON, "test_the_api_in_short")],
    "sampling.md": [(PYTHON, "test_stop_strings")],
    "servers.md": [(HERE, "test_drawings_name_what_is_there")],
    "settings.md": [(README, "test_the_flags_in_the_docs_work")],
    "simulate.md": [
        (COMMAND, "test_tables_have_the_lines_of_the_page"),
        (COMMAND, "test_own_lengths_as_on_the_page"),
    ],
    "slime.md": [(PYTHON, "test_metadata_of_slime")],
    "staleness.md": [(EXAMPLES, "test_continuous_generation_as_on_the_page")],
    "testing.md": [
        ("test_testing_docs.py", "test_the_whole_test_runs_as_it_stands"),
        ("test_testing_docs.py", "test_the_script_on_the_page_is_a_script"),
    ],
    "trl.md": [(PYTHON, "test_trl")],
    "tutorial.md": [("test_tutorial.py", "test_the_tutorial_runs_as_pasted")] * 4,
}
"""Page: the test that runs each of its blocks that are neither commands nor settings, in their order."""


@cache
def names(test_file: str) -> frozenset[str]:
    """Of the tests in a file."""
    tree = parse((ROOT / "tests" / test_file).read_text("utf-8"))
    return frozenset(node.name for node in walk(tree) if isinstance(node, FunctionDef))


def test_every_block_is_executed() -> None:
    """As many tests as blocks, page by page; each is there, in a file that names the page."""
    others = Counter(b.page for b in blocks() if b.language not in (*COMMANDS, *YAML))
    assert others == {page: len(tests) for page, tests in EXECUTED_BY.items()}
    for page, tests in EXECUTED_BY.items():
        for file, name in tests:
            assert name in names(file), name
            assert page in (ROOT / "tests" / file).read_text("utf-8"), (page, file)


def test_nothing_else_is_a_block() -> None:
    """Every fence on a page is found, also in a list, and there is no other kind."""
    for page in PAGES:
        text = page.read_text("utf-8")
        assert len(re.findall(r"^ *```", text, re.M)) == 2 * len([b for b in blocks() if b.page == page.name]), (
            page.name
        )
        assert not re.search(r"^ *~~~|^    +\$ ", text, re.M)


@pytest.mark.parametrize("block", blocks(*YAML), ids=str)
def test_every_yaml_block_is_a_configuration(block: Block) -> None:
    """april.Config takes it; what stands below ``april:`` is for slime, whose adapter reads it."""
    values: dict[str, Any] = yaml.safe_load(block.text)
    if set(values) == {"april"}:
        assert block.page == "slime.md"
        trainers.slime([], values["april"])
        return
    config = april.Config(**(SMALLEST | values))
    said = config.model_dump(exclude_unset=True)
    assert set(values) <= set(said)


def test_the_rooms_of_the_house_are_there() -> None:
    """Every file and directory in the tree of docs/architecture.md."""
    head, *lines = block("architecture.md", "april/\n").text.splitlines()
    named = {name.rstrip("/") for line in lines for name in line.strip().split("  ")[0].split(", ")}
    there = {path.name for path in (ROOT / head).iterdir()}
    packages = {path.parent.name for path in (ROOT / head).glob("*/__init__.py")}
    assert packages <= named <= there


@pytest.mark.parametrize("page", ["architecture.md", "servers.md"])
def test_drawings_name_what_is_there(page: str) -> None:
    """Names in a drawing are methods of the scheduler, or of the core."""
    drawn = [b.text for b in blocks("text") if b.page == page and "--" in b.text]
    words = {word for text in drawn for word in re.findall(r"\w+_\w+|\w+(?=\()", text)} - {"step_7", "step_8", "step"}
    assert words
    assert {w for w in words if not hasattr(april.RolloutScheduler, w) and not hasattr(RolloutCore, w)} == set()


def test_the_line_is_drawn_as_on_the_page() -> None:
    """Step 12 after 34 s, with the figures of the page."""
    line = Line()
    moment: dict[str, Any] = {
        "step": 12, "ready": 17, "target": 32, "whole_groups": True, "in_flight": 186, "partials": 41, "oldest": 2,
        "engines": {"e": 186}, "waits": Waits.FUNCTIONS.value,
    }  # fmt: skip
    for passed in (0, 24, 34):
        line.add(float(passed), Standing(observed=12_300 * passed, **moment))
    assert str(line) == block("report.md", "step 12").text.strip()
