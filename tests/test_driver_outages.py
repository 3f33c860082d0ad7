"""Engines that break, refuse, restart or fall silent for a while cost no token that had reached april."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from virtual_rollouts import on_virtual_time

import april
from april.core.versions import PolicyVersion
from april.testing import FakeEngine, Fault, FaultScript, rollouts, run_virtual

pytestmark = on_virtual_time


def dropped(
    script: FaultScript, lengths: Any, steps: int, engines: int = 1, what: str = "tokens", **config: Any
) -> dict[str, int]:
    """What was dropped in a few steps on engines that share a script, by reason; everything else is audited."""

    async def program() -> dict[str, int]:
        made = [FakeEngine(f"e{i}", lengths=lengths, chunk_tokens=1, faults=script) for i in range(engines)]
        settings = april.Config(n_samples_per_prompt=1, max_response_len=200, **config)
        async with rollouts(settings, engines=made, prompts=[[i + 1] for i in range(50)]) as run:
            for _ in range(steps):
                await run.next_batch()
                await run.weight_update()
            run.audit()
            assert script.fired
            return {str(reason): n for reason, n in run.ledger()[what].dropped.items() if n}

    return run_virtual(program(), limit_s=10_000)


def test_a_short_outage_costs_no_token() -> None:
    """An engine that is away for 2 s is probed until it is back; attempts are not spent on it meanwhile."""
    script = FaultScript(Fault("engine_dies", sample=(0, 0), after_tokens=20, seconds=2.0))
    assert dropped(script, 30, 1, rollout_batch_size=1) == {}


def test_a_broken_engine_does_not_attract_its_own_retries() -> None:
    """An idle dead engine is the least loaded one; the other one gets the work all the same."""
    script = FaultScript(Fault("engine_dies", engine="e0", sample=(0, 0), after_tokens=20, seconds=2.0))
    assert dropped(script, 30, 1, engines=2, rollout_batch_size=2) == {}


def test_failures_with_progress_between_them_do_not_add_up() -> None:
    """One refused attempt in each of three steps, tokens in between: the sample goes on."""
    script = FaultScript(*(Fault("break_off", sample=(1, 0), attempt=a) for a in (1, 3, 5)))
    lengths = {(g, 0): 100 if g == 1 else 5 for g in range(50)}
    assert dropped(script, lengths, 4, rollout_batch_size=1, over_sampling_batch_size=2) == {}


def test_an_engine_that_sends_nothing_three_times_costs_the_group_and_no_more() -> None:
    """A request that stalls again and again at the same token is given up by name, like one that breaks off."""
    script = FaultScript(*(Fault("stall", sample=(0, 0), attempt=a, after_tokens=0) for a in (1, 2, 3)))
    assert dropped(script, 8, 1, what="prompts", rollout_batch_size=1, stall_timeout_s=50) == {"failed": 1}


async def test_a_dead_engine_does_not_hold_up_weight_updates() -> None:
    """The others train on; back again with old weights it gets no request before an update has reached it."""
    faults = FaultScript(Fault("engine_dies", engine="bad", from_s=5, seconds=100))
    bad, good = FakeEngine("bad", lengths=20, faults=faults), FakeEngine("good", lengths=20)
    config = april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=60)
    prompts = [[i + 1, 2] for i in range(60)]
    async with rollouts(config, engines=[bad, good], prompts=prompts, reward=lambda p, r: 1.0) as run:
        for n in range(6):
            await run.next_batch()
            assert await run.weight_update() == PolicyVersion(0, n + 1)
            sent = [r for r in bad.attempts.values() if r.started_s > 5]
            if bad.version < run.version:
                assert not sent
        assert asyncio.get_running_loop().time() > 105
        assert bad.version == good.version == run.version
        await run.next_batch()
        assert [r for r in bad.attempts.values() if r.started_s > 105]
        run.audit()


async def test_an_update_that_no_engine_takes_is_an_error() -> None:
    """All dead: the version stays, and the first engine's error comes out."""
    faults = FaultScript(Fault("engine_dies", from_s=5, seconds=100))
    config = april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=60)
    prompts = [[i + 1, 2] for i in range(60)]
    engine = FakeEngine(lengths=20, faults=faults)
    async with rollouts(config, engines=[engine], prompts=prompts, reward=lambda p, r: 1.0) as run:
        step = asyncio.create_task(run.next_batch())
        await asyncio.sleep(10)
        with pytest.raises(april.EngineError, match="is dead"):
            await run.weight_update()
        assert run.version == PolicyVersion(0, 0)
        await step
        assert await run.weight_update() == PolicyVersion(0, 1)
