"""Several SGLang servers behind sglang-router are one engine: control goes to each of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_servers.base import uncut
from fake_servers.sglang import FakeSglangRouter, FakeSglangServer
from server_fixtures import PROMPT, behind_a_router, read, request, routed, until

from april.core.versions import PolicyVersion
from april.engines.protocol import EngineFinish
from april.errors import ConfigError, EngineError, EngineUnreachable

V1 = PolicyVersion(0, 1)


@asynccontextmanager
async def fleet(**options: Any) -> AsyncIterator[tuple[list[FakeSglangServer], FakeSglangRouter, Any]]:
    """Two workers, a router and the engine before them."""
    servers = [FakeSglangServer(**options) for _ in range(2)]
    async with behind_a_router(*servers) as (router, engine):
        yield servers, router, engine


async def test_requests_go_through_the_router_and_aborts_to_every_worker() -> None:
    async with fleet(mean_length=10**6) as (servers, _router, engine):
        assert engine.capabilities.max_in_flight == 128
        for server in servers:
            server.stepped = True
            server.runs.clear()
        asked = [request([*PROMPT, i]) for i in range(8)]
        reading = [asyncio.create_task(read(engine, r)) for r in asked]
        await until(lambda: all(server.waiting == 4 for server in servers))
        for server in servers:
            server.step(5)
        await engine.abort([r.attempt_id for r in asked])
        cut = await asyncio.gather(*reading)
        assert {g.finish for g in cut} == {EngineFinish.ABORT}
        for server in servers:
            server.go_on()
        for r, g in zip(asked, cut, strict=True):
            prompt = r.token_ids.tolist()
            assert len(g.tokens) == 6
            rest = await read(engine, request(prompt + g.tokens, 58))
            assert g.tokens + rest.tokens == uncut(prompt, mean_length=10**6)[0]


async def test_half_an_update_is_no_update() -> None:
    """One worker has new weights and the other has died: nothing is generated until an update has reached both."""
    async with fleet() as (servers, _router, engine):
        servers[1].die()
        with pytest.raises(EngineUnreachable):
            await engine.update_weights(V1, "/weights/w1")
        health = await engine.health()
        assert (health.ok, health.current) == (False, False)
        assert "between two versions" in health.detail
        got = await read(engine, request())
        assert type(got.error) is EngineError
        assert "between two versions" in str(got.error)
        await servers[1].restart()
        await engine.update_weights(V1, "/weights/w1")
        assert (await engine.health()).ok
        assert set((await read(engine, request())).versions) == {V1}


@asynccontextmanager
async def four_requests() -> AsyncIterator[tuple[Any, Any, list[asyncio.Task[Any]]]]:
    """Two of them wait at each of two workers."""
    async with fleet(mean_length=10**6) as (servers, _router, engine):
        for server in servers:
            server.stepped = True
        reading = [asyncio.create_task(read(engine, request([*PROMPT, i]))) for i in range(4)]
        await until(lambda: all(server.waiting == 2 for server in servers))
        yield servers, engine, reading


async def test_a_killed_worker_breaks_its_requests_and_the_others_serve_on() -> None:
    """No token that came is wrong; new requests are passed to the worker that lives; health names the dead."""
    async with four_requests() as (servers, engine, reading):
        for server in servers:
            server.step(20)
        servers[0].die()
        servers[1].go_on()
        got = await asyncio.gather(*reading)
        assert sum(isinstance(g.error, EngineUnreachable) for g in got) == 2
        for i, g in enumerate(got):
            whole = uncut([*PROMPT, i], mean_length=10**6)[0]
            assert g.tokens == (whole if g.error is None else whole[: len(g.tokens)])
        assert (await read(engine, request())).finish is EngineFinish.LENGTH
        health = await engine.health()
        assert health.ok
        assert servers[0].url in health.detail


async def test_pausing_needs_no_dead_worker() -> None:
    """Requests of the worker that lives are aborted, those of the dead one have broken; then it is paused."""
    async with four_requests() as (servers, engine, reading):
        servers[0].die()
        await engine.pause()
        assert sorted(str(g.finish) for g in await asyncio.gather(*reading)) == ["None", "None", "abort", "abort"]


async def test_a_dead_router_is_noticed() -> None:
    """Its workers live, and no request reaches them."""
    async with fleet() as (_servers, router, engine):
        router.ready = False
        health = await engine.health()
        assert not health.ok
        assert "/readiness answers 503" in health.detail
        router.ready = True
        assert (await engine.health()).ok
        await router.close()
        health = await engine.health()
        assert not health.ok
        assert router.url in health.detail


async def test_a_restarted_worker_behind_the_router_is_noticed() -> None:
    """Its answers name weights that april did not give: none of its tokens is taken for the current version's."""
    async with fleet() as (servers, _router, engine):
        await engine.update_weights(V1, "/weights/w1")
        await servers[0].restart("w0")
        got = [await read(engine, request()) for _ in range(4)]
        assert sum(g.error is None for g in got) == 2
        assert {v for g in got for v in g.versions} == {V1}
        assert not (await engine.health()).current


async def test_workers_of_the_router_are_those_of_the_configuration() -> None:
    """A worker that is not configured would keep old weights, one that is not used says something is wrong."""
    async with fleet() as (servers, router, _engine):
        with pytest.raises(ConfigError, match=r"which is missing in engine\.urls"):
            await routed(router, servers[0])
        router.workers = router.workers[:1]
        with pytest.raises(ConfigError, match="does not have"):
            await routed(router, *servers, probe_timeout_s=3.0)
        with pytest.raises(ConfigError, match="has no /workers"):
            await routed(servers[1], servers[0])


async def test_a_router_that_has_just_started_is_waited_for() -> None:
    """It has no workers at first."""
    async with behind_a_router(FakeSglangServer(), FakeSglangServer(), late=1) as (_, engine):
        assert (await read(engine, request())).error is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("vocab_size", 400, "differ in vocab_size"), ("decode", None, r"differ in stop_strings \(True and False\)")],
)
async def test_workers_must_be_alike(name: str, value: Any, words: str) -> None:
    """A worker without a tokenizer, for example, can search neither for stop strings nor by a grammar."""
    async with fleet(decode=str) as (servers, router, _engine):
        setattr(servers[1], name, value)
        with pytest.raises(ConfigError, match=words):
            await (await routed(router, *servers)).close()
