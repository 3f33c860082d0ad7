"""An engine for tests with real threads: requests that a test holds end when it says so, all others at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from april.core.sampling import LogprobKind
from april.core.versions import PolicyVersion
from april.engines.protocol import Capabilities, Chunk, EngineFinish, Health, Request

VOCAB, EOS = 1000, 0
HEAD, TAIL = [5, 5], [6, EOS]
"""A held request has HEAD before it is held; every request that is not aborted ends with TAIL."""


class GateEngine:
    """Holds the requests that ``holds`` names, until they are aborted or ``together`` of them are held."""

    def __init__(self, holds: Callable[[Request], bool] = lambda request: False, together: int | None = None) -> None:
        self.name = "gate"
        self.capabilities = Capabilities(
            logprob_kind=LogprobKind.TEMPERATURE, vocab_size=VOCAB, max_context=1000, eos_token_ids=(EOS,)
        )
        self.most = 0
        """Requests held at the same time, at most."""
        self._holds = holds
        self._together = together
        self._held: dict[str, asyncio.Future[EngineFinish]] = {}
        self._version = PolicyVersion(0, 0)

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        finish = EngineFinish.STOP
        if self._holds(request):
            yield self._chunk(HEAD)
            gate = self._held[request.attempt_id] = asyncio.get_running_loop().create_future()
            self.most = max(self.most, len(self._held))
            if self.most == self._together:
                self._open(list(self._held), finish)
            try:
                finish = await gate
            finally:
                self._held.pop(request.attempt_id, None)
        yield self._chunk(TAIL if finish is EngineFinish.STOP else [], finish)

    def _chunk(self, tokens: list[int], finish: EngineFinish | None = None) -> Chunk:
        return Chunk(np.array(tokens, np.int32), np.full(len(tokens), -1.0, np.float32), self._version, finish)

    def _open(self, attempt_ids: Sequence[str], finish: EngineFinish) -> None:
        for attempt_id in attempt_ids:
            gate = self._held.get(attempt_id)
            if gate is not None and not gate.done():
                gate.set_result(finish)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        self._open(list(self._held) if attempt_ids is None else attempt_ids, EngineFinish.ABORT)

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        self._version = version

    async def health(self) -> Health:
        return Health(ok=True)

    async def close(self) -> None: ...
