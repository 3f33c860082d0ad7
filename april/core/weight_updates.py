"""Runs a weight update over all engines: pause, transfer, load, resume; engines that fail may be left out.

Requests in flight end before the pause. With ``on_weight_update: keep`` or ``recompute``, engines keep them, and april
ends only requests that must not continue: requests at an engine that is left out or resumes without complete weights
and, with ``keep``, requests without a token, whose prompt was read with the old weights.

Invariants: the policy version changes only when every engine that may get requests for it has confirmed it. An engine's
version is confirmed only by its own report of a load; it is unknown while a load runs, and after a load that failed. A
cancelled update has either changed nothing or goes on to its end. Every engine that can be resumed is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from msgspec.structs import replace

from april.core import commands as do
from april.core import events as ev
from april.core.context import CoreContext
from april.core.engine_table import EngineGate, EngineState, EngineWeights
from april.core.types import Attempt, AttemptState, DropReason, OnWeightUpdate
from april.core.versions import PolicyVersion

QUARANTINED_PATIENCE_S = 2.0
"""Longest time in seconds that an update waits for a quarantined engine to pause."""
MAX_NAMED = 3
"""Maximum number of engines that a message names."""
MACHINE_DIGITS = 32
"""Number of digits at the end of a directory's content hash that differ between machines even for equal files."""
TRANSFER = 0
"""Value of ``UpdateEnded.failed``, instead of a call number, if the trainer's transfer of weights failed."""


class Phase(StrEnum):
    """Phases of a weight update."""

    IDLE = "idle"
    STOPPING = "stopping"
    """Waits until the requests in flight have ended. If all engines are just being given the present weights (see
    ``engine_recovery``), also waits until one engine has loaded these."""
    PAUSING = "pausing"
    RECALLING = "recalling"
    """Engines are paused; kept requests that must not continue are being ended."""
    HANDING_OVER = "handing over"
    LOADING = "loading"
    CHECKING = "checking"
    """The update has failed; engines that refused to load are asked whether they still have their old weights."""
    RESTORING = "restoring"
    RESUMING = "resuming"


# module-level names, as an enum member costs 60 ns per use on Python 3.11 and these are used at every event
IDLE, STOPPING, RECALLING = Phase.IDLE, Phase.STOPPING, Phase.RECALLING
RESUBMIT, KEEP = OnWeightUpdate.RESUBMIT, OnWeightUpdate.KEEP


def weights_of(content: str) -> str:
    """Return the part of a content hash that is the same on every machine; empty if the hash is unknown."""
    return content[:-MACHINE_DIGITS]


