"""A version of the policy that is an adapter under a new name: what servers are asked, and whose each token is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_servers.adapters import FakeAdapters, salt_of, write_adapter
from fake_servers.base import SAYS_NOTHING, ControlFault, PlannedControlFault, uncut
from fake_servers.sglang import FakeSglangServer
from fake_servers.vllm import FakeVllmServer
from server_fixtures import (
    BOTH,
    KINDS,
    PROMPT,
    ServerThread,
    behind_a_router,
    facts_of,
    listening,
    read,
    request,
    saved,
    served,
    settings,
    until,
    update,
)

import april
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.doctor.examine import TimeLimits, examine_urls
from april.doctor.findings import Level
from april.engines.http.loaded_adapters import LoadedAdapters, is_ours
from april.engines.http.server_probe import choose_model
from april.engines.http.weight_labels import WeightLabels
from april.engines.kinds.factory import open_servers
from april.errors import EngineError, EngineUnreachable, WeightsGone
from april.testing import conformance

both = pytest.mark.parametrize("kind", BOTH)
LOADS = {"vllm": "/v1/load_lora_adapter", "sglang": "/load_lora_adapter"}
UNLOADS = {"vllm": "/v1/unload_lora_adapter", "sglang": "/unload_lora_adapter"}


def version(n: int) -> PolicyVersion:
    return PolicyVersion(0, n)


def server_of(kind: str, **options: Any) -> Any:
    return KINDS[kind][0](loras=FakeAdapters(), **options)


def under(path: str | None, prompt: list[int] = PROMPT, weights: str = "w0") -> list[int]:
    """What an uncut response says under an adapter."""
    return uncut(prompt, weights=weights + ("" if path is None else salt_of(path)))[0]


# ---------------------------------------------------------------- what an update asks


@both
async def test_a_version_is_an_adapter_under_a_new_name(kind: str, tmp_path: Path) -> None:
    """Its requests name it and their tokens are of it; the server is not paused, and its cache is left alone."""
    async with served(kind, server=server_of(kind)) as (server, engine):
        assert (await read(engine, request())).tokens == under(None)
        for n in range(1, 5):
            path = write_adapter(tmp_path / str(n % 2), n)
            await update(engine, version(n), path)
            got = await read(engine, request())
            assert got.tokens == under(path)
            assert set(got.versions) == {version(n)}
            assert (await engine.health()).ok
        assert len(set(server.loras.ever)) == 4
        assert all(map(is_ours, server.loras.ever))
        assert list(server.loras.present) == server.loras.ever[-1:]
        if kind == "vllm":
            assert server.pauses == []


@both
async def test_an_adapter_of_the_start_is_version_0(kind: str, tmp_path: Path) -> None:
    """Requests name it until april gives another one, and never again."""
    server = server_of(kind)
    server.adapters.append("policy")
    path = write_adapter(tmp_path, 1)
    async with served(kind, server=server, config={"model": "policy"}) as (server, engine):
        assert not engine.capabilities.updates_from_disk
        await read(engine, request())
        await update(engine, version(1), path)
        server.adapters.clear()
        assert (await engine.health()).ok
        got = await read(engine, request())
        assert got.tokens == under(path)
        if kind == "sglang":
            assert [run.params["lora_path"] for run in server.runs] == ["policy", *server.loras.ever]
        else:
            assert [run.model for run in server.runs] == ["policy", *server.loras.ever]


@both
async def test_whole_weights_after_an_adapter(kind: str, tmp_path: Path) -> None:
    """They are the model itself again, no request names the adapter, and the next one is laid over them."""
    path = write_adapter(tmp_path / "adapter", 1)
    async with served(kind, server=server_of(kind)) as (server, engine):
        await update(engine, version(1), path)
        await update(engine, version(2), saved(tmp_path, "whole"))
        got = await read(engine, request())
        assert (got.tokens, set(got.versions)) == (under(None, weights="whole"), {version(2)})
        assert server.loras.present == {}
        await update(engine, version(3), path)
        got = await read(engine, request())
        assert (got.tokens, set(got.versions)) == (under(path, weights="whole"), {version(3)})
        assert (await engine.health()).ok


# ---------------------------------------------------------------- what goes wrong


WRONG = [ControlFault.FAILS, ControlFault.ECHOED, *SAYS_NOTHING]


@both
@pytest.mark.parametrize("wrong", WRONG)
async def test_a_load_that_fails_hurts_nothing(kind: str, wrong: ControlFault, tmp_path: Path) -> None:
    """Whatever the server answers, and 200 without the adapter in its list: one sentence, the old version stays, and
    the next update, under another name, succeeds."""
    first, second = write_adapter(tmp_path / "1", 1), write_adapter(tmp_path / "2", 2)
    async with served(kind, server=server_of(kind)) as (server, engine):
        await update(engine, version(1), first)
        server.control_faults.append(PlannedControlFault(kind=wrong, route=LOADS[kind]))
        with pytest.raises(EngineError, match=r"could not load the adapter in .*; it keeps its old") as caught:
            await update(engine, version(2), second)
        assert "\n" not in str(caught.value)
        assert (await engine.health()).ok
        got = await read(engine, request())
        assert (got.tokens, set(got.versions)) == (under(first), {version(1)})
        await update(engine, version(2), second)
        got = await read(engine, request())
        assert (got.tokens, set(got.versions)) == (under(second), {version(2)})


@both
async def test_a_load_that_hangs_hurts_nothing(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may have it by now: under a name that no request has, and that is unloaded later."""
    first, second = write_adapter(tmp_path / "1", 1), write_adapter(tmp_path / "2", 2)
    monkeypatch.setattr("april.engines.vllm.engine.LOAD_S", 0.01)
    monkeypatch.setattr("april.engines.sglang.worker.LOAD_S", 0.01)
    async with served(kind, server=server_of(kind)) as (server, engine):
        await update(engine, version(1), first)
        server.control_faults.append(PlannedControlFault(kind=ControlFault.SILENT, route=LOADS[kind]))
        with pytest.raises(EngineUnreachable, match=f"{LOADS[kind]} did not answer within 0.01 s"):
            await update(engine, version(2), second)
        assert len(server.loras.present) == 2
        got = await read(engine, request())
        assert (got.tokens, set(got.versions)) == (under(first), {version(1)})
        monkeypatch.undo()
        await update(engine, version(2), second)
        assert list(server.loras.present) == server.loras.ever[-1:]


