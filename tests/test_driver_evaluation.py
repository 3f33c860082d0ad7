"""Evaluations on engines that are busy, die or lose their weights, and evaluations that nobody waits for any more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_driver_pool import Server, pool, servers
from virtual_rollouts import on_virtual_time

import april
from april.errors import EngineBusy
from april.testing import rollouts, run_virtual

pytestmark = on_virtual_time

PROMPTS = [[i + 1, 5] for i in range(6)]


class Busy(Server):
    """Refuses its first requests."""

    refusals = 0
    most_open = 0

    async def generate(self, request: Any) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise EngineBusy(f"{self.name} has too much to do", 7.0)
        async for chunk in super().generate(request):
            self.most_open = max(self.most_open, self.open_streams)
            yield chunk


def ends(*engines: Server) -> set[str]:
    """Why evaluation requests ended."""
    return {r.end for e in engines for r in e.attempts.values() if r.evaluation}


async def test_a_cancelled_evaluation_ends_its_requests_before_it_closes_their_streams() -> None:
    """The engine is told; no stream is closed under a request that still runs, and training goes on."""
    a = Server("a", lengths=50)
    async with pool([a]) as run:
        evaluation = asyncio.create_task(run.evaluate(PROMPTS))
        await asyncio.sleep(5.5)
        evaluation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await evaluation
        assert not a.open_streams
        assert ends(a) == {"abort"}
        assert {i for x in a.aborts for i in x.attempt_ids or ()} == set(a.attempts)
        await run.next_batch()
        run.audit()


async def test_a_failing_evaluation_ends_its_other_requests() -> None:
    """One reward raises: the rest is aborted, not cut."""

    def reward(prompt: Any, response: Any) -> float:
        if len(response.tokens) < 10:
            raise ValueError("too short")
        return 1.0

    a = Server("a", lengths=lambda request: 5 if request.token_ids[0] == 1 else 50)
    config = april.Config(rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=60)
    async with rollouts(config, engines=[a], prompts=PROMPTS, reward=reward) as run:
        with pytest.raises(april.RolloutError, match="evaluation prompt 0: the reward function raised"):
            await run.evaluate(PROMPTS)
        assert ends(a) <= {"abort", "stop"}


@pytest.mark.parametrize("alone", [False, True])
async def test_an_evaluation_waits_for_an_engine_that_is_busy(alone: bool) -> None:
    """Nothing has failed: the request goes to another engine, or waits as long as it was asked to."""
    a, b = Busy("a", lengths=20), Server("b", lengths=20)
    a.refusals = 2
    async with pool([a] if alone else [a, b]) as run:
        result = await run.evaluate(PROMPTS)
        assert [len(r.tokens) for (r,) in result.responses] == [20] * 6
        assert not run.scheduler._driver.core.engines.states["a"].quarantined
        if alone:  # it took four, so that is its cap: the other two wait for places
            assert asyncio.get_running_loop().time() == pytest.approx(20.0 + 20.0)
            assert a.most_open == 4


async def test_an_evaluation_does_not_shorten_the_rest_of_an_engine() -> None:
    """It is that of the engine, whoever asks: it rests as long as it said, also when training was told so."""
    a = Busy("a", lengths=20)
    a.refusals = 1
    async with pool([a], n=1, n_samples_per_prompt=1) as run:
        step = asyncio.create_task(run.next_batch())
        await asyncio.sleep(2.0)
        assert run.scheduler._driver.core.engines.states["a"].resting
        await run.evaluate(PROMPTS[:1])
        assert asyncio.get_running_loop().time() == pytest.approx(7.0 + 20.0)
        assert [r.started_s for r in a.attempts.values() if r.evaluation] == [7.0]
        await step
        run.audit()


async def test_an_evaluation_respects_the_cap_of_an_engine() -> None:
    """What its memory holds is no other for an evaluation: four at a time, then two."""
    async with servers("a", Busy) as (run, a):
        run.scheduler._driver.core.engines.states["a"].cap.measured = 4
        await run.evaluate(PROMPTS)
        assert a.most_open == 4
        assert asyncio.get_running_loop().time() == pytest.approx(40.0)


def test_an_evaluation_on_an_engine_that_is_busy_for_ever_ends() -> None:
    """Rests in a row end in an outage, of which the engine's own words are the reason; nobody asks it all the time."""

    async def program() -> None:
        a = Busy("a", lengths=20)
        a.refusals = 1 << 30
        async with pool([a]) as run:
            with pytest.raises(april.EngineError, match="a has too much to do"):
                await run.evaluate(PROMPTS)
            assert 600 < asyncio.get_running_loop().time() < 1000
            assert (1 << 30) - a.refusals < 50

    run_virtual(program(), limit_s=10_000)


async def test_servers_are_looked_at_during_an_evaluation() -> None:
    """One that loses its weights in the middle is found out: its requests begin again where they are right."""
    async with servers() as (run, a, b):
        await run.weight_update("/first")
        evaluation = asyncio.create_task(run.evaluate(PROMPTS))
        await asyncio.sleep(1.0)
        a.lose_weights("of others")
        await evaluation
        assert a.weights == "/first"
        assert len([r for r in [*a.attempts.values(), *b.attempts.values()] if r.evaluation]) == 9
        assert run.scheduler._driver.core.counters["stale_engines"] == 1


def test_an_evaluation_request_begins_again_when_its_engine_dies() -> None:
    """On another engine, with the same seed: the result is that of an evaluation without the death."""

    async def program(death: bool) -> list[list[int]]:
        a, b = Server("a", lengths=20), Server("b", lengths=20)
        async with pool([a, b]) as run:
            evaluation = asyncio.create_task(run.evaluate(PROMPTS, seed=3))
            await asyncio.sleep(5.5)
            if death:
                a.die()
            result = await evaluation
            seeds: dict[Any, set[int | None]] = {}
            for record in [*a.attempts.values(), *b.attempts.values()]:
                seeds.setdefault(record.request.sample_key, set()).add(record.request.sampling.seed)
            assert [len(s) for s in seeds.values()] == [1] * 6
            assert len(a.attempts) + len(b.attempts) == (9 if death else 6)
            return [r.tokens.tolist() for (r,) in result.responses]

    assert run_virtual(program(death=True)) == run_virtual(program(death=False))


async def test_an_evaluation_fails_when_no_engine_is_left() -> None:
    """It waits for one to be well again as long as a step would; then the error is that of the engine."""
    async with servers("a") as (run, a):
        evaluation = asyncio.create_task(run.evaluate(PROMPTS))
        await asyncio.sleep(5.5)
        a.die()
        with pytest.raises(april.EngineError, match="engine a died"):
            await evaluation
        assert asyncio.get_running_loop().time() >= 5.5 + run.scheduler.config.outage_deadline_s


async def test_an_evaluation_never_uses_an_engine_without_the_present_weights() -> None:
    """A server that was started anew since its last request is found out before the evaluation begins."""
    async with servers() as (run, a, b):
        await run.weight_update(transfer=lambda: None)
        a.restart()
        await run.evaluate(PROMPTS)
        assert not a.attempts
        b.restart()
        with pytest.raises(april.EngineError, match="all engines are quarantined or have other weights: a, b"):
            await run.evaluate(PROMPTS)
