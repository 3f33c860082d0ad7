"""Servers that had the weights of an earlier run when this one began: nothing brings those back."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest
from fake_servers.sglang import FakeSglangServer
from fake_servers.vllm import FakeVllmServer
from server_fixtures import connected, read, request, update

import april
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.errors import WeightsGone
from april.testing import rollouts

SECOND = PolicyVersion(0, 1)
SERVERS: dict[str, Any] = {"vllm": FakeVllmServer, "sglang": FakeSglangServer}


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("label", ["default", "step-7"], ids=["of its start", "of an earlier run"])
async def test_a_server_that_is_started_anew_before_the_first_update(kind: str, label: str) -> None:
    """It is given the first version's name again only if it had the weights of its start at the connection."""
    make = SERVERS[kind]

    server = make()
    await server.start()
    server.weights, server.label = ("w0", label) if label == "default" else ("w7", label)
    engine = await connected(kind, server)
    await update(engine, FIRST_VERSION)  # it is the same process still
    assert (await engine.health()).current
    await server.restart()
    assert not (await engine.health()).current
    with nullcontext() if label == "default" else pytest.raises(WeightsGone, match="had got weights"):
        await update(engine, FIRST_VERSION)
    assert (await engine.health()).current == (label == "default")
    assert ((await read(engine, request())).error is None) == (label == "default")
    await update(engine, SECOND)  # the trainer has put them there
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
        server.weights, server.label = "w7", "step-7"
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
    assert "its server was restarted, and had got weights ('step-7') before" in warned[0]
