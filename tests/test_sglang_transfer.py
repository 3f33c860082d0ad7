"""Weights that a trainer's process sends to SGLang servers: the calls, in which order, and what fails how in each."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from fake_servers.base import SAYS_NOTHING, ControlFault, PlannedControlFault
from fake_servers.sglang import FakeSglangServer
from server_fixtures import begun, behind_a_router, beside, connected, listening, probed, read, request, served, until

from april.core.versions import PolicyVersion
from april.engines.sglang.worker import PartlyUpdated
from april.engines.weight_transfer import GroupInvitation, Handshake, ReceivesWeights, TensorSpec
from april.errors import EngineError

V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)
LONG = 10**6
EMBED, HEAD = TensorSpec("embed.weight", "bfloat16", (8, 4)), TensorSpec("head.weight", "float32", (4,))
BUCKETS = [((EMBED,), False), ((HEAD,), True)]
PHASES = {
    "join": "/init_weights_update_group", "pause": "/pause_generation", "begin": "/begin_weight_update",
    "receive": "/update_weights_from_distributed", "finish": "/end_weight_update",
}  # fmt: skip
"""The call of each phase, in this order."""


def meeting(workers: int = 1, **changes: Any) -> GroupInvitation:
    made: Any = GroupInvitation(
        address="127.0.0.1", port=4711, world_size=workers + 1, rank_offset=1, group="april-g1", backend="gloo",
        timeout_s=60.0, bucket_bytes=1 << 20,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[no-any-return]


async def sent(engine: Any, at: GroupInvitation | None = None, phases: list[str] | None = None) -> None:
    """All phases of a transfer to an engine that is paused; ``phases`` gets the names of those that were begun."""
    phases = [] if phases is None else phases
    phases.append("join")
    await engine.join(at or meeting(await engine.ranks()))
    phases.append("begin")
    await engine.begin()
    phases.append("receive")
    for specs, last in BUCKETS:
        await engine.receive(specs, last)
    phases.append("finish")
    await engine.finish()


async def transferred(engine: Any, version: PolicyVersion) -> None:
    await engine.pause()
    await sent(engine)
    await engine.update_weights(version)
    await engine.resume()


async def test_a_transfer_is_an_update() -> None:
    """The server joins, takes every tensor with name, dtype and shape, empties its cache, and shows april's label."""
    async with served("sglang") as (server, engine):
        assert isinstance(engine, ReceivesWeights)
        assert (engine.capabilities.collective, engine.handshake) == (("gloo",), Handshake.TORCH)
        assert (engine.sender_address, await engine.ranks()) == ("127.0.0.1", 1)
        await engine.pause()
        at = meeting()
        await engine.join(at)
        (group,) = server.groups.values()
        assert group == {
            "master_address": "127.0.0.1", "master_port": 4711, "rank_offset": 1, "world_size": 2,
            "group_name": "april-g1", "backend": "gloo",
        }  # fmt: skip
        await sent(engine, at)
        wanted = {"group_name": "april-g1", "abort_all_requests": False}
        assert server.buckets == [
            wanted | {"names": ["embed.weight"], "dtypes": ["bfloat16"], "shapes": [[8, 4]], "flush_cache": False},
            wanted | {"names": ["head.weight"], "dtypes": ["float32"], "shapes": [[4]], "flush_cache": True},
        ]
        assert not server.groups
        assert server.pause_mode == "retract"
        assert server.label.startswith("between-")
        await engine.update_weights(V1)
        assert server.label.startswith("v0.1-")
        await engine.resume()
        assert (server.pause_mode, server.session, server.stale_cache) == (None, False, False)
        assert set((await read(engine, request())).versions) == {V1}
        assert server.weights == "w1"
        server.coming = "w2"
        await transferred(engine, V2)
        assert set((await read(engine, request())).versions) == {V2}
        health = await engine.health()
        assert (health.ok, health.current) == (True, True)


async def test_requests_of_others_stand_still_meanwhile() -> None:
    """They run neither on a part of the weights nor on the new ones with old keys, and lose nothing."""
    async with served("sglang", stepped=True, mean_length=LONG) as (server, engine):
        other = await beside("sglang", server)
        reading = await begun(server, read(other, request()))
        server.step(3)
        await engine.pause()
        await sent(engine)
        server.step(5)
        assert len(server.runs[-1].ids) == 3
        await engine.update_weights(V1)
        assert server.pause_mode == "retract"
        await engine.resume()
        assert server.pause_mode is None
        server.go_on()
        await reading
        assert server.runs[-1].spans[0][1:] == (0, 3)
        await other.close()


async def test_a_transfer_that_somebody_has_left_open_is_ended() -> None:
    """A trainer that died in the middle of one leaves the server in its session, and paused."""
    async with served("sglang") as (server, engine):
        server.session, server.pause_mode = True, "retract"
        await transferred(engine, V1)
        assert (server.weights, server.pause_mode, server.session) == ("w1", None, False)


@pytest.mark.parametrize(
    ("change", "offered"),
    [
        ({}, ("gloo",)),
        ({"device": "cuda"}, ("nccl", "gloo")),
        ({"device": "npu"}, ()),
        ({"sizes": {"tp_size": 4}}, ("gloo",)),
        ({"sizes": {"dp_size": 2}}, ()),
        ({"sizes": {"pp_size": 2}}, ()),
        ({"transfers": False}, ()),
        ({"adapters": ["one"]}, ()),
    ],
)
async def test_what_is_offered(change: dict[str, Any], offered: tuple[str, ...]) -> None:
    """Groups over what its devices have, of tensor-parallel workers only: copies are refused by SGLang, and stages
    would all be one rank."""
    server = FakeSglangServer()
    for name, value in change.items():
        setattr(server, name, value)
    async with listening(server):
        config = {"model": "one"} if server.adapters else {}
        facts = await probed(server, **config)
        assert facts.capabilities.collective == offered


