"""Wraps an engine and records its requests, chunks and aborts; subclasses can alter them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from april.core.versions import PolicyVersion
from april.engines.http.weight_directories import content_of
from april.engines.protocol import (
    Capabilities,
    Chunk,
    Engine,
    EngineFinish,
    Health,
    KeepsRequests,
    OnWeightUpdate,
    ReadsPaths,
    Request,
)
from april.errors import EngineError
from april.testing.records import AbortRecord


class RecordingEngine:
    """An engine that passes all calls on to ``engine`` and records requests, chunks and aborts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: dict[str, Request] = {}
        """Every request as the caller made it, by attempt id."""
        self.yielded: dict[str, list[Chunk]] = defaultdict(list)
        """Copies of the chunks that the caller got, by attempt id."""
        self.ends: dict[str, EngineFinish | None] = {}
        """Finish of every attempt, by attempt id; None while the attempt runs, or if it ended with an error."""
        self.aborts: list[AbortRecord] = []
        self.open_streams = 0

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    @property
    def tokens(self) -> int:
        """Number of tokens that the caller got."""
        return sum(len(chunk.tokens) for chunks in self.yielded.values() for chunk in chunks)

    def alter_request(self, request: Request) -> Request:
        """Return the request to pass on to the engine; subclasses may override this."""
        return request

    def alter_chunk(self, request: Request, chunk: Chunk) -> Chunk:
        """Return the chunk to pass on to the caller; subclasses may override this."""
        return chunk

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        altered = self.alter_request(request)
        self.requests[request.attempt_id] = request
        self.ends[request.attempt_id] = None
        record = self.yielded[request.attempt_id]
        self.open_streams += 1
        try:
            async with aclosing(self.engine.generate(altered)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    chunk = self.alter_chunk(request, chunk)
                    record.append(replace(chunk, tokens=np.array(chunk.tokens), logprobs=np.array(chunk.logprobs)))
                    self.ends[request.attempt_id] = chunk.finish
                    yield chunk
        finally:
            self.open_streams -= 1

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        now = asyncio.get_running_loop().time()
        self.aborts.append(AbortRecord(now, None if attempt_ids is None else tuple(attempt_ids)))
        await self.engine.abort(attempt_ids)

    async def pause(self) -> None:
        await self.engine.pause()

    async def pause_in_flight(self, in_flight: OnWeightUpdate) -> None:
        if not isinstance(self.engine, KeepsRequests):
            raise EngineError(f"engine {self.name} keeps no requests over a weight update")
        await self.engine.pause_in_flight(in_flight)

    async def resume(self) -> None:
        await self.engine.resume()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        await self.engine.update_weights(version, path)

    async def content_of(self, path: str) -> str:
        return await self.engine.content_of(path) if isinstance(self.engine, ReadsPaths) else content_of(path)

    async def health(self) -> Health:
        return await self.engine.health()

    async def close(self) -> None:
        await self.engine.close()
