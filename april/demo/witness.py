"""An independent witness between engine and scheduler: what did the engine really hand over?

It wraps an engine, passes everything through, and keeps each attempt's tokens on its own, so that the
scheduler's ledger and every delivered segment can be checked against something the scheduler never touched.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np

from april.core.batch import Batch
from april.core.tape import Float32, Int32, SegmentKind
from april.core.versions import PolicyVersion
from april.engines.protocol import Chunk, Engine, Request
from april.testing.wrapped_engine import WrappedEngine


class Witness(WrappedEngine):
    """An engine that writes down what passes through it. Recording can be switched off (evaluations)."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.recording = True
        self.tokens = 0
        """Tokens handed over while recording."""
        self._attempts: dict[str, list[tuple[Int32, Float32, PolicyVersion]]] = {}

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Pass the engine's chunks through."""
        async with aclosing(self.engine.generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if self.recording:
                    self.tokens += len(chunk.tokens)
                    self._attempts.setdefault(request.attempt_id, []).append(
                        (chunk.tokens.copy(), chunk.logprobs.copy(), chunk.version)
                    )
                yield chunk

    def disagreements(self, batch: Batch) -> int:
        """Delivered generated tokens that differ from what their attempt handed over (token, log-prob or version)."""
        wrong = 0
        for sample in batch.samples:
            used: dict[str, int] = {}
            for segment in sample.segments:
                if segment.kind is not SegmentKind.GENERATED:
                    continue
                rows = self._attempts[segment.attempt_id]
                tokens = np.concatenate([r[0] for r in rows])
                logprobs = np.concatenate([r[1] for r in rows])
                versions = np.concatenate([np.full(len(r[0]), r[2].n) for r in rows])
                start = used.get(segment.attempt_id, 0)
                used[segment.attempt_id] = stop = start + segment.count
                here = slice(segment.start, segment.start + segment.count)
                equal = (
                    (sample.tokens[here] == tokens[start:stop])
                    & (sample.logprobs[here] == logprobs[start:stop])
                    & (sample.versions[here, 1] == versions[start:stop])
                )
                wrong += int(segment.count - equal.sum())
        return wrong
