"""Weights of a vLLM server: loaded, cache emptied, named, confirmed; and a server that was started anew is seen."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_servers.vllm import fake_vllm_response
from sglang_fixtures import PROMPT, read, request, run, until
from vllm_fixtures import beside, served

from april.core.versions import PolicyVersion
from april.engines.protocol import EngineFinish
from april.errors import EngineError

SECOND = PolicyVersion(0, 1)


def saved(directory: Path, name: str) -> str:
    """A directory that looks like one with weights."""
    (directory / name).mkdir()
    (directory / name / "model.safetensors").write_bytes(b"")
    return str(directory / name)


@pytest.mark.parametrize("scale_out", [True, False], ids=["tokens", "completions"])
def test_update_from_disk(tmp_path: Path, scale_out: bool) -> None:
    """What runs is ended with its tokens, and what comes after says what the new weights say, under their version."""

    async def program() -> None:
        async with served(scale_out=scale_out, stepped=True, mean_length=10**6) as (server, engine):
            reading = asyncio.create_task(read(engine, request()))
            await until(lambda: server.open_requests == 1)
            server.step(4)
            await engine.pause()
            cut = await reading
            assert cut.finish is EngineFinish.ABORT
            assert cut.tokens == fake_vllm_response(PROMPT, mean_length=10**6)[0][:4]
            waiting = asyncio.create_task(read(engine, request()))
            server.resets_refused = 2
            await engine.update_weights(SECOND, saved(tmp_path, "w1"))
            await engine.update_weights(SECOND, str(tmp_path / "w1"))
            assert len(server.runs) == 1
            server.go_on()
            await engine.resume()
            got = await waiting
            assert got.tokens == fake_vllm_response(PROMPT, weights="w1", mean_length=10**6)[0]
            assert set(got.versions) == {SECOND}
            assert server.label.startswith("v0.1-")
            assert (await engine.health()).current

    run(program)


def test_label_alone(tmp_path: Path) -> None:
    """Without a path the trainer has transferred the weights: cache and name are april's."""

    async def program() -> None:
        async with served() as (server, engine):
            await engine.pause()
            server.weights, server.stale_cache = "w1", True
            await engine.update_weights(SECOND)
            await engine.resume()
            got = await read(engine, request())
            assert got.tokens == fake_vllm_response(PROMPT, weights="w1")[0]
            assert set(got.versions) == {SECOND}

    run(program)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    """The server is not asked to load it, keeps its weights and version, and serves on."""

    async def program() -> None:
        async with served() as (server, engine):
            for path in (tmp_path, tmp_path / "nowhere"):
                await engine.pause()
                with pytest.raises(EngineError, match="no weights in it"):
                    await engine.update_weights(SECOND, str(path))
                await engine.resume()
            assert server.weights == "w0"
            assert server.label.startswith("v0.0-")
            got = await read(engine, request())
            assert got.tokens == fake_vllm_response(PROMPT)[0]
            assert set(got.versions) == {PolicyVersion(0, 0)}

    run(program)


def test_a_load_that_fails(tmp_path: Path) -> None:
    """The server may be without weights: it gets no request before an update has succeeded."""

    async def program() -> None:
        async with served() as (server, engine):
            await engine.pause()
            with pytest.raises(EngineError, match="could not load"):
                await engine.update_weights(SECOND, saved(tmp_path, "missing"))
            await engine.resume()
            assert "without weights" in str((await read(engine, request())).error)
            health = await engine.health()
            assert not health.ok
            assert not health.current
            assert not server.runs
            await engine.update_weights(SECOND, saved(tmp_path, "w1"))
            assert (await read(engine, request())).error is None

    run(program)


def test_a_path_where_the_server_has_no_route(tmp_path: Path) -> None:
    """A sentence, and nothing is changed."""

    async def program() -> None:
        async with served(developer=False) as (server, engine):
            await engine.pause()
            with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
                await engine.update_weights(SECOND, saved(tmp_path, "w1"))
            await engine.resume()
            assert server.weights == "w0"

    run(program)


@pytest.mark.parametrize("options", [{}, {"developer": False}], ids=["label", "start of the process"])
def test_a_restart_is_seen(options: dict[str, Any]) -> None:
    """A server that was started anew has not the weights that it was given here, until it is given some."""

    async def program() -> None:
        async with served(**options) as (server, engine):
            assert (await engine.health()).current
            await server.restart()
            health = await engine.health()
            assert health.ok
            assert not health.current
            await engine.pause()
            await engine.update_weights(PolicyVersion(0, 1))
            await engine.resume()
            assert (await engine.health()).current
            server.die()
            assert not (await engine.health()).ok

    run(program)


def test_one_look_at_the_metrics_that_fails_hides_no_restart() -> None:
    """Missing during an update, the start of the process is still that of before."""

    async def program() -> None:
        async with served(developer=False) as (server, engine):
            server.without = ("/metrics",)
            await engine.update_weights(SECOND)
            server.without = ()
            assert (await engine.health()).current
            await server.restart()
            assert not (await engine.health()).current

    run(program)


def test_two_aprils_on_one_server_do_not_take_each_other_for_themselves() -> None:
    """Both call their weights version 0; the one that came first notices, and claims no version for their tokens."""

    async def program() -> None:
        async with served() as (server, engine):
            other = await beside(server)
            assert not (await engine.health()).current
            assert (await other.health()).current
            got = await read(engine, request())
            assert server.label in str(got.error)
            assert not got.tokens
            assert (await read(other, request())).error is None
            await other.close()

    run(program)


def test_tokens_of_foreign_weights_are_refused() -> None:
    """Somebody else has named the weights: no version is claimed for their tokens."""

    async def program() -> None:
        async with served() as (server, engine):
            server.label = "step-9"
            got = await read(engine, request())
            assert "step-9" in str(got.error)
            assert not got.tokens
            assert not (await engine.health()).current

    run(program)


def test_load_of_the_server() -> None:
    """Running and waiting requests as the metrics say them, those of others included."""

    async def program() -> None:
        async with served(stepped=True, max_running=2) as (server, engine):
            readings = [asyncio.create_task(read(engine, request())) for _ in range(5)]
            await until(lambda: server.open_requests == 5)
            server.step()
            load = (await engine.health()).load
            assert (load.running, load.waiting, load.kv_usage) == (2, 3, 1.0)
            server.go_on()
            await asyncio.gather(*readings)

    run(program)
