"""A weight update: pause the engines, hand over, load, resume; who is left out, and what holds if it fails halfway.

Invariants: the version moves only when every engine that may get requests for it has confirmed it; an update that is
cancelled either has changed nothing or goes on to its end; no engine is left paused that can be resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum

from april.core import commands as do
from april.core import events as ev
from april.core.context import CoreContext
from april.core.engine_calls import EngineCalls
from april.core.engine_table import EngineGate, EngineState, EngineWeights
from april.core.versions import PolicyVersion

QUARANTINED_PATIENCE_S = 2.0
"""Longest wait of a weight update for an engine that is not well anyway to pause."""
NAMED = 3
"""Engines that a sentence names."""
OF_ONE_MACHINE = 32
"""Last digits of what stands for a directory, which the same files have on no other machine."""
TRANSFER = 0
"""Stands for the number of a call where the trainer's own transfer has failed."""


class Phase(StrEnum):
    """How far an update is."""

    IDLE = "idle"
    STOPPING = "stopping"
    """What is in flight ends, and so does what gives weights to single engines if those are all there are."""
    PAUSING = "pausing"
    HANDING_OVER = "handing over"
    LOADING = "loading"
    CHECKING = "checking"
    """It has failed; engines that refused to load say whether they still have what they had."""
    RESTORING = "restoring"
    RESUMING = "resuming"


# names of the module: an enum's member costs 60 ns per use on Python 3.11, and these are used at every event
IDLE, STOPPING = Phase.IDLE, Phase.STOPPING


def weights_of(content: str) -> str:
    """Of what stands for a directory, the part that is the same on every machine; empty: it does not say."""
    return content[:-OF_ONE_MACHINE]


