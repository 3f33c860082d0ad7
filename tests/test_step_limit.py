"""The distance of a step from the limit: what it is made of, in the metrics of a run and in its report."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import april
from april.core.event_pump import RequestLog, RequestSums
from april.core.rollout_core import RolloutCore
from april.core.settings import EngineLimits
from april.driver.step_limit import GROUPS, distance_of
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine
from april.engines.simulated.response_lengths import LognormalLengths
from april.record.file import RunRecord
from april.testing import rollouts, run_virtual
from april.view.report import page
from april.view.run_data import distance, read_run

COST = DecodeCost(0.02, 1e-4, 1e-7, 1e-5)
LENGTHS = LognormalLengths(120.0, 0.5, 0.5, seed=4, cap=900)
PARTS = ["of_limit", "lost_reprefill", "lost_unexplained", *(f"lost_{name.replace(' ', '_')}" for name in GROUPS)]


def engine(name: str, slots: int = 32) -> SimulatedEngine:
    return SimulatedEngine(name, COST, lambda r: LENGTHS.sample(*(r.sample_key or (0, 0))), max_running=slots)


SIZES = {
    "rollout_batch_size": 4, "n_samples_per_prompt": 8, "over_sampling_batch_size": 8, "max_response_len": 1000,
}  # fmt: skip


async def train(
    engines: list[SimulatedEngine], batches: int, path: Path | None, before: Any = None, **config: Any
) -> list[dict[str, float]]:  # fmt: skip
    """Metrics of the batches of a trainer that takes three seconds for each; before each, ``before`` is called."""
    found = []
    async with rollouts(
        april.Config(**(SIZES | config)), engines=engines, prompts=[[1, 2]] * 400, reward=lambda p, r: 1.0,
        record=None if path is None else RunRecord(path),
    ) as scheduler:  # fmt: skip
        for number in range(batches):
            if before is not None:
                await before(scheduler, number)
            found.append(dict((await scheduler.next_batch()).metrics))
            await asyncio.sleep(3.0)
            await scheduler.weight_update("weights")
    return found


def run(path: Path | None = None, batches: int = 12, **config: Any) -> list[dict[str, float]]:
    """The same of two engines."""

    async def program() -> list[dict[str, float]]:
        return await train([engine("e0"), engine("e1")], batches, path, **config)

    return run_virtual(program())


def test_the_shares_of_a_step_add_up_to_one() -> None:
    """As soon as the cost is known; what is lost is lost to something that there was."""
    steps = run()
    assert [name for name in PARTS if name in steps[-1]] == PARTS
    for step in steps:
        assert sum(step[name] for name in PARTS) == pytest.approx(1.0, abs=1e-9)
        assert all(step[name] >= 0.0 for name in PARTS)
        assert step["lost_evaluation"] == 0.0
    assert all(step["lost_boundary"] > 0.05 for step in steps[2:])
    assert all(step["lost_reprefill"] > 0.0 for step in steps[2:])


def test_too_few_requests_say_nothing() -> None:
    """No metric, rather than a wrong one."""
    (step,) = run(batches=1, rollout_batch_size=1, over_sampling_batch_size=1)
    assert step["generated_tokens"] > 0
    assert not any(name in step for name in PARTS)


JOIN, CHANGE = 6, 14


def run_with_changes(path: Path) -> list[dict[str, float]]:
    """Metrics of 24 batches: one engine, then four, of which one is replaced; 8 slots each."""

    async def before(scheduler: Any, number: int) -> None:
        if number == JOIN:
            for name in ("a", "b", "c"):
                await scheduler.scheduler.aadd_engine(engine(name, 8))
        if number == CHANGE:
            await scheduler.scheduler.aremove_engine("a", cut=True)
            await scheduler.scheduler.aadd_engine(engine("d", 8))

    return run_virtual(train([engine("here", 8)], 24, path, before))


def test_the_report_counts_engines_as_long_as_they_were_there(tmp_path: Path) -> None:
    """Engines join, and one is replaced: the most places at a time, and the limit of the engines that there were."""
    steps = run_with_changes(tmp_path / "run.jsonl")
    data = read_run(tmp_path / "run.jsonl")
    assert len(data.engines) == 5
    assert data.engine_history.places[0] == 8
    assert data.places == 32
    at = [batch.time_s for batch in data.batches]
    assert data.engine_history.engine_s(at[JOIN], at[CHANGE - 1]) == pytest.approx(4 * (at[CHANGE - 1] - at[JOIN]))
    assert data.engine_count == 4
    assert "Each of the 32 places" in page([data])
    for first, last in ((0, JOIN - 1), (JOIN, CHANGE - 1), (CHANGE, 23), (0, 23)):
        found = distance(data, at[first], at[last])
        assert found is not None
        there = [step["step_s"] * (1 if number < JOIN else 4) for number, step in enumerate(steps)]
        for name, share in (("of_limit", found.at_limit), ("lost_reprefill", found.reprefill)):
            told = sum(steps[n][name] * there[n] for n in range(first + 1, last + 1)) / sum(there[first + 1 : last + 1])
            assert told == pytest.approx(share, rel=0.05), (name, first, last)


def test_the_limit_is_full_places_and_nothing_twice() -> None:
    """By hand: two engines, ten places each, all of it at once."""
    brought = RequestSums(generated=1000, context=500, resident=2e6)
    cost = DecodeCost(0.01, 1e-4, 1e-8, 1e-5)
    found = distance_of([(cost, brought)] * 2, places=20, seconds=4.0, again=200.0, idle={"bubble": 6.0, "boundary": 2})
    assert found is not None
    each = 1000 * (0.01 / 10 + 1e-4) + 2e6 * 1e-8
    assert found.at_limit == pytest.approx((2 * each + 1e-5 * (1000 - 200)) / 8.0)
    assert found.reprefill == pytest.approx(1e-5 * 200 / 8.0)
    rest = 1.0 - found.at_limit - found.reprefill
    assert found.causes == {"bubble": pytest.approx(0.75 * rest), "boundary": pytest.approx(0.25 * rest)}
    full = distance_of([(cost, brought)] * 2, places=20, seconds=4.0, again=200.0, idle={"bubble": 0.1})
    assert full is not None
    assert (full.causes, full.unexplained) == ({}, pytest.approx(rest))
    assert distance_of([], places=20, seconds=4.0, again=0.0, idle={}) is None
    assert distance_of([(cost, brought)], places=20, seconds=0.0, again=0.0, idle={}) is None


def test_an_engine_that_brought_nothing_was_there() -> None:
    """Half of the engines, at work all the time, are half of the limit."""
    cost, brought = DecodeCost(1e-4, 1e-3, 0.0), RequestSums(generated=3960)
    found = distance_of(
        [(cost, brought), (cost, RequestSums())], places=20, seconds=4.0, again=0.0, idle={"admission": 40.0}
    )
    assert found is not None
    assert found.at_limit == pytest.approx(0.5, rel=1e-3)
    assert found.causes == {"admission": pytest.approx(1.0 - found.at_limit)}
    config = april.Config(rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=10)
    settings = config.core_settings(has_reward=False, group_reward=False, run_id=0)
    core = RolloutCore(settings, [EngineLimits("a", 100), EngineLimits("b", 100)])
    assert set(RequestLog(core, lambda: 0.0).take_sums()) == {"a", "b"}
