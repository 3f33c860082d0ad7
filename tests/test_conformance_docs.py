"""docs/engines.md is true: it names every promise, and its examples run as they stand."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from conformance_subjects import fake_subject
from fake_async_llm import FakeAsyncLLM, install_vllm

import april
from april.testing import conformance, run_virtual

PAGE = (Path(__file__).parent.parent / "docs" / "engines.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)


def test_the_page_names_every_promise() -> None:
    """In the suite's order; the site has a table of them in their place."""
    assert re.findall(r"`(\w+)`", PAGE.partition("<!-- promises -->")[2]) == [c.name for c in conformance.CHECKS]


def test_the_fields_on_the_page_are_fields_of_a_subject() -> None:
    """Every name in the first column of the table of fields exists."""
    table = PAGE.partition("| field | for |")[2].partition("\n\n")[0]
    named = {name.partition(".")[0].partition("=")[0] for name in re.findall(r"`([\w.=]+)`", table)}
    known = {f.name for f in fields(conformance.Subject)} | {"RecordingProxy", "prompts"}
    assert {n for n in named if n not in ("conformance",)} <= known


@pytest.mark.parametrize("name", ["budgets", "abort_queued"])
def test_the_example_is_a_test(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied from the page; only the loop is a virtual one here."""
    example = BLOCKS[1]
    monkeypatch.setattr("asyncio.run", run_virtual)
    space: dict[str, Any] = {"my_engine": fake_subject().open}
    exec(compile(example, "engines.md", "exec"), space)  # noqa: S102 - this is what the test is about
    space["test_my_engine"](conformance.check_named(name))


CONFIG: dict[str, Any] = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_len": 60}


def prompts() -> list[list[int]]:
    return [[5, 6, 7 + n] for n in range(90)]


def test_vllm_in_process_as_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied from the page, with a stand-in for the AsyncLLM; it has loaded every directory that was named."""
    install_vllm(monkeypatch)
    llm = FakeAsyncLLM()
    directories = ["tiny1", "tiny2", "tiny3"]
    space: dict[str, Any] = {
        "llm": llm, "april": april, "config": april.Config(**CONFIG), "prompts": prompts(), "steps": 3,
        "reward": lambda prompt, response: 1.0, "train": lambda batch: directories[batch.version.n],
    }  # fmt: skip
    exec(compile(BLOCKS[0], "engines.md", "exec"), space)  # noqa: S102 - as above

    assert (llm.weights, space["batch"].version.n) == ("tiny3", 2)
