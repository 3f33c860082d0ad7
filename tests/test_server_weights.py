"""Weights of vLLM and SGLang servers: loaded, confirmed, named; what fails how; and a new process is seen."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_servers.base import uncut
from server_fixtures import (
    BOTH,
    KINDS,
    PROMPT,
    Got,
    begun,
    beside,
    connected,
    read,
    request,
    saved,
    served,
    until,
    update,
)

from april.core.versions import PolicyVersion
from april.engines.protocol import EngineFinish
from april.engines.sglang import engine as sglang
from april.engines.sglang.worker import PartlyUpdated
from april.errors import EngineError, EngineUnreachable

V1 = PolicyVersion(0, 1)
LONG = 10**6


@pytest.mark.parametrize("from_disk", [True, False], ids=["from disk", "handed over"])
@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai"])
async def test_an_update(tmp_path: Path, kind: str, from_disk: bool) -> None:
    """What runs is ended with its tokens, what comes waits, can be aborted, and gets the new weights and version.

    Cache and label are april's affair in both ways; an OpenAI-compatible server has neither, and no route for a path.
    """
    async with served(kind, stepped=True, mean_length=LONG) as (server, engine):
        cut = Got()
        reading = await begun(server, read(engine, request(), cut))
        server.step(4)
        if kind == "openai":
            await until(lambda: len(cut.tokens) == 4)
            with pytest.raises(EngineError, match="pause the engine first"):
                await engine.update_weights(V1)
        await engine.pause()
        await reading
        assert cut.finish is EngineFinish.ABORT
        made = 5 if kind == "sglang" else 4  # a running request of SGLang makes one token more
        assert cut.tokens == uncut(PROMPT, mean_length=LONG)[0][:made]
        assert server.pause_mode is None
        waiting, ended = request(), request()
        readings = [asyncio.create_task(read(engine, asked)) for asked in (waiting, ended)]
        await until(lambda: "2 waiting" in repr(engine))
        await engine.abort([ended.attempt_id])
        assert (await readings[1]).finish is EngineFinish.ABORT
        server.resets_refused = 2
        path = saved(tmp_path, "w1") if from_disk else None
        if kind == "openai" and from_disk:
            with pytest.raises(EngineError, match=r"does not load weights from disk.*transfer="):
                await engine.update_weights(V1, path)
            path = None
        if path is None:
            server.weights, server.stale_cache = "w1", kind != "openai"
        await engine.update_weights(V1, path)
        await engine.update_weights(V1, path)
        assert len(server.runs) == 1
        server.go_on()
        await engine.resume()
        got = await readings[0]
        assert got.tokens == uncut(PROMPT, weights="w1", mean_length=LONG)[0]
        assert set(got.versions) == {V1}
        assert server.label.startswith("v0.1-") or kind == "openai"
        if kind == "sglang" and from_disk:
            assert server.updates[0]["abort_all_requests"] is False
        health = await engine.health()
        assert (health.ok, health.current) == (True, True)


@pytest.mark.parametrize(
    ("kind", "options"), [("vllm", {}), ("vllm", {"developer": False}), ("sglang", {}), ("openai", {})], ids=str
)
async def test_a_restart_is_seen(kind: str, options: dict[str, Any]) -> None:
    """By its label, or by the start of its process; until it is given weights its tokens are nobody's."""
    async with served(kind, **options) as (server, engine):
        assert (await engine.health()).current
        server.die()
        assert not (await engine.health()).ok
        assert isinstance((await read(engine, request())).error, EngineUnreachable)
        if kind == "sglang":
            with pytest.raises(EngineUnreachable):
                await engine.update_weights(V1, "/weights/w1")
        await server.restart()
        health = await engine.health()
        assert (health.ok, health.current) == (True, False)
        if not options and kind != "openai":  # where nothing names weights, those of the start are version 0 again
            assert isinstance((await read(engine, request())).error, EngineError)
        await update(engine, V1)
        assert (await engine.health()).current
        assert (await read(engine, request())).error is None


@pytest.mark.parametrize("kind", KINDS)
async def test_health_says_the_load(kind: str) -> None:
    """Running and waiting requests, those of others included; the probe itself is no request."""
    async with served(kind, stepped=True, max_running=2, mean_length=LONG) as (server, engine):
        readings = [asyncio.create_task(read(engine, request())) for _ in range(5)]
        await until(lambda: server.open_requests == 5)
        server.step()
        load = (await engine.health()).load
        assert (load.running, load.waiting) == (2, 3)
        assert 0 < load.kv_usage <= 1
        assert load.preemptions == (0 if kind == "sglang" else 3)
        assert len(server.runs) == 5
        server.go_on()
        await asyncio.gather(*readings)


