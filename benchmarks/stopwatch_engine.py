"""An engine with a stopwatch: when aborts were asked for, when the last request ended, and how many were in flight."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from april.engines.protocol import Chunk, Engine, Request
from april.testing.recording_engine import RecordingEngine


class StopwatchEngine(RecordingEngine):
    """Passes everything through; read the figures between two steps and :meth:`reset` them."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._running = 0
        self._changed = time.perf_counter()
        self.reset()

    def reset(self) -> None:
        """Begin anew; nothing is in flight."""
        self._changed = time.perf_counter()
        self.busy_s = 0.0
        """Requests in flight, integrated over the time of the step."""
        self.first_abort: float | None = None
        self.last_end: float | None = None

    @property
    def abort_s(self) -> float:
        """Seconds from the first abort to the end of the last request; 0 when nothing was aborted."""
        if self.first_abort is None or self.last_end is None:
            return 0.0
        return max(self.last_end - self.first_abort, 0.0)

    def up_to_now(self) -> None:
        """Count the time since the last request began or ended, too."""
        self._change(0)

    def _change(self, by: int) -> float:
        now = time.perf_counter()
        self.busy_s += self._running * (now - self._changed)
        self._changed = now
        self._running += by
        return now

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Pass the chunks through."""
        self._change(+1)
        try:
            async with aclosing(self.engine.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
        finally:
            self.last_end = self._change(-1)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Note the time of the first one."""
        self.first_abort = self.first_abort or time.perf_counter()
        await self.engine.abort(attempt_ids)
