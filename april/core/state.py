"""The state machine: ``handle(event) -> list[Command]``, the only way in which anything changes.

It wires the four parts (over-sampler, completion monitor, abort controller, partial-rollout buffer) together.
Invariants, checked by :meth:`RolloutCore.validate`: each sample is in exactly one state; tokens and prompts
are delivered, held, or dropped for a named reason; every attempt in flight belongs to exactly one sample.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from april.core import commands as do
from april.core import events as ev
from april.core.abort_controller import AbortController
from april.core.attempt_book import AttemptBook
from april.core.batch import Batch, batch_metrics, deliver_sample
from april.core.completion_monitor import CompletionMonitor
from april.core.engine_table import EngineTable
from april.core.history import History
from april.core.ledger import Ledger
from april.core.over_sampler import WAITING, OverSampler
from april.core.partial_buffer import PartialBuffer
from april.core.settings import CoreSettings, EngineLimits
from april.core.step import Step
from april.core.tape import Int32, TokenTape
from april.core.types import (
    Attempt,
    DropReason,
    FinishReason,
    GenerateCall,
    Group,
    OnLongPrompt,
    OnStale,
    Sample,
    SampleId,
    SampleState,
)
from april.core.validation import validate
from april.core.versions import VersionClock
from april.errors import InvariantError

TOO_LONG_IN_A_ROW = 1000
"""Skipped prompts without one that fits, after which the data cannot be meant for these engines."""


class RolloutCore:
    """Schedules the rollouts of one trainer over any number of engines.

    Args:
        settings: what to do; already checked.
        engines: at least one.
        clock: policy version; a fresh one starts at version 0.0.
        check: run :meth:`validate` after every event (for tests; costs time in proportion to what is held).
    """

    def __init__(
        self,
        settings: CoreSettings,
        engines: Sequence[EngineLimits],
        clock: VersionClock | None = None,
        *,
        check: bool = False,
    ) -> None:
        self.settings = settings
        self.clock = clock or VersionClock()
        self.engines = EngineTable(engines, self.clock.current)
        self.over_sampler = OverSampler(settings)
        self.monitor = CompletionMonitor(settings.rollout_batch_size)
        self.aborts = AbortController(settings.abort_deadline_s, settings.abort_resend_s)
        self.buffer = PartialBuffer(settings, self.clock)
        self.book = AttemptBook(settings, self.engines)
        self.attempts = self.book.in_flight
        self.starting = 0
        """Samples that hold a place without an attempt (state STARTED)."""
        self.tokens = Ledger()
        self.prompts = Ledger()
        self.leased: dict[int, Batch] = {}
        self.step: Step | None = None
        self.paused = False
        self.counters: Counter[str] = Counter()
        """Totals over the run; the differences over a step are in its batch's metrics."""
        self.history = History()
        self.event_number = 0
        self._check = check
        self._pause_asked = False
        self._batches = 0
        self._groups = 0
        self._failed_in_a_row = 0
        self._long_in_a_row = 0
        self._out: list[do.Command] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.StepRequested: self._step_requested,
            ev.PromptsDrawn: self._prompts_drawn,
            ev.CallMade: self._call_made,
            ev.AttemptEnded: self._attempt_ended,
            ev.AttemptFailed: self._attempt_failed,
            ev.SampleReturned: self._sample_returned,
            ev.SampleFailed: self._sample_failed,
            ev.Scored: self._scored,
            ev.TimerFired: self._timer_fired,
            ev.PauseRequested: self._pause_requested,
            ev.Resumed: self._resumed,
            ev.WeightsUpdated: self._weights_updated,
            ev.EngineReady: self._engine_ready,
            ev.BatchCommitted: self._batch_committed,
        }

    def __repr__(self) -> str:
        states = Counter(s.state for s in self.buffer.samples())
        parts = [f"{state}={count}" for state, count in sorted(states.items())]
        t = self.tokens
        return (
            f"<RolloutCore version={self.clock.current} step={self.step} groups={len(self.buffer)} "
            f"ready={self.monitor.ready} {' '.join(parts)} in_flight={len(self.attempts)} "
            f"aborting={self.aborts.pending} tokens: observed={t.observed} delivered={t.delivered} held={t.held} "
            f"dropped={sum(t.dropped.values())}>"
        )

    # ---------------------------------------------------------------- the one way in

    def handle(self, event: ev.Event) -> list[do.Command]:
        """Take one event; returns what is to be done, in order.

        Raises:
            InvariantError: april's books do not balance, or the event cannot happen; names the sample's story.
        """
        self.event_number += 1
        out: list[do.Command] = []
        self._out = out
        self._handlers[type(event)](event)
        self._advance()
        if self._check:
            self.validate()
        return out

    def validate(self) -> None:
        """Cross-check every index and ledger; raises InvariantError with the story of the sample concerned."""
        validate(self)

    def story(self, sample_id: SampleId) -> str:
        """What happened to one sample, one line per transition."""
        return self.history.story(sample_id)

    def observed_tokens(self) -> int:
        """Tokens april has parsed so far, those on running attempts included."""
        return self.tokens.observed + sum(a.tape.count for a in self.attempts.values())

    # ---------------------------------------------------------------- steps

    def _step_requested(self, event: ev.StepRequested) -> None:
        if self.step is not None:
            raise InvariantError("a step was requested while another one is running; deliver that one first")
        self.step = Step(self.event_number, self.counters.copy())
        self._plan_deadlines()

    def _advance(self) -> None:
        """Do what the present state allows: stop, deliver, or fill."""
        step = self.step
        if self._pause_asked and not self.attempts:
            self._pause_asked = False
            self._out.append(do.Paused())
        if step is None:
            return
        if not step.stopping and (self.monitor.target_reached or self._nothing_more_can_come()):
            step.stopping = True
            step.in_flight_at_stop = len(self.attempts)
            self._stop(list(self.attempts.values()))
        if step.stopping:
            if not self.attempts:
                self._deliver()
        elif not self.paused:
            self._fill()

    def _nothing_more_can_come(self) -> bool:
        """The source has ended and no group is in work: deliver what is there, even if it is less than N."""
        return self.over_sampler.exhausted and self.monitor.ready == len(self.buffer) and not self.attempts

    def _stop(self, attempts: list[Attempt]) -> None:
        self.counters["aborted_attempts"] += sum(1 for a in attempts if a.id not in self.aborts)
        self._out += self.aborts.stop(attempts, self.engines.in_flight())

    def _deliver(self) -> None:
        assert self.step is not None
        groups = self.monitor.take()
        step, self.step = self.step, None
        if not groups:
            self._out.append(do.EndOfData())
            return
        masks = self.settings.on_stale in (OnStale.MASK, OnStale.FINISH)
        bound = self.settings.max_staleness if masks else None
        samples = []
        for group in groups:
            self.buffer.remove(group)
            self.prompts.deliver(1)
            for sample in group.samples:
                samples.append(deliver_sample(sample, self.clock.staleness, bound))
                sample.state = SampleState.LEASED
                self.tokens.deliver(sample.tape.generated)
                self._note(sample, f"leased in batch {self._batches}")
        metrics = batch_metrics(groups, samples, self.clock.current)
        metrics |= step.metrics(self.counters)
        metrics |= {
            "carried_groups": float(len(self.buffer)),
            "surplus_groups": float(self.monitor.ready),
            "held_tokens": float(self.tokens.held),
        }
        batch = Batch(
            self._batches, self.clock.current, tuple(samples), tuple(len(g.samples) for g in groups), metrics
        )
        self._batches += 1
        self.leased[batch.id] = batch
        self._out.append(do.Deliver(batch))

    def _batch_committed(self, event: ev.BatchCommitted) -> None:
        if self.leased.pop(event.batch_id, None) is None:
            raise InvariantError(f"batch {event.batch_id} was committed twice, or never delivered")
        self.counters["committed_batches"] += 1

    # ---------------------------------------------------------------- filling

    def _fill(self) -> None:
        """Start what may start, then ask for prompts if there is nothing left to start."""
        self._start_waiting()
        step = self.step
        assert step is not None
        count = self.over_sampler.prompts_to_draw(
            ready=self.monitor.ready,
            open_groups=len(self.buffer) - self.monitor.ready,
            free_places=self._free_places() - self.over_sampler.waiting,
            step_start=not step.filled,
            room=self.buffer.room(self.tokens.held),
        )
        step.filled = True
        if count:
            self.over_sampler.asked = count
            self._out.append(do.DrawPrompts(count))

    def _free_places(self) -> int:
        return self.settings.max_in_flight - len(self.attempts) - self.starting

    def _start_waiting(self) -> None:
        while self.over_sampler.waiting and self._free_places() > 0:
            engine = self.engines.pick(self.clock.current)
            if engine is None:
                return
            sample = self.over_sampler.pop()
            assert sample is not None
            if sample.state is SampleState.NEW:
                self.starting += 1
                self._to(sample, SampleState.STARTED, "rollout function started")
                self._out.append(do.StartSample(sample))
            else:
                self._submit(sample, engine.limits.name)

    def _prompts_drawn(self, event: ev.PromptsDrawn) -> None:
        self.over_sampler.asked = 0
        self.over_sampler.exhausted |= event.exhausted
        for prompt in event.prompts:
            self.prompts.observe(1)
            self.counters["prompts_drawn"] += 1
            group = Group(self._groups, prompt, self.settings.n_samples_per_prompt)
            self._groups += 1
            if len(prompt.token_ids) >= self.engines.max_context:
                self.prompts.drop(1, DropReason.TOO_LONG)
                self.counters["prompts_too_long"] += 1
                self._long_in_a_row += 1
                if self.settings.on_long_prompt is OnLongPrompt.ERROR:
                    self._fail_step(
                        f"prompt {group.id} has {len(prompt.token_ids)} tokens, which leaves no room in the engines' "
                        f"context of {self.engines.max_context}; shorten it or set on_long_prompt: skip"
                    )
                elif self._long_in_a_row >= TOO_LONG_IN_A_ROW:
                    self._fail_step(
                        f"{self._long_in_a_row} prompts in a row leave no room in the engines' context of "
                        f"{self.engines.max_context}; is it meant to be that small?"
                    )
                    self._long_in_a_row = 0
                continue
            self._long_in_a_row = 0
            self.buffer.add(group)
            for sample in group.samples:
                self.over_sampler.push(sample)
        if event.error is not None:
            self._fail_step(event.error)

    # ---------------------------------------------------------------- one sample

    def _call_made(self, event: ev.CallMade) -> None:
        sample = self._sample(event.sample)
        if sample.state is SampleState.STARTED:
            self.starting -= 1
        elif sample.state is not SampleState.OUTSIDE:
            raise self._impossible(sample, "called generate twice at the same time")
        if event.token_ids is not None:
            error = self._take_environment(sample, event.token_ids)
            if error:
                self._to(sample, SampleState.OUTSIDE, "call refused")
                self._give_up(sample.group, DropReason.FAILED, f"{sample.id}: {error}")
                return
        sample.call = GenerateCall(event.sampling, len(sample.tape))
        if self.book.budget(sample, sample.call) <= 0:
            self._complete_call(sample, FinishReason.LENGTH)
            return
        self._to(sample, SampleState.QUEUED, f"asks for up to {event.sampling.max_tokens} tokens")
        self.over_sampler.push(sample)

    def _take_environment(self, sample: Sample, token_ids: Int32) -> str | None:
        """What the rollout function added since the last call becomes a segment of the environment."""
        have = np.concatenate((sample.group.prompt.token_ids, sample.tape.tokens))
        if len(token_ids) < len(have) or not np.array_equal(token_ids[: len(have)], have):
            return (
                "llm.generate was given tokens that do not begin with the prompt and everything generated so far; "
                "append to the conversation, never rewrite it"
            )
        sample.tape.add_environment(np.asarray(token_ids[len(have) :], np.int32), self.clock.current)
        return None

    def _submit(self, sample: Sample, engine: str) -> None:
        call, held = sample.call, len(sample.tape)
        assert call is not None
        attempt = self.book.open(sample, call, engine, self.clock.current.incarnation)
        self.counters["attempts"] += 1
        if held > call.start:
            self.counters["resumed_attempts"] += 1
            self.counters["reprefill_tokens"] += len(attempt.token_ids)
        self._to(sample, SampleState.IN_FLIGHT, f"attempt {attempt.id} on {engine} from token {held}")
        self._out.append(do.Submit(attempt))

    def _attempt_ended(self, event: ev.AttemptEnded) -> None:
        attempt = self._take_attempt(event.attempt_id)
        if attempt is None:
            return
        self.engines.states[attempt.engine].failures = 0
        sample = attempt.sample
        self._keep(attempt)
        if sample.state is SampleState.DROPPED:
            return
        call = sample.call
        assert call is not None
        if event.finish == "stop" or (event.finish == "abort" and self.book.ends_in_stop(attempt)):
            self._complete_call(sample, FinishReason.STOP)
        elif event.finish == "length" or self.book.budget(sample, call) <= 0:
            self._complete_call(sample, FinishReason.LENGTH)
        else:
            if not attempt.tape.count:
                self.counters["empty_partials"] += 1
            self._requeue(sample, f"partial after {attempt.tape.count} tokens")

    def _attempt_failed(self, event: ev.AttemptFailed) -> None:
        attempt = self._take_attempt(event.attempt_id)
        if attempt is None:
            return
        self.counters["failed_attempts"] += 1
        sample = attempt.sample
        self.tokens.observe(event.rejected)
        self.tokens.drop(event.rejected, DropReason.CORRUPT)
        if event.corrupt:
            self.tokens.observe(attempt.tape.count)
            self.tokens.drop(attempt.tape.count, DropReason.CORRUPT)
        else:
            self._keep(attempt)
        if self.engines.failed(attempt.engine):
            self._out.append(do.ProbeEngine(attempt.engine))
        if sample.state is SampleState.DROPPED:
            return
        # what counts is failing again and again at the same token: an engine that restarts is not the sample's fault
        progressed = attempt.tape.count > 0 and not event.corrupt
        sample.failures = 1 if progressed else sample.failures + 1
        if progressed and self.book.ends_in_stop(attempt):
            self._complete_call(sample, FinishReason.STOP)  # it broke off behind the last token
        elif progressed and sample.call is not None and self.book.budget(sample, sample.call) <= 0:
            self._complete_call(sample, FinishReason.LENGTH)
        elif sample.failures >= self.settings.max_attempt_failures:
            self._to(sample, SampleState.OUTSIDE, f"attempt failed: {event.error}")
            self._give_up(sample.group, DropReason.FAILED, f"{sample.id}: {event.error}")
        else:
            self._requeue(sample, f"attempt failed: {event.error}")

    def _take_attempt(self, attempt_id: str) -> Attempt | None:
        """The attempt, which is no longer in flight; None for one that is already accounted for."""
        attempt = self.book.close(attempt_id)
        if attempt is None:
            self.counters["late_events"] += 1
        self.aborts.ended(attempt_id)
        return attempt

    def _keep(self, attempt: Attempt) -> None:
        """The attempt's tokens move to the sample, or into the books of the reason it was dropped for."""
        sample, count = attempt.sample, attempt.tape.count
        self.tokens.observe(count)
        if sample.state is SampleState.DROPPED:
            assert sample.group.dropped_for is not None
            self.tokens.drop(count, sample.group.dropped_for)
        else:
            sample.tape.add_attempt(attempt.tape, attempt.id, attempt.engine, attempt.sampling.temperature)

    def _requeue(self, sample: Sample, why: str) -> None:
        self._to(sample, SampleState.QUEUED, why)
        self.over_sampler.push(sample)

    def _complete_call(self, sample: Sample, finish: FinishReason) -> None:
        assert sample.call is not None
        start, sample.call, sample.finish = sample.call.start, None, finish
        self._to(sample, SampleState.OUTSIDE, f"call complete ({finish}) at {len(sample.tape)} tokens")
        self._out.append(do.CallCompleted(sample, start))

    def _sample_returned(self, event: ev.SampleReturned) -> None:
        sample = self._sample(event.sample)
        if sample.state is SampleState.STARTED:
            self.starting -= 1
        elif sample.state is not SampleState.OUTSIDE:
            raise self._impossible(sample, "returned while it was waiting for tokens")
        if sample.finish is None:
            self._to(sample, SampleState.OUTSIDE, "returned nothing")
            error = "the rollout function returned without a call of llm.generate"
            self._give_up(sample.group, DropReason.FAILED, f"{sample.id}: {error}")
            return
        self._to(sample, SampleState.SCORING, "returned")
        if not self.settings.has_reward:
            self._finish(sample)
        elif not self.settings.group_reward:
            self._out.append(do.ScoreSample(sample))
        else:
            self._score_group(sample.group)

    def _score_group(self, group: Group) -> None:
        """Ask for the rewards of a group once all its samples have returned (some may begin again after that)."""
        if all(s.state in (SampleState.SCORING, SampleState.FINISHED) for s in group.samples):
            self._out.append(do.ScoreGroup(group))

    def _scored(self, event: ev.Scored) -> None:
        group = self.buffer.groups.get(event.group)
        if group is None:
            self.counters["late_events"] += 1
            return
        for index, reward in event.rewards:
            sample = group.samples[index]
            if sample.state is SampleState.FINISHED and self.settings.group_reward:
                sample.reward = reward  # a sibling began again, and the group was scored anew
                continue
            if sample.state is not SampleState.SCORING:
                self.counters["late_events"] += 1
                continue
            if not math.isfinite(reward):
                self._fail(sample, f"the reward is {reward}; it must be a finite number")
                return
            sample.reward = reward
            self._finish(sample)

    def _finish(self, sample: Sample) -> None:
        self._to(sample, SampleState.FINISHED, f"finished, reward {sample.reward:g}")
        if self.monitor.sample_finished(sample.group, self.event_number):
            self._failed_in_a_row = 0

    # ---------------------------------------------------------------- failures and drops

    def _sample_failed(self, event: ev.SampleFailed) -> None:
        group = self.buffer.groups.get(event.sample.group)
        if group is None or group.samples[event.sample.index].state is SampleState.FINISHED:
            self.counters["late_events"] += 1
            return
        self._fail(group.samples[event.sample.index], event.error)

    def _fail(self, sample: Sample, error: str) -> None:
        """Try again what failed, the reward or the whole sample, until it has failed too often."""
        sample.failures += 1
        self.counters["failed_samples"] += 1
        self._note(sample, f"failed: {error}")
        if sample.failures >= self.settings.max_attempt_failures or sample.state is SampleState.IN_FLIGHT:
            self._give_up(sample.group, DropReason.FAILED, f"{sample.id}: {error}")
        elif sample.state is not SampleState.SCORING:
            self._begin_again(sample, DropReason.FAILED)
        elif self.settings.group_reward:
            self._score_group(sample.group)
        else:
            self._out.append(do.ScoreSample(sample))

    def _begin_again(self, sample: Sample, reason: DropReason) -> None:
        """Drop the tokens of a sample that is not in flight, and start it anew."""
        self._leave(sample)
        if sample.state is SampleState.FINISHED:
            self.monitor.reopen(sample.group)
        self.tokens.drop(sample.tape.generated, reason)
        sample.tape = TokenTape()
        sample.call, sample.finish, sample.reward = None, None, 0.0
        self._to(sample, SampleState.NEW, f"begins again ({reason})")
        self.over_sampler.push(sample)

    def _leave(self, sample: Sample) -> None:
        """Take a sample out of wherever it is waiting, and end its rollout function."""
        if sample.state in WAITING:
            self.over_sampler.forget(sample)
        if sample.state is SampleState.STARTED:
            self.starting -= 1
        if sample.state is not SampleState.NEW:
            self._out.append(do.CancelSample(sample))

    def _give_up(self, group: Group, reason: DropReason, error: str) -> None:
        """Drop a whole group; it is replaced by the rules of the over-sampler."""
        group.dropped_for = reason
        in_flight = [self.attempts[s.attempt_id] for s in group.samples if s.state is SampleState.IN_FLIGHT]
        self.monitor.forget(group)
        self.buffer.remove(group)
        self.prompts.drop(1, reason)
        self.counters[f"groups_dropped_{reason}"] += 1
        for sample in group.samples:
            self._leave(sample)
            self.tokens.drop(sample.tape.generated, reason)
            self._to(sample, SampleState.DROPPED, f"group dropped ({reason}): {error}")
        self._stop(in_flight)
        if reason is DropReason.FAILED:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= self.settings.max_failed_groups:
                self._fail_step(f"{self._failed_in_a_row} groups failed in a row, the last one: {error}")
                self._failed_in_a_row = 0

    def _fail_step(self, error: str) -> None:
        """Tell the trainer; everything is kept, and a new step may be asked for."""
        if self.step is not None:
            self.step = None
            self._stop(list(self.attempts.values()))
            self._out.append(do.Fail(error))

    # ---------------------------------------------------------------- pauses, versions, engines

    def _pause_requested(self, event: ev.PauseRequested) -> None:
        self.paused = self._pause_asked = True
        self._stop(list(self.attempts.values()))

    def _resumed(self, event: ev.Resumed) -> None:
        self.paused = self._pause_asked = False

    def _weights_updated(self, event: ev.WeightsUpdated) -> None:
        if event.version < self.clock.current:
            raise InvariantError(f"weights went back from version {self.clock.current} to {event.version}")
        self.clock.current = event.version
        for name in self.engines.states if event.engines is None else event.engines:
            self.engines.states[name].version = event.version
        for sample in self.buffer.too_old():
            if sample.state is SampleState.IN_FLIGHT or sample.group.dropped_for is not None:
                continue
            if self.settings.on_stale is OnStale.RESTART:
                self._begin_again(sample, DropReason.STALE)
            else:
                self._give_up(sample.group, DropReason.STALE, f"{sample.id} is older than max_staleness")
        if self.step is not None:
            self._plan_deadlines()

    def _plan_deadlines(self) -> None:
        """With on_stale: finish, see to it that nothing gets too old; what the step owes goes first."""
        if self.settings.on_stale is not OnStale.FINISH:
            return
        for group in self.monitor.plan(self.buffer.slacks(), self.settings.max_staleness):
            for sample in group.samples:
                if sample.state in WAITING:
                    self.over_sampler.forget(sample)
                    self.over_sampler.push(sample)

    def _timer_fired(self, event: ev.TimerFired) -> None:
        commands, late = self.aborts.timer_fired(event.timer, self.engines.in_flight())
        self._out += commands
        for attempt in late:
            self.counters["fenced_attempts"] += 1
            state = self.engines.states[attempt.engine]
            if not state.quarantined:
                state.quarantined = True
                self._out.append(do.ProbeEngine(attempt.engine))
            self._attempt_ended(ev.AttemptEnded(attempt.id, "abort"))

    def _engine_ready(self, event: ev.EngineReady) -> None:
        state = self.engines.states[event.engine]
        state.quarantined, state.failures = False, 0

    # ---------------------------------------------------------------- helpers

    def _sample(self, sample_id: SampleId) -> Sample:
        group = self.buffer.groups.get(sample_id.group)
        if group is None:
            raise InvariantError(f"no such sample: {sample_id}; {self.story(sample_id)}")
        return group.samples[sample_id.index]

    def _to(self, sample: Sample, state: SampleState, why: str) -> None:
        sample.state = state
        self.history.note(self.event_number, sample.id, why)

    def _note(self, sample: Sample, what: str) -> None:
        self.history.note(self.event_number, sample.id, what)

    def _impossible(self, sample: Sample, what: str) -> InvariantError:
        return InvariantError(f"{sample.id} {what} (it is {sample.state}); {self.story(sample.id)}")
