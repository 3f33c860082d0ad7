"""docs/testing.md is true: its test runs as it stands, and its tables name everything there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import april.testing as testing
from april.core.types import DropReason
from april.testing import Audit, Fault, FaultKind, FaultScript

PAGE = (Path(__file__).parent.parent / "docs" / "testing.md").read_text("utf-8")
WHOLE_TEST, SCRIPT = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)


def test_the_whole_test_runs_as_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copied from the page: a tool under a random script on virtual time; faults hit it, samples cross updates."""
    seen: list[Any] = []
    real_audit, real_random = testing.Rollouts.audit, FaultScript.random
    monkeypatch.setattr(testing.Rollouts, "audit", lambda run: seen.append((run, real_audit(run))))
    monkeypatch.setattr(FaultScript, "random", lambda **given: seen.append(real_random(**given)) or seen[-1])
    space: dict[str, Any] = {}
    exec(compile(WHOLE_TEST, "testing.md", "exec"), space)  # noqa: S102 - this is what the test is about
    space["test_solve"]()

    script, (run, found) = seen
    assert len({fired.fault.kind for fired in script.fired}) >= 5
    assert (found.samples, found.lost, found.problems) == (40, 0, ())
    assert any(len({s.version for s in sample.segments}) > 1 for batch in run.batches for sample in batch.samples)
    assert repr(script) in capsys.readouterr().out
    assert repr(script) in PAGE
    lines = [line for line in WHOLE_TEST.splitlines() if line.strip()]
    assert len(lines) <= 30


def test_the_script_on_the_page_is_a_script() -> None:
    """The example of declared faults is accepted, four of them."""
    space: dict[str, Any] = {}
    exec(compile(SCRIPT, "testing.md", "exec"), space)  # noqa: S102 - as above
    assert [type(fault) for fault in space["script"].faults] == [Fault] * 4


def test_the_tables_are_complete() -> None:
    """Every kind of fault, and the star exactly for those that take after_tokens; every count of the audit."""
    from april.testing.fault_script import AT_TOKENS

    table = "".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `"))
    for kind in FaultKind:
        assert (f"`{kind}` *" in table) == (kind in AT_TOKENS), kind
        assert f"`{kind}`" in table
    for field in Audit.__dataclass_fields__:
        assert f"`{field}`" in table or field in ("samples", "problems")


def test_every_reason_for_a_drop_is_on_the_page() -> None:
    """One row per reason, and no row of a reason that does not exist."""
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.partition("| reason | tokens |")[2].partition("\n\n")[0], re.M)
    assert rows == [str(reason) for reason in DropReason]