def list_engines(names: Sequence[str]) -> str:
    """Return the first few engine names and the number of further engines, for a message."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{'engine' if len(names) == 1 else 'engines'} {', '.join(names[:MAX_NAMED])}{more}"


class EngineCalls:
    """Makes pause, load and resume calls to engines. Each engine has at most one open call; a new call replaces it."""

    def __init__(self, context: CoreContext) -> None:
        self._context = context
        self._number = 0
        self._loading: dict[str, tuple[PolicyVersion, bool]] = {}
        """(Version that the engine is loading, True if a failed load may leave incomplete weights), by engine."""
        self.weight_changes = 0
        """Counter that grows before and after every change of weights; a probe during which it grew is ignored."""
        self.step_changes = 0
        """Counter that grows when a step begins or ends; between two steps the trainer may change weights."""
        self._changes_at_probe: dict[str, tuple[int, int]] = {}

    def pause(self, name: str, within_s: float, in_flight: OnWeightUpdate = RESUBMIT) -> None:
        """Stop admission at an engine; ``in_flight`` says what happens to its running requests."""
        self._context.engines.states[name].gate = EngineGate.CLOSING
        self._context.out.append(do.PauseEngine(name, self._next_number(name), within_s, in_flight))

    def load(
        self, name: str, version: PolicyVersion, path: str | None, contents: tuple[str, ...] = (),
        base: PolicyVersion | None = None,
    ) -> None:  # fmt: skip
        """Make an engine load weights; its version is unknown until it confirms the load.

        ``contents`` are the accepted content hashes of the directory; empty accepts any. For ``base`` see LoadEngine.
        """
        state = self._context.engines.states[name]
        self._loading[name] = version, path is not None or state.weights is EngineWeights.HALF
        state.loaded_before = state.loaded or state.loaded_before
        state.loaded, state.weights = frozenset(), EngineWeights.LOADING
        within_s = self._context.settings.outage_deadline_s
        self._context.out.append(
            do.LoadEngine(
                engine=name, call=self._next_number(name), within_s=within_s, version=version, path=path,
                contents=contents, base=base,
            )
        )  # fmt: skip

    def resume(self, name: str) -> None:
        self._context.engines.states[name].gate = EngineGate.OPENING
        within_s = self._context.settings.abort_deadline_s
        self._context.out.append(do.ResumeEngine(name, self._next_number(name), within_s))

    def _next_number(self, name: str) -> int:
        self._number += 1
        self._context.engines.states[name].open_call = self._number
        return self._number

    def ended(self, event: ev.EngineCallEnded) -> bool:
        """Record the result of a call in the engine's gate and weights; return False for a call that was replaced."""
        state = self._context.engines.state_of(event.engine)
        if event.call != state.open_call:
            return False
        state.open_call = 0
        done = event.result is ev.CallResult.DONE
        if state.weights is EngineWeights.LOADING:
            version, may_be_incomplete = self._loading.pop(event.engine)
            state.weights = EngineWeights.HALF if may_be_incomplete else EngineWeights.UNKNOWN
            if done:
                state.confirm(version)
            elif event.result in (ev.CallResult.BUSY, ev.CallResult.OTHER_CONTENT):
                state.confirm_previous()
                if event.result is ev.CallResult.OTHER_CONTENT:
                    state.unloadable_version = version  # of this load; an update may have begun since
        elif state.gate is EngineGate.OPENING:
            state.gate = EngineGate.OPEN if done else EngineGate.CLOSED
        elif done:
            state.gate = EngineGate.CLOSED
        return True

    def forget(self, name: str) -> None:
        """Forget the open calls and probes of an engine that has left or joins again."""
        self._loading.pop(name, None)
        self._changes_at_probe.pop(name, None)

    def probe(self, name: str) -> None:
        self._number += 1
        self._context.engines.states[name].open_probe = self._number
        self._changes_at_probe[name] = self.weight_changes, self.step_changes
        self._context.out.append(do.ProbeEngine(name, self._number))

    def probe_answered(self, event: ev.EngineProbed) -> tuple[bool, bool]:
        """Return (True if no weights changed since the probe was sent, True if also no step began or ended since)."""
        self._context.engines.states[event.engine].open_probe = 0
        weights, steps = self._changes_at_probe.pop(event.engine)
        return weights == self.weight_changes, (weights, steps) == (self.weight_changes, self.step_changes)

    def weights_lost(self, name: str) -> None:
        """Record that an engine lost its weights, and end its requests; their tokens are dropped.

        The tokens are kept if the engine is paused, since a paused engine generates nothing.
        """
        context = self._context
        context.counters["stale_engines"] += 1
        state = context.engines.states[name]
        state.lose_weights(EngineWeights.HALF if state.weights is EngineWeights.HALF else EngineWeights.UNKNOWN)
        doubtful = [a for a in context.attempts if a.engine == name]
        for attempt in doubtful:
            if state.gate is not EngineGate.CLOSED and attempt.state in (AttemptState.WANTED, AttemptState.SILENT):
                attempt.drop_reason = DropReason.UNKNOWN_WEIGHTS
                context.change_state(attempt, AttemptState.DOUBTFUL, f"engine {name} has other weights")
        context.stop(doubtful)


