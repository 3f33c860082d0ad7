"""docs/engines.md is true: it names every promise, and its example runs as it stands."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from conformance_subjects import fake_subject

from april.testing import conformance, run_virtual

PAGE = (Path(__file__).parent.parent / "docs" / "engines.md").read_text("utf-8")


def test_the_page_has_every_promise_as_the_suite_says_it() -> None:
    """One row per check, word by word."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.partition("promises: begin")[2], re.M)
    assert rows[: len(conformance.CHECKS)] == [(c.name, c.promise) for c in conformance.CHECKS]


def test_the_fields_on_the_page_are_fields_of_a_subject() -> None:
    """Every name in the first column of the table of fields exists."""
    table = PAGE.partition("| field | for |")[2].partition("\n\n")[0]
    named = {name.partition(".")[0].partition("=")[0] for name in re.findall(r"`([\w.=]+)`", table)}
    known = {f.name for f in fields(conformance.Subject)} | {"RecordingProxy", "prompts"}
    assert {n for n in named if n not in ("conformance",)} <= known


@pytest.mark.parametrize("name", ["budgets", "abort_queued"])
def test_the_example_is_a_test(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied from the page; only the loop is a virtual one here."""
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
    monkeypatch.setattr("asyncio.run", run_virtual)
    space: dict[str, Any] = {"my_engine": fake_subject().open}
    exec(compile(example, "engines.md", "exec"), space)  # noqa: S102 - this is what the test is about
    space["test_my_engine"](conformance.check_named(name))
