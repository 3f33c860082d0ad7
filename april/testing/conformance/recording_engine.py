"""An engine around the one under test: writes down what april got, and cuts responses where a check says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from april.core.versions import PolicyVersion
from april.engines.protocol import Chunk, Engine, EngineFinish, Int32, Request
from april.errors import EngineError
from april.testing.wrapped_engine import WrappedEngine


class RecordingEngine(WrappedEngine):
    """Delegates to ``engine``, which it does not close.

    Args:
        engine: the engine under test.
        cut: how many tokens the attempt may have before it is handed over as aborted; None: as many as it asks for. The
            cut is made by a smaller budget, so that it hits the very token.
        shift: the number of updates by which april's version is behind the engine's.
    """

    def __init__(
        self, engine: Engine, cut: Callable[[Request], int | None] = lambda request: None, shift: int = 0
    ) -> None:
        super().__init__(engine)
        self._cut = cut
        self._shift = shift
        self.requests: dict[str, Request] = {}
        self.ends: dict[str, EngineFinish | None] = {}
        """How each attempt ended; None: broken off, or not yet."""
        self._chunks: dict[str, list[Int32]] = {}

    def tokens(self, attempt_id: str) -> Int32:
        """What april got for an attempt, int32 [T]."""
        return np.concatenate([np.empty(0, np.int32), *self._chunks[attempt_id]])

    @property
    def handed_over(self) -> int:
        """All tokens that april got."""
        return sum(len(tokens) for chunks in self._chunks.values() for tokens in chunks)

    @property
    def aborted(self) -> int:
        """Attempts that ended with ABORT."""
        return sum(end is EngineFinish.ABORT for end in self.ends.values())

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """See the protocol."""
        cut = self._cut(request)
        short = cut is not None and cut < request.sampling.max_tokens
        asked = replace(request, sampling=request.sampling.capped(cut)) if short and cut is not None else request
        self.requests[request.attempt_id] = request
        self.ends[request.attempt_id] = None
        chunks = self._chunks[request.attempt_id] = []
        async with aclosing(self.engine.generate(asked)) as stream:  # type: ignore[type-var]
            async for chunk in stream:
                chunks.append(chunk.tokens.copy())
                finish = chunk.finish
                if finish is not None and short:
                    finish = EngineFinish.ABORT
                if finish is not None:
                    self.ends[request.attempt_id] = finish
                version = PolicyVersion(chunk.version.incarnation, chunk.version.n - self._shift)
                yield replace(chunk, finish=finish, version=version)

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """See the protocol."""
        await self.engine.update_weights(PolicyVersion(version.incarnation, version.n + self._shift), path)

    async def close(self) -> None:
        """What still runs is ended; the engine stays open."""
        try:
            await self.engine.abort([i for i, end in self.ends.items() if end is None])
        except EngineError:
            return
