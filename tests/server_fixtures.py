"""Fake servers of every kind with april's engines before them, and requests for those."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from fake_servers.base import PlannedFault, RequestFault, uncut
from fake_servers.openai import FakeOpenAIServer
from fake_servers.sglang import FakeSglangRouter, FakeSglangServer
from fake_servers.vllm import FakeVllmServer
from steady_loop import turn_of_all

from april.config.engines import OpenAIEngineConfig, ServerEngineConfig, SglangEngineConfig, VllmEngineConfig
from april.core.attachments import Extras
from april.core.batch import DeliveredSample
from april.core.sampling import SamplingParams
from april.core.versions import PolicyVersion
from april.engines.http.http_client import HttpClient
from april.engines.http.server_probe import ServerFacts
from april.engines.kinds.factory import open_servers
from april.engines.kinds.identify import probe
from april.engines.protocol import Chunk, EngineFinish, Request
from april.engines.weight_transfer import GroupInvitation, TensorSpec

PROMPT = [11, 12, 13]
PATIENCE_S = 60.0
"""A test that hangs ends then; nothing is judged by time."""
KNOWN: dict[str, Any] = {"vocab_size": 512, "eos_token_ids": (2,)}
"""Settings that no files of a model tell here."""
KINDS: dict[str, tuple[Callable[..., Any], type[ServerEngineConfig], dict[str, Any]]] = {
    "vllm": (FakeVllmServer, VllmEngineConfig, KNOWN),
    "sglang": (FakeSglangServer, SglangEngineConfig, {}),
    "openai": (FakeOpenAIServer, OpenAIEngineConfig, KNOWN | {"max_len": 4096}),
}
"""Server, settings, and what the settings must say."""
BOTH = ["vllm", "sglang"]
"""Kinds of servers that abort by id, name their weights and load them."""
_numbers = itertools.count()


def request(
    prompt: Sequence[int] = PROMPT, max_tokens: int = 64, *, temperature: float = 1.0, stream: bool = False,
    extras: tuple[str, ...] = (), extras_from: int = 0, **more: Any,
) -> Request:  # fmt: skip
    """A fresh attempt with an id as april makes them."""
    sampling = SamplingParams(max_tokens, temperature=temperature, **more)
    return Request(
        attempt_id=f"{next(_numbers):032x}", token_ids=np.array(prompt, np.int32), sampling=sampling, stream=stream,
        extras=extras, extras_from=extras_from,
    )  # fmt: skip


@dataclass
class Got:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    finish: EngineFinish | None = None
    chunks: list[Chunk] = field(default_factory=list)
    extras: Extras = field(default_factory=dict)
    cached_tokens: int | None = None
    error: Exception | None = None


async def read(engine: Any, asked: Request, got: Got | None = None) -> Got:
    """All chunks; an error is kept beside them."""
    got = got if got is not None else Got()
    try:
        async with aclosing(engine.generate(asked)) as chunks:
            async for chunk in chunks:
                assert got.finish is None, "a chunk after the last one"
                got.tokens += chunk.tokens.tolist()
                got.logprobs += chunk.logprobs.tolist()
                got.versions += [chunk.version] * len(chunk.tokens)
                got.finish = chunk.finish
                got.chunks.append(chunk)
                assert got.finish is not None or not chunk.extras, "rows before the last chunk"
                got.extras = chunk.extras
                got.cached_tokens = chunk.cached_tokens
    except Exception as error:
        got.error = error
    return got


@asynccontextmanager
async def listening(server: Any) -> AsyncIterator[str]:
    """A fake server on this loop; gives its address."""
    try:
        yield await server.start()
    finally:
        await server.close()


@asynccontextmanager
async def served(
    kind: str, *faults: PlannedFault | RequestFault, config: dict[str, Any] | None = None, stepped: bool = False,
    server: Any = None, **options: Any,
) -> AsyncIterator[tuple[Any, Any]]:  # fmt: skip
    """A server and an engine that is connected to it; faults count requests from the first after the connection."""
    server = KINDS[kind][0](**options) if server is None else server
    async with listening(server):
        engine = await connected(kind, server, **(config or {}))
        server.stepped = stepped
        server.runs.clear()
        server.faults += [f if isinstance(f, PlannedFault) else PlannedFault(f) for f in faults]
        try:
            yield server, engine
            assert not server.violations
        finally:
            await engine.close()


def settings(kind: str, *servers: Any, **config: Any) -> Any:
    """Those of an engine of a kind before these servers, or addresses."""
    urls = tuple(server if isinstance(server, str) else server.url for server in servers)
    return KINDS[kind][1](**({"urls": urls} | KINDS[kind][2] | config))


async def connected(kind: str, server: Any, **config: Any) -> Any:
    """An engine before a server that runs."""
    (engine,) = await open_servers(settings(kind, server, **config))
    return engine


@asynccontextmanager
async def behind_a_router(
    *servers: Any, key: str = "", late: int = 0, **config: Any
) -> AsyncIterator[tuple[Any, Any]]:
    """SGLang servers, a router before them (``key`` and ``late`` are its own), and the engine before the router."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(listening(server)) for server in servers]
        router = await stack.enter_async_context(FakeSglangRouter(urls, key=key, late=late))
        engine = await routed(router, *servers, **config)
        stack.push_async_callback(engine.close)
        yield router, engine
        assert not [v for server in servers for v in server.violations]