def some(names: Sequence[str]) -> str:
    """A few of them, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{'engine' if len(names) == 1 else 'engines'} {', '.join(names[:NAMED])}{more}"


class WeightUpdates:
    """One update at a time, the others in their order; ``adopt`` takes the new version and the last trained batch.

    An engine that cannot be reached is left out if there are others: it is quarantined, and gets no requests before it
    has these weights or later ones. If some engines have loaded the new weights and others have refused them, nothing
    is generated until an update has reached them all.
    """

    def __init__(
        self, context: CoreContext, calls: EngineCalls, adopt: Callable[[PolicyVersion, int | None], None]
    ) -> None:
        self._context = context
        self._calls = calls
        self._adopt = adopt
        self.phase = Phase.IDLE
        self.half_updated: str | None = None
        """Why nothing may be generated: the engines hold different weights, or such as nobody has told of."""
        self.path: str | None = None
        self.contents: tuple[str, ...] = ()
        """What ``path`` holds as long as it holds the present weights; empty: nobody could read it."""
        self._known = True
        """The present weights are those of ``contents``, or, where ``path`` is None, those of every server's start."""
        self._requests: list[ev.UpdateRequested] = []
        self._update = ev.UpdateRequested(update=0)
        self._left_out: set[str] = set()
        self._awaited: set[str] = set()
        """Engines that have not answered in this phase."""
        self._answers: dict[str, ev.EngineCallEnded] = {}
        self._failed: int | None = None
        """The call whose error the update ends with."""
        self._why = ""
        """What is wrong where that call raised nothing."""
        self._odd: frozenset[int] = frozenset()
        """Calls that loaded other weights than those of the update."""
        self._adopted = False
        self._written = False
        """Some update has begun to write weights, whatever became of it; or one of an earlier run had."""
        self._first = context.clock.current

    @property
    def none_yet(self) -> bool:
        """Whether no weights have been changed, nor were about to be: every engine has those of its start."""
        return not self._calls.moves and self._context.clock.current == self._first

    @property
    def running(self) -> bool:
        """Whether an update has begun and not ended."""
        return self.phase is not IDLE

    @property
    def waits(self) -> bool:
        """Whether an update waits for its time."""
        return self.phase is STOPPING or bool(self._requests)

    @property
    def pending(self) -> bool:
        """Whether there is an update, which runs or waits."""
        return self.phase is not IDLE or bool(self._requests)

    @property
    def broken(self) -> str | None:
        """Why nothing can be generated, where no update that might change it was asked for: who waits is told this."""
        return None if self.half_updated is None or self.pending else self.half_updated

    @property
    def waits_for(self) -> str:
        """What the update that is first in turn waits for, for people."""
        engines, in_flight = some(sorted(self._awaited)), len(self._context.attempts.in_flight)
        match self.phase:
            case Phase.IDLE:
                return "the end of an evaluation or of a pause"
            case Phase.STOPPING:
                given = [name for name, state in self._context.engines.states.items() if state.taken_back]
                return f"{in_flight} requests to end" if in_flight else f"{some(given)} to get the present weights"
            case Phase.PAUSING:
                return f"{engines} to pause"
            case Phase.HANDING_OVER:
                return "its transfer function to return"
            case Phase.LOADING:
                return f"{engines} to load"
            case Phase.CHECKING:
                return f"{engines} to say which weights it has"
            case Phase.RESTORING:
                return "the saved state to be taken"
            case Phase.RESUMING:
                return f"{engines} to resume"

    @property
    def loads_a_state(self) -> bool:
        """Whether the update that is first in turn is that of ``load_state_dict``."""
        first = self._update if self.running else next(iter(self._requests), self._update)
        return first.restores

    @property
    def numbers(self) -> list[int]:
        """Of the updates that were asked for and have not ended."""
        return [*([self._update.update] if self.running else ()), *(r.update for r in self._requests)]

    @property
    def trained(self) -> int:
        """The newest batch that those will commit which may still be adopted; -1: they commit none."""
        over = self.phase in (Phase.IDLE, Phase.CHECKING, Phase.RESUMING)
        updates = (*(() if over else (self._update,)), *self._requests)
        return max((u.trained for u in updates if u.trained is not None), default=-1)

    def can_give(self, state: EngineState) -> bool:
        """Whether april can give an engine the present weights on its own.

        A label alone does not make those of the start out of what a broken load has left.
        """
        named_only = self.path is None and state.weights is EngineWeights.HALF
        lost = state.not_given == self._context.clock.current
        return self._known and self.half_updated is None and not named_only and not lost

    # ---------------------------------------------------------------- from outside

    def requested(self, event: ev.UpdateRequested) -> None:
        """New weights; they wait for an update that runs."""
        self._requests.append(event)

    def cancelled(self, event: ev.UpdateCancelled) -> None:
        """An update has no effect where none has begun; engines that load go on to the end."""
        waiting = [r for r in self._requests if r.update == event.update]
        if waiting:
            self._requests.remove(waiting[0])
            self._context.out.append(do.UpdateEnded(event.update, self._context.clock.current))
        elif self._update.update != event.update:
            self._context.counters["late_events"] += 1
        elif self.phase is Phase.STOPPING:
            self._end()
        elif self.phase in (Phase.PAUSING, Phase.HANDING_OVER):
            self._resume()

    def go_on(self, *, held: bool) -> None:
        """Begin the next update, if its time has come; ``held``: somebody else has paused generation."""
        context = self._context
        ready = [r for r in self._requests if r.restores == held] if self._requests and not self.running else ()
        if ready:
            self._requests.remove(ready[0])
            self._update, self.phase = ready[0], Phase.STOPPING
            self._failed, self._why, self._adopted = None, "", False
            self._calls.moves += 1
            context.stop(list(context.attempts.in_flight.values()), sweep=True)
        if self.phase is Phase.STOPPING and not context.attempts.in_flight:
            taken_back = {name for name, state in context.engines.states.items() if state.taken_back}
            if not taken_back or len(taken_back) < len(context.engines.states):
                # an engine that gets the present weights at this moment gets the new ones afterwards
                self._left_out = taken_back
                self._pause()

    def joins(self, name: str) -> None:
        """An engine that comes in the middle of an update gets its weights afterwards.

        Before the first update it has those of its start. Once one has begun to write, in this run or an earlier one,
        its server may have been written to, under this name or another one, and what it loaded may never have been
        adopted.
        """
        self._written |= self._context.engines.states[name].limits.written  # nor are those of who comes later known
        if self.phase not in (Phase.IDLE, Phase.STOPPING):
            self._left_out.add(name)
        state = self._context.engines.states[name]
        if self._written:
            state.weights = EngineWeights.HALF
        elif self.none_yet:
            state.confirm(self._context.clock.current)

    def leave(self, names: Sequence[str]) -> None:
        """Engines are here no longer: an update that runs goes on without them."""
        self._left_out.difference_update(names)
        for name in names:
            self._answers.pop(name, None)
        if not self._awaited.isdisjoint(names):
            self._awaited.difference_update(names)
            self._go_on_if_answered()

    def weights_written(self, event: ev.WeightsWritten) -> None:
        """Nothing is generated before an update has reached all engines: weights were written without one."""
        self.half_updated = event.error
        self._context.stop(list(self._context.attempts.in_flight.values()), sweep=True)

    # ---------------------------------------------------------------- what engines and the trainer answer

    def call_ended(self, event: ev.EngineCallEnded) -> None:
        """An engine has answered; the update goes on when all have."""
        self._answers[event.engine] = event
        self._awaited.discard(event.engine)
        self._go_on_if_answered()

    def handed_over(self, event: ev.HandedOver) -> None:
        """The trainer's weights are where they belong, or nobody knows what is where."""
        if self.phase is not Phase.HANDING_OVER or event.update != self._update.update:
            self._context.counters["late_events"] += 1
        elif event.error is None:
            self._load()
        else:
            self._broken_off(event.error)

    def restored(self, event: ev.Restored) -> None:
        """The saved state is in the core, under the version that the engines have."""
        self._take_over()

    def checks(self, name: str) -> bool:
        """Whether the answer of this engine to a probe is for the update."""
        return self.phase is Phase.CHECKING and name in self._awaited

    def checked(self, event: ev.EngineProbed) -> None:
        """An engine that refused to load says what it has."""
        state = self._context.engines.states[event.engine]
        if event.answered and event.current:
            state.still_has_them()
        else:
            if event.answered:
                self._calls.lost(event.engine)
            self._context.engine_failed(event.engine)
        self._awaited.discard(event.engine)
        self._go_on_if_answered()

    # ---------------------------------------------------------------- the plan

    def _pause(self) -> None:
        states, limit_s = self._context.engines.states, self._context.settings.abort_deadline_s
        names = self._enter(Phase.PAUSING)
        hurry = not all(states[name].quarantined for name in names)
        for name in names:
            ill = hurry and states[name].quarantined
            self._calls.pause(name, min(limit_s, QUARANTINED_PATIENCE_S) if ill else limit_s)
        self._go_on_if_answered()

    def _paused(self) -> None:
        failed = self._failures()
        self._leave_out(failed)
        if self._fails_by(e for name, e in failed.items() if name not in self._left_out):
            self._resume()
        elif self._update.transfers:
            self.phase = Phase.HANDING_OVER
            self._context.out.append(do.HandOver(self._update.update))
        else:
            self._load()

    def _broken_off(self, why: str) -> None:
        """Engines with a part of the new weights must not generate as if they had the old ones."""
        self._written = True
        states = self._context.engines.states.values()
        own = [state for state in states if state.limits.remote or state.limits.own_weights]
        for state in own:
            state.lose(EngineWeights.HALF)
        if own:
            self.half_updated = (
                f"the last transfer of weights was broken off ({why}), and nobody knows what the servers have of "
                "it; call weight_update again before the next batch"
            )
        self._failed, self._why = TRANSFER, ""
        self._resume()

    @property
    def _version(self) -> PolicyVersion:
        current = self._context.clock.current
        return self._update.version or PolicyVersion(current.incarnation, current.n + 1)

    def _load(self) -> None:
        self._written = True
        for name in self._enter(Phase.LOADING):
            self._calls.load(name, self._version, self._update.path)
        self._go_on_if_answered()

    def _loaded(self) -> None:
        """All engines have the new weights, or it is known which do."""
        self._disown()
        for name, event in self._failures().items():
            if event.result is ev.CallResult.UNREACHABLE:
                self._calls.lost(name)
                self._context.engine_failed(name)
        self._leave_out({n: e for n, e in self._failures().items() if e.result is not ev.CallResult.REFUSED})
        failed = {name: e for name, e in self._failures().items() if name not in self._left_out}
        if not self._fails_by(failed.values()):
            self.half_updated = None
            update, loaded = self._update, {e.content for e in self._answers.values() if e.content}
            if not self._answers and update.content:  # who joins is the first to load it
                loaded.add(update.content)
            self.path, self.contents = update.path, tuple(sorted(loaded))
            self._known = bool(loaded) and not update.transfers
            if self._update.restores:
                self.phase = Phase.RESTORING
                self._context.out.append(do.Restore(self._update.update))
            else:
                self._take_over()
            return
        done = [name for name, e in self._answers.items() if e.result is ev.CallResult.DONE]
        for name in done:  # the next update has the same version, of other weights
            self._context.engines.states[name].lose(EngineWeights.HALF)
        if done or self._update.transfers:
            why = "; ".join(f"{name}: {event.error}" for name, event in failed.items())
            self.half_updated = (
                f"the last weight update reached engines {done} and not {list(failed)} ({why}); "
                "call weight_update again before the next batch"
            )
        refused = [name for name, event in failed.items() if event.result is ev.CallResult.REFUSED]
        if self.half_updated is None and refused:
            self.phase, self._awaited = Phase.CHECKING, set(refused)
            for name in refused:
                self._calls.probe(name)
        else:
            self._resume()

    def _disown(self) -> None:
        """Engines that loaded other weights than those of the update, each of them whole: theirs are of no version.

        Which are right, the trainer's process says, if it can read the directory; otherwise nobody does.
        """
        right, path = weights_of(self._update.content), self._update.path
        found = {name: weights_of(e.content) for name, e in self._answers.items() if e.result is ev.CallResult.DONE}
        kinds, self._odd = set(filter(None, found.values())), frozenset()
        if len(kinds) < 2:
            return
        for name, weights in found.items():
            if weights == right or (not weights and right in kinds):
                continue
            self._context.engines.states[name].lose(EngineWeights.HALF)
            self._odd |= {self._answers[name].call}
            self._answers[name] = replace(
                self._answers[name], result=ev.CallResult.UNREACHABLE, content="",
                error=f"{path} held other weights when engine {name} loaded it than when others did; write into a "
                "directory again when the weight update is over, and let all machines have the same files there",
            )  # fmt: skip

    def _take_over(self) -> None:
        self._adopted = True
        self._adopt(self._version, self._update.trained)
        self._resume()

    def _resume(self) -> None:
        for name in self._enter(Phase.RESUMING):
            self._calls.resume(name)
        self._go_on_if_answered()

    def _resumed(self) -> None:
        """An update that was adopted is done, whatever engines make of their resumption: asked again, it is another."""
        failed = self._failures()
        self._leave_out(failed)
        for name, event in failed.items():
            self._context.engine_failed(name)
            if self._adopted and name not in self._left_out:
                self._context.out.append(do.Warn(f"engine {name} has the new weights and is paused: {event.error}"))
        if self._failed is None and not self._adopted:
            self._fails_by(failed.values())
        self._end()

    def _end(self) -> None:
        update, current = self._update.update, self._context.clock.current
        self._context.out.append(do.UpdateEnded(update, current, self._failed, self._why))
        self.phase, self._awaited = Phase.IDLE, set()
        self._calls.moves += 1

    # ---------------------------------------------------------------- steps of the plan

    def _enter(self, phase: Phase) -> list[str]:
        """The engines that take part in the next phase, each of which is to answer."""
        names = [name for name in self._context.engines.states if name not in self._left_out]
        self.phase, self._awaited, self._answers = phase, set(names), {}
        return names

    def _go_on_if_answered(self) -> None:
        """The next phase, once all engines have answered in this one; there may be none that is to."""
        if self._awaited:
            return
        if self.phase is Phase.PAUSING:
            self._paused()
        elif self.phase is Phase.LOADING:
            self._loaded()
        elif self.phase is Phase.CHECKING:
            self._resume()
        elif self.phase is Phase.RESUMING:
            self._resumed()

    def _failures(self) -> dict[str, ev.EngineCallEnded]:
        answers = self._answers
        names = [name for name in self._context.engines.states if name in answers]
        return {name: answers[name] for name in names if answers[name].result is not ev.CallResult.DONE}

    def _leave_out(self, failed: dict[str, ev.EngineCallEnded]) -> set[str]:
        """Engines that failed and can be done without, as there are others: quarantined until a probe."""
        if len(self._left_out.union(failed)) == len(self._context.engines.states):
            return set()
        for name, event in failed.items():
            self._context.out.append(do.Warn(f"engine {name} is left out of the weight update: {event.error}"))
            self._context.engine_failed(name)
        self._left_out |= set(failed)
        return set(failed)

    def _fails_by(self, events: Iterable[ev.EngineCallEnded]) -> bool:
        """Whether there is an error that the update ends with: the first of these."""
        first = next(iter(events), None)
        self._failed = None if first is None else first.call
        self._why = first.error if first is not None and first.call in self._odd else ""
        return first is not None

    def check(self) -> str | None:
        """What contradicts itself, or None."""
        states = self._context.engines.states
        if self.phase not in (Phase.IDLE, Phase.STOPPING) and len(self._context.attempts):
            return f"requests are in flight while an update is {self.phase}"
        for name, state in states.items():
            part = self.running and self.phase is not Phase.STOPPING and name not in self._left_out
            if bool(state.call) != (state.taken_back or (self.phase is not Phase.CHECKING and name in self._awaited)):
                return f"engine {name} is called, and nobody waits for it, or the other way round"
            usable = self._context.clock.current in state.loaded and not state.quarantined
            if not self.running and usable and state.gate is not EngineGate.OPEN:
                return f"engine {name} is well, and nobody opens its gate, which is {state.gate}"
            writing = self.phase in (Phase.HANDING_OVER, Phase.LOADING, Phase.RESTORING)
            if part and writing and state.gate is not EngineGate.CLOSED:
                return f"engine {name} takes part in an update that is {self.phase}, and its gate is {state.gate}"
            if part and self.phase is Phase.RESTORING and self._version not in state.loaded:
                return f"engine {name} does not have the weights that are adopted"
        return None
