"""A fake SGLang server with an april engine before it, and requests for it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fake_servers.base import PlannedFault, RequestFault
from fake_servers.sglang import FakeSglangServer
from steady_loop import turn_of_all

from april.config.engines import SglangEngineConfig
from april.core.sampling import SamplingParams
from april.core.versions import PolicyVersion
from april.engines.protocol import EngineFinish, Request
from april.engines.sglang.engine import SglangEngine, connect_sglang

PROMPT = [11, 12, 13]
PATIENCE_S = 60.0
"""A test that hangs ends then; nothing is judged by time."""
_numbers = itertools.count()


def run(program: Callable[[], Awaitable[None]]) -> None:
    """The program on a loop of its own; nothing may be left behind but what the program's own server does."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await program()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"tasks are left: {others}"

    asyncio.run(bounded())


def request(
    prompt: Sequence[int] = PROMPT, max_tokens: int = 64, *, temperature: float = 1.0, stream: bool = False, **more: Any
) -> Request:
    """A fresh attempt with an id as april makes them."""
    sampling = SamplingParams(max_tokens, temperature=temperature, **more)
    return Request(
        attempt_id=f"{next(_numbers):032x}", token_ids=np.array(prompt, np.int32), sampling=sampling, stream=stream
    )


@dataclass
class Got:
    """What came for a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    finish: EngineFinish | None = None
    chunks: int = 0
    error: Exception | None = None


async def read(engine: SglangEngine, asked: Request, got: Got | None = None) -> Got:
    """All chunks; an error is kept beside them."""
    got = got if got is not None else Got()
    try:
        async with aclosing(engine.generate(asked)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                got.tokens += chunk.tokens.tolist()
                got.logprobs += chunk.logprobs.tolist()
                got.versions += [chunk.version] * len(chunk.tokens)
                got.finish = chunk.finish
                got.chunks += 1
    except Exception as error:
        got.error = error
    return got


@asynccontextmanager
async def served(
    *faults: PlannedFault | RequestFault, config: dict[str, Any] | None = None, stepped: bool = False, **options: Any
) -> AsyncIterator[tuple[FakeSglangServer, SglangEngine]]:
    """A server and an engine that is connected to it; faults count requests from the first after the connection."""
    server = FakeSglangServer(**options)
    await server.start()
    engine: SglangEngine | None = None
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


async def connected(server: FakeSglangServer, config: dict[str, Any] | None = None) -> SglangEngine:
    (engine,) = await connect_sglang(SglangEngineConfig(urls=(server.url,), **(config or {})))
    assert isinstance(engine, SglangEngine)
    return engine


async def beside(server: FakeSglangServer) -> SglangEngine:
    """Another engine before a stepped server; the probe's requests are let through."""
    server.go_on()
    engine = await connected(server)
    server.stepped = True
    return engine


async def until(true: Callable[[], bool]) -> None:
    """Turns of the loop until something is true; the test's own patience bounds it."""
    while not true():  # noqa: ASYNC110 - the server lives on this loop and moves by its turns
        await asyncio.sleep(0)


class ServerThread:
    """Fake servers on a loop of their own, as a scheduler's background loop sees them; also a context manager.

    Their tokens wait for the turns of the loops that ask: no stalled thread finds them all made at once.
    """

    def __init__(self, *servers: Any) -> None:
        self.servers = servers
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake servers")

    def __enter__(self) -> ServerThread:
        self._thread.start()
        for server in self.servers:
            server.turn = turn_of_all
            self.call(server.start())
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            self.call(server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine beside the servers."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)
