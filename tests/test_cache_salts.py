"""Keys that other weights, another run or another client left in a server's caches are never read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_servers.vllm import FakeVllmServer
from server_fixtures import KINDS, connected, listening, read, request, saved, served, update
from test_server_weights import V1

from april.core.versions import FIRST_VERSION
from april.errors import ConfigError


async def salts_of_a_run(kind: str, server: Any, path: str | None) -> list[str]:
    """Connect, send two requests, update the weights, send two more; return the salt of each request."""
    more = {} if kind == "openai" else {"first_weights": "present"}  # those of the run before
    engine, had = await connected(kind, server, **more), len(server.runs)
    for version in (FIRST_VERSION, V1):
        if version == V1:
            await update(engine, version, path)
        for _ in range(2):
            assert (await read(engine, request())).error is None
    await engine.close()
    return [run.cache_salt for run in server.runs[had:]]


@pytest.mark.parametrize("kind", KINDS)
async def test_no_run_finds_keys_of_another(kind: str, tmp_path: Path) -> None:
    """Requests share a salt within a version of a run, so that a group shares its prompt, and with nothing else."""
    server = KINDS[kind][0]()
    async with listening(server):
        server.stale_cache = kind == "vllm"  # a run before this one has left keys of other weights
        path = None if kind == "openai" else saved(tmp_path, "w1")
        runs = [await salts_of_a_run(kind, server, path) for _ in range(2)]
        assert [(a == b, c == d) for a, b, c, d in runs] == [(True, True)] * 2
        salts = {salt for run in runs for salt in run}
        assert len(salts) == 4
        assert "" not in salts
        assert all(len(salt) <= 128 and not set(salt) & set("@/\\\0") for salt in salts)
        assert server.violations == []


BY_TOKENS = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
SALTED = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(connectors)}}


@pytest.mark.parametrize(
    ("connector", "developer", "trusted", "refused"),
    [
        (None, True, (), ""),
        (SALTED, True, (), ""),
        (BY_TOKENS, True, (), "the KV connector ExampleConnector"),
        (BY_TOKENS, True, ("ExampleConnector",), ""),
        (several(SALTED), True, (), ""),
        (several(SALTED, BY_TOKENS), True, (), "the KV connector ExampleConnector"),
        (None, False, (), ""),
        (SALTED, False, (), "a KV connector whose name is hidden"),
        (SALTED, False, ("OffloadingConnector",), ""),
    ],
)
async def test_a_connector_that_may_ignore_salts_is_refused(
    connector: dict[str, Any] | None, developer: bool, trusted: tuple[str, ...], refused: str
) -> None:
    """A second cache that may answer with keys of older weights is refused before anything starts, and by name."""
    server = FakeVllmServer(kv_connector=connector, developer=developer)
    async with listening(server):
        if not refused:
            await (await connected("vllm", server, salted_kv_connectors=trusted)).close()
            return
        with pytest.raises(ConfigError, match=rf"{refused}.*engine\.salted_kv_connectors"):
            await connected("vllm", server, salted_kv_connectors=trusted)


async def test_encoders_outputs_in_another_cache_are_refused() -> None:
    """They are found by the image alone, whatever weights made them; who does not train the encoder may say so."""
    server = FakeVllmServer()
    server.shown = {"ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}}
    async with listening(server):
        await (await connected("vllm", server, salted_kv_connectors=("ECExampleConnector",))).close()
        with pytest.raises(ConfigError, match=r"encoder-cache connector ECExampleConnector.*salted_kv_connectors"):
            await connected("vllm", server)


@pytest.mark.parametrize(
    ("options", "seeds"),
    [
        ({"developer": False}, False),
        ({"developer": True, "device": "cpu", "chunked_prefill": True}, False),
        ({"developer": True, "device": "cpu"}, True),
        ({"developer": True, "chunked_prefill": True}, True),
    ],
    ids=["settings not shown", "CPU with chunks", "CPU without chunks", "GPU with chunks"],
)
async def test_no_seeds_where_the_server_might_die_of_them(options: dict[str, Any], seeds: bool) -> None:
    """A seed is sent only to a server that shows that it survives it."""
    async with served("vllm", **options) as (server, engine):
        assert engine.capabilities.honours_seeds is seeds
        assert (await read(engine, request(seed=7))).error is None
        assert ("seed" in server.runs[-1].params) is seeds
