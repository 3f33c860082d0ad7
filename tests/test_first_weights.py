"""Which weights a new run believes servers to have: those of their start, its own, and no others without a word."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fake_servers.adapters import FakeAdapters, write_adapter
from fake_servers.base import SAYS_NOTHING, ControlFault, PlannedControlFault, next_token
from fake_servers.images import FakeImages
from fake_servers.sglang import FakeSglangServer
from server_fixtures import (
    BOTH,
    KINDS,
    ServerThread,
    begun,
    behind_a_router,
    connected,
    facts_of,
    listening,
    read,
    request,
    saved,
    served,
    update,
)

import april
from april.core.batch import Batch
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.driver.command_executor import limits_of
from april.engines.http import server_probe
from april.engines.protocol import FirstWeights
from april.errors import EngineError

SECOND = PolicyVersion(0, 1)
OF_ANOTHER_RUN = ["v0.7-abcdef", "v1.0-abcdef", "v0.0-abcdef-given", "between-01234567-abcdef"]
PROMPTS = [[5, 6 + i] for i in range(20)]


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_probe, "AGAIN_S", 0.0)


def left_by(server: Any, label: str, weights: str = "w7") -> Any:
    """A server that a run has left with these weights under this label."""
    server.weights, server.label = weights, label
    return server


@contextmanager
def run_before(kind: str, *servers: Any, **engine: Any) -> Iterator[april.RolloutScheduler]:
    """A new run, without a state."""
    config = april.Config(
        rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=20,
        engine={"kind": kind, "urls": [server.url for server in servers], **KINDS[kind][2], **engine},
    )  # fmt: skip
    with april.RolloutScheduler(config, prompts=PROMPTS, reward=lambda p, r: 1.0, progress=False) as run:
        yield run


def require_made_by(batch: Batch, weights: str) -> None:
    """Every token is the one that these weights make."""
    for sample in batch.samples:
        ids = sample.prompt.token_ids.tolist()
        for token in sample.tokens.tolist():
            assert next_token(weights, ids, 512, 2, 24)[0] == token
            ids.append(token)


# ---------------------------------------------------------------- a new run


@pytest.mark.parametrize("label", OF_ANOTHER_RUN)
@pytest.mark.parametrize("kind", BOTH)
def test_weights_of_another_run_are_no_first_version(
    kind: str, label: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches and evaluations are refused at once with what to do, until the run has given its own weights."""
    server = KINDS[kind][0]()
    with ServerThread(server):
        with run_before(kind, left_by(server, label)) as run:
            assert server.label == label  # the other run may live: nothing is taken from it before an update
            asked = len(server.runs)
            for call in (run.next_batch, lambda: run.evaluate(PROMPTS[:2])):
                with pytest.raises(EngineError, match=r"earlier run.*weight_update.*restart.*first_weights: present"):
                    call()
            assert len(server.runs) == asked
            assert run.weight_update(path=saved(tmp_path, "w1")) == SECOND
            batch = run.next_batch()
            require_made_by(batch, "w1")
            assert batch.version == SECOND
        assert [r.getMessage() for r in caplog.records if "of another run" in r.getMessage()] == [
            f"engine {server.url.partition('//')[2]} has weights of another run of april (with the label '{label}'), "
            "and has none of this run before a weight update"
        ]  # fmt: skip


@pytest.mark.parametrize("kind", BOTH)
def test_a_run_that_goes_on_from_a_state(kind: str, tmp_path: Path) -> None:
    """Killed and started anew with other settings, before a server that the killed run has left: its weights come back
    with the state, and a second server that joins them with its own old label is given them, too.
    """
    servers = [KINDS[kind][0](), KINDS[kind][0]()]
    path = saved(tmp_path, "w1")
    with ServerThread(*servers):
        with run_before(kind, servers[0]) as run:
            first = run.next_batch()
            run.weight_update(path=path)
            state = run.state_dict(trained_through=first.id)
            run.weight_update(path=saved(tmp_path, "w2"))
        left_by(servers[1], "v0.3-abcdef")
        with run_before(kind, *servers, max_in_flight=3) as run:
            assert run.load_state_dict(state, path=path) == PolicyVersion(1, 1)
            require_made_by(run.next_batch(), "w1")
            assert {server.weights for server in servers} == {"w1"}