@pytest.mark.parametrize(
    ("kind", "options", "name", "words"),
    [
        pytest.param("vllm", {}, "empty", "contains no weights", id="vLLM would die of an empty directory"),
        pytest.param("vllm", {}, "nowhere", "contains no weights", id="vLLM would die of no directory"),
        pytest.param("vllm", {"developer": False}, "w1", "VLLM_SERVER_DEV_MODE=1", id="vLLM without the route"),
        pytest.param("vllm", {}, "missing", "could not load", id="vLLM may be without weights"),
        pytest.param("sglang", {}, "missing", r"could not load \S+ as v0.1-.* its old weights",
                     id="SGLang keeps what it has"),
    ],
)  # fmt: skip
async def test_a_load_that_fails(tmp_path: Path, kind: str, options: dict[str, Any], name: str, words: str) -> None:
    """A server that is not asked, or keeps what it had, serves on; another gets no request before an update."""
    (tmp_path / "empty").mkdir()
    path = saved(tmp_path, name) if name in ("w1", "missing") else str(tmp_path / name)
    async with served(kind, **options) as (server, engine):
        with pytest.raises(EngineError, match=words):
            await update(engine, V1, path)
        got, health = await read(engine, request()), await engine.health()
        if (kind, name) == ("vllm", "missing"):
            assert "no weights now" in str(got.error)
            assert (health.ok, health.current, server.runs) == (False, False, [])
            await engine.update_weights(V1, saved(tmp_path, "w1"))
            assert (await read(engine, request())).error is None
            return
        assert (server.weights, server.label[:5]) in (("w0", "v0.0-"), ("w0", "defau"))
        assert got.tokens == uncut(PROMPT)[0]
        assert set(got.versions) == {PolicyVersion(0, 0)}
        assert health.ok


@pytest.mark.parametrize("by", ["another april", "somebody"])
@pytest.mark.parametrize("kind", BOTH)
async def test_weights_that_others_have_named(kind: str, by: str) -> None:
    """Two aprils call theirs version 0: the one that came first notices, and claims no version for such tokens."""
    async with served(kind) as (server, engine):
        other = await beside(kind, server) if by == "another april" else None
        if other is None:
            server.label = "step-9"
        assert not (await engine.health()).current
        got = await read(engine, request())
        assert server.label in str(got.error)
        assert not got.tokens
        if other is not None:
            assert (await other.health()).current
            assert (await read(other, request())).error is None
            await other.close()


# ---------------------------------------------------------------- SGLang alone


async def test_a_probe_that_sees_the_trainers_weights_first_takes_them_for_an_update() -> None:
    """Where an update of others is followed it begins one; a server that was started anew has lost its weights."""
    async with served("sglang") as (server, engine):
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


async def test_requests_of_others_live_through_an_update() -> None:
    """Another client's request neither ends nor holds up the update: it goes on under the new weights, in spans.

    Their label is not taken for a version of the other client's own, though it has updated nothing yet either.
    """
    config = {"max_token_loss": 100}
    async with served("sglang", stepped=True, mean_length=LONG, config=config) as (server, engine):
        server.go_on()
        other = await connected("sglang", server, **config)
        server.stepped = True
        reading = await begun(server, read(other, request()))
        server.step(10)
        await engine.pause()
        await engine.update_weights(V1, "/weights/w1")
        assert server.pause_mode is None
        assert server.open_requests == 1
        server.go_on()
        await engine.resume()
        got = await reading
        first = uncut(PROMPT, mean_length=LONG)[0][:10]
        rest = uncut(PROMPT + first, weights="w1", max_tokens=54, mean_length=LONG)[0]
        assert server.runs[-1].ids == first + rest
        assert server.runs[-1].finish == {"type": "length", "length": 64}
        # that one is an april too, which has named none of the new weights
        assert "tokens of weights 'v0.1-" in str(got.error)
        assert got.tokens == first
        assert got.versions == [PolicyVersion(0, 0)] * 10
        assert not (await other.health()).current
        await other.close()


@pytest.mark.parametrize("path", ["/weights/w1", None], ids=["loaded", "transferred"])
@pytest.mark.parametrize("route", ["/model_info", "/update_weight_version", "/continue_generation"])
async def test_what_fails_behind_new_weights_leaves_a_half_update(path: str | None, route: str) -> None:
    """The server has new weights, and april does not know all that belongs to them: no request before an update."""
    async with served("sglang", stepped=True, mean_length=LONG) as (server, engine):
        other = await beside("sglang", server)
        reading = await begun(server, read(other, request()))
        await engine.pause()
        server.weights, server.stale_cache = "w1", True
        server.unanswered = {route: 4}
        if path is not None and route == "/update_weight_version":
            server.relabels = False
        with pytest.raises(PartlyUpdated) as caught:
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


async def test_an_update_that_is_cancelled_leaves_no_version() -> None:
    """What the server made of it is not known: no request before an update has succeeded."""
    async with served("sglang", stepped=True, mean_length=LONG) as (server, engine):
        await engine.pause()
        updating = asyncio.create_task(engine.update_weights(V1, "/weights/w1"))
        await until(lambda: bool(server.updates))
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        await engine.resume()
        assert "between two versions" in str((await read(engine, request())).error)


async def test_a_hanging_probe_is_an_unreachable_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health says so, and raises nothing."""
    monkeypatch.setattr(sglang, "HEALTH_S", 0.0)

    async with served("sglang") as (server, engine):
        health = await engine.health()
        assert not health.ok
        assert f"{server.url} has not reported its load and label" in health.detail
