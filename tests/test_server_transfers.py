"""Weights sent to vLLM and SGLang servers: the exact calls, what fails how in each, and a server that is whole then."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_servers.base import SAYS_NOTHING, ControlFault, PlannedControlFault
from fake_servers.sglang import FakeSglangServer
from fake_servers.vllm import FakeVllmServer
from server_fixtures import (
    BOTH,
    BUCKETS,
    KINDS,
    begun,
    behind_a_router,
    beside,
    connected,
    invitation,
    listening,
    probed,
    read,
    request,
    saved,
    sent,
    served,
    transferred,
    until,
)

from april.core.versions import PolicyVersion
from april.engines.sglang.worker import PartlyUpdated
from april.engines.vllm import plugin
from april.engines.weight_transfer import Handshake, ReceivesWeights
from april.errors import EngineError

V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)
GLOO = {"transfers": "april_gloo"}
OPTIONS: dict[str, dict[str, Any]] = {"vllm": GLOO, "sglang": {}}
"""With which a server takes weights."""
INIT, START = "/init_weight_transfer_engine", "/start_weight_update"
UPDATE, FINISH = "/update_weights", "/finish_weight_update"
PHASES = {
    "vllm": {"join": INIT, "begin": START, "receive": UPDATE, "finish": FINISH},
    "sglang": {
        "join": "/init_weights_update_group", "pause": "/pause_generation", "begin": "/begin_weight_update",
        "receive": "/update_weights_from_distributed", "finish": "/end_weight_update",
    },
}  # fmt: skip
"""The call of each phase, in this order."""
EACH_PHASE = [(kind, phase) for kind, phases in PHASES.items() for phase in phases]
JOIN = PHASES["sglang"]["join"]


def receiving(kind: str, **options: Any) -> Any:
    """A server that takes weights, and the engine before it."""
    return served(kind, **OPTIONS[kind], **options)


# ---------------------------------------------------------------- the calls


async def test_the_calls_to_sglang() -> None:
    """The server joins, takes every tensor with name, dtype and shape, empties its cache, and shows april's label."""
    async with served("sglang") as (server, engine):
        assert isinstance(engine, ReceivesWeights)
        assert (engine.capabilities.collective, engine.handshake) == (("gloo",), Handshake.TORCH)
        assert (engine.sender_address, await engine.ranks()) == ("127.0.0.1", 1)
        await engine.pause()
        await engine.join(invitation())
        (group,) = server.groups.values()
        assert group == {
            "master_address": "127.0.0.1", "master_port": 4711, "rank_offset": 1, "world_size": 2,
            "group_name": "april-g1", "backend": "gloo",
        }  # fmt: skip
        await sent(engine)
        wanted = {"group_name": "april-g1", "abort_all_requests": False}
        assert server.buckets == [
            wanted | {"names": ["embed.weight"], "dtypes": ["bfloat16"], "shapes": [[8, 4]], "flush_cache": False},
            wanted | {"names": ["head.weight"], "dtypes": ["float32"], "shapes": [[4]], "flush_cache": True},
        ]
        assert not server.groups
        assert server.label.startswith("between-")
        await engine.update_weights(V1)
        assert server.label.startswith("v0.1-")
        await engine.resume()
        assert (server.pause_mode, server.session, server.stale_cache) == (None, False, False)
        assert (server.weights, set((await read(engine, request())).versions)) == ("w1", {V1})
        server.coming = "w2"
        await transferred(engine, V2)
        assert (server.weights, set((await read(engine, request())).versions)) == ("w2", {V2})
        health = await engine.health()
        assert (health.ok, health.current) == (True, True)


