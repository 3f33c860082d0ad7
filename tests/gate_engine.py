"""A fake engine for tests with real threads: requests that a test holds end when it says so, all others at once."""

from __future__ import annotations

import math
from collections.abc import Callable

from april.engines.protocol import Request
from april.testing import FakeEngine, Fault, FaultScript
from april.testing.fake_engine import FakeStream
from april.testing.fault_script import AttemptFaults

VOCAB, EOS = 1000, 0
HEAD, TAIL = [5, 5], [6, EOS]
"""A held request has HEAD before it is held; every request that is not aborted ends with TAIL."""


class _Holds(FaultScript):
    """Stalls the attempts that were marked, behind HEAD."""

    def __init__(self) -> None:
        super().__init__()
        self.marked: set[str] = set()

    def attempt(self, engine: str, request: Request) -> AttemptFaults:
        found = super().attempt(engine, request)
        if request.attempt_id in self.marked:
            self._drawn.append(Fault("stall", after_tokens=len(HEAD)))
            found.faults.append(self._drawn[-1])
        return found


class GateEngine(FakeEngine):
    """Holds the requests that ``holds`` names, until they are aborted or ``together`` of them are held."""

    def __init__(self, holds: Callable[[Request], bool] = lambda request: False, together: int | None = None) -> None:
        self._holds, self._together, self._marks = holds, together, _Holds()
        super().__init__(
            "gate", responses=self._says, faults=self._marks, seconds_per_token=1e-9, max_running=1 << 16,
            vocab_size=VOCAB, eos_token_id=EOS, max_context=1000,
        )  # fmt: skip
        self.most = 0
        """Requests held at the same time, at most."""

    def _says(self, request: Request) -> list[int]:
        held = self._holds(request)
        if held:
            self._marks.marked.add(request.attempt_id)
        return [*HEAD, *TAIL] if held or request.response_offset else TAIL

    def _break_here(self, stream: FakeStream, now: float) -> bool:
        stalled = super()._break_here(stream, now)
        if stalled:
            held = [s for s in self._streams.values() if s.made_until == math.inf]
            self.most = max(self.most, len(held))
            for one in held if self.most == self._together else ():
                one.made_until = now
                one.wake_up()
        return stalled
