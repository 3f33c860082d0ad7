"""Weights and versions of SGLang servers: what is confirmed, what fails how, and whose requests notice."""

from __future__ import annotations

import asyncio

import pytest
from fake_servers.base import PlannedFault, RequestFault
from fake_servers.sglang import fake_sglang_response
from sglang_fixtures import PROMPT, Got, beside, connected, read, request, run, served, until

from april.core.versions import PolicyVersion
from april.engines.protocol import EngineFinish
from april.engines.sglang import engine as sglang
from april.engines.sglang.worker import HalfUpdated
from april.errors import EngineError, EngineUnreachable

V1 = PolicyVersion(0, 1)
LONG = 10**6


def test_an_update_changes_tokens_and_versions() -> None:
    """After pause, update and resume every token is of the new weights and says so; the cache is empty."""

    async def program() -> None:
        async with served() as (server, engine):
            await engine.pause()
            await engine.update_weights(V1, "/weights/w1")
            waiting = asyncio.create_task(read(engine, request()))
            await engine.resume()
            got = await waiting
            assert got.tokens == fake_sglang_response(PROMPT, weights="w1")[0]
            assert set(got.versions) == {V1}
            assert server.updates[0]["abort_all_requests"] is False
            health = await engine.health()
            assert health.ok
            assert health.current
            # weights that the trainer has transferred itself: an empty cache and a label
            server.weights, server.stale_cache = "w2", True
            await engine.update_weights(PolicyVersion(0, 2))
            got = await read(engine, request())
            assert got.tokens == fake_sglang_response(PROMPT, weights="w2")[0]
            assert set(got.versions) == {PolicyVersion(0, 2)}

    run(program)


def test_a_probe_that_sees_the_trainers_weights_first_takes_them_for_an_update() -> None:
    """Where an update of others is followed it begins one; a server that was started anew has lost its weights."""

    async def program() -> None:
        async with served() as (server, engine):
            begun: list[bool] = []
            engine.on_foreign_pause = lambda: begun.append(engine.is_paused_by_others)
            server.label = "2"
            health = await engine.health()
            assert begun == [True]
            assert (health.ok, health.current) == (False, True)
            await engine.pause()
            await engine.resume()
            server.label = "default"
            assert not (await engine.health()).current

    run(program)


@pytest.mark.parametrize("labels", [True, False])
def test_a_server_that_cannot_load_keeps_weights_and_version(labels: bool) -> None:
    async def program() -> None:
        async with served(labels=labels) as (_, engine):
            await engine.pause()
            with pytest.raises(EngineError, match=r"could not load /weights/missing as v0.1-.* it keeps the weights"):
                await engine.update_weights(V1, "/weights/missing")
            await engine.resume()
            got = await read(engine, request())
            assert got.tokens == fake_sglang_response(PROMPT)[0]
            assert set(got.versions) == {PolicyVersion(0, 0)}
            assert (await engine.health()).ok

    run(program)


def test_pausing_ends_requests_and_holds_new_ones() -> None:
    """Paused: what ran has handed over its tokens, what comes waits at april's door and can be aborted there."""

    async def program() -> None:
        async with served(stepped=True, mean_length=LONG) as (server, engine):
            cut = asyncio.create_task(read(engine, request()))
            await until(lambda: server.waiting == 1)
            server.step(9)
            await engine.pause()
            assert (await cut).finish is EngineFinish.ABORT
            assert len((await cut).tokens) == 10
            assert server.pause_mode is None
            held, ended = request(), request()
            reading = [asyncio.create_task(read(engine, r)) for r in (held, ended)]
            await until(lambda: "2 waiting" in repr(engine))
            await engine.abort([ended.attempt_id])
            assert (await reading[1]).finish is EngineFinish.ABORT
            assert len(server.runs) == 1
            server.go_on()
            await engine.resume()
            assert (await reading[0]).finish is EngineFinish.LENGTH

    run(program)


def test_requests_of_others_live_through_an_update() -> None:
    """Another client's request neither ends nor holds up the update: it goes on under the new weights, in spans.

    Their label is not taken for a version of the other client's own, though it has updated nothing yet either.
    """

    async def program() -> None:
        async with served(stepped=True, mean_length=LONG, config={"max_token_loss": 100}) as (server, engine):
            server.go_on()
            other = await connected(server, {"max_token_loss": 100})
            server.stepped = True
            reading = asyncio.create_task(read(other, request()))
            await until(lambda: server.waiting == 1)
            server.step(10)
            await engine.pause()
            await engine.update_weights(V1, "/weights/w1")
            assert server.pause_mode is None
            assert server.open_requests == 1
            server.go_on()
            await engine.resume()
            got = await reading
            first = fake_sglang_response(PROMPT, mean_length=LONG)[0][:10]
            rest = fake_sglang_response(PROMPT + first, weights="w1", max_tokens=54, mean_length=LONG)[0]
            assert server.runs[-1].ids == first + rest
            assert server.runs[-1].finish == {"type": "length", "length": 64}
            # that one is an april too, which has named none of the new weights
            assert "tokens of weights 'v0.1-" in str(got.error)
            assert got.tokens == first
            assert got.versions == [PolicyVersion(0, 0)] * 10
            assert not (await other.health()).current
            await other.close()

    run(program)