@pytest.mark.parametrize(
    ("transfers", "changes", "handshake", "init"),
    [
        ("april_gloo", {"backend": "gloo"}, Handshake.TORCH, {
            "rank_offset": 3, "world_size": 9, "master_address": "127.0.0.1", "master_port": 4711, "group": "april-g1",
            "timeout_s": 60.0,
        }),
        # the fields of vLLM's own NCCLWeightTransferInitInfo, in 0.32 as in 0.33
        ("nccl", {"backend": "nccl", "unique_id": "aWQ="}, Handshake.UNIQUE_ID, {
            "rank_offset": 3, "world_size": 9, "nccl_unique_id_b64": "aWQ=", "packed": True, "packed_num_buffers": 1,
            "packed_buffer_size_bytes": 1 << 20,
        }),
    ],
    ids=["gloo", "nccl"],
)  # fmt: skip
@pytest.mark.parametrize("release", [32, 33])
async def test_the_calls_to_vllm(
    release: int, transfers: str, changes: dict[str, Any], handshake: Handshake, init: dict[str, Any]
) -> None:
    """Joined, begun, received, finished, in vLLM's words; then caches emptied, the label set, requests right."""
    at = invitation(rank_offset=3, world_size=9, **changes)
    buckets = [
        (UPDATE, {"update_info": {"names": [spec.name], "dtype_names": [spec.dtype], "shapes": [list(spec.shape)]}})
        for (spec,) in BUCKETS
    ]
    async with served("vllm", transfers=transfers, release=release) as (server, engine):
        assert isinstance(engine, ReceivesWeights)
        assert (engine.capabilities.collective, engine.handshake) == ((at.backend,), handshake)
        await engine.pause()
        await sent(engine, at)
        assert server.transfer_calls == [
            (INIT, {"init_info": init}),
            (START, None), (FINISH, {}),  # what an earlier trainer may have left behind is forgotten
            (START, None), *buckets, (FINISH, {}),
        ]  # fmt: skip
        assert (server.stale_cache, server.stale_encoder) == (True, True)
        await engine.update_weights(V1)
        await engine.resume()
        assert server.weights == "w1"
        assert server.label.startswith("v0.1-")
        assert (server.stale_cache, server.stale_encoder) == (False, False)
        assert set((await read(engine, request())).versions) == {V1}
        server.transfer_calls.clear()
        await engine.pause()
        await sent(engine, at)
        assert [route for route, _ in server.transfer_calls] == [INIT, START, UPDATE, UPDATE, FINISH]
        await engine.update_weights(V2)


@pytest.mark.parametrize(
    ("kind", "options", "change", "offered"),
    [
        ("vllm", GLOO, {}, ("gloo",)),
        ("vllm", {}, {}, ()),
        ("vllm", {"transfers": "ipc"}, {}, ()),
        ("vllm", GLOO | {"developer": False}, {}, ()),
        ("sglang", {}, {}, ("gloo",)),
        ("sglang", {}, {"device": "cuda"}, ("nccl", "gloo")),
        ("sglang", {}, {"device": "npu"}, ()),
        ("sglang", {}, {"sizes": {"tp_size": 4}}, ("gloo",)),
        ("sglang", {}, {"sizes": {"dp_size": 2}}, ()),
        ("sglang", {}, {"sizes": {"pp_size": 2}}, ()),
        ("sglang", {"transfers": False}, {}, ()),
        ("sglang", {}, {"adapters": ["one"]}, ()),
    ],
)
async def test_what_is_offered(
    kind: str, options: dict[str, Any], change: dict[str, Any], offered: tuple[str, ...]
) -> None:
    """As a vLLM server was started; by SGLang groups over what its devices have, of tensor-parallel workers only: it
    refuses copies, and stages would all be one rank."""
    server = KINDS[kind][0](**options)
    for name, value in change.items():
        setattr(server, name, value)
    async with listening(server):
        facts = await probed(server, **({"model": "one"} if server.adapters else {}))
        assert facts.capabilities.collective == offered


@pytest.mark.parametrize(("copies", "world_size"), [(1, 1), (1, 4), (2, 4)])
async def test_all_workers_are_counted(copies: int, world_size: int) -> None:
    """Those of tensor parallelism and of all data-parallel copies of vLLM."""
    async with receiving("vllm", copies=copies, world_size=world_size) as (_, engine):
        assert await engine.ranks() == world_size
        assert engine.capabilities.max_in_flight == 64 * copies


async def test_all_workers_behind_a_router_join() -> None:
    """One behind the other, each with as many ranks as it has."""
    first, second = FakeSglangServer(), FakeSglangServer()
    first.sizes = {"tp_size": 2}
    async with behind_a_router(first, second) as (_, engine):
        assert await engine.ranks() == 3
        await engine.pause()
        at = invitation(rank_offset=5, world_size=9)
        await engine.join(at)
        assert [next(iter(s.groups.values()))["rank_offset"] for s in (first, second)] == [5, 7]
        await sent(engine, at)
        await engine.update_weights(V1)
        await engine.resume()
        assert [s.label[:4] for s in (first, second)] == ["v0.1"] * 2


# ---------------------------------------------------------------- others at the server