@both
@pytest.mark.parametrize("wrong", [ControlFault.FAILS, ControlFault.SILENT])
async def test_an_unload_that_fails(
    kind: str, wrong: ControlFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The update has succeeded all the same; a warning names the adapter, and the next update tries again."""
    monkeypatch.setattr("april.engines.http.loaded_adapters.UNLOAD_S", 0.01)
    paths = [write_adapter(tmp_path / str(n), n) for n in range(4)]
    async with served(kind, server=server_of(kind)) as (server, engine):
        await update(engine, version(1), paths[1])
        server.control_faults.append(PlannedControlFault(kind=wrong, route=UNLOADS[kind], times=2))
        monkeypatch.setattr(logging.getLogger("april"), "propagate", True)
        await update(engine, version(2), paths[2])
        assert (await read(engine, request())).tokens == under(paths[2])
        kept = server.loras.ever[0]
        assert f"still has the adapter {kept}, which april no longer needs" in caplog.text
        monkeypatch.undo()
        server.control_faults.clear()
        await update(engine, version(3), paths[3])
        assert list(server.loras.present) == server.loras.ever[-1:]


@both
@pytest.mark.parametrize("when", [ControlFault.RESTARTS_BEFORE, ControlFault.RESTARTS_AFTER])
async def test_a_server_that_is_started_anew_as_it_loads(kind: str, when: ControlFault, tmp_path: Path) -> None:
    """Whether before it reads the adapter or after: the update fails, and no request names what is not there."""
    first, second = write_adapter(tmp_path / "1", 1), write_adapter(tmp_path / "2", 2)
    async with served(kind, server=server_of(kind)) as (server, engine):
        await update(engine, version(1), first)
        server.control_faults.append(PlannedControlFault(kind=when, route=LOADS[kind]))
        with pytest.raises(EngineError, match=r"restarted|it keeps its old"):
            await update(engine, version(2), second)
        health = await engine.health()
        assert not health.current
        await update(engine, version(2), second)
        got = await read(engine, request())
        assert (got.tokens, set(got.versions)) == (under(second), {version(2)})


@both
async def test_somebody_else_unloads_the_adapter(kind: str, tmp_path: Path) -> None:
    """The process is the same, and the probe sees it all the same."""
    async with served(kind, server=server_of(kind)) as (server, engine):
        await update(engine, version(1), write_adapter(tmp_path, 1))
        name = server.loras.ever[0]
        server.loras.present.clear()
        health = await engine.health()
        assert (health.ok, health.current) == (False, False)
        assert f"the server no longer has the adapter {name}" in health.detail


@both
async def test_an_adapter_is_of_the_model_that_the_run_gave(kind: str, tmp_path: Path) -> None:
    """A server that is started anew has lost whole weights of an update; the adapter would be laid over others."""
    path = write_adapter(tmp_path / "adapter", 1)
    async with served(kind, server=server_of(kind)) as (server, engine):
        await update(engine, version(1), saved(tmp_path, "whole"))
        await update(engine, version(2), path)
        await server.restart()
        with pytest.raises(WeightsGone, match=r"but the adapter belongs to .*; update it with full weights"):
            await update(engine, version(3), path)


@both
async def test_somebody_else_changes_the_model_below(kind: str, tmp_path: Path) -> None:
    """Tokens of an adapter over other weights are nobody's."""
    async with served(kind, server=server_of(kind), stepped=True) as (server, engine):
        await update(engine, version(1), write_adapter(tmp_path, 1))
        task = asyncio.create_task(read(engine, request()))
        await until(lambda: server.open_requests == 1)
        server.step(2)
        server.label = "step-7"
        server.go_on()
        got = await task
        assert "somebody else changes its weights" in str(got.error)
        assert not (await engine.health()).current


async def test_workers_of_a_router_have_one_name(tmp_path: Path) -> None:
    """A request may come to any of them; if one cannot load it, all go on under what they have."""
    workers = [FakeSglangServer(loras=FakeAdapters()) for _ in range(2)]
    first, second = write_adapter(tmp_path / "1", 1), write_adapter(tmp_path / "2", 2)
    async with behind_a_router(*workers) as (_, engine):
        await update(engine, version(1), first)
        assert workers[0].loras.ever == workers[1].loras.ever  # type: ignore[union-attr]
        workers[1].control_faults.append(PlannedControlFault(kind=ControlFault.FAILS, route=LOADS["sglang"]))
        with pytest.raises(EngineError, match="could not load the adapter"):
            await update(engine, version(2), second)
        for _ in workers:
            assert (await read(engine, request())).tokens == under(first)
        assert (await engine.health()).ok


def test_several_api_processes_take_no_adapters() -> None:
    """A load reaches one of them, and the requests of the others would not find it."""
    can = facts_of(FakeVllmServer(loras=FakeAdapters(), processes=2)).capabilities
    assert can.adapters is None
    assert "--api-server-count 1" in can.needs["adapters"]


# ---------------------------------------------------------------- names


def test_names_of_april_are_no_models() -> None:
    """What a run has left behind on a server is nobody's choice, unless it is named."""
    card = {"id": "m", "root": "/m"}
    left = "april-v0.3-abcdef.2"
    listed = {"data": [card, {"id": left, "parent": "m"}]}
    assert choose_model("http://h:1", listed, None).name == "m"
    assert choose_model("http://h:1", listed, left).base == "m"
    assert not is_ours("april-policy")


def test_no_name_is_given_twice() -> None:
    """Not even to the same version of an update that failed."""
    own = LoadedAdapters(WeightLabels())
    names = [own.new_adapter(version(1), "p").name for _ in range(3)]
    assert len(set(names)) == 3
    assert all(map(is_ours, names))
    assert own.note_request("a") is None
    assert own.base == FIRST_VERSION


# ---------------------------------------------------------------- a run


def run_of(server: Any, kind: str, **more: Any) -> april.Config:
    engine = {"kind": kind, "urls": [server.url], "vocab_size": 512, "eos_token_ids": [2], "max_len": 200}
    return april.Config(
        rollout_batch_size=2, n_samples_per_prompt=2, over_sampling_batch_size=4, max_response_len=60, engine=engine,
        max_staleness=8, **more,
    )  # fmt: skip


def hold_to(sample: Any, paths: Sequence[str | None]) -> int:
    """Every token is what the adapter of its version (None: the model) says after those before it; counts segments."""
    before = sample.prompt.token_ids.tolist()
    for segment in sample.segments:
        said = sample.tokens[segment.start : segment.start + segment.count].tolist()
        assert said == under(paths[segment.version.n], before)[: len(said)]
        before += said
    return len(sample.segments)


@both
def test_a_run_with_cut_and_resumed_responses(kind: str, tmp_path: Path) -> None:
    """Eight updates by adapter: every token is what the adapter of its version says after those before it."""
    server = server_of(kind)
    prompts = [[3 + i, 7, 9] for i in range(80)]
    paths: list[str | None] = [None]
    segments = 0
    with ServerThread(server):
        config = run_of(server, kind)
        with april.RolloutScheduler(config, prompts=prompts, reward=lambda p, r: 1.0) as scheduler:
            for n in range(1, 9):
                for sample in scheduler.next_batch().samples:
                    segments += hold_to(sample, paths)
                paths.append(write_adapter(tmp_path / str(n), n))
                assert scheduler.weight_update(path=paths[n]) == version(n)
            scheduler.validate()
    assert segments > 8 * 4, "no response was cut"
    assert not server.violations
    assert len(server.loras.ever) == 8


@both
def test_a_server_that_dies_in_the_middle_is_given_the_present_adapter(kind: str, tmp_path: Path) -> None:
    """april loads the directory of the present version again, and no token is of anything else."""
    server = server_of(kind)
    prompts = [[3 + i, 7, 9] for i in range(80)]
    path = write_adapter(tmp_path, 1)
    with ServerThread(server) as thread:
        config = run_of(server, kind)
        with april.RolloutScheduler(config, prompts=prompts, reward=lambda p, r: 1.0) as scheduler:
            scheduler.next_batch()
            scheduler.weight_update(path=path)
            scheduler.next_batch()
            thread.call(server.restart())
            (response,) = scheduler.evaluate([[90, 7, 9]]).responses[0]  # which nothing that is finished can answer
            assert response.tokens.tolist() == under(path, [90, 7, 9])[: len(response.tokens)]
            batch = scheduler.next_batch()
            scheduler.validate()
            for sample in batch.samples:
                hold_to(sample, [None, path])
    assert len(server.loras.ever) >= 2
    assert not server.violations


@both
def test_an_adapter_lies_over_the_whole_weights_of_the_run(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that was gone when those came is left out, until it has whole ones again."""
    servers = [server_of(kind) for _ in range(2)]
    with ServerThread(*servers) as thread:
        config = run_of(servers[0], kind)
        urls = (servers[0].url, servers[1].url)
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"urls": urls})})
        prompts = [[3 + i, 7, 9] for i in range(200)]
        with april.RolloutScheduler(config, prompts=prompts, reward=lambda p, r: 1.0) as scheduler:
            scheduler.next_batch()
            thread.call(servers[1].close())
            scheduler.weight_update(path=saved(tmp_path, "w1"))
            thread.call(servers[1].restart())
            scheduler.weight_update(path=write_adapter(tmp_path / "2", 2))
            assert [len(server.loras.ever) for server in servers] == [1, 0]
            assert "the full weights of version 0.0, but the adapter of version 0.2 belongs to those" in caplog.text
            scheduler.weight_update(path=saved(tmp_path, "w3"))
            scheduler.weight_update(path=write_adapter(tmp_path / "4", 4))
            assert [len(server.loras.ever) for server in servers] == [2, 1]
            scheduler.validate()


def test_requests_that_live_through_updates_have_adapters_to_their_end(tmp_path: Path) -> None:
    """To keep them would leave them on old adapters for good: refused by name, and nothing has happened."""
    server = server_of("vllm")
    with ServerThread(server):
        config = run_of(server, "vllm", generation="continuous", on_weight_update="keep")
        with april.RolloutScheduler(config, prompts=[[3, 7, 9]] * 9, reward=lambda p, r: 1.0) as scheduler:
            with pytest.raises(april.ConfigError, match="on_weight_update: keep would leave requests in flight"):
                scheduler.weight_update(path=write_adapter(tmp_path, 1))
            assert scheduler.version == FIRST_VERSION
    assert server.loras.ever == []


@both
@pytest.mark.parametrize("takes", [True, False])
async def test_the_doctor_says_whether_adapters_are_taken(kind: str, takes: bool) -> None:
    """Up to which rank and how many at a time, or with which flags they would be; no promise depends on it."""
    server = KINDS[kind][0](loras=FakeAdapters() if takes else None)
    async with listening(server) as url:
        report = await examine_urls([url], None, TimeLimits())
    (found,) = [f for f in report.all if f.subject == "adapters"]
    if takes:
        assert (found.level, "up to rank 16, 2 at the same time" in found.sentence) == (Level.OK, True)
    else:
        assert (found.level, "--enable-lora" in found.sentence) == (Level.REMARK, True)


# ---------------------------------------------------------------- conformance


class OneLabel:
    """An engine that calls all tokens those of its newest version."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: Any) -> Any:
        async for chunk in self._engine.generate(request):
            yield replace(chunk, version=self._engine._version)


@both
@pytest.mark.parametrize("wrong", [False, True], ids=["sound", "one label"])
async def test_the_conformance_suite_on_adapters(kind: str, wrong: bool, tmp_path: Path) -> None:
    """Three versions run at once; whoever calls their tokens by the newest is found out."""
    paths = [write_adapter(tmp_path / str(n), n) for n in (1, 2)]
    server = server_of(kind, mean_length=10**9, max_running=64, turns=40)
    async with listening(server) as url:

        async def opened() -> Any:
            (engine,) = await open_servers(settings(kind, url))
            return OneLabel(engine) if wrong else engine

        subject = conformance.Subject(open=opened, adapters=[conformance.Weights(path) for path in paths])
        verdict = await conformance.check_named("adapter_versions")(subject)
    if wrong:
        assert verdict.outcome is conformance.Outcome.FAILED
        assert "tokens of requests that were sent under version 0." in verdict.detail
    else:
        assert (verdict.outcome, verdict.detail) == (conformance.Outcome.PASSED, "")
        assert verdict.figures["versions at the same time"] == 3
    assert len(server.loras.ever) == 2
