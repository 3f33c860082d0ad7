"""What april finds out about an SGLang server, and what it says about it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_servers.base import ControlFault, PlannedControlFault
from fake_servers.sglang import FakeSglangServer
from sglang_fixtures import run, until

from april.config.engines import SglangEngineConfig
from april.core.sampling import LogprobKind
from april.engines.http.http_client import HttpClient
from april.engines.sglang import probe as sglang_probe
from april.engines.sglang.engine import connect_sglang
from april.engines.sglang.probe import SglangFacts, probe_sglang
from april.errors import ConfigError, EngineError, EngineUnreachable


async def offer(server: FakeSglangServer, **config: Any) -> SglangFacts:
    client = HttpClient(server.url, name="probe")
    try:
        return await probe_sglang(client, SglangEngineConfig(urls=(server.url,), **config))
    finally:
        await client.close()


def offered(config: dict[str, Any] | None = None, **options: Any) -> SglangFacts:
    """Of a server with these options; nothing of it may change by being asked."""
    found: list[SglangFacts] = []

    async def program() -> None:
        server = FakeSglangServer(**options)
        await server.start()
        try:
            found.append(await offer(server, **(config or {})))
            assert (server.label, server.pause_mode, server.aborts, server.updates) == ("default", None, [], [])
            assert server.open_requests == 0
            assert sum(len(r.ids) for r in server.runs) <= 6
            assert not server.violations
        finally:
            await server.close()

    run(program)
    return found[0]


def test_a_recent_server_offers_everything() -> None:
    said = offered()
    can = said.capabilities
    assert (said.software, said.model) == ("0.5.23", "fake/model")
    assert (can.vocab_size, can.max_context, can.max_in_flight) == (512, 4090, 64)
    assert (can.version_spans, said.incremental, said.stream_interval, said.loads) == (True, True, True, True)
    assert said.pause_modes == ("abort", "retract", "in_place")
    assert can.logprob_kind is LogprobKind.TEMPERATURE
    # the fake has no model files, and seeds do nothing
    assert [sentence.split(":")[0] for sentence in can.notes] == [
        "Seeds do nothing",
        "The ids that end a response are not known, as the model's files are not on this machine or name none",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"incremental": False}, "--incremental-streaming-output"),
        ({"spans": False}, "0.5.20"),
        ({"labels": False}, "/update_weight_version is missing"),
        ({"intervals": False}, "--stream-interval"),
        ({"loads": False}, "/v1/loads is missing"),
        ({"logprobs": "raw"}, "SGLANG_RETURN_ORIGINAL_LOGPROB"),
    ],
    ids=str,
)
def test_what_is_missing_is_said_with_the_remedy(options: dict[str, Any], words: str) -> None:
    assert any(words in sentence for sentence in offered(**options).capabilities.notes)


def test_the_configuration_is_believed() -> None:
    can = offered({"vocab_size": 500, "max_len": 100, "eos_token_ids": (7,), "logprobs": "processed"}).capabilities
    assert (can.vocab_size, can.max_context, can.eos_token_ids) == (500, 100, (7,))
    assert can.logprob_kind is LogprobKind.PROCESSED


def test_capabilities_follow() -> None:
    """Without incremental streams one answer at the end is cheaper, unless the user wants to lose less."""
    assert offered().capabilities.streams
    assert not offered(incremental=False).capabilities.streams
    assert offered({"max_token_loss": 50}, incremental=False).capabilities.streams
    assert offered({"max_in_flight": 5}, incremental=False).capabilities.max_in_flight == 5


async def test_a_paused_server_is_described_and_not_connected_to() -> None:
    server = FakeSglangServer()
    await server.start()
    server.pause_mode = "retract"
    said = await offer(server)
    assert said.paused
    assert "POST /continue_generation" in said.capabilities.notes[0]
    with pytest.raises(EngineError, match="is paused"):
        await connect_sglang(SglangEngineConfig(urls=(server.url,)))
    await server.close()


async def test_what_is_no_sglang_server_is_said() -> None:
    """A closed port, a page that is not there, and a server that never answers: an error each, in time."""
    server = FakeSglangServer()
    await server.start()
    await server.close()
    with pytest.raises(EngineUnreachable):
        await connect_sglang(SglangEngineConfig(urls=(server.url,)))

    async def hang(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    cases = ((None, 30.0, ConfigError, "no SGLang server"), (hang, 0.3, EngineError, "has not said"))
    for handler, patience, error, words in cases:
        app = web.Application()
        if handler is not None:
            app.add_routes([web.route("*", "/{path:.*}", handler)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        with pytest.raises(error, match=words):
            await connect_sglang(SglangEngineConfig(urls=(url,), probe_timeout_s=patience))
        await runner.cleanup()


@pytest.mark.parametrize(
    ("memory", "page", "room"), [(65536, 64, 4090), (4096, 1, 4090), (4096, 64, 4096 - 128), (1000, 16, 968)]
)
async def test_the_context_is_what_its_memory_has_room_for(memory: int, page: int, room: int) -> None:
    """A response that needs more than whole pages leave is cut short without a word."""
    server = FakeSglangServer()
    server.memory, server.page_size = memory, page
    await server.start()
    try:
        assert (await offer(server)).capabilities.max_context == room
    finally:
        await server.close()


async def test_all_ids_at_which_it_stops(tmp_path: Path) -> None:
    """The model's, its tokenizer's EOS, and the ends of turns that SGLang finds among the tokenizer's added tokens.

    Without files of the model nothing is known: its generation configuration may have more.
    """
    model, tokenizer = tmp_path / "step-5", tmp_path / "start"
    model.mkdir(), tokenizer.mkdir()
    added = {str(i): {"content": text} for i, text in ((7, "<|end|>"), (8, "<|other|>"), (9, "<|eom_id|>"))}
    files = {"eos_token": "<|end|>", "added_tokens_decoder": added}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(files), "utf-8")

    server = FakeSglangServer()
    server.model_path, server.tokenizer_path = str(model), str(tokenizer)
    await server.start()
    try:
        assert (await offer(server)).capabilities.eos_token_ids == ()
        (model / "config.json").write_text(json.dumps({"eos_token_id": 2}), "utf-8")
        assert (await offer(server)).capabilities.eos_token_ids == (2, 7, 9)
        assert (await offer(server, eos_token_ids=(3,))).capabilities.eos_token_ids == (3,)
    finally:
        await server.close()


@pytest.mark.parametrize("how", ["answers", "is cut off", "is silent", "says nothing"])
async def test_asking_for_the_pause_modes_leaves_no_server_paused(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes any mode is continued, whatever happens to the question; one paused by others is not."""
    monkeypatch.setattr(sglang_probe, "PAUSE_S", 0.05)

    server = FakeSglangServer()
    await server.start()
    client = HttpClient(server.url, name="a")
    config = SglangEngineConfig(urls=(server.url,))
    server.any_mode = True
    if how in ("is cut off", "is silent"):
        server.control_faults.append(PlannedControlFault(kind=ControlFault.SILENT, route="/pause_generation", later=1))
    if how == "says nothing":
        fault = PlannedControlFault(kind=ControlFault.FAILS, route="/pause_generation", later=1, obeyed=True)
        server.control_faults.append(fault)
    probing = asyncio.create_task(probe_sglang(client, config))
    if how == "is cut off":
        await until(lambda: server.pause_mode is not None)
        probing.cancel()
    (result,) = await asyncio.gather(probing, return_exceptions=True)
    assert server.pause_mode is None
    assert isinstance(result, BaseException) == (how in ("is cut off", "is silent"))
    server.pause_mode = "retract"
    server.any_mode = False
    assert (await probe_sglang(client, config)).pause_modes == ("abort", "retract", "in_place")
    assert server.pause_mode == "retract"
    await client.close()
    await server.close()
