"""Weights sent to a vLLM server: the exact calls, over gloo and NCCL, and a server that is whole after anything."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_servers.vllm import FakeVllmServer
from server_fixtures import begun, connected, listening, read, request, saved, served

from april.core.versions import PolicyVersion
from april.engines.weight_transfer import GroupInvitation, Handshake, ReceivesWeights, TensorSpec
from april.errors import EngineError

V1 = PolicyVersion(0, 1)
INIT, START = "/init_weight_transfer_engine", "/start_weight_update"
UPDATE, FINISH = "/update_weights", "/finish_weight_update"
SPECS = (TensorSpec("embed.weight", "bfloat16", (4, 2)), TensorSpec("norm.weight", "float32", (2,)))
INFO = {
    "names": ["embed.weight", "norm.weight"], "dtype_names": ["bfloat16", "float32"], "shapes": [[4, 2], [2]],
}  # fmt: skip


def meeting(backend: str, **others: Any) -> GroupInvitation:
    return GroupInvitation(
        address="10.0.0.1", port=4567, world_size=9, rank_offset=3, group="april-g", backend=backend, timeout_s=75.0,
        bucket_bytes=1 << 20, **others,
    )  # fmt: skip


async def send(engine: Any, how: GroupInvitation) -> None:
    await engine.pause()
    await engine.join(how)
    await engine.begin()
    await engine.receive(SPECS, True)
    await engine.finish()


@pytest.mark.parametrize(
    ("transfers", "how", "init"),
    [
        ("april_gloo", meeting("gloo"), {
            "rank_offset": 3, "world_size": 9, "master_address": "10.0.0.1", "master_port": 4567, "group": "april-g",
            "timeout_s": 75.0,
        }),
        # the fields of vLLM's own NCCLWeightTransferInitInfo, in 0.32 as in 0.33
        ("nccl", meeting("nccl", unique_id="aWQ="), {
            "rank_offset": 3, "world_size": 9, "nccl_unique_id_b64": "aWQ=", "packed": True, "packed_num_buffers": 1,
            "packed_buffer_size_bytes": 1 << 20,
        }),
    ],
    ids=["gloo", "nccl"],
)  # fmt: skip
@pytest.mark.parametrize("release", [32, 33])
async def test_the_calls(release: int, transfers: str, how: GroupInvitation, init: dict[str, Any]) -> None:
    """Joined, begun, received, finished, in vLLM's words; then caches emptied, the label set, requests right."""
    async with served("vllm", transfers=transfers, release=release) as (server, engine):
        assert isinstance(engine, ReceivesWeights)
        assert engine.capabilities.collective == (how.backend,)
        assert engine.handshake is (Handshake.TORCH if how.backend == "gloo" else Handshake.UNIQUE_ID)
        server.sent_weights = "w1"
        await send(engine, how)
        assert server.transfer_calls == [
            (INIT, {"init_info": init}),
            (START, None), (FINISH, {}),  # what an earlier trainer may have left behind is forgotten
            (START, None), (UPDATE, {"update_info": INFO}), (FINISH, {}),
        ]  # fmt: skip
        assert (server.stale_cache, server.stale_encoder) == (True, True)
        await engine.update_weights(V1)
        await engine.resume()
        assert server.weights == "w1"
        assert server.label.startswith("v0.1-")
        assert (server.stale_cache, server.stale_encoder) == (False, False)
        assert set((await read(engine, request())).versions) == {V1}
        server.transfer_calls.clear()
        await send(engine, how)
        assert [route for route, _ in server.transfer_calls] == [INIT, START, UPDATE, FINISH]
        await engine.update_weights(PolicyVersion(0, 2))