async def routed(router: Any, *servers: Any, **config: Any) -> Any:
    """The engine of SGLang servers behind a router that runs."""
    (engine,) = await open_servers(settings("sglang", *servers, router=router.url, **config))
    return engine


async def beside(kind: str, server: Any) -> Any:
    """Another engine before a stepped server; the probe's requests are let through."""
    stepped = server.stepped
    server.go_on()
    engine = await connected(kind, server)
    server.stepped = stepped
    return engine


def kind_of(server: Any) -> str:
    if isinstance(server, FakeSglangServer):
        return "sglang"
    return "openai" if isinstance(server, FakeOpenAIServer) else "vllm"


async def probed(server: Any, key: str | None = None, **config: Any) -> Any:
    """What the probe finds at a server that runs."""
    client = HttpClient(server.url, name="probed", api_key=key)
    try:
        return await probe(client, settings(kind_of(server), server, **config))
    finally:
        await client.close()


def facts_of(server: Any, **config: Any) -> Any:
    """What the probe finds at a server that runs for this alone."""

    async def program() -> ServerFacts:
        async with asyncio.timeout(PATIENCE_S), listening(server):
            return await probed(server, **config)

    return asyncio.run(program())


def is_of_its_weights(sample: DeliveredSample, weights: str = "w", **options: Any) -> None:
    """Assert that each segment is what the weights of its version say to what stands before it."""
    before = list(map(int, sample.prompt.token_ids))
    for segment in sample.segments:
        part = slice(segment.start, segment.start + segment.count)
        made = sample.tokens[part].tolist(), sample.logprobs[part].tolist()
        wanted = uncut(before, weights=f"{weights}{segment.version.n}", max_tokens=segment.count, **options)
        assert made == wanted, sample.id
        before += made[0]
    assert len(before) == len(sample.prompt.token_ids) + len(sample.tokens)


async def until(true: Callable[[], bool]) -> None:
    """Turns of the loop until something is true; the test's own patience bounds it."""
    while not true():  # noqa: ASYNC110 - the server lives on this loop and moves by its turns
        await asyncio.sleep(0)


async def begun(server: Any, work: Coroutine[Any, Any, Got]) -> asyncio.Task[Got]:
    """A request that is the only one at the server."""
    task = asyncio.create_task(work)
    await until(lambda: server.open_requests == 1)
    return task


async def update(engine: Any, version: PolicyVersion, path: str | None = None) -> None:
    """A whole update; the engine goes on if it fails."""
    await engine.pause()
    try:
        await engine.update_weights(version, path)
    finally:
        await engine.resume()


BUCKETS = (TensorSpec("embed.weight", "bfloat16", (8, 4)),), (TensorSpec("head.weight", "float32", (4,)),)
"""What a transfer of weights brings."""


def invitation(**changes: Any) -> GroupInvitation:
    """To a group of the sender and one worker."""
    made = GroupInvitation(
        address="127.0.0.1", port=4711, world_size=2, rank_offset=1, group="april-g1", backend="gloo", timeout_s=60.0,
        bucket_bytes=1 << 20,
    )  # fmt: skip
    return replace(made, **changes)


async def sent(engine: Any, at: GroupInvitation | None = None) -> None:
    """All phases of a transfer to an engine that is paused."""
    await engine.join(at or invitation())
    await engine.begin()
    for bucket in BUCKETS:
        await engine.receive(bucket, bucket is BUCKETS[-1])
    await engine.finish()


async def transferred(engine: Any, version: PolicyVersion) -> None:
    """A whole update by a transfer."""
    await engine.pause()
    await sent(engine)
    await engine.update_weights(version)
    await engine.resume()


def saved(directory: Path, name: str) -> str:
    """A directory that looks like one with weights."""
    (directory / name).mkdir(exist_ok=True)
    (directory / name / "model.safetensors").write_bytes(name.encode())
    return str(directory / name)


class ServerThread:
    """Fake servers on a loop of their own, as a scheduler's background loop sees them; also a context manager.

    Their tokens wait for the turns of the loops that ask: no stalled thread finds them all made at once.
    """

    def __init__(self, *servers: Any) -> None:
        self.servers = servers
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="fake servers")

    def __enter__(self) -> ServerThread:
        self._thread.start()
        for server in self.servers:
            server.turn = turn_of_all
            self.call(server.start())
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            self.call(server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine beside the servers."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)
