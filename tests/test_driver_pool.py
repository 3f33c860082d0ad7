"""Servers that die, are started anew or stay paused: found out, given the present weights, and never used before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from virtual_rollouts import on_virtual_time

import april
from april.core.engine_recovery import CHECK_INTERVAL_S
from april.core.versions import PolicyVersion
from april.core.weight_updates import QUARANTINED_PATIENCE_S
from april.engines.protocol import Capabilities, Health
from april.errors import EngineBusy
from april.testing import FakeEngine, Fault, FaultScript, rollouts, run_virtual

pytestmark = on_virtual_time

START = "start"


class Server(FakeEngine):
    """An engine behind a server, whose weights have names; ``hangs`` are its methods that do not return."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, chunk_tokens=1, **options)
        self.weights = START
        self.lost = False
        """It has other weights than it was given."""
        self.hangs: set[str] = set()
        self.used: set[str] = set()
        """Weights that wrote tokens."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, remote=True)

    def restart(self, seconds: float = 0.0) -> None:
        """The process dies; another one is there after ``seconds``, with the weights of the start."""
        self.die(seconds)
        self.lose_weights(START)

    def lose_weights(self, weights: str) -> None:
        """Somebody else gives it other ones; its requests go on."""
        self.weights, self.lost = weights, True

    async def generate(self, request: Any) -> Any:
        async for chunk in super().generate(request):
            if len(chunk.tokens):
                self.used.add(self.weights)
            yield chunk

    async def _maybe(self, what: str) -> None:
        while what in self.hangs:  # noqa: ASYNC110
            await asyncio.sleep(1)

    async def pause(self) -> None:
        await self._maybe("pause")
        await super().pause()

    async def resume(self) -> None:
        await self._maybe("resume")
        await super().resume()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        await self._maybe("update_weights")
        await super().update_weights(version, path)
        self.weights, self.lost = self.weights if path is None else path, False

    async def health(self) -> Health:
        return replace(await super().health(), current=not self.lost)


def pool(engines: Sequence[FakeEngine], n: int = 4, **config: Any) -> Any:
    """A scheduler on ``engines`` with enough prompts."""
    settings = april.Config(**({"rollout_batch_size": n, "n_samples_per_prompt": 2, "max_response_len": 60} | config))
    return rollouts(settings, engines=engines, prompts=[[i + 1, 2] for i in range(400)], reward=lambda p, r: 1.0)


@asynccontextmanager
async def servers(names: str = "ab", kind: Any = Server, **options: Any) -> AsyncIterator[tuple[Any, ...]]:
    """A scheduler and its servers, each of a letter; no token is lost without a name, and the books agree."""
    made = [kind(name, lengths=20, **options) for name in names]
    async with pool(made) as run:
        yield run, *made
        assert run.audit().lost == sum(run.ledger()["tokens"].dropped.values())
        run.validate()


async def write() -> None:
    """A transfer by the trainer."""


async def step_with(run: Any, *happen: Callable[[], Any], at: float = 3.5) -> april.Batch:
    """The next batch; something happens after so many seconds."""
    step = asyncio.create_task(run.next_batch())
    await asyncio.sleep(at)
    for what in happen:
        what()
    batch: april.Batch = await step
    return batch


def hang(server: Server, *calls: str) -> Callable[[], None]:
    return lambda: server.hangs.update(calls)


def used_after(server: FakeEngine, seconds: float) -> list[str]:
    """Ids of requests that a server got after a time."""
    return [i for i, r in server.attempts.items() if r.started_s > seconds]


@pytest.mark.parametrize("path", [None, "/first"])
async def test_a_server_that_was_restarted_in_the_middle_of_a_step_gets_its_weights_back(path: str | None) -> None:
    """The probe finds it well with other weights: those of the last path, or at version 0 those of the start."""
    async with servers() as (run, a, _):
        if path is not None:
            await run.weight_update(path)
        await step_with(run, lambda: a.restart(3.0), at=5.5)
        await run.next_batch()
        assert used_after(a, 8.5)
        assert a.used == {path or START}
        assert a.updates[-1][1:] == (run.version, path)


async def test_tokens_of_a_server_whose_weights_were_changed_by_others_are_dropped() -> None:
    """Found by the next look; its requests go on elsewhere from what was certain."""
    async with servers() as (run, a, _):
        await run.weight_update("/first")
        batch = await step_with(run, lambda: a.lose_weights("of others"), at=5 * CHECK_INTERVAL_S / 2)
        at_a = [r for r in a.attempts.values() if r.started_s < CHECK_INTERVAL_S]
        ledger = run.ledger()["tokens"]
        assert ledger.dropped == {"unknown_weights": sum(r.count for r in at_a)}
        assert len(at_a) == 4
        certain = {s.attempt_id for x in batch.samples for s in x.segments}
        assert certain.isdisjoint(r.request.attempt_id for r in at_a)
        assert [path for _, _, path in a.updates] == ["/first", "/first"]


async def test_an_update_that_gives_servers_nothing_is_refused() -> None:
    """Their old weights would be called the new version: nothing happens, not even a pause."""
    a, b = Server("a", lengths=20), FakeEngine("b", lengths=20, chunk_tokens=1)
    async with pool([b, a]) as run:
        step = asyncio.create_task(run.next_batch())
        await asyncio.sleep(5.5)
        with pytest.raises(april.ConfigError, match="weight_update: a would keep the old weights under the new"):
            await run.weight_update()
        assert run.version == PolicyVersion(0, 0)
        assert not a.aborts
        batch = await step
        assert {len(s.segments) for s in batch.samples} == {1}
        assert not a.updates


async def test_a_relative_path_is_made_absolute_for_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has another working directory than the trainer."""
    monkeypatch.chdir(tmp_path)

    async with servers("a") as (run, a):
        await run.weight_update("weights/1")
        assert a.weights == str(tmp_path / "weights" / "1")


