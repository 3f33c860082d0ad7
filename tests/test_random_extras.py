"""Rows of extras over faults, cuts, updates and restarts: every delivered one is that of the attempt and the version
that made its token, in fake engines whose rows a test can compute again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from virtual_rollouts import on_virtual_time

import april
from april.core.batch import Batch, DeliveredSample
from april.core.tape import SegmentKind
from april.core.versions import PolicyVersion
from april.engines.simulated.synthetic_rows import synthetic_rows
from april.testing import AuditError, FakeEngine, Fault, FaultScript, rollouts
from april.testing.fault_script import ROW_FAULTS, STREAM_FAULTS, FaultKind

NAMES = ("routed_experts", "others")
PROMPTS = [[5, 6, 7 + i] for i in range(40)]


def made_again(sample: DeliveredSample, name: str) -> Any:
    """The rows that the versions of its tokens make; those of a prompt, or of a tool, by the next generated token."""
    ids = np.concatenate((sample.prompt.token_ids, sample.tokens))
    spans: list[tuple[PolicyVersion, int]] = []
    end = 0
    for segment in sample.segments:
        if segment.kind is SegmentKind.GENERATED:
            stop = len(sample.prompt.token_ids) + segment.start + segment.count - 1
            spans.append((segment.version, stop - end))
            end = stop
    return synthetic_rows(name, ids, spans)


def check(batch: Batch) -> int:
    """Compare every row of a batch; returns how many of them are of continued responses."""
    resumed = 0
    for sample in batch.samples:
        for name in NAMES:
            assert np.array_equal(sample.extras[name], made_again(sample, name)), sample.id
        resumed += sample.resumes and len(sample.tokens)
    return resumed


def engines(script: FaultScript, **options: Any) -> list[FakeEngine]:
    """Two, with responses of many lengths."""
    return [
        FakeEngine(f"e{i}", lengths=lambda r: 3 + 7 * (sum(r.sample_key or (0, 0)) % 5), chunk_tokens=3, extras=NAMES,
                   faults=script, **options)
        for i in range(2)
    ]  # fmt: skip


CONFIG: dict[str, Any] = {
    "rollout_batch_size": 3, "over_sampling_batch_size": 6, "n_samples_per_prompt": 2, "max_response_len": 64,
    "extras": NAMES, "max_attempt_failures": 20, "stall_timeout_s": 30.0,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@on_virtual_time
async def test_rows_over_faults_and_updates(seed: int) -> None:
    """A quarter of all attempts goes wrong, in streams and in rows; nothing that is delivered has a foreign row."""
    script = FaultScript.random(seed=seed, rate=0.25, kinds=(*STREAM_FAULTS, *ROW_FAULTS))
    resumed = 0
    config = april.Config(**CONFIG, generation="continuous" if seed % 2 else "stepwise")
    async with rollouts(config, engines=engines(script), prompts=PROMPTS) as run:
        for _ in range(5):
            resumed += check(await run.next_batch())
            run.audit()
            run.validate()
            await run.weight_update()
    assert resumed


@pytest.mark.parametrize("kind", ROW_FAULTS)
@on_virtual_time
async def test_each_fault_of_rows(kind: FaultKind) -> None:
    """Rows that are missing or too few cost their attempt's tokens, by name, and no delivered token is without."""
    script = FaultScript(Fault(kind, times=4))
    async with rollouts(april.Config(**CONFIG), engines=engines(script), prompts=PROMPTS) as run:
        for _ in range(4):
            check(await run.next_batch())
            run.audit()
            await run.weight_update()
        dropped = run.ledger()["tokens"].dropped
    assert not script.unfired
    assert {reason for reason, count in dropped.items() if count} == {
        "corrupt" if kind is FaultKind.SHORT_ROWS else "no_extras"
    }


@on_virtual_time
async def test_the_audit_finds_a_row_of_another_token() -> None:
    """It goes by the engines' records, and sees two rows that have changed places."""
    async with rollouts(april.Config(**CONFIG), engines=engines(FaultScript()), prompts=PROMPTS) as run:
        batch = await run.next_batch()
        sample = batch.samples[0]
        rows = sample.extras["others"].copy()
        rows[[1, 2]] = rows[[2, 1]]
        object.__setattr__(sample, "extras", {**sample.extras, "others": rows})
        with pytest.raises(AuditError, match="row of others"):
            run.audit()


@on_virtual_time
async def test_rows_of_a_wrong_length_for_ever_cost_their_group_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """A response whose rows never fit is given up after three attempts, and its group with it; the log says why."""
    script = FaultScript(Fault(FaultKind.SHORT_ROWS, sample=(0, 1), times=99))
    config = april.Config(**CONFIG | {"max_attempt_failures": 3})
    async with rollouts(config, engines=engines(script), prompts=PROMPTS) as run:
        for _ in range(3):
            batch = await run.next_batch()
            check(batch)
            assert 0 not in {sample.id.group for sample in batch.samples}
            await run.weight_update()
        assert run.ledger()["prompts"].dropped["failed"] == 1
    assert "rows of routed_experts, but" in caplog.text
