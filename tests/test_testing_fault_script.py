"""Fault scripts through the real driver on virtual time: whatever goes wrong, nothing is lost and batches come."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from virtual_rollouts import on_virtual_time

import april
from april.core.types import DropReason
from april.testing import (
    ALL_FAULTS,
    STREAM_FAULTS,
    FakeEngine,
    Fault,
    FaultKind,
    FaultScript,
    Rollouts,
    rollouts,
    run_virtual,
)
from april.testing.fault_script import ROW_FAULTS

STEPS = 6
CONFIG = april.Config(
    rollout_batch_size=2,
    over_sampling_batch_size=4,
    n_samples_per_prompt=2,
    max_response_len=60,
    abort_deadline_s=6.0,
    max_staleness=2,
)


def length_of(request: Any) -> int:
    """1 to 40 tokens, by sample."""
    group, index = request.sample_key
    return 1 + (11 * group + 7 * index) % 40


def make(script: FaultScript, config: april.Config = CONFIG, engines: int = 2, **options: Any) -> Rollouts:
    """Rollouts on fake engines that share a script."""
    options = {"lengths": length_of, "chunk_tokens": 4} | options
    made = [FakeEngine(f"e{i}", faults=script, **options) for i in range(engines)]
    return rollouts(
        config, engines=made, prompts=[[i + 1, 2] for i in range(400)], reward=lambda p, r: float(len(r.tokens))
    )


async def update(run: Rollouts) -> int:
    """A weight update as a trainer must do it where engines may fail; returns the number of failures."""
    for failures in range(50):
        try:
            await run.weight_update()
        except april.EngineError:
            await asyncio.sleep(1.0)
        else:
            return failures
    pytest.fail("no weight update worked")


async def steps(run: Rollouts, count: int = STEPS) -> int:
    """Batches with an audit after each of them; returns the number of failed weight updates."""
    failures = 0
    for _ in range(count):
        batch = await run.next_batch()
        assert len(batch.group_sizes) == 2
        run.audit()
        run.validate()
        failures += await update(run)
    return failures


EACH: dict[str, list[Fault]] = {
    "break_off at once": [Fault("break_off", sample=(0, 1))],
    "break_off in the middle": [Fault("break_off", after_tokens=5, times=3)],
    "break_off behind the last token": [Fault("break_off", sample=(0, 1), after_tokens=8)],
    "engine_dies by time": [Fault("engine_dies", engine="e1", from_s=7.0, seconds=20.0)],
    "engine_dies by token": [Fault("engine_dies", sample=(1, 0), attempt=1, after_tokens=6, seconds=3.0)],
    "stall": [Fault("stall", after_tokens=2, seconds=25.0, times=4)],
    "stall of what the step does not need": [Fault("stall", sample=(1, 1), attempt=1)],
    "empty_chunks": [Fault("empty_chunks", after_tokens=2, seconds=25.0, times=4)],
    "abort_ignored": [Fault("abort_ignored", times=2)],
    "abort_hangs": [Fault("abort_hangs", times=2)],
    "abort_hangs for a while": [Fault("abort_hangs", seconds=4.0, times=2)],
    "abort_late": [Fault("abort_late", seconds=3.0, times=2)],
    "abort_missed": [Fault("abort_missed", seconds=50.0, times=2)],
    "abort_empty": [Fault("abort_empty", times=3)],
    "sick_probe": [Fault("engine_dies", engine="e1", from_s=7.0, seconds=2.0), Fault("sick_probe", times=3)],
    "failed_update": [Fault("failed_update", engine="e1", times=3)],
    "chunk_after_finish": [Fault("chunk_after_finish", times=3)],
    "no_finish": [Fault("no_finish", times=3)],
} | {
    kind: [Fault(FaultKind(kind), after_tokens=3, times=3)]
    for kind in (
        "nan_logprob",
        "positive_logprob",
        "clamped_logprob",
        "unknown_token",
        "lengths_differ",
        "too_many_tokens",
        "future_version",
        "older_version",
        "early_length",
        "early_stop",
    )
}


def test_every_kind_has_a_case() -> None:
    """A kind that is added later needs a case here."""
    assert {fault.kind for faults in EACH.values() for fault in faults} == set(FaultKind) - set(ROW_FAULTS)


@pytest.mark.parametrize("case", list(EACH))
@on_virtual_time
async def test_each_fault_loses_nothing(case: str) -> None:
    """Six steps: the fault hits, every batch comes, audit and ledger are exact, only wrong chunks cost tokens."""
    script = FaultScript(*EACH[case])
    async with make(script) as run:
        failures = await steps(run)
        assert not script.unfired, script.unfired
        found = run.audit()
        dropped = {reason for reason, count in run.ledger()["tokens"].dropped.items() if count}
    assert found.samples == STEPS * 4
    assert found.delivered > 0
    assert found.lost == found.duplicated == 0
    wrong = sum(r.count for e in run.engines for r in e.attempts.values() if r.wrong)  # type: ignore[attr-defined]
    assert found.rejected == wrong
    assert dropped == ({DropReason.CORRUPT} if wrong else set())
    assert failures == {"failed_update": 3}.get(case, failures)


@pytest.mark.parametrize("seed", range(60))
@on_virtual_time
async def test_random_scripts_lose_nothing(seed: int) -> None:
    """60 mixes over modes, engines and chunk sizes: every batch comes, the audit and the ledger are exact."""
    rng = np.random.default_rng(seed)
    kinds = (STREAM_FAULTS, ALL_FAULTS)[seed % 2]
    config = april.Config(
        rollout_batch_size=2,
        over_sampling_batch_size=int(rng.choice([2, 4])),
        n_samples_per_prompt=int(rng.integers(1, 4)),
        max_response_len=int(rng.choice([25, 100])),
        refill=str(rng.choice(["none", "group", "sample"])),
        on_stale=str(rng.choice(["finish", "restart", "mask", "drop"])),
        max_staleness=int(rng.integers(1, 4)),
        abort_deadline_s=float(rng.choice([3.0, 6.0])),
    )

    script = FaultScript.random(seed, float(rng.choice([0.2, 0.4])), kinds)
    options = {
        "chunk_tokens": [None, 1, 4][seed % 3],
        "max_running": int(rng.choice([3, 64])),
        "weight_update_s": float(rng.choice([0.0, 1.5])),
    }
    async with make(script, config, engines=1 + seed % 3, **options) as run:
        await steps(run)
        found = run.audit()
    assert script.fired
    assert found.handed_over == found.delivered + found.waiting + found.rejected + found.lost
    assert found.duplicated == 0
    assert found.samples == STEPS * 2 * config.n_samples_per_prompt
    assert all(e.open_streams == 0 for e in run.engines)  # type: ignore[attr-defined]
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left


def test_a_random_script_repeats_itself_and_prints_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed hits the same attempts at the same times; another seed does not; the call is printed."""

    def fired(seed: int) -> list[Any]:
        script = FaultScript.random(seed, 0.3, ALL_FAULTS)

        async def program() -> None:
            async with make(script) as run:
                await steps(run, 3)

        run_virtual(program(), limit_s=10_000)
        return [(f.fault, f.engine, f.at_s, f.sample, f.attempt) for f in script.fired]

    first = fired(7)
    assert first == fired(7) != fired(8)
    assert len(first) > 5
    printed = capsys.readouterr().out
    assert "FaultScript.random(seed=7, rate=0.3, kinds=[" in printed


