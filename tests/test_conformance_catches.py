"""Every check of the conformance suite fails on an engine that breaks its promise: one planted defect each."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import conformance_defects as planted
import pytest
from conformance_defects import FakeWitness, Sound
from conformance_subjects import embedded_subject, fake, fake_subject, seeing_subject, simulated

from april.engines.protocol import Engine
from april.testing import FakeEngine, conformance, run_virtual
from april.testing.conformance import CHECKS, Outcome, Subject, Verdict

ON_FAKES: dict[type[Sound], tuple[str, str]] = {
    planted.OneTokenTooMany: ("budgets", "tokens came, but only 1 were left of the budget"),
    planted.OneTokenTooFew: ("budgets", r"for lack of room \(\"length\"\) after 1 of 2 tokens"),
    planted.ForgetsMinTokens: ("budgets", "but min_tokens is 20|of at least 20"),
    planted.CutsStopOff: ("eos_in_tokens", r"its last token \(\d+\) is neither EOS nor a stop token"),
    planted.IgnoresStopIds: ("stop_token_ids", "ended with length"),
    planted.Unseeded: ("seeds", "with seed 1 again"),
    planted.OneSeedForAll: ("seeds", "4 seeds gave 1 different responses"),
    planted.CutsPrompts: ("over_long_input", "a prompt of 1000 tokens was served"),
    planted.WrapsIds: ("out_of_vocabulary", "token id 1000 of a vocabulary of 1000 was served"),
    planted.RenamesIds: ("duplicate_id", "a second request with an id in flight was served"),
    planted.LosesATokenAtAborts: ("abort_running", "tokens are lost"),
    planted.RepeatsATokenAtAborts: ("cut_and_resume", "tokens that are not the|not .* as in the uncut"),
    planted.AbortsEverything: ("abort_queued", "64 of 64 requests ended with ABORT, although nobody had aborted"),
    planted.NoEndAtAborts: ("abort_prefilling", "without a finish reason"),
    planted.RemembersAborts: ("abort_just_finished", "the request that came later ended with ABORT"),
    planted.FailsWithoutTokens: ("abort_queued", "was aborted in the queue"),
    planted.IgnoresAborts: ("abort_burst", "an abort of their ids ended none of 300 requests"),
    planted.IgnoresSweeps: ("abort_burst", "an abort of all ended none of 300 requests"),
    planted.KeepsTheOldLabel: ("kept_over_an_update", "carry version 0.0 instead of 0.1"),
    planted.VersionsGoBack: ("update_under_way", "policy version 0.0 came, but only"),
    planted.PausesNothing: ("pause_and_resume", "requests sent while the engine was paused got 96 tokens"),
    planted.LooksAtNothing: ("attached", "got 1 different answers|got 3 different answers|got 2 different answers"),
    planted.LooksOnce: ("attached_and_resumed", "a response with attachments, resumed: token"),
    planted.LosesARow: ("extras", "came with 27 rows of routed_experts|rows of routed_experts, but"),
    planted.MixesRows: ("extras", r"of its rows of routed_experts equal those of .*: the rows belong to other tokens"),
    planted.GivesRowsUnasked: ("extras", "rows arrived, although the request had not asked for them"),
    planted.ForgetsBans: ("banned_ids", "ids were banned, but .* were generated"),
    planted.ForgetsTheResponse: ("cut_and_resume", "is .*, not"),
}
"""Defect -> the check that must catch it, and what it must say."""


def spoilt(defect: type[Sound], **changes: Any) -> Subject:
    """A fake engine with the defect, and a witness behind the defect."""
    witness = FakeWitness()

    def make() -> Engine:
        witness.engine = fake()
        return defect(witness.engine)

    return fake_subject(make, compare_with_wire=witness.compare, **changes)


def verdict_on(name: str, subject: Subject) -> Verdict:
    return run_virtual(conformance.check_named(name)(subject))


def assert_caught(verdict: Verdict, says: str) -> None:
    assert verdict.outcome is Outcome.FAILED, str(verdict)
    assert re.search(says, verdict.detail), verdict.detail


@pytest.mark.parametrize("defect", ON_FAKES, ids=lambda d: d.__name__)
def test_a_defect_is_caught(defect: type[Sound]) -> None:
    """The same check passes on the sound engine behind the same wrapper, and fails on the spoilt one."""
    name, says = ON_FAKES[defect]

    assert verdict_on(name, spoilt(Sound)).outcome is Outcome.PASSED
    assert_caught(verdict_on(name, spoilt(defect)), says)


@pytest.mark.parametrize(
    ("defect", "name", "says"),
    [
        (planted.ShiftsLogprobs, "logprobs", "differ from the reference by up to 0.001"),
        (planted.Declares, "logprobs_temperature", "declared as raw .* they are those of the kind temperature"),
        (planted.DeclaresProcessed, "logprobs_top_p", "declared as processed .* of the kind temperature"),
        (planted.KeepsTheOldLabel, "version_exactness", "carry version 0.0 instead of 0.1"),
        (planted.DropsTensors, "sent_weights", "is not the greedy one of these weights|nothing was loaded"),
        (planted.LoadsNothing, "version_exactness", "other weights, or their cache, made it|nothing was loaded"),
    ],
)
def test_a_defect_that_only_a_reference_shows_is_caught(
    tmp_path: Path, defect: type[Sound], name: str, says: str
) -> None:
    """On the embedded engine, against Hugging Face."""
    subject = embedded_subject(tmp_path)

    async def opened() -> Engine:
        return defect(await subject.open())

    spoilt_subject = embedded_subject(tmp_path, open=opened)
    assert_caught(asyncio.run(conformance.check_named(name)(spoilt_subject)), says)


def test_images_of_other_prompts_are_caught() -> None:
    """Two prompts have the same tokens, and the second one is answered by the image of the first."""
    verdict = verdict_on("attached", spoilt(planted.RemembersTokens))
    assert_caught(verdict, "4 prompts with other attachments got 2 different answers")


def test_images_that_old_weights_have_read_are_caught(tmp_path: Path) -> None:
    """On the embedded engine, against Hugging Face."""
    subject = seeing_subject(tmp_path)

    async def opened() -> Engine:
        return planted.LoadsNothing(await subject.open())

    update = conformance.check_named("attached_after_an_update")
    assert asyncio.run(update(subject)).outcome is Outcome.PASSED
    assert_caught(asyncio.run(update(seeing_subject(tmp_path, open=opened))), "the reference: other or earlier weights")


def test_aborts_by_prefix_are_caught() -> None:
    """The engine takes any id, and an abort hits all that begin with it."""
    subject = fake_subject(lambda: planted.AbortsByPrefix(simulated()))
    assert verdict_on("prefix_free_ids", fake_subject(lambda: Sound(simulated()))).outcome is Outcome.PASSED
    assert_caught(verdict_on("prefix_free_ids", subject), "the abort of .*1 ended .*10 after")


def test_one_lost_token_in_a_thousand_aborts_is_caught() -> None:
    """The witness has seen it, april does not hold it."""
    assert_caught(verdict_on("thousand_aborts", spoilt(planted.LosesATokenAtAborts, aborts=100)), "tokens are lost")


def test_requests_that_outlive_their_readers_are_caught() -> None:
    """The engine still works on them when it should have nothing to do."""
    slow: dict[str, Any] = {"seconds_per_token": 0.05, "max_context": 2000, "lengths": 1500, "responses": None}
    changes: dict[str, Any] = {"long_tokens": 900, "patience_s": 20.0}
    sound = fake_subject(lambda: Sound(fake(**slow)), **changes)
    orphans = fake_subject(lambda: planted.KeepsOrphans(fake(**slow)), **changes)

    assert verdict_on("disconnect", sound).outcome is Outcome.PASSED
    assert_caught(verdict_on("disconnect", orphans), "the engine still works on 8 requests")


def mortal(defect: type[Sound]) -> Subject:
    """A fake engine that can be killed."""
    engines: list[FakeEngine] = []

    def make() -> Engine:
        engines.append(fake())
        return defect(engines[-1])

    async def kill() -> None:
        engines[0].die()

    return fake_subject(make, kill=kill)


def test_a_death_that_looks_like_an_abort_is_caught() -> None:
    """A stream that its server's death has cut must not end as if it had been complete, or asked for."""
    assert verdict_on("server_killed", mortal(Sound)).outcome is Outcome.PASSED
    assert_caught(verdict_on("server_killed", mortal(planted.DiesQuietly)), "of the dead server ended with abort")