class WeightUpdates:
    """Runs weight updates one at a time, in the order in which they were requested.

    ``adopt`` is called with the new version and the id of the last trained batch. An unreachable engine is left out if
    there are other engines: it is quarantined and gets no requests until it has these or newer weights. If some engines
    loaded the new weights and others refused them, nothing is generated until an update has reached all of them.
    """

    def __init__(
        self, context: CoreContext, calls: EngineCalls, adopt: Callable[[PolicyVersion, int | None], None]
    ) -> None:
        self._context = context
        self._calls = calls
        self._adopt = adopt
        self.phase = Phase.IDLE
        self.half_updated = self._unknown_weights = self._why_unknown_weights()
        """Reason why nothing may be generated, as the engines hold different or unknown weights; else None."""
        self.path: str | None = None
        self.contents: tuple[str, ...] = ()
        """Content hashes of the directory ``path`` with the present weights; empty if they are unknown."""
        self._reloadable = True
        """True if engines can be given the present weights again: from ``path`` with known content, or because they are
        still the weights with which the servers started."""
        self._requests: list[ev.UpdateRequested] = []
        self._update = ev.UpdateRequested(update=0)
        self._left_out: set[str] = set()
        self._awaited: set[str] = set()
        """Names of the engines that have not answered in this phase."""
        self._recalled: list[str] = []
        """Ids of the attempts that must end while the engines are paused."""
        self._resumes_after_recall = False
        """True if the engines resume once the recalled attempts have ended; False if the transfer or load follows."""
        self._answers: dict[str, ev.EngineCallEnded] = {}
        self._transfer_engines: tuple[str, ...] = ()
        """Names of the engines that were paused when the transfer began."""
        self._failed: int | None = None
        """Number of the call whose error ends the update; None if none failed."""
        self._why = ""
        """Error text, if the call in ``_failed`` succeeded but loaded other weights; else empty."""
        self._wrong_loads: frozenset[int] = frozenset()
        """Numbers of the calls that loaded weights other than the update's."""
        self._adopted = False
        self._written = False
        """True once an update of this run or an earlier run has begun to write weights, even if it failed."""
        self._initial_version = self._full_version = context.clock.current
        """``_full_version`` is the version of the last full weights, to which adapters (LoRA) are applied."""
        self.base: PolicyVersion | None = None
        """Version of the full weights to which the present adapter belongs; None while no adapter is used."""

    def _why_unknown_weights(self) -> str | None:
        """Return why nothing may be generated if all engines may hold weights of an earlier run; else None."""
        states = self._context.engines.states
        if not all(state.limits.written for state in states.values()):
            return None
        return (
            f"{list_engines(list(states))} may have the weights of an earlier run, which belong to no version of this "
            "run; call weight_update or load_state_dict with path=, weights= or transfer= to load this run's weights, "
            "or restart the servers, or set engine.first_weights: present if the run begins with the weights that they "
            "have"
        )

    @property
    def nothing_updated(self) -> bool:
        """True if no update has begun, so that every engine still has the weights with which it started."""
        return not self._calls.weight_changes and self._context.clock.current == self._initial_version

    @property
    def running(self) -> bool:
        return self.phase is not IDLE

    @property
    def waits(self) -> bool:
        """True if an update waits to begin, or for requests to end."""
        return self.phase is STOPPING or self.phase is RECALLING or bool(self._requests)

    @property
    def pending(self) -> bool:
        """True if an update is running or waiting."""
        return self.phase is not IDLE or bool(self._requests)

    @property
    def broken(self) -> str | None:
        """Reason why nothing can be generated; None if generation is possible or a pending update may make it so."""
        return None if self.half_updated is None or self.pending else self.half_updated

    @property
    def waits_for(self) -> str:
        """Text for users: what the running update (or the next update, if none runs) is waiting for."""
        engines, in_flight = list_engines(sorted(self._awaited)), len(self._context.attempts.in_flight)
        given = list_engines([name for name, state in self._context.engines.states.items() if state.recovering])
        return {
            Phase.IDLE: "the end of an evaluation or of a pause",
            Phase.STOPPING: f"{in_flight} requests to end" if in_flight else f"{given} to get the current weights",
            Phase.PAUSING: f"{engines} to pause",
            Phase.RECALLING: f"{len(self._recalled)} requests to end",
            Phase.HANDING_OVER: "the weights to be sent" if self._update.sends else "its transfer function to return",
            Phase.LOADING: f"{engines} to load",
            Phase.CHECKING: f"{engines} to confirm the loaded weights",
            Phase.RESTORING: "the core to take over the saved state",
            Phase.RESUMING: f"{engines} to resume",
        }[self.phase]

    @property
    def loads_a_state(self) -> bool:
        """True if the running update (or the next update, if none runs) belongs to ``load_state_dict``."""
        first = self._update if self.running else next(iter(self._requests), self._update)
        return first.restores

    @property
    def numbers(self) -> list[int]:
        """Numbers of the updates that were requested and have not ended."""
        return [*([self._update.update] if self.running else ()), *(r.update for r in self._requests)]

    @property
    def newest(self) -> int:
        """Value of the version's ``n`` once all updates in ``numbers`` have succeeded."""
        n = self._context.clock.current.n
        for update in (*((self._update,) if self.running and not self._adopted else ()), *self._requests):
            n = n + 1 if update.version is None else update.version.n
        return n

    @property
    def trained(self) -> int:
        """Id of the newest batch that pending updates will commit; -1 if they commit none."""
        over = self.phase in (Phase.IDLE, Phase.CHECKING, Phase.RESUMING)
        over |= self.phase is RECALLING and self._failed is not None
        updates = (*(() if over else (self._update,)), *self._requests)
        return max((u.trained for u in updates if u.trained is not None), default=-1)

    def can_reload(self, state: EngineState) -> bool:
        """Return True if april itself can give an engine the present weights.

        Without a directory this is impossible after an incomplete load: the initial weights cannot be loaded again.
        """
        named_only = self.path is None and state.weights is EngineWeights.HALF
        lost = state.unloadable_version == self._context.clock.current
        return self._reloadable and self.half_updated is None and not named_only and not lost

    # ---------------------------------------------------------------- requests and joining engines

    def requested(self, event: ev.UpdateRequested) -> None:
        self._requests.append(event)

    def cancelled(self, event: ev.UpdateCancelled) -> None:
        """Cancel an update that has changed nothing yet; once engines are loading, it goes on to its end."""
        waiting = [r for r in self._requests if r.update == event.update]
        if waiting:
            self._requests.remove(waiting[0])
            self._context.out.append(do.UpdateEnded(event.update, self._context.clock.current))
        elif self._update.update != event.update:
            self._context.counters["late_events"] += 1
        elif self.phase is Phase.STOPPING:
            self._end()
        elif self.phase in (Phase.PAUSING, Phase.HANDING_OVER) or (self.phase is RECALLING and self._failed is None):
            self._resume()

    def continue_next(self, *, held: bool) -> None:
        """Begin or continue the next update if nothing delays it. ``held`` is True during a requested pause."""
        context = self._context
        waits = self._requests if not self.running else ()
        ready = [r for r in waits if (r.restores or r.held) == held]
        if ready:
            self._requests.remove(ready[0])
            self._update, self.phase = ready[0], Phase.STOPPING
            self._failed, self._why, self._adopted = None, "", False
            self._calls.weight_changes += 1
            if self._in_flight is RESUBMIT:
                context.stop(list(context.attempts.in_flight.values()), sweep=True)
        if self.phase is RECALLING:
            self._continue_if_ended()
        if self.phase is STOPPING and not (self._in_flight is RESUBMIT and context.attempts.in_flight):
            taken_back = {name for name, state in context.engines.states.items() if state.recovering}
            if not taken_back or len(taken_back) < len(context.engines.states):
                # an engine that is being given the present weights gets the new weights after this update
                self._left_out = taken_back
                self._pause()

    def engine_joined(self, name: str) -> None:
        """Add an engine; if it joins during an update, it gets the new weights after the update.

        Before the first update, an engine has the weights with which it started. Once an update of this run or an
        earlier run has begun to write, its server may hold weights that were never adopted, as it may have taken part
        in that update under another name.
        """
        # if an earlier run wrote this engine's weights, the weights of engines that join later are unknown, too
        self._written |= self._context.engines.states[name].limits.written
        if self.phase not in (Phase.IDLE, Phase.STOPPING):
            self._left_out.add(name)
        state = self._context.engines.states[name]
        if self._written:
            state.weights = EngineWeights.HALF
        elif self.nothing_updated:
            state.confirm(self._context.clock.current)
            if self.half_updated == self._unknown_weights:
                self.half_updated = None

    def engines_left(self, names: Sequence[str]) -> None:
        """Continue a running update without the engines that have left."""
        self._left_out.difference_update(names)
        for name in names:
            self._answers.pop(name, None)
        if not self._awaited.isdisjoint(names):
            self._awaited.difference_update(names)
            self._continue_if_answered()

    def weights_written(self, event: ev.WeightsWritten) -> None:
        """Stop generation until an update has reached all engines, as weights were written without an update."""
        self.half_updated = event.error
        self._context.stop(list(self._context.attempts.in_flight.values()), sweep=True)

    # ---------------------------------------------------------------- answers of engines and the trainer

    def call_ended(self, event: ev.EngineCallEnded) -> None:
        """Record an engine's answer; the update goes to its next phase when all engines have answered."""
        self._answers[event.engine] = event
        self._awaited.discard(event.engine)
        self._continue_if_answered()

    def handed_over(self, event: ev.HandedOver) -> None:
        """Continue after the trainer's transfer: have the engines load if it succeeded, otherwise end the update."""
        if self.phase is not Phase.HANDING_OVER or event.update != self._update.update:
            self._context.counters["late_events"] += 1
        elif event.error is None:
            self._leave_out_unsent(event.not_given or ())
            self._load()
        else:
            if event.not_given is None:
                self._transfer_broke_off(event.error)
            else:
                self._sent_to_none(event.error, event.not_given)
            self._failed, self._why = TRANSFER, ""
            self._resume()

    def restored(self, event: ev.Restored) -> None:
        """Adopt the version of the saved state, which the core now holds."""
        self._take_over()

    def checks(self, name: str) -> bool:
        """Return whether the update waits for this engine's answer to a probe."""
        return self.phase is Phase.CHECKING and name in self._awaited

    def checked(self, event: ev.EngineProbed) -> None:
        """Use the probe of an engine that refused to load: it tells whether the engine still has the old weights."""
        state = self._context.engines.states[event.engine]
        if event.answered and event.current:
            state.confirm_previous()
        else:
            if event.answered:
                self._calls.weights_lost(event.engine)
            self._context.engine_failed(event.engine)
        self._awaited.discard(event.engine)
        self._continue_if_answered()

    # ---------------------------------------------------------------- phases of an update

    def _pause(self) -> None:
        states, limit_s = self._context.engines.states, self._context.settings.abort_deadline_s
        names = self._enter_phase(Phase.PAUSING)
        some_healthy = not all(states[name].quarantined for name in names)
        for name in names:
            impatient = some_healthy and states[name].quarantined
            self._calls.pause(name, min(limit_s, QUARANTINED_PATIENCE_S) if impatient else limit_s, self._in_flight)
        self._continue_if_answered()

    def _paused(self) -> None:
        failed, attempts = self._failures(), self._context.attempts.in_flight
        silent = [attempts[i] for e in self._answers.values() for i in e.silent if i in attempts]
        self._leave_out(failed)
        if self._record_failure(e for name, e in failed.items() if name not in self._left_out):
            self._resume()
        else:
            self._recall(silent, opens=False)

    def _hand_over(self) -> None:
        if self._update.transfers:
            self.phase = Phase.HANDING_OVER
            self._transfer_engines = tuple(name for name in self._context.engines.states if name not in self._left_out)
            self._context.out.append(do.HandOver(self._update.update, self._transfer_engines))
        else:
            self._load()

    def _recall(self, attempts: list[Attempt], *, opens: bool) -> None:
        """End attempts that paused engines keep; then resume the engines (if ``opens``) or start the transfer."""
        self._resumes_after_recall, self._recalled = opens, [attempt.id for attempt in attempts]
        if attempts:
            self.phase = RECALLING
            self._context.stop(attempts, sweep=True)
        else:
            self._continue_if_ended()

    def _continue_if_ended(self) -> None:
        """Continue the update once all recalled attempts have ended."""
        while self._recalled and self._recalled[-1] not in self._context.attempts.in_flight:
            self._recalled.pop()
        if self._recalled:
            return
        if self._resumes_after_recall:
            self._resume_engines()
        else:
            self._hand_over()

    def _transfer_broke_off(self, why: str) -> None:
        """Record that a transfer broke off; servers may hold a part of the new weights and must not generate."""
        self._written = True
        states = self._context.engines.states.values()
        own = [state for state in states if state.limits.remote or state.limits.own_weights]
        for state in own:
            state.lose_weights(EngineWeights.HALF)
        if own:
            self.half_updated = (
                f"the last transfer of weights was interrupted ({why}), so april does not know which weights the "
                "servers have; call weight_update again before the next batch"
            )

    def _leave_out_unsent(self, failures: Sequence[ev.TransferFailure]) -> None:
        """Leave out the engines that did not get the weights that all others got."""
        states = self._context.engines.states
        for failure in [f for f in failures if f.engine in states and f.engine not in self._left_out]:
            name = failure.engine
            self._context.out.append(do.Warn(f"engine {name} is left out of the weight update: {failure.why}"))
            self._mark_partially_updated(failure)
            self._context.engine_failed(name)
            self._context.stop(self._attempts_at([name]))
            self._left_out.add(name)

    def _sent_to_none(self, why: str, failures: Sequence[ev.TransferFailure]) -> None:
        """Record that a transfer reached no engine; engines that hold a part of the new weights must not generate."""
        states, current = self._context.engines.states, self._context.clock.current
        partial = [failure for failure in failures if failure.torn]
        for failure in partial:
            self._mark_partially_updated(failure)
        if partial:  # an engine that joined meanwhile may be one of these servers under another name
            for state in (state for name, state in states.items() if name not in self._transfer_engines):
                state.lose_weights(EngineWeights.HALF)
        if partial and not any(current in state.loaded for state in states.values()):
            self.half_updated = (
                f"the last transfer of weights was interrupted ({why}), and no engine has complete weights; call "
                "weight_update again before the next batch"
            )

    def _mark_partially_updated(self, failure: ev.TransferFailure) -> None:
        if failure.torn:
            self._written = True
            if (state := self._context.engines.states.get(failure.engine)) is not None:
                state.lose_weights(EngineWeights.HALF)

    @property
    def _version(self) -> PolicyVersion:
        current = self._context.clock.current
        return self._update.version or PolicyVersion(current.incarnation, current.n + 1)

    def _load(self) -> None:
        self._written = True
        base = self._full_version if self._update.adapter else None
        for name in self._enter_phase(Phase.LOADING):
            self._calls.load(name, self._version, self._update.path, base=base)
        self._continue_if_answered()

    def _loaded(self) -> None:
        """Adopt the new weights if all engines that are not left out have loaded them; else fail the update."""
        self._reject_wrong_loads()
        for name, event in self._failures().items():
            if event.result is ev.CallResult.UNREACHABLE:
                self._calls.weights_lost(name)
                self._context.engine_failed(name)
        # an engine that refuses weights that were sent is left out; a refused directory is wrong for all engines
        given = [n for n, e in self._answers.items() if self._update.sends and e.result is ev.CallResult.DONE]
        failures = self._failures()
        if self._update.transfers:  # the weights were written before the load, even if the engine refused it
            for name in failures:
                self._context.engines.states[name].lose_weights(EngineWeights.HALF)
        self._leave_out({n: e for n, e in failures.items() if given or e.result is not ev.CallResult.REFUSED})
        failed = {name: e for name, e in self._failures().items() if name not in self._left_out}
        if not self._record_failure(failed.values()):
            self.half_updated = None
            update, loaded = self._update, {e.content for e in self._answers.values() if e.content}
            if not self._answers and update.content:  # all engines have left; engines that join later load it
                loaded.add(update.content)
            self.path, self.contents = update.path, tuple(sorted(loaded))
            self._reloadable = bool(loaded) and not update.transfers
            self._full_version = self._full_version if update.adapter else self._version
            self.base = self._full_version if update.adapter else None
            if self._update.restores:
                self.phase = Phase.RESTORING
                self._context.out.append(do.Restore(self._update.update))
            else:
                self._take_over()
            return
        done = [name for name, e in self._answers.items() if e.result is ev.CallResult.DONE]
        for name in done:  # the next update will use this version for other weights
            self._context.engines.states[name].lose_weights(EngineWeights.HALF)
        if done or self._update.transfers:
            why = "; ".join(f"{name}: {event.error}" for name, event in failed.items())
            self.half_updated = (
                f"the last weight update reached engines {done} but not {list(failed)} ({why}); call weight_update "
                "again before the next batch"
            )
        refused = [name for name, event in failed.items() if event.result is ev.CallResult.REFUSED]
        if self.half_updated is None and refused:
            self.phase, self._awaited = Phase.CHECKING, set(refused)
            for name in refused:
                self._calls.probe(name)
        else:
            self._resume()

    def _reject_wrong_loads(self) -> None:
        """Mark loads as failed if engines found different weights in the same directory.

        The right weights are those that the trainer's process read there; engines that report no hash are assumed to
        have these. If no engine has the right weights, or the trainer could not read them, all loads count as failed.
        """
        right, path = weights_of(self._update.content), self._update.path
        found = {name: weights_of(e.content) for name, e in self._answers.items() if e.result is ev.CallResult.DONE}
        kinds, self._wrong_loads = set(filter(None, found.values())), frozenset()
        if len(kinds) < 2:
            return
        for name, weights in found.items():
            if right in kinds and weights in (right, ""):
                continue
            self._context.engines.states[name].lose_weights(EngineWeights.HALF)
            self._wrong_loads |= {self._answers[name].call}
            self._answers[name] = replace(
                self._answers[name], result=ev.CallResult.UNREACHABLE, content="",
                error=(
                    f"{path} held other weights when engine {name} loaded it than when the other engines did; write "
                    "into a directory again only after the weight update, and give all machines the same files there"
                ),
            )  # fmt: skip

    def _take_over(self) -> None:
        self._adopted = True
        self._adopt(self._version, self._update.trained)
        self._resume()

    @property
    def _in_flight(self) -> OnWeightUpdate:
        """Policy for requests in flight; loading a state always ends them first."""
        return RESUBMIT if self._update.restores else self._context.settings.on_weight_update

    def _attempts_at(self, names: Iterable[str]) -> list[Attempt]:
        here = set(names)
        return [a for a in self._context.attempts.in_flight.values() if a.engine in here] if here else []

    def _resume(self) -> None:
        states = self._context.engines.states.items()
        incomplete = [name for name, state in states if not state.loaded and name not in self._left_out]
        self._recall(self._attempts_at(incomplete), opens=True)

    def _resume_engines(self) -> None:
        for name in self._enter_phase(Phase.RESUMING):
            self._calls.resume(name)
        self._continue_if_answered()

    def _resumed(self) -> None:
        """End the update once all engines have answered; an adopted update succeeds even if some could not resume."""
        failed = self._failures()
        self._leave_out(failed)
        self._context.stop(self._attempts_at(failed))
        for name, event in failed.items():
            self._context.engine_failed(name)
            if self._adopted and name not in self._left_out:
                self._context.out.append(do.Warn(
                    f"engine {name} has the new weights but is still paused: {event.error}"
                ))
        if self._failed is None and not self._adopted:
            self._record_failure(failed.values())
        self._end()

    def _end(self) -> None:
        update, current = self._update.update, self._context.clock.current
        self._context.out.append(do.UpdateEnded(update, current, self._failed, self._why))
        self.phase, self._awaited = Phase.IDLE, set()
        self._calls.weight_changes += 1

    # ---------------------------------------------------------------- helpers of the phases

    def _enter_phase(self, phase: Phase) -> list[str]:
        """Begin a phase and return the names of the engines that take part; each of them must answer."""
        names = [name for name in self._context.engines.states if name not in self._left_out]
        self.phase, self._awaited, self._answers = phase, set(names), {}
        return names

    def _continue_if_answered(self) -> None:
        """Go to the next phase if no answer is missing in the present phase."""
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

    def _leave_out(self, failed: dict[str, ev.EngineCallEnded]) -> None:
        """Quarantine failed engines and continue the update without them, if other engines remain."""
        if len(self._left_out.union(failed)) == len(self._context.engines.states):
            return
        for name, event in failed.items():
            self._context.out.append(do.Warn(f"engine {name} is left out of the weight update: {event.error}"))
            self._context.engine_failed(name)
        self._context.stop(self._attempts_at(failed))
        self._left_out |= set(failed)

    def _record_failure(self, events: Iterable[ev.EngineCallEnded]) -> bool:
        """Record the first of these errors as the error of the update; return False if there is none."""
        first = next(iter(events), None)
        self._failed = None if first is None else first.call
        self._why = first.error if first is not None and first.call in self._wrong_loads else ""
        return first is not None

    def contradiction(self) -> str | None:
        """Describe a contradiction between phase, calls and gates; None if there is none."""
        states = self._context.engines.states
        cuts, attempts = self._in_flight is RESUBMIT, self._context.attempts
        if self.phase not in (Phase.IDLE, Phase.STOPPING) and (len(attempts) if cuts else attempts.of_evaluations):
            return f"requests are in flight while an update is {self.phase}"
        if self.phase is not RECALLING and any(i in attempts.in_flight for i in self._recalled):
            return f"requests that must be aborted are in flight while an update is {self.phase}"
        for name, state in states.items():
            part = self.running and self.phase is not Phase.STOPPING and name not in self._left_out
            awaited = self.phase is not Phase.CHECKING and name in self._awaited
            if bool(state.open_call) != (state.recovering or awaited):
                return f"engine {name} is called although nobody waits for it, or the other way round"
            usable = self._context.clock.current in state.loaded and not state.quarantined
            if not self.running and usable and state.gate is not EngineGate.OPEN:
                return f"engine {name} is healthy, but nobody opens its gate, which is {state.gate}"
            writing = self.phase in (Phase.HANDING_OVER, Phase.LOADING, Phase.RESTORING)
            if part and writing and state.gate is not EngineGate.CLOSED:
                return f"engine {name} takes part in an update that is {self.phase}, but its gate is {state.gate}"
            if part and self.phase is Phase.RESTORING and self._version not in state.loaded:
                return f"engine {name} does not have the adopted weights"
        return None