@on_virtual_time
async def test_selectors_choose_engine_sample_attempt_and_time() -> None:
    """A fault hits what it names and nothing else."""
    script = FaultScript(
        Fault("break_off", engine="e1", after_tokens=1),
        Fault("break_off", sample=(3, 0), attempt=2, after_tokens=1),
        Fault("stall", from_s=20.0, until_s=40.0, seconds=1.5, times=3),
        Fault("stall", sample=(999, 0)),
    )
    async with make(script) as run:
        await steps(run)
    by = {fault: [f for f in script.fired if f.fault is fault] for fault in script.faults}
    first, second, third, never = (by[fault] for fault in script.faults)
    assert [f.engine for f in first] == ["e1"]
    assert [(f.sample, f.attempt) for f in second] == [((3, 0), 2)]
    assert len(third) == 3
    assert all(20 <= f.at_s < 40 for f in third)
    assert not never
    assert script.unfired == [script.faults[3]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "typo"}, "there is no fault 'typo'; choose from break_off, engine_dies"),
        ({"kind": "break_off", "seconds": 3.0}, "break_off has no duration"),
        ({"kind": "stall", "seconds": 0.0}, "seconds must be positive"),
        ({"kind": "stall", "after_tokens": -1}, "after_tokens must be at least 0"),
        ({"kind": "older_version"}, "after_tokens must be at least 1"),
        ({"kind": "stall", "times": 0}, "count from 1"),
        ({"kind": "stall", "attempt": 0}, "count from 1"),
        ({"kind": "stall", "from_s": 4.0, "until_s": 4.0}, "until_s=4.0 is not after"),
    ],
)
def test_faults_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    """One sentence each, when the fault is written down and not when it should hit."""
    with pytest.raises(ValueError, match=message):
        Fault(**values)
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\]"):
        FaultScript.random(1, 1.5)


def test_a_fault_is_shown_as_it_would_be_typed() -> None:
    """What a failed test prints can be pasted into the next one."""
    fault = Fault("stall", sample=(1, 0), after_tokens=4, seconds=2.0)
    assert repr(fault) == "Fault('stall', sample=(1, 0), after_tokens=4, seconds=2.0)"
    assert eval(repr(fault)) == fault  # noqa: S307 - that is what it is for
    assert repr(FaultScript(fault)) == f"FaultScript({fault!r})"
