"""The conformance suite on the engines that need no server: every promise is kept, or named as not offered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from conformance_subjects import embedded_subject, fake_subject, seeing_subject, simulated

from april.testing import conformance, run_virtual
from april.testing.conformance import Outcome, Report

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
    given_up = {"stop_token_ids": DRAWS_BY_STOP_IDS}
    report = run_virtual(conformance.run(fake_subject(simulated, gives_up=given_up)))

    assert not report.failed, list(map(str, report.failed))
    assert outcomes(report, Outcome.NOT_OFFERED) == {*given_up, "adapter_versions", "banned_ids", *ATTACHED} | SENT
    assert report.verdict("stop_token_ids").detail == DRAWS_BY_STOP_IDS
    assert outcomes(report, Outcome.NOT_TESTED) == KILLS | NO_REFERENCE


def test_an_unknown_check_is_named_with_all_that_there_are() -> None:
    """A typing error in a name says what there is."""
    with pytest.raises(KeyError, match="there is no check abort; choose from budgets, "):
        conformance.check_named("abort")