async def test_a_server_that_does_not_answer_does_not_hide_what_the_others_say() -> None:
    """Each answer counts as it comes, and each server is asked again in its own time."""

    class Silent(Server):
        async def health(self) -> Health:
            await asyncio.sleep(1000)
            raise AssertionError

    a, b = Server("a", lengths=20), Silent("b", lengths=20)
    async with pool([a, b]) as run:
        await run.weight_update("/first")
        step = asyncio.create_task(run.next_batch())
        await asyncio.sleep(3 * CHECK_INTERVAL_S / 2)
        a.lose_weights("of others")
        await asyncio.sleep(CHECK_INTERVAL_S)
        assert run.scheduler._driver.core.counters["stale_engines"] == 1
        await step
        run.audit()


async def test_servers_are_given_the_weights_of_a_checkpoint() -> None:
    """Not believed to have them; and what those weights had generated before the restart is not stale under them."""
    async with servers("a") as (run, _):
        await run.next_batch()
        await run.weight_update("/first")
        await run.next_batch()
        state = run.scheduler.state_dict()  # with a batch of the first update's weights
    server = Server("a", lengths=20)
    async with pool([server]) as run:
        with pytest.raises(april.ConfigError, match=r"load_state_dict: a would keep their current weights"):
            await run.scheduler._driver.load_state_dict(state)
        assert (server.weights, run.version) == (START, (0, 0))
        await run.scheduler._driver.load_state_dict(state, "/first")
        assert (server.weights, run.version) == ("/first", (1, 1))
        batch = await run.next_batch()
        assert {g.version for s in batch.samples for g in s.segments} == {(0, 1)}
        assert batch.metrics["staleness_max"] == batch.off_policy_share == 0


