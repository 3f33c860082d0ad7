"""One request at a fake engine: tokens are made as time passes, and taken out in chunks.

Invariant: made = sent + what is in ``unsent``, and no token is made beyond ``target``, so that a fault after k tokens
finds exactly k.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field

from april.core.versions import PolicyVersion
from april.engines.protocol import EngineFinish, Int32
from april.errors import EngineError
from april.testing.fault_script import AT_TOKENS, AttemptFaults
from april.testing.records import AttemptRecord


@dataclass(slots=True)
class FakeStream:
    """What an engine keeps of a request that it serves."""

    record: AttemptRecord
    script: AttemptFaults
    tokens: Int32
    """What this attempt is going to say."""
    finish: EngineFinish
    token_s: float
    chunk_tokens: int | None
    running: bool = False
    """It has a place."""
    made: int = 0
    made_until: float = 0.0
    """Time from which the next token counts; in the future: nothing is made before."""
    unsent: deque[tuple[PolicyVersion, int]] = field(default_factory=deque)
    """Tokens made and not handed over, by version."""
    sent: int = 0
    passed: int = -1
    """Faults up to this number of tokens had their chance."""
    empty_until: float = -math.inf
    """Chunks without tokens come before this time."""
    abort_at: float = math.inf
    deaf_until: float = -math.inf
    """Aborts have no effect before this time."""
    error: EngineError | None = None
    wake: asyncio.Future[None] | None = None

    @property
    def target(self) -> int:
        """Tokens of the attempt at which something happens next: a chunk is full, or a fault is due."""
        full = len(self.tokens) if self.chunk_tokens is None else self.sent + self.chunk_tokens
        return min(full, len(self.tokens), *(k for k in self.marks if k >= self.sent and k > self.passed))

    @property
    def marks(self) -> list[int]:
        """Numbers of tokens after which a fault is due."""
        return [fault.after_tokens for fault in self.script.faults if fault.kind in AT_TOKENS]

    @property
    def due_s(self) -> float:
        """When the target is reached."""
        return self.made_until + (self.target - self.made) * self.token_s

    def make(self, now: float, version: PolicyVersion) -> None:
        """The tokens for which there was time since the last look."""
        if not self.running or self.error is not None or self.made_until >= now:
            return
        # a timer of a real loop may come a moment early
        count = min(int((now - self.made_until) / self.token_s + 1e-6), self.target - self.made)
        if count <= 0:
            return
        self.made += count
        self.made_until += count * self.token_s
        if self.unsent and self.unsent[-1][0] == version:
            count += self.unsent.pop()[1]
        self.unsent.append((version, count))

    def take(self, version: PolicyVersion) -> tuple[Int32, PolicyVersion]:
        """The next tokens of one version; none, and ``version``, if nothing was made."""
        version, count = self.unsent.popleft() if self.unsent else (version, 0)
        tokens = self.tokens[self.sent : self.sent + count].copy()
        self.sent += count
        return tokens, version

    def withhold(self) -> None:
        """What was made and not handed over never will be."""
        self.record.withheld += sum(count for _, count in self.unsent)
        self.unsent.clear()

    def wake_up(self) -> None:
        """Something has happened to the stream."""
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)

    async def wait(self, until: float) -> None:
        """Until a time on the loop's clock, or until something happens to the stream."""
        loop = asyncio.get_running_loop()
        self.wake = loop.create_future()
        timer = loop.call_at(until, self.wake_up) if until < math.inf else None
        try:
            await self.wake
        finally:
            self.wake = None
            if timer is not None:
                timer.cancel()