def test_every_check_has_a_defect_that_it_catches() -> None:
    """No check is here that cannot fail."""
    elsewhere = {
        "logprobs", "logprobs_temperature", "logprobs_top_p", "version_exactness", "sent_weights", "prefix_free_ids",
        "thousand_aborts", "disconnect", "server_killed",
        "adapter_versions",  # tests/test_adapter_versions.py
        "attached_after_an_update",
    }  # fmt: skip
    assert {name for name, _ in ON_FAKES.values()} | elsewhere == {c.name for c in CHECKS}


@pytest.mark.parametrize("check", [c for c in CHECKS if c.name not in ("prefix_free_ids",)], ids=str)
def test_a_hanging_engine_fails_and_the_suite_goes_on(check: conformance.Check) -> None:
    """Every wait ends: the verdict comes, after the patience on the virtual clock."""
    verdict = run_virtual(check(spoilt(planted.Hangs)))
    not_offered = {Outcome.NOT_OFFERED} if check.name in ("sent_weights", "adapter_versions") else set()
    assert verdict.outcome in {Outcome.FAILED, Outcome.NOT_TESTED} | not_offered, str(verdict)
    assert verdict.outcome is not Outcome.NOT_TESTED or not verdict.detail.startswith("only"), str(verdict)


def test_what_an_engine_or_a_subject_raises_is_a_verdict() -> None:
    """A bug in an engine is a failed check with its words, not the end of the run; the engine is opened anew."""
    opened = 0

    class Explodes(Sound):
        async def health(self) -> Any:
            raise ZeroDivisionError("no")

    def make() -> Engine:
        nonlocal opened
        opened += 1
        return Explodes(fake())

    checks = [conformance.check_named(n) for n in ("abort_burst", "budgets")]
    report = run_virtual(conformance.run(fake_subject(make), checks))
    assert [v.outcome for v in report.verdicts] == [Outcome.FAILED, Outcome.PASSED]
    assert "ZeroDivisionError: no" in report.verdicts[0].detail
    assert opened == 2


def test_greedy_checks_are_left_out_where_greedy_does_not_repeat() -> None:
    """bf16 on a GPU: what would compare greedy responses is not tested, and the rest is."""
    report = run_virtual(conformance.run(fake_subject(greedy_repeats=False, aborts=50)))
    assert not report.failed
    assert report.verdict("cut_and_resume").outcome is Outcome.NOT_TESTED
    assert "greedy_repeats=False" in report.verdict("cut_and_resume").detail
    assert report.verdict("thousand_aborts").outcome is Outcome.PASSED
