"""Servers and hosts that had the weights of an earlier run when this one began: nothing brings those back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_servers.sglang import FakeSglangServer
from fake_servers.vllm import FakeVllmServer
from hash_engine import START, HashEngine, Server, conversation, longer, next_token, save
from server_fixtures import connected, read, request
from virtual_rollouts import on_virtual_time

import april
from april.core.batch import Batch
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.errors import WeightsGone
from april.processes.host import Host
from april.processes.link import Link, memory_links
from april.processes.remote_hosts import HostDoor
from april.testing import rollouts

SECOND = PolicyVersion(0, 1)
SERVERS: dict[str, Any] = {"vllm": FakeVllmServer, "sglang": FakeSglangServer}


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("label", ["default", "v0.7-abcdef"], ids=["of its start", "of an earlier run"])
async def test_a_server_that_is_started_anew_before_the_first_update(kind: str, label: str) -> None:
    """It is given the first version's name again only if it had the weights of its start at the connection."""
    make = SERVERS[kind]

    server = make()
    await server.start()
    server.weights, server.label = ("w0", label) if label == "default" else ("w7", label)
    engine = await connected(kind, server)
    await engine.pause()
    await engine.update_weights(FIRST_VERSION)  # it is the same process still
    await engine.resume()
    assert (await engine.health()).current
    await server.restart()
    assert not (await engine.health()).current
    await engine.pause()
    if label == "default":
        await engine.update_weights(FIRST_VERSION)
    else:
        with pytest.raises(WeightsGone, match="had been given weights"):
            await engine.update_weights(FIRST_VERSION)
    await engine.resume()
    assert (await engine.health()).current == (label == "default")
    assert ((await read(engine, request())).error is None) == (label == "default")
    await engine.pause()
    await engine.update_weights(SECOND)  # the trainer has put them there
    await engine.resume()
    assert set((await read(engine, request())).versions) == {SECOND}
    await engine.close()
    await server.close()


@pytest.mark.parametrize("kind", SERVERS)
async def test_it_waits_for_the_next_update_and_says_so_once(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other server goes on; the metric names the one that waits."""
    monkeypatch.setattr("april.core.engine_table.PROBE_INTERVAL_S", 0.01)
    make = SERVERS[kind]
    servers = [make(), make()]
    for server in servers:
        await server.start()
        server.weights, server.label = "w7", "v0.7-abcdef"
    engines = [await connected(kind, server) for server in servers]
    config = april.Config(
        rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=40, max_in_flight=4, max_staleness=4,
        engine={"kind": "simulated"},
    )  # fmt: skip
    prompts = [[3 + i % 400, 7, 9] for i in range(400)]
    async with rollouts(config, engines=engines, prompts=prompts, reward=lambda p, r: 1.0) as life:
        await life.next_batch()
        await servers[0].restart()
        for _ in range(50):
            batch = await life.next_batch()
            if batch.metrics[f"engine/{engines[0].name}/waits_for_update"]:
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError("it does not wait")
        assert not servers[0].label.startswith("v0.0")

        def hand_over() -> None:
            for server in servers:
                server.weights = "w8"

        await life.weight_update(transfer=hand_over)
        assert (await life.next_batch()).metrics[f"engine/{engines[0].name}/waits_for_update"] == 0
    for server in servers:
        await server.close()
    warned = [r.getMessage() for r in caplog.records if "waits for the next weight update" in r.getMessage()]
    assert len(warned) == 1
    assert "its server was started anew, and had been given weights ('v0.7-abcdef') before" in warned[0]


def check(batch: Batch, named: dict[PolicyVersion, str], seeds: dict[str, int | None]) -> set[str]:
    """Every token is of the weights that its version names; returns the engines that made some."""
    for sample in batch.samples:
        made = conversation(sample.prompt.token_ids)
        for s in sample.segments:
            for i in range(s.start, s.start + s.count):
                is_of = next_token(named[s.version], seeds[s.attempt_id], made)
                assert is_of == (sample.tokens[i], sample.logprobs[i]), f"{s.engine} of {s.version}"
                made = longer(made, int(sample.tokens[i]))
    return {s.engine for sample in batch.samples for s in sample.segments}


@pytest.mark.parametrize("by", ["path", "broken transfer", "restart before the first update"])
@on_virtual_time
async def test_a_host_that_outlives_its_scheduler(tmp_path: Path, by: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its engine waits for the first update of the next scheduler, with one sentence, whatever it was given before."""
    seeds: dict[str, int | None] = {}
    doors = [HostDoor(deadline_s=20.0), HostDoor(deadline_s=20.0)]
    links: list[Link] = []
    server = Server()
    door = doors[0]
    config = april.Config(
        rollout_batch_size=4, n_samples_per_prompt=2, max_response_len=30, max_staleness=4, max_in_flight=16,
        outage_deadline_s=60.0, engine={"kind": "simulated"},
    )  # fmt: skip

    async def join() -> Link:
        here, there = memory_links()
        links.append(here)
        door.accept(here)
        return there

    def life() -> Any:
        own = [HashEngine("own", seeds, Server())]
        prompts = [[1, 2 + i] for i in range(900)]
        return rollouts(config, engines=own, prompts=prompts, reward=lambda p, r: 1.0, hosts=door)

    host = Host("h", engines=[HashEngine("e", seeds, server)], join=join, rejoin_s=1e6)
    joining = asyncio.ensure_future(host.astart())

    async def breaks() -> None:
        server.weights = "torn"
        raise OSError("the network")

    async with life() as run:
        await joining
        check(await run.next_batch(), {FIRST_VERSION: START}, seeds)
        if by == "path":
            await run.weight_update(path=save(tmp_path / "1", "w1"))
        elif by == "broken transfer":
            with pytest.raises(OSError, match="the network"):
                await run.weight_update(transfer=breaks)
        else:
            server.restart(1.0)
            await asyncio.sleep(10.0)
        links[-1].close()  # its process is killed, and says no goodbye
        door = doors[1]
    caplog.clear()
    async with life() as run:
        await asyncio.sleep(10.0)
        known = by == "restart before the first update"
        used = check(await run.next_batch(), {FIRST_VERSION: START}, seeds)
        assert ("h/e" in used) == known
        named = {FIRST_VERSION: START, await run.weight_update(path=save(tmp_path / "2", "w2")): "w2"}
        for _ in range(3):
            used = check(await run.next_batch(), named, seeds)
        assert "h/e" in used
    await host.aclose()
    told = [r.getMessage() for r in caplog.records if "earlier run" in r.getMessage()]
    assert told == ([] if known else [
        "engine h/e has not the present weights and waits for the next weight update: it may have those of an "
        "earlier run"
    ])  # fmt: skip
    assert not any("policy version" in r.getMessage() for r in caplog.records)