async def test_all_workers_behind_a_router_join() -> None:
    """One behind the other, each with as many ranks as it has."""
    first, second = FakeSglangServer(), FakeSglangServer()
    first.sizes = {"tp_size": 2}
    async with behind_a_router(first, second) as (_, engine):
        assert await engine.ranks() == 3
        await engine.pause()
        at = meeting(3, rank_offset=5, world_size=9)
        await engine.join(at)
        offsets = [next(iter(s.groups.values()))["rank_offset"] for s in (first, second)]
        assert offsets == [5, 7]
        await sent(engine, at)
        await engine.update_weights(V1)
        await engine.resume()
        assert [s.label[:4] for s in (first, second)] == ["v0.1"] * 2


REFUSALS = [ControlFault.FAILS, ControlFault.ECHOED, *SAYS_NOTHING]


@pytest.mark.parametrize("fault", REFUSALS)
@pytest.mark.parametrize("phase", PHASES)
async def test_a_phase_that_fails(phase: str, fault: ControlFault) -> None:
    """Status 500 and 422, a page, and 200 without a word of success: the phase fails in one sentence with the server.

    Before the first bucket the server has what it had, under its label, and serves it; afterwards it has the weights of
    no version, and says so to whoever looks, until an update has reached it.
    """
    async with served("sglang") as (server, engine):
        await transferred(engine, V1)
        await engine.pause()
        server.coming = "w2"
        server.control_faults.append(PlannedControlFault(kind=fault, route=PHASES[phase]))
        phases: list[str] = []
        with pytest.raises(EngineError, match=server.url) as caught:
            await sent(engine, phases=phases)
        assert phases[-1] == {"pause": "begin"}.get(phase, phase)
        error = str(caught.value)
        assert len(error) < 700
        if phase == "receive":
            assert "embed.weight" in error
        untouched = await engine.leave()
        assert untouched == (phase in ("join", "pause", "begin"))
        await engine.resume()
        assert (server.pause_mode, server.session) == (None, False)
        got = await read(engine, request())
        if untouched:
            assert (server.weights, set(got.versions)) == ("w1", {V1})
            assert (await engine.health()).current
        else:
            assert "between two versions" in str(got.error)
            assert not got.tokens
            assert not (await engine.health()).current
            assert server.label.startswith("between-")
            fresh = await connected("sglang", server)
            assert server.label != "default"
            await fresh.close()
        server.coming = "w3"
        await transferred(engine, V2)
        assert (server.weights, set((await read(engine, request())).versions)) == ("w3", {V2})


@pytest.mark.parametrize("phase", PHASES)
async def test_a_server_that_hangs(phase: str) -> None:
    """The call is ended by the limit of the meeting, or by whoever waits; the server goes on if it ever does."""
    async with served("sglang") as (server, engine):
        await engine.pause()
        server.control_faults.append(PlannedControlFault(kind=ControlFault.SILENT, route=PHASES[phase]))
        running = asyncio.create_task(sent(engine))
        await until(lambda: not server.control_faults[0].times)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        untouched = await engine.leave()
        assert untouched == (phase in ("join", "pause", "begin"))
        await engine.resume()
        assert (server.pause_mode, server.session) == (None, False)


@pytest.mark.parametrize("phase", ["begin", "receive", "finish"])
async def test_a_server_that_restarts_in_a_transfer(phase: str) -> None:
    """The new process has the weights of its start, and never gets the label of what was sent to the old one."""
    async with served("sglang") as (server, engine):
        await engine.pause()
        server.control_faults.append(PlannedControlFault(kind=ControlFault.RESTARTS_BEFORE, route=PHASES[phase]))
        with pytest.raises(EngineError):
            await sent(engine)
        await engine.leave()
        await engine.resume()
        assert server.weights == "w0"
        assert server.label[:7] in ("default", "between")
        assert (await read(engine, request())).error is not None
        await transferred(engine, V2)
        assert (server.weights, set((await read(engine, request())).versions)) == ("w1", {V2})


async def test_a_server_that_restarts_behind_a_transfer() -> None:
    """Between the last call of the transfer and the name of the version."""
    async with served("sglang") as (server, engine):
        await transferred(engine, V1)
        await engine.pause()
        await sent(engine)
        server._restart_at_once()
        with pytest.raises(PartlyUpdated, match="was restarted"):
            await engine.update_weights(V2)
        await engine.resume()
        assert server.label == "default"
        assert (await read(engine, request())).error is not None


async def test_one_worker_that_cannot_join_ends_the_wait_for_the_other() -> None:
    """The others wait for it inside of the group, so nobody waits for their answers."""
    first, second = FakeSglangServer(), FakeSglangServer()
    async with behind_a_router(first, second) as (_, engine):
        first.control_faults.append(PlannedControlFault(kind=ControlFault.SILENT, route=PHASES["join"]))
        second.control_faults.append(PlannedControlFault(kind=ControlFault.FAILS, route=PHASES["join"]))
        await engine.pause()
        with pytest.raises(EngineError, match=f"{second.url} could not join the group: status 500"):
            await engine.join(meeting(2))
        await engine.resume()


async def test_a_server_that_is_paused_for_a_transfer_goes_on_when_the_engine_closes() -> None:
    """Nobody else would continue it."""
    async with served("sglang") as (server, engine):
        await engine.pause()
        await engine.join(meeting())
        await engine.begin()
        assert server.pause_mode == "retract"
        await engine.close()
        assert server.pause_mode is None
