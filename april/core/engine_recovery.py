"""Brings engines back into use: decides when they rest (get no requests because they are busy) or are probed, and gives
them the present weights if needed. ``EngineTable.count_failure`` decides which failures quarantine an engine, and
``attempt_results`` what becomes of its requests.

Invariant: a quarantined engine is used again only after a probe has found it healthy, not paused, and with the weights
that its next requests need. The probe does not count if any weights changed before it was answered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from april.core import commands as do
from april.core import engine_table
from april.core import events as ev
from april.core.context import CoreContext
from april.core.engine_table import EngineGate, EngineHealth, EngineState, EngineWeights
from april.core.types import Timer, TimerKind
from april.core.weight_updates import EngineCalls, WeightUpdates

CHECK_INTERVAL_S = 2.0
"""Seconds between two probes of a working server."""


class EngineRecovery:
    """Decides when engines are probed, when they rest, and when they are used again."""

    def __init__(self, context: CoreContext, calls: EngineCalls, updates: WeightUpdates) -> None:
        self._context = context
        self._calls = calls
        self._updates = updates
        self._load_errors: dict[str, str] = {}
        """Errors of engines that failed to load the present weights, by engine name."""

    # ---------------------------------------------------------------- joining and leaving engines

    def joined(self, event: ev.EnginesJoined) -> None:
        """Add engines to the table. Engines whose weights are unknown, or that may be paused, are probed before use."""
        context = self._context
        self._remove([e.name for e in event.engines if e.name in context.engines.states])
        for limits in event.engines:
            state = context.engines.join(limits)
            self._updates.engine_joined(limits.name)
            if not state.loaded or state.gate is not EngineGate.OPEN:
                state.health = EngineHealth.QUARANTINED
                self._calls.probe(limits.name)

    def leaving(self, event: ev.EngineLeaving) -> None:
        """Send an engine no more requests, and with ``cut`` end its running requests."""
        context = self._context
        context.engines.states[event.engine].leaving = True
        if event.cut:
            context.stop([a for a in context.attempts.in_flight.values() if a.engine == event.engine])

    def left(self, event: ev.EnginesLeft) -> None:
        self._remove(event.names)

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._context.engines.leave(name)
            self._calls.forget(name)
            self._load_errors.pop(name, None)
        self._updates.engines_left(names)

    # ---------------------------------------------------------------- load and rests

    def adjust_cap(self, event: ev.LoadReported) -> None:
        """Adjust the limit of an engine's concurrent requests to the load that the engine reports."""
        state = self._context.engines.states[event.engine]
        state.kv_usage = event.kv_usage
        if state.cap.report(state.in_flight, event.running, event.waiting, event.kv_usage, event.preemptions):
            self._context.counters["lowered_caps"] += 1
        state.update_load()

    def busy(self, name: str, event: ev.AttemptFailed) -> None:
        """After an engine refused an attempt because it is busy, let it rest, or quarantine it after many rests."""
        context = self._context
        state = context.engines.states[name]
        # a server may ask for any waiting time, but a step waits no longer than this deadline for an engine
        asked_s = 0.0 if math.isnan(event.busy_s) else min(event.busy_s, context.settings.outage_deadline_s)
        seconds = context.engines.count_refusal(name, asked_s, state.in_flight)
        if seconds is not None:
            why = (
                f"engine {name} accepts no requests at the moment, and april sends it none for {seconds:g} s: "
                f"{event.error}"
            )
            state.rest_timer = context.start_timer(TimerKind.REST, seconds, name, "" if state.has_rested else why)
            state.health, state.has_rested = EngineHealth.RESTING, True
        elif not state.rest_timer:
            context.engine_failed(name)

    # ---------------------------------------------------------------- sending probes

    def start_checks(self, name: str) -> None:
        """Start periodic probes of an engine, if it is a server and has requests in flight."""
        state = self._context.engines.states[name]
        if state.limits.remote and not state.probe_timer and state.in_flight:
            state.probe_timer = self._context.start_timer(TimerKind.CHECK, CHECK_INTERVAL_S, name)

    def probe_all(self) -> None:
        """Probe all servers now, because a server may have been restarted while it was idle."""
        for name, state in self._context.engines.states.items():
            if state.limits.remote and not state.quarantined and not self._updates.checks(name):
                self._calls.probe(name)

    def timer_fired(self, timer: Timer) -> None:
        """End a rest, or probe an engine."""
        state = self._context.engines.state_of(timer.engine)
        if timer.kind is TimerKind.REST:
            if timer.number == state.rest_timer:
                state.rest_timer = 0
                state.health = EngineHealth.WELL if state.resting else state.health
            return
        if timer.number != state.probe_timer:
            return
        state.probe_timer = 0
        if state.quarantined or (state.limits.remote and state.in_flight):
            self._calls.probe(timer.engine)

    # ---------------------------------------------------------------- answers to probes

    def probed(self, event: ev.EngineProbed) -> None:
        """Handle the answer to a probe.

        An answer from before a change of weights is ignored, unless a weight update waits for it.
        """
        name, state = event.engine, self._context.engines.state_of(event.engine)
        if event.probe != state.open_probe:
            self._context.counters["late_events"] += 1
            return
        same_weights, same_step = self._calls.probe_answered(event)
        if self._updates.checks(name):
            self._updates.checked(event)
            if state.quarantined and not state.probe_timer:  # the answer was for the update only, so probe once more
                self._probe_later(name)
        elif state.quarantined:
            if not event.answered:
                self._context.out.append(do.Warn(f"probe of engine {name} failed: {event.detail}"))
            # an engine with incomplete or other weights (current=False) need not be healthy: it gets weights next
            found = event.answered and (event.ok or not event.current)
            if found and same_weights and not self._updates.running:
                self._readmit(name, state, current=event.current)
            else:
                self._probe_later(name)
        else:
            # a missing answer does not count as a failure here: if the engine is down, its requests fail
            if event.answered and event.ok and same_step and not self._updates.running:
                self._check_weights(event, state)
            self.start_checks(name)

    def _check_weights(self, event: ev.EngineProbed, state: EngineState) -> None:
        if event.current:
            if event.load is not None:
                self.adjust_cap(event.load)
        elif state.loaded:
            name = event.engine
            self._context.out.append(do.Warn(
                f"engine {name} does not have the weights that it was given: {event.detail}"
            ))
            self._calls.weights_lost(name)
            self._context.engine_failed(name)

    def _probe_later(self, name: str) -> None:
        state = self._context.engines.states[name]
        state.probe_timer = self._context.start_timer(TimerKind.PROBE, engine_table.PROBE_INTERVAL_S, name)

    # ---------------------------------------------------------------- return of quarantined engines

    def _readmit(self, name: str, state: EngineState, *, current: bool) -> None:
        """Use a quarantined engine again after a successful probe; if it lacks the present weights, load them first."""
        if current:
            state.confirm_previous()
        elif state.loaded or state.loaded_before:
            self._calls.weights_lost(name)
        if self._context.clock.current in state.loaded and state.gate is EngineGate.OPEN:
            self._context.engines.mark_well(name)
        elif state.in_flight:
            self._probe_later(name)  # wait for its requests to end, as they would continue under other weights
        else:
            self._continue_recovery(name, state)

    def _continue_recovery(self, name: str, state: EngineState) -> None:
        """Pause an engine to load the present weights, or resume it if it has them; otherwise end its recovery."""
        context, version = self._context, self._context.clock.current
        state.recovering = True
        if version in state.loaded and state.gate is not EngineGate.OPEN:
            self._calls.resume(name)
        elif version not in state.loaded and self._updates.can_reload(state):
            self._calls.pause(name, context.settings.abort_deadline_s)
        else:
            state.recovering = False
            if version in state.loaded:
                what = f"has the weights of version {version}"
            else:
                what = (
                    f"does not have the current weights and waits for the next weight update{self._why_it_waits(name)}"
                )
            context.out.append(do.Warn(f"engine {name} {what}"))
            context.engines.mark_well(name)

    def _why_it_waits(self, name: str) -> str:
        trouble = self._load_errors.pop(name, None)
        if trouble is not None:
            return f": {trouble}"
        if self._updates.nothing_updated and self._context.engines.states[name].limits.written:
            return ": it may have weights of an earlier run"
        path, unread = self._updates.path, not self._updates.contents
        return f": april cannot read here whether {path} still holds the current weights" if path and unread else ""

    def call_ended(self, event: ev.EngineCallEnded, was: tuple[EngineGate, EngineWeights]) -> None:
        """Handle the end of a call to a recovering engine; ``was`` is (gate, weights) from before the call ended."""
        name, state = event.engine, self._context.engines.states[event.engine]
        gate, weights = was
        if event.result is not ev.CallResult.DONE:
            self._load_errors.setdefault(name, event.error)
        if gate is EngineGate.OPENING:
            state.recovering = False
            opened = event.result is ev.CallResult.DONE
            if opened and state.unloadable_version == self._context.clock.current and not self._updates.running:
                # the version cannot be loaded any more, so the engine waits for the next update
                self._continue_recovery(name, state)
                return
            trouble = self._load_errors.pop(name, None)
            if trouble is not None:
                self._context.out.append(do.Warn(f"engine {name} did not load the current weights: {trouble}"))
            if trouble is not None or self._updates.running:
                self._probe_later(name)
            else:
                self._continue_recovery(name, state)
        elif weights is EngineWeights.LOADING or name in self._load_errors or not self._updates.can_reload(state):
            self._calls.resume(name)  # nothing to load: it has just ended or failed, or another update came
        else:
            updates = self._updates
            self._calls.load(name, self._context.clock.current, updates.path, updates.contents, updates.base)
