"""A fake vLLM server with an april engine before it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fake_servers.base import PlannedFault, RequestFault
from fake_servers.vllm import FakeVllmServer

from april.config.engines import VllmEngineConfig
from april.engines.vllm.engine import connect_vllm

KNOWN: dict[str, Any] = {"vocab_size": 512, "eos_token_ids": (2,)}
"""Settings that no files of a model tell here."""


@asynccontextmanager
async def served(
    *faults: PlannedFault | RequestFault, config: dict[str, Any] | None = None, stepped: bool = False, **options: Any
) -> AsyncIterator[tuple[FakeVllmServer, Any]]:
    """A server and an engine that is connected to it; faults count requests from the first after the connection."""
    server = FakeVllmServer(**options)
    await server.start()
    engine = None
    try:
        engine = await connected(server, config)
        server.stepped = stepped
        server.runs.clear()
        server.faults += [f if isinstance(f, PlannedFault) else PlannedFault(f) for f in faults]
        yield server, engine
        assert not server.violations
    finally:
        if engine is not None:
            await engine.close()
        await server.close()


async def connected(server: FakeVllmServer, config: dict[str, Any] | None = None) -> Any:
    (engine,) = await connect_vllm(VllmEngineConfig(urls=(server.url,), **(KNOWN | (config or {}))))
    return engine


async def beside(server: FakeVllmServer) -> Any:
    """Another engine before a server."""
    return await connected(server)
