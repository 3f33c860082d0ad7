"""An engine around another one: everything is passed through, and subclasses look at, or change, what they care for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from april.core.versions import PolicyVersion
from april.engines.http.weight_directories import content_of
from april.engines.protocol import Capabilities, Chunk, Engine, Health, ReadsPaths, Request


class WrappedEngine:
    """Implements :class:`april.engines.protocol.Engine` by ``engine``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        async with aclosing(self.engine.generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        await self.engine.abort(attempt_ids)

    async def pause(self) -> None:
        await self.engine.pause()

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
