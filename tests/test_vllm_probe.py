"""What the probe finds out about a vLLM server, without disturbing it, and what it says of what is missing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fake_servers.vllm import FakeVllmServer
from sglang_fixtures import read, request, until
from vllm_fixtures import KNOWN, connected, served

from april.config.engines import VllmEngineConfig
from april.core.engine_table import EngineTable
from april.core.sampling import LogprobKind
from april.core.versions import PolicyVersion
from april.driver.local_host import limits_of
from april.engines.http.http_client import HttpClient
from april.engines.http.server_probe import eos_of, model_files
from april.engines.protocol import AbortMeans
from april.engines.vllm.probe import VllmFacts, probe_vllm
from april.engines.vllm.wire import TOKEN_ROUTE
from april.errors import ConfigError, EngineError


async def probed(server: FakeVllmServer, key: str | None = None, **config: Any) -> VllmFacts:
    client = HttpClient(server.url, name="probed", api_key=key)
    try:
        return await probe_vllm(client, VllmEngineConfig(urls=(server.url,), **config))
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("options", "means", "spans", "disk", "words"),
    [
        ({}, AbortMeans.BY_ID, True, True, None),
        ({"developer": False}, AbortMeans.BY_ID, False, False, "VLLM_SERVER_DEV_MODE=1"),
        ({"scale_out": False}, AbortMeans.BY_ID, False, True, "--enable-scale-out"),
        ({"scale_out": False, "release": 33}, AbortMeans.BY_ID, True, True, None),
        ({"scale_out": False, "release": 33, "developer": False}, AbortMeans.CLOSE, False, False, "VLLM_SERVER_DEV"),
        ({"developer": False, "scale_out": False}, AbortMeans.CLOSE, False, False, "cannot be aborted by id"),
        ({"processes": 2}, AbortMeans.PAUSE, True, True, "--api-server-count 1"),
        ({"processes": 2, "developer": False}, AbortMeans.CLOSE, False, False, "--api-server-count 1"),
        ({"logprobs": "raw"}, AbortMeans.BY_ID, True, True, "--logprobs-mode processed_logprobs"),
    ],
)
async def test_each_kind_of_server(
    options: dict[str, Any], means: AbortMeans, spans: bool, disk: bool, words: str | None
) -> None:
    """Means, spans and routes as they are; whatever is missing is a sentence with the flag that helps."""
    async with served(**options) as (server, _):
        facts = await probed(server, eos_token_ids=(2,))
        can = facts.capabilities
        assert (can.abort_means, can.version_spans, can.updates_from_disk) == (means, spans, disk)
        software = f"0.{options.get('release', 32)}.0"
        assert (facts.software, facts.model, can.max_context) == (software, "fake", 4096)
        assert can.vocab_size == 512
        assert (words is None) == (not can.limits), can.notes
        assert words is None or any(words in note for note in can.notes)


@pytest.mark.parametrize("said", [True, False], ids=["said", "seen"])
@pytest.mark.parametrize("kind", ["raw", "processed", "temperature"])
async def test_logprob_kind(kind: str, said: bool) -> None:
    """Out of the server's settings, or seen from requests of one token each; the configuration's word goes first."""
    # no server says "temperature" of itself
    async with served(logprobs=kind, says_logprobs=said and kind != "temperature") as (server, _):
        server.runs.clear()
        facts = await probed(server, **KNOWN)
        assert facts.capabilities.logprob_kind is LogprobKind(kind)
        assert all(len(r.ids) == 1 for r in server.runs)
        assert len(server.runs) == (0 if said and kind != "temperature" else 2)
        facts = await probed(server, logprobs="raw", **KNOWN)
        assert facts.capabilities.logprob_kind is LogprobKind.RAW


async def test_a_server_in_use_is_not_disturbed() -> None:
    """No abort, no pause, no cache reset, no label: requests of others go on through a probe."""
    async with served(mean_length=10**6) as (server, engine):
        before = server.label
        reading = asyncio.create_task(read(engine, request(max_tokens=500)))
        await until(lambda: server.open_requests == 1)
        server.stale_cache = False
        await probed(server, **KNOWN)
        assert (server.aborts, server.pauses, server.label) == ([], [], before)
        assert (await reading).error is None


async def test_key() -> None:
    """Without the key a sentence with the status; the key is in no message and no repr."""
    server = FakeVllmServer(api_key="secret-key")
    await server.start()
    with pytest.raises((ConfigError, EngineError), match="401") as caught:
        await probed(server, "wrong-secret", **KNOWN)
    assert "wrong-secret" not in str(caught.value)
    assert (await probed(server, "secret-key", **KNOWN)).route == TOKEN_ROUTE
    engine = await connected(server, {"api_key": "secret-key"})
    assert "secret-key" not in repr(engine) + repr(engine.facts) + repr(vars(engine)["_client"])
    assert (await read(engine, request())).error is None
    await engine.close()
    await server.close()


async def test_disk_updates_need_all_developer_routes() -> None:
    """A server that lacks one of them would be told of new weights and keep its old ones."""
    async with served(without=("/abort_requests",)) as (server, engine):
        facts = await probed(server, **KNOWN)
        assert (facts.developer_routes, facts.capabilities.updates_from_disk) == (False, False)
        await engine.pause()
        with pytest.raises(EngineError, match="cannot load weights"):
            await engine.update_weights(PolicyVersion(0, 1), "/weights/w1")


@pytest.mark.parametrize(
    ("tied", "device", "developer", "words"),
    [
        (True, "cpu", True, "The server runs on a CPU"),
        (True, "cuda", True, None),
        (False, "cpu", True, None),
        (None, "cpu", True, None),
        (True, None, True, "If the server runs on a CPU"),
        (True, "cpu", False, None),
    ],
)
async def test_tied_embeddings_on_a_cpu(
    tied: bool | None, device: str | None, developer: bool, words: str | None, tmp_path: Path
) -> None:
    """vLLM reloads such a model wrongly there: said before it happens, where weights are updated from disk at all."""
    (tmp_path / "config.json").write_text(json.dumps({} if tied is None else {"tie_word_embeddings": tied}))

    without = ("/server_info",) if device is None else ()
    async with served(root=str(tmp_path), device=device or "cpu", developer=developer, without=without) as (
        server,
        engine,
    ):
        for notes in ((await probed(server, **KNOWN)).capabilities.notes, engine.capabilities.notes):
            said = [note for note in notes if "tied embeddings" in note]
            assert len(said) == (words is not None)
            assert words is None or said[0].startswith(words)


async def test_a_paused_server_is_not_taken() -> None:
    """It would answer no request: an error that says how to resume it."""
    server = FakeVllmServer()
    await server.start()
    server.pause_mode = "keep"
    with pytest.raises(EngineError, match="is paused; resume it"):
        await connected(server)
    await server.close()


async def test_what_is_wrong_with_the_configuration() -> None:
    """A model that is not there is named together with those that are."""
    async with served() as (server, _):
        with pytest.raises(ConfigError, match="it serves: fake"):
            await probed(server, model="other", **KNOWN)


async def test_a_cpu_that_reads_prompts_in_chunks_gets_no_seeds() -> None:
    """It would die of them; its limit of requests is that of all its copies together."""
    async with served(device="cpu", chunked_prefill=True, copies=2, max_running=8) as (server, engine):
        assert not engine.capabilities.honours_seeds
        assert engine.capabilities.max_in_flight == 16
        got = await read(engine, request(seed=7))
        assert got.error is None
        assert server.alive
    async with served(device="cpu") as (server, engine):
        assert engine.capabilities.honours_seeds
        assert (await read(engine, request(seed=7))).error is None
        assert server.runs[-1].params["seed"] == 7


async def test_a_tied_model_is_not_reloaded_on_a_cpu(tmp_path: Path) -> None:
    """A directory is refused by name before the server is asked; the engine says that it loads none."""
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    (tmp_path / "model.safetensors").write_bytes(b"")

    async with served(root=str(tmp_path), device="cpu") as (server, engine):
        assert not engine.capabilities.updates_from_disk
        await engine.pause()
        with pytest.raises(EngineError, match="tied embeddings"):
            await engine.update_weights(PolicyVersion(0, 1), str(tmp_path))
        assert server.weights == "w0"
        await engine.resume()


@pytest.mark.parametrize("developer", [True, False])
async def test_weights_that_no_label_shows_are_unverified(developer: bool) -> None:
    """Said by the engine, and so by every batch."""
    async with served(developer=developer, scale_out=False) as (_, engine):
        assert engine.capabilities.verifies_weights is developer
        table = EngineTable([limits_of(engine)], PolicyVersion(0, 0))
        said = {f"engine/{engine.name}/unverified_weights": 1.0}
        assert said.items() <= table.metrics({}, PolicyVersion(0, 0)).items() or developer
        assert not (developer and said.items() & table.metrics({}, PolicyVersion(0, 0)).items())


@pytest.mark.parametrize("where", ["tokenizer_config.json", "tokenizer.json", "nowhere"])
def test_all_ids_that_end_a_response(where: str, tmp_path: Path) -> None:
    """The model's, those of its generation configuration, and the tokenizer's: servers stop at each of them."""
    token = {"content": "<|im_end|>", "special": True}
    files: dict[str, Any] = {
        "config.json": {"eos_token_id": 2, "text_config": {"eos_token_id": 5}},
        "generation_config.json": {"eos_token_id": [2, 3]},
        "tokenizer_config.json": {"eos_token": "<|im_end|>" if where != "tokenizer.json" else token},
        "tokenizer.json": {"added_tokens": [{"id": 8, "content": "<|other|>"}]},
    }
    if where == "tokenizer_config.json":
        files[where]["added_tokens_decoder"] = {"8": {"content": "<|other|>"}, "9": token}
    if where == "tokenizer.json":
        files[where]["added_tokens"].append(token | {"id": 9})
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content), "utf-8")
    assert eos_of(model_files(tmp_path)) == ((2, 3, 5) if where == "nowhere" else (2, 3, 5, 9))
    assert eos_of(model_files(tmp_path / "elsewhere")) is None
    (tmp_path / "tokenizer_config.json").write_text("[]", "utf-8")
    assert eos_of(model_files(tmp_path)) == (2, 3, 5)