def test_tokens_of_weights_that_april_did_not_name_are_refused() -> None:
    """Behind april's back: what came under the known label stays, what follows is never handed over."""

    async def program() -> None:
        async with served(stepped=True, mean_length=LONG) as (server, engine):
            got = Got()
            reading = asyncio.create_task(read(engine, request(), got))
            await until(lambda: server.waiting == 1)
            server.step(20)
            await until(lambda: len(got.tokens) > 0)
            server.weights, server.label = "theirs", "step-7"
            server.go_on()
            await reading
            assert type(got.error) is EngineError
            assert "'step-7'" in str(got.error)
            assert got.tokens == fake_sglang_response(PROMPT, mean_length=LONG)[0][: len(got.tokens)]
            # the answer's spans say that three tokens more were of the known weights
            assert len(got.tokens) == 20
            health = await engine.health()
            assert (health.ok, health.current) == (True, False)

    run(program)


@pytest.mark.parametrize("path", ["/weights/w1", None], ids=["loaded", "transferred"])
@pytest.mark.parametrize("route", ["/model_info", "/update_weight_version", "/continue_generation"])
def test_what_fails_behind_new_weights_leaves_a_half_update(path: str | None, route: str) -> None:
    """The server has new weights, and april does not know all that belongs to them: no request before an update."""

    async def program() -> None:
        async with served(stepped=True, mean_length=LONG) as (server, engine):
            other = await beside(server)
            reading = asyncio.create_task(read(other, request()))
            await until(lambda: server.waiting == 1)
            await engine.pause()
            server.weights, server.stale_cache = "w1", True
            server.unanswered = {route: 4}
            if path is not None and route == "/update_weight_version":
                server.relabels = False
            with pytest.raises(HalfUpdated) as caught:
                await engine.update_weights(V1, path)
            assert isinstance(caught.value, EngineUnreachable)
            server.relabels, server.unanswered = True, {}
            await engine.resume()
            assert "between two versions" in str((await read(engine, request())).error)
            health = await engine.health()
            assert (health.ok, health.current) == (False, False)
            await engine.update_weights(V1, path)
            assert (await engine.health()).ok
            server.go_on()
            await reading
            assert set((await read(engine, request())).versions) == {V1}
            await other.close()

    run(program)


def test_an_update_that_is_cancelled_leaves_no_version() -> None:
    """What the server made of it is not known: no request before an update has succeeded."""

    async def program() -> None:
        async with served(labels=False, stepped=True, mean_length=LONG) as (server, engine):
            await engine.pause()
            updating = asyncio.create_task(engine.update_weights(V1, "/weights/w1"))
            await until(lambda: bool(server.updates))
            updating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await updating
            await engine.resume()
            assert "between two versions" in str((await read(engine, request())).error)

    run(program)


def test_a_hanging_probe_is_an_unreachable_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health says so, and raises nothing."""
    monkeypatch.setattr(sglang, "HEALTH_S", 0.0)

    async def program() -> None:
        async with served() as (server, engine):
            health = await engine.health()
            assert not health.ok
            assert f"{server.url} has not said its load and label" in health.detail

    run(program)


def test_a_restarted_server_is_well_and_not_current() -> None:
    """Until an update has reached it; then it is used again."""

    async def program() -> None:
        async with served() as (server, engine):
            server.die()
            assert not (await engine.health()).ok
            assert isinstance((await read(engine, request())).error, EngineUnreachable)
            with pytest.raises(EngineUnreachable):
                await engine.update_weights(V1, "/weights/w1")
            await server.restart("w9")
            health = await engine.health()
            assert (health.ok, health.current) == (True, False)
            assert isinstance((await read(engine, request())).error, EngineError)
            await engine.update_weights(V1, "/weights/w1")
            assert (await engine.health()).current
            assert (await read(engine, request())).tokens == fake_sglang_response(PROMPT, weights="w1")[0]

    run(program)


def test_health_says_the_load() -> None:
    async def program() -> None:
        fault = PlannedFault(RequestFault.UNASKED_ABORT, after_tokens=1000)
        async with served(fault, stepped=True, max_running=2, mean_length=LONG) as (server, engine):
            asked = [request() for _ in range(5)]
            reading = [asyncio.create_task(read(engine, r)) for r in asked]
            await until(lambda: server.waiting == 5)
            server.step()
            load = (await engine.health()).load
            assert load is not None
            assert (load.running, load.waiting) == (2, 3)
            assert 0 < load.kv_usage < 1
            assert len(server.runs) == 5  # the probe was no request
            await engine.abort(None)
            await asyncio.gather(*reading)

    run(program)
