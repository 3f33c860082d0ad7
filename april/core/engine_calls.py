"""Calls of engines: pause, load, resume and probe; what each moves in the engine's gate and weights.

Invariant: an engine is confirmed to have a version only by its own word that it has loaded it; while a call to load
runs, and after one that failed, it has none.
"""

from __future__ import annotations

from april.core import commands as do
from april.core import events as ev
from april.core.context import CoreContext
from april.core.engine_table import EngineGate, EngineWeights
from april.core.types import AttemptState, DropReason
from april.core.versions import PolicyVersion


class EngineCalls:
    """At most one call per engine; one that is followed by another is void."""

    def __init__(self, context: CoreContext) -> None:
        self._context = context
        self._number = 0
        self._loading: dict[str, tuple[PolicyVersion, bool]] = {}
        """By engine: the version that it loads, and whether its weights are torn if that fails."""
        self.moves = 0
        """Grows when weights are about to change and when they have; a probe says nothing of other times."""
        self.turns = 0
        """Grows when a step begins and when it ends: between two steps the trainer may change weights."""
        self._asked: dict[str, tuple[int, int]] = {}

    def pause(self, name: str, within_s: float) -> None:
        """Close its gate."""
        self._context.engines.states[name].gate = EngineGate.CLOSING
        self._context.out.append(do.PauseEngine(name, self._next(name), within_s))

    def load(self, name: str, version: PolicyVersion, path: str | None, contents: tuple[str, ...] = ()) -> None:
        """Give it weights; until it says that it has them, nobody knows which it has.

        ``contents``: the directory must hold one of these; none: whatever it holds.
        """
        state = self._context.engines.states[name]
        self._loading[name] = version, path is not None or state.weights is EngineWeights.HALF
        state.loaded_before = state.loaded or state.loaded_before
        state.loaded, state.weights = frozenset(), EngineWeights.LOADING
        within_s = self._context.settings.outage_deadline_s
        self._context.out.append(
            do.LoadEngine(
                engine=name, call=self._next(name), within_s=within_s, version=version, path=path, contents=contents
            )
        )

    def resume(self, name: str) -> None:
        """Open its gate."""
        self._context.engines.states[name].gate = EngineGate.OPENING
        within_s = self._context.settings.abort_deadline_s
        self._context.out.append(do.ResumeEngine(name, self._next(name), within_s))

    def _next(self, name: str) -> int:
        self._number += 1
        self._context.engines.states[name].call = self._number
        return self._number

    def ended(self, event: ev.EngineCallEnded) -> bool:
        """What a call has done to gate and weights; False for one that is void."""
        state = self._context.engines.known(event.engine)
        if event.call != state.call:
            return False
        state.call = 0
        done = event.result is ev.CallResult.DONE
        if state.weights is EngineWeights.LOADING:
            version, tears = self._loading.pop(event.engine)
            state.weights = EngineWeights.HALF if tears else EngineWeights.UNKNOWN
            if done:
                state.confirm(version)
            elif event.result in (ev.CallResult.BUSY, ev.CallResult.OTHER_CONTENT):
                state.still_has_them()
        elif state.gate is EngineGate.OPENING:
            state.gate = EngineGate.OPEN if done else EngineGate.CLOSED
        elif done:
            state.gate = EngineGate.CLOSED
        return True

    def forget(self, name: str) -> None:
        """An engine has left, or comes anew: it owes no answer."""
        self._loading.pop(name, None)
        self._asked.pop(name, None)

    # ---------------------------------------------------------------- what engines say of themselves

    def probe(self, name: str) -> None:
        """Ask for its health."""
        self._number += 1
        self._context.engines.states[name].probe = self._number
        self._asked[name] = self.moves, self.turns
        self._context.out.append(do.ProbeEngine(name, self._number))

    def answered(self, event: ev.EngineProbed) -> tuple[bool, bool]:
        """Whether no weights have moved since the probe was sent, and whether no step has begun or ended either."""
        self._context.engines.states[event.engine].probe = 0
        moves, turns = self._asked.pop(event.engine)
        return moves == self.moves, (moves, turns) == (self.moves, self.turns)

    def lost(self, name: str) -> None:
        """It does not have the weights that it was given; what it generates at this moment, nobody knows by which."""
        context = self._context
        context.counters["stale_engines"] += 1
        state = context.engines.states[name]
        state.lose(EngineWeights.HALF if state.weights is EngineWeights.HALF else EngineWeights.UNKNOWN)
        doubtful = [a for a in context.attempts if a.engine == name]
        for attempt in doubtful:
            if attempt.state in (AttemptState.WANTED, AttemptState.SILENT):
                attempt.lost_for = DropReason.UNKNOWN_WEIGHTS
                context.to(attempt, AttemptState.DOUBTFUL, f"engine {name} has other weights")
        context.stop(doubtful)
