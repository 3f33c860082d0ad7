"""What the core knows of each engine: load, version, health; and where the next attempt goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from april.core.settings import EngineLimits
from april.core.versions import PolicyVersion

FAILURES_BEFORE_QUARANTINE = 3
"""Answers in a row that cannot be true; one is an accident, three are an engine."""


@dataclass(slots=True)
class EngineState:
    """One engine as the core sees it."""

    limits: EngineLimits
    version: PolicyVersion
    in_flight: int = 0
    failures: int = 0
    quarantined: bool = False

    @property
    def has_room(self) -> bool:
        """Whether it takes one more request."""
        cap = self.limits.max_in_flight
        return not self.quarantined and (cap is None or self.in_flight < cap)


class EngineTable:
    """All engines, in the order of the configuration."""

    def __init__(self, engines: Sequence[EngineLimits], version: PolicyVersion) -> None:
        self.states = {e.name: EngineState(e, version) for e in engines}
        self.max_context = min(e.max_context for e in engines)
        self.eos_token_ids = frozenset(i for e in engines for i in e.eos_token_ids)
        kinds = {e.logprob_kind for e in engines}
        self.logprob_kind = kinds.pop() if len(kinds) == 1 else "mixed"

    def pick(self, version: PolicyVersion, avoid: str = "") -> EngineState | None:
        """The least loaded engine that confirmed ``version`` and has room; ``avoid`` only if no other has."""
        best: EngineState | None = None
        for name, state in self.states.items():
            if state.version != version or not state.has_room or (name == avoid and best is not None):
                continue
            if best is None or best.limits.name == avoid or state.in_flight < best.in_flight:
                best = state
        return best

    def usable(self, version: PolicyVersion) -> bool:
        """Whether some engine is well and has confirmed ``version``."""
        return any(s.version == version and not s.quarantined for s in self.states.values())

    def in_flight(self) -> dict[str, int]:
        """Attempts per engine."""
        return {name: s.in_flight for name, s in self.states.items()}

    def failed(self, name: str, *, at_once: bool) -> bool:
        """Count a failure; True when the engine is now quarantined (``at_once``, or after several in a row)."""
        state = self.states[name]
        state.failures += 1
        if state.quarantined or not (at_once or state.failures >= FAILURES_BEFORE_QUARANTINE):
            return False
        state.quarantined = True
        return True
