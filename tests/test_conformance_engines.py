"""The conformance suite on the engines that need no server: every promise is kept, or named as not offered."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from conformance_subjects import embedded_subject, fake_subject, seeing_subject, simulated
from rich.console import Console

from april.testing import conformance, run_virtual
from april.testing.conformance import Outcome, Report, Verdict

DRAWS_BY_STOP_IDS = "the responses are synthetic: a stop id changes what they say, and does not end them"
KILLS = {"server_killed"}
SENT = {"sent_weights"}
"""What has no model takes no tensors."""
ATTACHED = {"attached", "attached_and_resumed", "attached_after_an_update"}
"""What a text model does not offer."""
NO_REFERENCE = {"logprobs", "logprobs_temperature", "logprobs_top_p"}


def outcomes(report: Report, outcome: Outcome) -> set[str]:
    return {v.check for v in report.verdicts if v.outcome is outcome}


def test_the_embedded_engine_keeps_every_promise(tmp_path: Path) -> None:
    """A tiny model, real time, log-probabilities and updates held to Hugging Face; 200 aborts here, 1,000 by hand."""
    report = asyncio.run(conformance.run(embedded_subject(tmp_path)))

    assert not report.failed, list(map(str, report.failed))
    assert outcomes(report, Outcome.NOT_TESTED) == KILLS
    assert outcomes(report, Outcome.NOT_OFFERED) == {
        "update_under_way", "kept_over_an_update", "adapter_versions", "extras", *ATTACHED,
    }  # fmt: skip
    assert report.verdict("sent_weights").figures["responses changed"] == 6
    assert report.verdict("logprobs_top_p").figures["kind"] == "temperature"
    assert 0 < float(report.verdict("logprobs").figures["largest difference"]) < 1e-4
    assert report.verdict("cut_and_resume").figures["responses"] == 80
    assert int(report.verdict("thousand_aborts").figures["aborted"]) >= 200
    assert report.verdict("version_exactness").figures["responses changed"] == 6


def test_the_embedded_engine_sees_as_it_should(tmp_path: Path) -> None:
    """A model with a vision tower: what is attached is read as it stands, resumed, and read anew by new weights."""
    checks = [check for check in conformance.CHECKS if check.name in {*ATTACHED, "banned_ids"}]
    report = asyncio.run(conformance.run(seeing_subject(tmp_path), checks))

    assert outcomes(report, Outcome.PASSED) == {*ATTACHED, "banned_ids"}, list(map(str, report.verdicts))
    assert 0 < float(report.verdict("attached").figures["largest difference to the reference"]) < 1e-4


def test_the_fake_engine_keeps_every_promise() -> None:
    """On virtual time, over 1,000 aborts included; it has no model to compare log-probabilities with."""
    report = run_virtual(conformance.run(fake_subject()))

    assert not report.failed, list(map(str, report.failed))
    assert outcomes(report, Outcome.NOT_TESTED) == KILLS | NO_REFERENCE | {"attached_after_an_update"}
    assert int(report.verdict("thousand_aborts").figures["aborted"]) >= 1000


def test_the_simulated_engine_keeps_every_promise_but_stop_ids() -> None:
    """What its responses are not made for is declared, and listed as not offered with the sentence."""
    given_up = dict.fromkeys(("stop_token_ids", "eos_at_a_cut"), DRAWS_BY_STOP_IDS)
    report = run_virtual(conformance.run(fake_subject(simulated, gives_up=given_up)))

    assert not report.failed, list(map(str, report.failed))
    assert outcomes(report, Outcome.NOT_OFFERED) == {*given_up, "adapter_versions", "banned_ids", *ATTACHED} | SENT
    assert report.verdict("stop_token_ids").detail == DRAWS_BY_STOP_IDS
    assert outcomes(report, Outcome.NOT_TESTED) == KILLS | NO_REFERENCE


def test_a_report_is_json_a_table_and_a_matrix() -> None:
    """A report reads back equal; the matrix has a column per engine, rows for words and promises, and the sentences."""
    first = Report(
        engine="a", version="1.0", capabilities={"seeds": "honoured"},
        verdicts=(
            Verdict(check="budgets", promise="Kept.", outcome=Outcome.PASSED, figures={"budgets": 7}),
            Verdict(check="seeds", promise="Same.", outcome=Outcome.FAILED, detail="they differ"),
        ),
    )  # fmt: skip
    second = Report(
        engine="b", verdicts=(Verdict(check="seeds", promise="Same.", outcome=Outcome.NOT_OFFERED, detail="it cannot"),)
    )

    assert Report.from_json(first.json()) == first
    assert [v.check for v in first.failed] == ["seeds"]
    assert str(first.failed[0]) == "seeds: failed: they differ"
    with pytest.raises(KeyError):
        first.verdict("aborts")
    assert conformance.semantics_matrix([first, second]).splitlines() == [
        "| | a 1.0 | b |",
        "|---|---|---|",
        "| seeds | honoured |  |",
        "| **promise** | | |",
        "| budgets | yes |  |",
        "| seeds | **no** [1] | not offered [2] |",
        "",
        "1. seeds: they differ",
        "2. seeds: it cannot",
        "",
        "* `budgets`: Kept.",
        "* `seeds`: Same.",
    ]
    console = Console(file=io.StringIO(), width=100)
    console.print(first.table())
    assert "they differ" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_unknown_check_is_named_with_all_that_there_are() -> None:
    """A typing error in a name says what there is."""
    with pytest.raises(KeyError, match="there is no check abort; choose from budgets, "):
        conformance.check_named("abort")