@pytest.mark.parametrize("after", ["begin", "receive"])
@pytest.mark.parametrize("then", ["sent", "from disk", "another trainer"])
async def test_a_transfer_that_broke_off_is_forgotten(tmp_path: Path, after: str, then: str) -> None:
    """Its layers count what they got of it to whatever comes next, unless an empty transfer is ended before."""
    server = FakeVllmServer(transfers="april_gloo")
    async with listening(server):
        engine = await connected("vllm", server)
        await engine.pause()
        await engine.join(meeting("gloo"))
        await engine.begin()
        if after == "receive":
            await engine.receive(SPECS, False)
        if then == "another trainer":  # the first one was killed
            await engine.close()
            engine = await connected("vllm", server)
        else:
            assert await engine.leave() is (after == "begin")
            await engine.resume()
            if after == "begin":
                assert (await read(engine, request())).error is None
            else:
                assert "part of the new weights" in str((await read(engine, request())).error)
        server.sent_weights = "w2"
        if then == "from disk":
            await engine.pause()
            await engine.update_weights(V1, saved(tmp_path, "w2"))
        else:
            await send(engine, meeting("gloo"))
            await engine.update_weights(V1)
        await engine.resume()
        assert (await read(engine, request())).error is None
        assert (server.weights, server.violations) == ("w2", [])
        await engine.close()


async def test_requests_of_others_stand_still_while_weights_come() -> None:
    """From the first call that changes layers until the label is set, or the transfer has broken off."""
    async with served("vllm", transfers="april_gloo", stepped=True) as (server, engine):
        other = await connected("vllm", server)
        server.stepped = True
        reading = await begun(server, read(other, request()))
        await engine.pause()
        await engine.join(meeting("gloo"))
        assert server.pause_mode is None
        await engine.begin()
        assert server.pause_mode == "keep"
        await engine.receive(SPECS, True)
        await engine.finish()
        assert server.pause_mode == "keep"
        await engine.update_weights(V1)
        assert server.pause_mode is None
        await engine.begin()
        await engine.leave()
        assert server.pause_mode is None
        reading.cancel()
        await asyncio.wait([reading])
        await other.close()


@pytest.mark.parametrize(("copies", "world_size"), [(1, 1), (1, 4), (2, 4)])
async def test_all_workers_are_counted(copies: int, world_size: int) -> None:
    """Those of tensor parallelism and of all data-parallel copies."""
    async with served("vllm", transfers="april_gloo", copies=copies, world_size=world_size) as (_, engine):
        assert await engine.ranks() == world_size
        assert engine.capabilities.max_in_flight == 64 * copies


@pytest.mark.parametrize(
    "options", [{}, {"transfers": "ipc"}, {"transfers": "april_gloo", "developer": False}], ids=str
)
async def test_a_server_that_takes_no_weights_so(options: dict[str, Any]) -> None:
    """Its capabilities say so; they come from the server's own settings."""
    async with served("vllm", **options) as (_, engine):
        assert engine.capabilities.collective == ()


@pytest.mark.parametrize("route", [INIT, START, UPDATE, FINISH])
async def test_words_of_failure_are_no_success(route: str) -> None:
    """A 200 of a proxy, or of another server, means nothing."""
    async with served("vllm", transfers="april_gloo") as (server, engine):
        server.says_done[route] = False
        with pytest.raises(EngineError, match=f"{route} answered with status 200, but did not confirm success"):
            await send(engine, meeting("gloo"))


def test_april_registers_its_back_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls the entry point in every process, some of them twice; without vLLM the module can be imported."""
    import importlib
    import types

    from april.engines.vllm import plugin

    asked = []

    class Factory:
        _registry: dict[str, object] = {}  # noqa: RUF012 - as vLLM's

        @classmethod
        def register_engine(cls, name: str, module: str, kind: str) -> None:
            asked.append((name, module, kind))
            cls._registry[name] = object

    module = types.SimpleNamespace(WeightTransferEngineFactory=Factory)
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    plugin.register()
    plugin.register()
    assert asked == [("april_gloo", "april.engines.vllm.gloo_worker", "GlooWeightTransferEngine")]
    assert (Path(plugin.__file__).parent / "gloo_worker.py").is_file()