@pytest.mark.parametrize("kind", BOTH)
async def test_requests_of_others_stand_still_meanwhile(kind: str) -> None:
    """From the first call that changes layers until the label is set: they run neither on a part of the weights nor on
    the new ones with old keys, and lose nothing."""
    async with receiving(kind, stepped=True, mean_length=10**6) as (server, engine):
        other = await beside(kind, server)
        reading = await begun(server, read(other, request()))
        server.step(3)
        await engine.pause()
        await engine.join(invitation())
        assert server.pause_mode is None
        await sent(engine)
        assert server.pause_mode is not None
        server.step(5)
        assert len(server.runs[-1].ids) == 3
        await engine.update_weights(V1)
        await engine.resume()
        assert server.pause_mode is None
        server.go_on()
        await reading
        assert server.runs[-1].spans[0][1:] == (0, 3)
        await other.close()


async def test_a_transfer_that_somebody_has_left_open_is_ended() -> None:
    """A trainer that died in the middle of one leaves an SGLang server in its session, and paused."""
    async with served("sglang") as (server, engine):
        server.session, server.pause_mode = True, "retract"
        await transferred(engine, V1)
        assert (server.weights, server.pause_mode, server.session) == ("w1", None, False)


async def test_a_server_that_is_paused_for_a_transfer_goes_on_when_the_engine_closes() -> None:
    """Nobody else would continue it."""
    async with served("sglang") as (server, engine):
        await engine.pause()
        await engine.join(invitation())
        await engine.begin()
        assert server.pause_mode == "retract"
        await engine.close()
        assert server.pause_mode is None


# ---------------------------------------------------------------- what fails


async def failing(engine: Any) -> tuple[str, EngineError]:
    """A transfer that fails: in which phase, and how."""
    phase = "ranks"
    try:
        await engine.ranks()
        phase = "join"
        await engine.join(invitation())
        phase = "begin"
        await engine.begin()
        phase = "receive"
        for bucket in BUCKETS:
            await engine.receive(bucket, bucket is BUCKETS[-1])
        phase = "finish"
        await engine.finish()
    except EngineError as error:
        return phase, error
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("fault", [ControlFault.FAILS, ControlFault.ECHOED, *SAYS_NOTHING])
@pytest.mark.parametrize(("kind", "phase"), EACH_PHASE)
async def test_a_phase_that_fails(kind: str, phase: str, fault: ControlFault) -> None:
    """Status 500 and 422, a page, and 200 without a word of success: the phase fails in one sentence with the server.

    Before the first bucket the server has what it had, under its label, and serves it; afterwards it has the weights of
    no version, and says so to whoever looks, until an update has reached it.
    """
    async with receiving(kind) as (server, engine):
        await transferred(engine, V1)
        await engine.pause()
        server.coming = "w2"
        server.control_faults.append(PlannedControlFault(kind=fault, route=PHASES[kind][phase]))
        failed, error = await failing(engine)
        assert failed == {"pause": "begin"}.get(phase, phase)
        assert server.url in str(error)
        assert len(str(error)) < 700
        untouched = await engine.leave()
        assert untouched == (phase in ("join", "pause", "begin"))
        await engine.resume()
        assert server.pause_mode is None
        got = await read(engine, request())
        if untouched:
            assert (server.weights, set(got.versions)) == ("w1", {V1})
            assert (await engine.health()).current
        else:
            assert type(got.error) is EngineError
            assert not got.tokens
            assert not (await engine.health()).current
        if kind == "sglang":
            assert not server.session
            assert phase != "receive" or "embed.weight" in str(error)
            assert untouched or "between two versions" in str(got.error)
            assert server.label.startswith("v0.1-" if untouched else "between-")
            fresh = await connected("sglang", server)
            assert server.label != "default"
            await fresh.close()
        server.coming = "w3"
        await transferred(engine, V2)
        assert (server.weights, set((await read(engine, request())).versions)) == ("w3", {V2})


@pytest.mark.parametrize(("kind", "phase"), EACH_PHASE)
async def test_a_server_that_hangs(kind: str, phase: str) -> None:
    """The call is ended by the limit of the meeting, or by whoever waits; the server goes on if it ever does."""
    async with receiving(kind) as (server, engine):
        await transferred(engine, V1)
        await engine.pause()
        server.control_faults.append(PlannedControlFault(kind=ControlFault.SILENT, route=PHASES[kind][phase]))
        running = asyncio.create_task(failing(engine))
        await until(lambda: not server.control_faults[0].times)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        untouched = await engine.leave()
        assert untouched == (phase in ("join", "pause", "begin"))
        await engine.resume()
        assert server.pause_mode is None
        assert kind == "vllm" or not server.session


