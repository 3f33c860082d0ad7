"""A subject whose trouble is made at the scripted engine behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from engine import Engine
from rich.console import Console

from april.core.tape import Float32
from april.testing.gateway import Attempt, Door, Row, Subject, run
from april.testing.records import fake_logprobs


class EngineSubject(Subject):
    """The engine's side of a subject; ``door.id`` is the session's name there."""

    def __init__(self) -> None:
        self.engine = Engine()

    async def record(self, door: Door) -> Sequence[Attempt]:
        return self.engine.attempts[door.id]

    def recompute(self, row: Row) -> Float32:
        pairs = zip(row.tokens, row.versions or (), strict=True)
        return np.array([fake_logprobs([t], v)[0] for t, v in pairs], np.float32)

    async def hold(self) -> None:
        self.engine.holds = True

    async def held(self) -> int:
        return sum(not waiting.done() for waiting in self.engine.standing)

    async def release(self) -> None:
        self.engine.release()

    async def abort(self) -> None:
        self.engine.abort()

    async def unavailable(self) -> None:
        self.engine.refuses = True

    async def refused(self) -> int:
        return self.engine.refused

    async def available(self) -> None:
        self.engine.refuses = False

    async def kill(self) -> None:
        self.engine.die()

    async def update(self) -> None:
        self.engine.update()


def main(subject: type[Subject]) -> None:
    """Run the suite and print its table."""
    report = asyncio.run(run(subject))
    Console(width=150).print(report.table())
    passed = sum(v.outcome == "passed" for v in report.verdicts)
    print(f"{passed} of {len(report.verdicts)} kept, {len(report.failed)} not")