async def test_a_weight_update_does_not_wait_for_an_engine_that_is_healed() -> None:
    """It is left out; when its load of the old weights is over, it gets the new ones."""
    async with servers() as (run, a, _):
        await run.weight_update("/first")
        await step_with(run, a.restart, hang(a, "update_weights"))
        before = asyncio.get_running_loop().time()
        await run.weight_update("/second")
        assert asyncio.get_running_loop().time() == before
        a.hangs = set()
        for _ in range(2):
            batch = await run.next_batch()
        assert [path for _, _, path in a.updates] == ["/first", "/first", "/second"]
        assert {s.engine for x in batch.samples for s in x.segments} == {"a", "b"}
        assert a.used == {"/first", "/second"}


@pytest.mark.parametrize("what", ["pause", "update_weights"])
async def test_an_update_that_reaches_no_engine_is_an_error(what: str) -> None:
    """One is being healed, the only other one fails: nobody has the new weights, so there is no new version."""
    async with servers() as (run, a, b):
        await run.weight_update("/first")
        await step_with(run, a.restart, hang(a, "update_weights"))
        b.hangs = {what}
        with pytest.raises(april.EngineError, match=f"engine b has not answered {what}"):
            await run.weight_update("/second")
        assert run.version == PolicyVersion(0, 1)
        a.hangs = b.hangs = set()
        assert await run.weight_update("/third") == PolicyVersion(0, 2)
        await run.next_batch()


async def test_a_quarantined_engine_that_hangs_is_not_waited_for() -> None:
    """A dead machine answers nothing, not even with an error: the others train on after a moment."""
    async with servers() as (run, a, _):
        await step_with(run, lambda: a.die(1000.0), hang(a, "pause", "update_weights", "resume"))
        before = asyncio.get_running_loop().time()
        await run.weight_update("/first")
        assert asyncio.get_running_loop().time() - before == pytest.approx(QUARANTINED_PATIENCE_S)


# ---------------------------------------------------------------- engines that are away for a while


@pytest.mark.parametrize(
    ("faults", "lengths", "engines", "changes", "dropped"),
    [
        pytest.param(
            [Fault("engine_dies", sample=(0, 0), after_tokens=20, seconds=2.0)], 30, 1, {}, {},
            id="an engine that is away for 2 s is probed until it is back; attempts are not spent on it meanwhile",
        ),
        pytest.param(
            [Fault("engine_dies", engine="e0", sample=(0, 0), after_tokens=20, seconds=2.0)], 30, 2, {"n": 2}, {},
            id="an idle dead engine is the least loaded one; the other one gets the work all the same",
        ),
        pytest.param(
            [Fault("break_off", sample=(1, 0), attempt=a) for a in (1, 3, 5)],
            {(g, 0): 100 if g == 1 else 5 for g in range(400)}, 1, {"over_sampling_batch_size": 2, "steps": 4}, {},
            id="one refused attempt in each of three steps with tokens in between does not add up",
        ),
        pytest.param(
            [Fault("stall", sample=(0, 0), attempt=a, after_tokens=0) for a in (1, 2, 3)], 8, 1,
            {"stall_timeout_s": 50}, {"failed": 1},
            id="a request that stalls three times at the same token is given up by name, and no more than its group",
        ),
    ],
)  # fmt: skip
async def test_an_outage_costs_no_token(
    faults: list[Fault], lengths: Any, engines: int, changes: dict[str, Any], dropped: dict[str, int]
) -> None:
    """Engines that break, refuse, restart or fall silent for a while; the prompts that are dropped, by reason."""
    script = FaultScript(*faults)
    made = [FakeEngine(f"e{i}", lengths=lengths, chunk_tokens=1, faults=script) for i in range(engines)]
    steps = changes.get("steps", 1)
    options = {"n": 1, "n_samples_per_prompt": 1, "max_response_len": 200} | changes
    options.pop("steps", None)
    async with pool(made, **options) as run:
        for _ in range(steps):
            await run.next_batch()
            await run.weight_update()
        run.audit()
        assert script.fired
        assert +run.ledger()["prompts"].dropped == dropped
        assert dropped or not +run.ledger()["tokens"].dropped


# ----------------------------------------------------------------
# Evaluations on engines that are busy, die or lose their weights, and evaluations that nobody waits for any more.


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