@pytest.mark.parametrize("kind", BOTH)
def test_a_server_with_the_weights_of_its_start_works_while_another_waits(kind: str, tmp_path: Path) -> None:
    """The one that an earlier run has written gets no request before the first update."""
    fresh, old = KINDS[kind][0](), KINDS[kind][0]()
    with ServerThread(fresh, old), run_before(kind, fresh, left_by(old, "v0.7-abcdef")) as run:
        asked, name = len(old.runs), old.url.partition("//")[2]
        batch = run.next_batch()
        require_made_by(batch, "w0")
        assert batch.metrics[f"engine/{name}/waits_for_update"] == 1
        assert len(old.runs) == asked
        run.weight_update(path=saved(tmp_path, "w1"))
        for _ in range(3):
            batch = run.next_batch()
        require_made_by(batch, "w1")
        assert batch.metrics[f"engine/{name}/waits_for_update"] == 0
        assert len(old.runs) > asked


@pytest.mark.parametrize("kind", BOTH)
def test_a_run_without_updates_leaves_the_weights_of_the_start(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The next one begins with them, without a word, also where the server is started anew meanwhile."""
    server = KINDS[kind][0]()
    with ServerThread(server):
        for _ in range(3):
            with run_before(kind, server) as run:
                batch = run.next_batch()
                require_made_by(batch, "w0")
                assert not any("unverified" in name for name in batch.metrics)
    assert not any("weights" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("kind", BOTH)
async def test_a_restart_after_such_a_run_brings_the_first_version_back(kind: str) -> None:
    """The label of another run that has written nothing says that the weights are those of the start."""
    server = KINDS[kind][0]()
    async with listening(server), asyncio.timeout(60):
        await (await connected(kind, server)).close()
        engine = await connected(kind, server)
        await server.restart()
        assert not (await engine.health()).current
        await update(engine, FIRST_VERSION)
        assert set((await read(engine, request())).versions) == {FIRST_VERSION}
        await engine.close()


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("label", ["v0.7-abcdef", "step-7"])
def test_the_settings_may_say_that_the_present_weights_are_meant(
    kind: str, label: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They are the first version then; a later run does not take them for those of the server's start."""
    server = KINDS[kind][0]()
    with ServerThread(server):
        with run_before(kind, left_by(server, label), first_weights="present") as run:
            batch = run.next_batch()
            require_made_by(batch, "w7")
            assert (batch.version, server.label[:5]) == (FIRST_VERSION, "v0.0-")
            assert not any("unverified" in name for name in batch.metrics)
        assert not any("weights" in record.getMessage() for record in caplog.records)
        with run_before(kind, server) as run, pytest.raises(EngineError, match="of an earlier run"):
            run.next_batch()


@pytest.mark.parametrize("kind", BOTH)
def test_a_name_that_april_has_not_given_is_unverified(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the first update, by a metric and one warning: somebody has named the start, or put other weights there."""
    server = KINDS[kind][0]()
    with ServerThread(server):
        with run_before(kind, left_by(server, "step-7")) as run:
            metric = f"engine/{server.url.partition('//')[2]}/unverified_weights"
            assert run.next_batch().metrics[metric] == 1
            run.weight_update(path=saved(tmp_path, "w1"))
            for _ in range(2):
                batch = run.next_batch()
            assert metric not in batch.metrics
        assert [r.levelno for r in caplog.records if "'step-7', a label that april did not set" in r.getMessage()] == [
            logging.WARNING
        ]


# ---------------------------------------------------------------- how a run may end


@pytest.mark.parametrize(
    ("kind", "way"), [*product(BOTH, ["handed over", "sent", "loaded"]), ("vllm", "kept")]  # SGLang keeps no requests
)
async def test_a_run_that_dies_in_its_first_update(kind: str, way: str, tmp_path: Path) -> None:
    """From the moment at which its weights may be written to, a server does not say that it has those of its start."""
    async with served(kind, scale_out=True) if kind == "vllm" else served(kind) as (server, engine):
        if way == "kept":
            await engine.pause_in_flight("keep")
        else:
            await engine.pause()
        if way == "loaded":
            route = "/update_weight_version" if kind == "vllm" else "/update_weights_from_disk"
            fault = PlannedControlFault(kind=ControlFault.FAILS, route=route, times=9, obeyed=kind == "sglang")
            server.control_faults.append(fault)
            with pytest.raises(EngineError):
                await engine.update_weights(SECOND, saved(tmp_path, "w1"))
            server.control_faults.clear()
            assert server.weights == "w1"
        left = server.label
        server.pause_mode = None
        another = await connected(kind, server)
        assert another.capabilities.first_weights is FirstWeights.OTHERS
        assert server.label == left
        assert "of another run" in str((await read(another, request())).error)
        await another.close()


@pytest.mark.parametrize("kind", BOTH)
async def test_an_update_that_wrote_nothing_leaves_the_first_version(kind: str) -> None:
    """It was cancelled while the server was paused: requests go on, under either name of those weights."""
    async with served(kind) as (server, engine):
        before = server.label
        await engine.pause()
        await engine.resume()
        assert server.label != before
        assert (await engine.health()).current
        assert set((await read(engine, request())).versions) == {FIRST_VERSION}
        server.label = before
        assert (await engine.health()).current


@pytest.mark.parametrize("kind", BOTH)
async def test_adapters_leave_the_model_of_the_start(kind: str, tmp_path: Path) -> None:
    """A run that has trained adapters leaves a model to begin with; adapters of its that are there are of no use.

    The same name never comes twice, and no adapter is laid over a model that another run has written.
    """
    async with served(kind, server=KINDS[kind][0](loras=FakeAdapters())) as (server, engine):
        for n in (1, 2):
            await update(engine, PolicyVersion(0, n), write_adapter(tmp_path / str(n), n))
        other = await connected(kind, server)  # the first is killed, and has unloaded nothing
        assert server.loras.present
        assert other.capabilities.first_weights is FirstWeights.KNOWN
        got = await read(other, request())
        assert set(got.versions) == {FIRST_VERSION}
        await update(other, SECOND, write_adapter(tmp_path / "1", 3))
        assert len(set(server.loras.ever)) == 3
        await other.close()
        left_by(server, "v0.7-abcdef")
        third = await connected(kind, server)
        with pytest.raises(EngineError, match="load full weights first"):
            await update(third, SECOND, write_adapter(tmp_path / "4", 4))
        await third.close()


# ---------------------------------------------------------------- routers


@pytest.mark.parametrize("old", [0, 1])
async def test_one_server_of_a_router(old: int, tmp_path: Path) -> None:
    """A request may come to any of them, so none comes before all have weights of this run."""
    workers = [FakeSglangServer() for _ in range(2)]
    left_by(workers[old], "v0.7-abcdef")
    async with behind_a_router(*workers) as (_, engine):
        assert limits_of(engine).written
        assert "of another run" in str((await read(engine, request())).error)
        await update(engine, SECOND, "/weights/w1")
        assert (await engine.health()).current
        for _ in workers:
            assert set((await read(engine, request())).versions) == {SECOND}


# ---------------------------------------------------------------- servers that are paused


@pytest.mark.parametrize("label", ["v0.5-abcdef", "between-01234567-abcdef", "v0.0-abcdef-given"])
@pytest.mark.parametrize(("kind", "mode"), [("vllm", "keep"), ("vllm", "abort"), ("sglang", "retract")])
async def test_a_server_that_a_killed_run_has_left_paused_is_resumed(
    kind: str, mode: str, label: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning; all that is known of a server that runs is known then, and it waits for the first update."""
    server = KINDS[kind][0]()
    async with listening(server):
        running = await connected(kind, server)
        left_by(server, label)
        server.pause_mode = mode
        engine = await connected(kind, server)
        assert server.pause_mode is None
        assert engine.capabilities.logprob_kind is running.capabilities.logprob_kind
        assert engine.capabilities.version_spans
        assert engine.capabilities.first_weights is FirstWeights.OTHERS
        await engine.close()
        await running.close()
    assert len([r for r in caplog.records if f"{server.url} is paused" in r.getMessage()]) == 1


@pytest.mark.parametrize("why", ["requests", "foreign", "default"])
@pytest.mark.parametrize(("kind", "mode"), [("vllm", "keep"), ("sglang", "retract")])
async def test_a_pause_of_somebody_who_may_live_stays(kind: str, mode: str, why: str) -> None:
    """Requests that wait in it, or a name that april has not given: it is named, with how to end it."""
    async with served(kind, stepped=True, mean_length=10**6) as (server, engine):
        if why == "requests":
            reading = await begun(server, read(engine, request()))
            server.step(2)
        else:
            server.label = "step-7" if why == "foreign" else "default"
        server.pause_mode = mode
        server.stepped = False
        with pytest.raises(EngineError, match=r"is paused; .* and start the run again"):
            await connected(kind, server)
        assert server.pause_mode == mode
        server.pause_mode = None
        server.go_on()
        if why == "requests":
            await reading


# ---------------------------------------------------------------- answers that are believed to the end of a run

ASKED = {
    "vllm": [
        "/version", "/v1/models", "/server_info", "/weight_info", "/is_paused", "/abort_requests", "/collective_rpc",
        "/v1/load_lora_adapter", "/inference/v1/generate",
    ],
    "sglang": [
        "/model_info", "/server_info", "/v1/models", "/update_weights_from_disk",
        "/update_weight_version", "/load_lora_adapter", "/pause_generation", "/begin_weight_update",
        "/init_weights_update_group", "/update_weights_from_distributed", "/openapi.json",
    ],
}  # fmt: skip
ONCE = [(kind, route, fault) for kind in BOTH for route in ASKED[kind] for fault in (*SAYS_NOTHING, ControlFault.FAILS)]


def a_server(kind: str) -> Any:
    """One that can do everything that is asked for."""
    images = FakeImages() if kind == "sglang" else None
    return KINDS[kind][0](loras=FakeAdapters(), images=images)


@pytest.mark.parametrize(("kind", "route", "fault"), ONCE)
def test_an_answer_that_is_not_the_servers_own_is_asked_for_again(kind: str, route: str, fault: ControlFault) -> None:
    """One page of a proxy, or one error, while a run begins takes nothing from the server for the whole run."""
    whole = facts_of(a_server(kind)).capabilities
    server = a_server(kind)
    server.control_faults.append(PlannedControlFault(kind=fault, route=route))
    found = facts_of(server).capabilities
    assert (found, found.notes, found.adapters is None) == (whole, whole.notes, False)
    assert server.control_faults[0].times == 0


@pytest.mark.parametrize("fault", [*SAYS_NOTHING, ControlFault.FAILS])
@pytest.mark.parametrize(
    ("kind", "route"), [("vllm", "/weight_info"), ("vllm", "/server_info"), ("vllm", "/v1/load_lora_adapter"),
                        ("vllm", "/is_paused"), ("sglang", "/server_info"), ("sglang", "/update_weight_version")],
)  # fmt: skip
def test_a_server_that_never_answers_in_its_own_words_is_refused(kind: str, route: str, fault: ControlFault) -> None:
    """It is not called one without labels, adapters or settings: the error names the route."""
    server = a_server(kind)
    server.control_faults.append(PlannedControlFault(kind=fault, route=route, times=100))
    with pytest.raises(EngineError, match=route):
        facts_of(server)