@pytest.mark.parametrize("phase", ["begin", "receive", "finish"])
@pytest.mark.parametrize("kind", BOTH)
async def test_a_server_that_restarts_in_a_transfer(kind: str, phase: str) -> None:
    """The new process has the weights of its start, and never gets the label of what was sent to the old one."""
    async with receiving(kind) as (server, engine):
        await transferred(engine, V1)
        await engine.pause()
        server.control_faults.append(PlannedControlFault(kind=ControlFault.RESTARTS_BEFORE, route=PHASES[kind][phase]))
        with pytest.raises(EngineError):
            await sent(engine)
        await engine.leave()
        await engine.resume()
        assert server.weights == "w0"
        assert server.label[:7] in ("default", "between")
        assert (await read(engine, request())).error is not None
        await transferred(engine, V2)
        assert (server.weights, set((await read(engine, request())).versions)) == ("w1", {V2})


@pytest.mark.parametrize("sender", ["april", "the trainer"])
@pytest.mark.parametrize("kind", BOTH)
async def test_a_server_that_restarts_behind_a_transfer(kind: str, sender: str) -> None:
    """The weights have gone into a process that is gone: the one that answers now has those of its start."""
    async with receiving(kind) as (server, engine):
        await engine.pause()
        if sender == "april":
            await sent(engine)
        server.weights = "w1"
        server._restart_at_once()
        with pytest.raises(PartlyUpdated if kind == "sglang" else EngineError, match="restarted"):
            await engine.update_weights(V1)
        await engine.resume()
        assert (server.weights, server.label) == ("w0", "default")
        assert (await read(engine, request())).error is not None
        await transferred(engine, V2)
        assert (server.weights, set((await read(engine, request())).versions)) == ("w1", {V2})


async def test_one_worker_that_cannot_join_ends_the_wait_for_the_other() -> None:
    """The others wait for it inside of the group, so nobody waits for their answers."""
    first, second = FakeSglangServer(), FakeSglangServer()
    async with behind_a_router(first, second) as (_, engine):
        first.control_faults.append(PlannedControlFault(kind=ControlFault.SILENT, route=JOIN))
        second.control_faults.append(PlannedControlFault(kind=ControlFault.FAILS, route=JOIN))
        await engine.pause()
        with pytest.raises(EngineError, match=f"{second.url} could not join the group: status 500"):
            await engine.join(invitation())
        await engine.resume()


@pytest.mark.parametrize("after", ["begin", "receive"])
@pytest.mark.parametrize("then", ["sent", "from disk", "another trainer"])
async def test_a_transfer_that_broke_off_is_forgotten(tmp_path: Path, after: str, then: str) -> None:
    """vLLM's layers count what they got of it to whatever comes next, unless an empty transfer is ended before."""
    server = FakeVllmServer(**GLOO)
    async with listening(server):
        engine = await connected("vllm", server)
        await engine.pause()
        await engine.join(invitation())
        await engine.begin()
        if after == "receive":
            await engine.receive(BUCKETS[0], False)
        if then == "another trainer":  # the first one was killed
            await engine.close()
            engine = await connected("vllm", server)
        else:
            assert await engine.leave() is (after == "begin")
            await engine.resume()
            got = await read(engine, request())
            assert got.error is None if after == "begin" else "part of the new weights" in str(got.error)
        if then == "from disk":
            await engine.pause()
            await engine.update_weights(V1, saved(tmp_path, "w1"))
            await engine.resume()
        else:
            await transferred(engine, V1)
        assert (await read(engine, request())).error is None
        assert (server.weights, server.violations) == ("w1", [])
        await engine.close()


def test_april_registers_its_back_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls the entry point in every process, some of them twice; without vLLM the module can be imported."""
    asked = []

    class Factory:
        _registry: dict[str, object] = {}  # noqa: RUF012 - as vLLM's

        @classmethod
        def register_engine(cls, name: str, module: str, kind: str) -> None:
            asked.append((name, module, kind))
            cls._registry[name] = object

    module = SimpleNamespace(WeightTransferEngineFactory=Factory)
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    plugin.register()
    plugin.register()
    assert asked == [("april_gloo", "april.engines.vllm.gloo_worker", "GlooWeightTransferEngine")]
    assert (Path(plugin.__file__).parent / "gloo_worker.py").is_file()
