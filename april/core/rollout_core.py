"""Schedules rollouts as a state machine: only ``RolloutCore.handle(event) -> list[Command]`` changes its state.

``RolloutCore`` runs steps with the over-sampler, completion monitor, abort controller and partial-rollout buffer, and
decides when training, evaluations, weight updates and pauses take turns. What happens to samples is decided in
``sample_calls`` (calls of ``llm.generate``), ``attempt_results`` (engine requests), ``function_results`` (results of
the user's functions), ``function_bugs``, ``group_completion`` and ``sample_lifecycle`` (retries and drops).

Invariants, checked by :meth:`RolloutCore.validate`: each sample is in exactly one state; tokens and prompts
are delivered, held, or dropped for a named reason; every attempt in flight belongs to exactly one sample.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from april.core import commands as do
from april.core import events as ev
from april.core.attempt_results import AttemptResults
from april.core.batch import (
    Batch,
    DeliveredSample,
    SampleFigures,
    batch_metrics,
    deliver_sample,
    figures_of,
    with_all_rows,
)
from april.core.completion_monitor import Unit
from april.core.context import CoreContext
from april.core.engine_recovery import EngineRecovery
from april.core.evaluation import Evaluations
from april.core.function_results import FunctionResults
from april.core.group_completion import GroupCompletion
from april.core.sample_calls import SampleCalls
from april.core.sample_lifecycle import SampleLifecycle
from april.core.settings import CoreSettings, EngineLimits
from april.core.types import (
    AttemptFailure,
    DropReason,
    GenerateCall,
    GenerationMode,
    Group,
    GroupState,
    OnDataEnd,
    OnLongPrompt,
    OnStale,
    Refill,
    Sample,
    SampleId,
    SampleState,
    Timer,
    TimerKind,
)
from april.core.validation import validate
from april.core.versions import PolicyVersion, VersionClock
from april.core.weight_updates import EngineCalls, WeightUpdates
from april.errors import InvariantError

SAMPLE_BYTES, TOKEN_BYTES = 32_768, 16
"""What a process grows by for a sample with its request and functions, and for a token with its log-probability, in
bytes; half of this is unused memory between other objects (measured with 65,536 samples)."""
STEP_METRICS = (
    "attempts", "resumed_attempts", "reprefill_tokens", "aborted_attempts", "empty_partials", "failed_attempts",
    "failed_samples", "fenced_attempts", "stalled_attempts", "late_events", "after_stop_tokens", "no_extras_tokens",
    "prompts_drawn", "prompts_too_long", "groups_dropped_failed", "groups_dropped_filtered", "groups_dropped_stale",
    "samples_dropped_failed", "samples_dropped_stale", "replaced_samples", "replays_diverged", "lost_functions",
    "busy_refusals", "stale_engines", "lowered_caps", "overridden_requests", "groups_put_aside",
    "constrained_answers", "broken_constraints",
)  # fmt: skip


@dataclass(slots=True, repr=False)
class Step:
    """Holds the phase of the running step and the counters from its beginning."""

    before: Counter[str]
    observed: int
    """Number of tokens observed in the run when the step began."""
    filled: bool = False
    """True once all prompts that the step wanted were drawn, including replacements for skipped prompts. False again
    after a commit or a weight update, when the step may draw more."""
    stopping: bool = False
    """True once the batch is complete or the step has failed; from then on, nothing is started."""
    long_round: bool = False
    """True if the step generates groups that earlier steps put aside, and no other prompts (tail batching)."""
    in_flight_at_stop: Counter[str] = field(default_factory=Counter)
    """Number of attempts in flight by engine, when the step stopped."""

    def __repr__(self) -> str:
        return "stopping" if self.stopping else "running"

    def metrics(self, now: Counter[str], observed: int) -> dict[str, float]:
        """Return the metrics of this step, from the run's counters ``now`` and the tokens ``observed`` so far."""
        out = {name: float(now[name] - self.before[name]) for name in STEP_METRICS}
        generated, again = float(observed - self.observed), out["reprefill_tokens"]
        out["generated_tokens"] = generated
        out["reprefill_share"] = again / (again + generated) if again else 0.0
        if cacheable := now["cacheable_tokens"] - self.before["cacheable_tokens"]:
            out["cached_share"] = (now["cached_tokens"] - self.before["cached_tokens"]) / cacheable
        out["in_flight_at_stop"] = float(self.in_flight_at_stop.total())
        return out


_Rows = tuple[list[DeliveredSample], SampleFigures]
"""Rows of the batch that come from one sample, and what the batch's metrics need of them."""
NO_REFILL = Refill.NONE
NEWEST_REQUESTS = 64
"""To make room for n requests of evaluations, the newest n + NEWEST_REQUESTS requests of training are considered."""
TOO_LONG_IN_A_ROW = 1000
"""Number of prompts in a row that may be too long for the engines before the step fails."""
MOST_COMMANDS = 64
"""Number of commands from one event after which further samples and calls start only at the event Continued, since
starting thousands at once would block the event loop for seconds."""
MOST_SAMPLES = 512
"""Maximum number of samples that one event draws, puts aside, marks as urgent or makes the rows of; like MOST_COMMANDS,
it keeps events short."""
# module-level names, as an enum member costs 60 ns per use on Python 3.11
OPEN, LEASED = GroupState.OPEN, SampleState.LEASED


class RolloutCore:
    """Schedules the rollouts of one trainer over any number of engines, at least one at the start.

    Without a ``clock``, the policy version is 0.0. ``check`` runs :meth:`validate` after every event; it is for tests,
    as that is slow with many samples.
    """

    def __init__(
        self,
        settings: CoreSettings,
        engines: Sequence[EngineLimits],
        clock: VersionClock | None = None,
        *,
        check: bool = False,
    ) -> None:
        self.context = context = CoreContext(settings, engines, clock or VersionClock())
        self.clock, self.engines = context.clock, context.engines
        self.tokens, self.prompts = context.tokens, context.prompts
        self.over_sampler, self.monitor = context.over_sampler, context.monitor
        self.aborts, self.buffer = context.aborts, context.buffer
        self.attempts = context.attempts.in_flight
        self.counters, self.leases, self.leased = context.counters, context.leases, context.leases.batches
        self.step: Step | None = None
        """The running step; None while nothing is generated.

        In stepwise generation it lasts from the request for a batch to its delivery; in continuous generation the first
        request begins it, and each delivery begins the next one.
        """
        self.batch_wanted = False
        """True while the trainer waits for a batch."""
        self.pause_held = False
        """True while a pause is requested."""
        self._continuous = settings.generation is GenerationMode.CONTINUOUS
        self._check, self._pause_asked = check, False
        self._continues = False
        """True from the command Continue to the event Continued; nothing is started or drawn in between."""
        self._rows: dict[SampleId, tuple[Any, _Rows]] = {}
        """Rows made ahead of the next delivery, by sample, with the state they were made from (:meth:`_depends_on`)."""
        self._without_rows: deque[Sample] = deque()
        """Samples of the next batch whose rows are still to be made."""
        self._unmarked: dict[int, Unit] = {}
        """Groups and samples in ``context.urgent`` whose samples are not marked as urgent yet."""
        self._long_in_a_row = 0
        self._outage_timer = 0
        self._outage = False
        self._engine_calls = engine_calls = EngineCalls(context)
        self.updates = updates = WeightUpdates(context, engine_calls, self._new_weights)
        self._recovery = recovery = EngineRecovery(context, engine_calls, updates)
        groups = GroupCompletion(context)
        self.lifecycle = lifecycle = SampleLifecycle(context, groups)
        self.calls = calls = SampleCalls(context, lifecycle)
        self._attempt_results = attempt_results = AttemptResults(context, calls, lifecycle)
        self._function_results = function_results = FunctionResults(context, groups, lifecycle, calls)
        self._evaluations = Evaluations(context, lifecycle)
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.StepRequested: self._step_requested,
            ev.PromptsDrawn: self._prompts_drawn,
            ev.Continued: self._continued,
            ev.CallMade: calls.call_made,
            ev.CallUnheard: calls.call_unheard,
            ev.AnswerChecked: calls.answer_checked,
            ev.StopFound: attempt_results.stop_found,
            ev.AttemptStalled: attempt_results.attempt_stalled,
            ev.AttemptEnded: attempt_results.attempt_ended,
            ev.AttemptFailed: self._attempt_failed,
            ev.SampleReturned: function_results.sample_returned,
            ev.TokensUnused: self._tokens_unused,
            ev.SampleFailed: self._sample_failed,
            ev.FunctionLost: calls.function_lost,
            ev.Scored: function_results.scored,
            ev.GroupJudged: self._group_judged,
            ev.TimerFired: self._timer_fired,
            ev.PauseRequested: self._pause_requested,
            ev.Resumed: self._resumed,
            ev.UpdateRequested: updates.requested,
            ev.UpdateCancelled: updates.cancelled,
            ev.HandedOver: updates.handed_over,
            ev.Restored: updates.restored,
            ev.WeightsWritten: updates.weights_written,
            ev.EngineCallEnded: self._engine_call_ended,
            ev.EngineProbed: recovery.probed,
            ev.EnginesAsked: lambda event: recovery.probe_all(),
            ev.EnginesJoined: recovery.joined,
            ev.EngineLeaving: recovery.leaving,
            ev.EnginesLeft: recovery.left,
            ev.LoadReported: recovery.adjust_cap,
            ev.EvaluationRequested: self._evaluation_requested,
            ev.EvaluationCancelled: self._evaluations.cancelled,
            ev.BatchCommitted: self._batch_committed,
            ev.StalenessLowered: self._staleness_lowered,
            ev.WorkChanged: context.change,
            ev.SourceExtended: self.over_sampler.extended,
        }

    @property
    def settings(self) -> CoreSettings:
        """The present settings; some of them may change during a run."""
        return self.context.settings

    def __repr__(self) -> str:
        states = Counter(s.state for s in self.buffer.samples())
        parts = [f"{state}={count}" for state, count in sorted(states.items())]
        t = self.tokens
        return (
            f"<RolloutCore version={self.clock.current} step={self.step} groups={len(self.buffer)} "
            f"ready={self.monitor.ready} {' '.join(parts)} in_flight={len(self.attempts)} "
            f"aborting={self.aborts.pending} evaluations={len(self.context.evaluations)} "
            f"tokens: observed={t.observed} delivered={t.delivered} held={t.held} "
            f"dropped={sum(t.dropped.values())}>"
        )

    # ---------------------------------------------------------------- events

    def handle(self, event: ev.Event) -> list[do.Command]:
        """Handle one event; return the commands to be executed, in order.

        Raises:
            InvariantError: the state is inconsistent, or the event is impossible; the message has the sample's log.
        """
        self.context.event_number += 1
        out: list[do.Command] = []
        self.context.out = out
        if self.context.changed:
            self.context.note_change(event)
        self._handlers[type(event)](event)
        self._advance()
        if self._check:
            self.validate()
        return out

    def validate(self) -> None:
        """Cross-check every index and ledger; raise InvariantError with the log of the sample concerned."""
        try:
            validate(self.context, self.updates)
        except InvariantError as error:
            raise InvariantError(f"{error}\n{self!r}") from None

    def story(self, sample_id: SampleId) -> str:
        return self.context.story(sample_id)

    def observed_tokens(self) -> int:
        """Return the number of tokens received so far, including tokens of running attempts."""
        return self.tokens.observed + sum(a.tape.parsed for a in self.attempts.values())

    @property
    def held_bytes(self) -> int:
        """Roughly what the process grew by for the samples that the run holds, in bytes, without their attachments."""
        samples = len(self.buffer.groups) * self.settings.n_samples_per_prompt
        return samples * SAMPLE_BYTES + self.tokens.held * TOKEN_BYTES

    # ---------------------------------------------------------------- steps

    def _step_requested(self, event: ev.StepRequested) -> None:
        if self.batch_wanted:
            raise InvariantError("a step was requested while another one is running; deliver that one first")
        self.batch_wanted = True
        if self.step is None:
            self._engine_calls.step_changes += 1
            self._recovery.probe_all()
            self._begin_step()

    def _begin_step(self) -> None:
        self.step = Step(self.counters.copy(), self.observed_tokens())
        # the batch of this step is trained one update later than the batch before, so samples may now be too old for it
        self.lifecycle.restart_or_drop_stale()
        self.step.long_round = self.settings.tail_batching and self.buffer.in_long_round
        self._plan_deadlines()

    def _advance(self) -> None:
        """Do what the state allows after an event: fail the step, deliver the batch, or start more work."""
        if self._outage and self.engines.usable(self.clock.current):
            self._outage = False
        if self.context.evaluations or self._pause_asked or self.updates.waits:
            self._advance_others()
        if self.step is None:
            return  # a failure between steps is reported when the next step runs
        if self.batch_wanted and self.updates.half_updated is not None and (broken := self.updates.broken) is not None:
            self._fail(broken, weights=True)
            return
        if self.context.failure is not None:
            if self.batch_wanted:
                self._fail(self.context.failure)
            elif not self.step.stopping:  # the work in flight would fail as well
                self.step.stopping = True
                self._stop_everything()
            return
        if self.train_first:
            return
        step, enough = self.step, self.batch_wanted and self._enough
        stops = enough and not self._continuous
        if enough and not step.stopping:
            step.in_flight_at_stop = Counter(a.engine for a in self.attempts.values())
        if stops and not step.stopping:
            self._stop_everything()
        step.stopping = stops  # may be False again: until all attempts have ended, an update may drop ready groups
        if stops and self.attempts:
            return
        if enough:
            if self.settings.tail_batching and not self._put_unfinished_aside():
                return
            if not self._make_rows():
                return
            self._end_step()
        if self._trains:
            self._fill()

    def _fail(self, failure: str, *, weights: bool = False) -> None:
        """End the step with an error; all samples are kept, and the trainer may ask for a batch again."""
        self.context.failure = None
        self._leave_step()
        self._stop_everything()
        self.context.out.append(do.Fail(failure, weights))

    def _leave_step(self) -> None:
        self.step, self.batch_wanted = None, False
        self.over_sampler.granted = 0  # the next step decides anew how many prompts it wants
        self._engine_calls.step_changes += 1

    @property
    def _enough(self) -> bool:
        """True if a batch can be delivered: the target is reached, or nothing runs and no prompt can be added."""
        if self.monitor.target_reached:
            return True
        if self.monitor.ready < self.buffer.units or self.attempts:
            return False
        # with a quorum, failures may leave too few samples for a batch; if new prompts could not be delivered in time
        # (fits is 0), the batch is delivered with the samples that are ready
        exhausted = self.over_sampler.exhausted and not (self.buffer.aside or self.buffer.unbegun)
        return exhausted or (self.monitor.ready > 0 and not self.buffer.fits)

    def _advance_others(self) -> None:
        """Advance evaluations, weight updates and pauses.

        Training may have to wait for these, and these may wait until the running requests of training have ended.
        """
        evaluations, updates = self._evaluations, self.updates
        first = min(updates.numbers, default=0)
        if self.context.evaluations:
            may_begin = not self.paused and (self._continuous or not self.attempts)
            evaluations.advance(may_begin=may_begin, half_updated=updates.half_updated, update=first)
            if any(evaluations.running) and not self._continues:
                self._start_waiting(training=False)
                evaluations.advance()  # an evaluation may just have failed because no engine was left
        if updates.waits and (updates.running or not evaluations.go_before_update(held=self.pause_held, update=first)):
            updates.continue_next(held=self.pause_held)
        if self._pause_asked and not self.attempts and not updates.running and not any(evaluations.running):
            self._pause_asked = False
            self.context.out.append(do.Paused())

    @property
    def _trains(self) -> bool:
        """True if training may start requests now."""
        waits = self.paused or self.train_first or (self.context.evaluations and not self._continuous)
        return self.step is not None and not waits

    @property
    def paused(self) -> bool:
        """True if nothing may start: a pause was requested, an update runs, or the engines' weights differ."""
        return self.pause_held or self.updates.running or self.updates.half_updated is not None

    @property
    def train_first(self) -> bool:
        """True if the step must wait for an update: with so many untrained batches, new samples would get too old."""
        return bool(self.leased) and self.leases.full and not (self.over_sampler.exhausted and not self.buffer)

    def _stop_everything(self) -> None:
        self.context.stop(list(self.attempts.values()), sweep=True)

    def _end_step(self) -> None:
        """End the step and deliver the batch.

        Nothing is delivered if the data has ended and less than a batch is left, with ``on_data_end: wait``.
        """
        ended = self.over_sampler.exhausted and self.monitor.ready < self.settings.target
        waits = ended and self.settings.on_data_end is OnDataEnd.WAIT
        units = [] if waits else self.monitor.take(self.buffer.delivery_order)
        step, self.batch_wanted = self.step, False
        assert step is not None
        if units and self.settings.tail_batching:
            done = {unit.id for unit in units}
            self._put_aside([g for g in self.buffer if g.id not in done and self.buffer.in_round(g)])
        if not (units and self._continuous):
            self._leave_step()
        if units:
            self._deliver(units, step)
        else:
            self.context.out.append(do.EndOfData(self.monitor.ready))
        self._rows.clear()
        self._without_rows.clear()
        if self.step is not None:
            self._begin_step()

    def _put_unfinished_aside(self) -> bool:
        """Put aside a portion of the groups that a round did not finish; return True once none is left."""
        if self._continues:
            return False
        unfinished = (g for g in self.buffer if not g.ready and self.buffer.in_round(g))
        most = max(1, MOST_SAMPLES // self.settings.n_samples_per_prompt)
        self._put_aside(list(itertools.islice(unfinished, most)))
        if next(unfinished, None) is not None:
            self._continue_later()
        return not self._continues

    def _put_aside(self, groups: list[Group]) -> None:
        out = self.context.out
        for group in groups:
            self.lifecycle.put_aside(group)
        # these groups begin again: withdraw what this event has told or asked the user's functions about them
        aside = set(groups)
        out[:] = [c for c in out if _group_of(c) not in aside]

    def _make_rows(self) -> bool:
        """Make rows of the next batch, a portion at each event; return True once less than a portion is missing.

        Samples that finish meanwhile may replace others in the batch; their rows are made at the delivery.
        """
        settings = self.settings
        if settings.rollout_batch_size * settings.n_samples_per_prompt <= MOST_SAMPLES:
            return True
        if self._continues:
            return False
        if not self._without_rows:
            units = self.monitor.next_units(self.buffer.delivery_order)
            missing = [s for u in units for s in u.members if self._rows_made_of(s) is None]
            if len(missing) < MOST_SAMPLES:
                return True
            self._without_rows.extend(missing)
        age = cache(self.leases.age)
        for _ in range(min(MOST_SAMPLES, len(self._without_rows))):
            sample = self._without_rows.popleft()
            if sample.state is SampleState.FINISHED:
                self._rows[sample.id] = self._depends_on(sample), self._rows_of(sample, age)
        self._continue_later()
        return False

    def _rows_of(self, sample: Sample, age: Callable[[PolicyVersion], int]) -> _Rows:
        """Return the rows of a finished sample, and what the batch's metrics need of them."""
        masks = self.settings.on_stale in (OnStale.MASK, OnStale.FINISH)
        rows = deliver_sample(sample, age, self.buffer.bound(sample) if masks else None)
        return rows, figures_of(rows, age)

    def _rows_made_of(self, sample: Sample) -> _Rows | None:
        """Return the rows that were made ahead, or None if there are none or they are outdated."""
        depends_on, rows = self._rows.get(sample.id, (None, None))
        return rows if depends_on == self._depends_on(sample) else None

    def _depends_on(self, sample: Sample) -> Any:
        """Return all values on which the rows of a finished sample depend and that may still change."""
        return self.clock.current, len(self.leases), sample.restarts, sample.group.since

    def _deliver(self, units: list[Unit], step: Step) -> None:
        context = self.context
        age = cache(self.leases.age)
        groups: dict[int, list[Sample]] = {}
        for unit in units:
            for sample in unit.members:
                groups.setdefault(sample.id.group, []).append(sample)
        samples: list[DeliveredSample] = []
        figures, sizes, why = [], dict.fromkeys(groups, 0), f"leased in batch {context.batches}"
        for number, members in groups.items():
            # make all rows of a group before any of its samples changes its state, as the rows depend on the states
            made = [self._rows_made_of(sample) or self._rows_of(sample, age) for sample in members]
            for sample, (rows, of_rows) in zip(members, made, strict=True):
                samples += rows
                figures.append(of_rows)
                sizes[number] += len(rows)
                context.change_state(sample, LEASED, why)
                sample.group.delivered += 1
                self.lifecycle.settle_sample(sample.group)
        lengths = [of_rows.generated for of_rows in figures]
        context.tokens.deliver(sum(lengths))
        context.lengths.trained.samples += len(lengths)
        context.lengths.trained.tokens += sum(lengths)
        metrics = batch_metrics(len(groups), samples, figures) | self.leases.recorded()
        metrics |= context.lengths.metrics(lengths)
        metrics |= step.metrics(self.counters, self.observed_tokens())
        metrics |= self.engines.metrics(step.in_flight_at_stop, self.clock.current)
        metrics |= {
            "carried_groups": float(len(self.buffer)),
            "aside_groups": float(len(self.buffer.aside)),
            "long_round": float(step.long_round),
            "surplus_groups": self.monitor.ready / self.settings.units_per_group,
            "held_tokens": float(context.tokens.held),
            "held_attachment_bytes": float(self.buffer.attachment_bytes),
            "held_extras_bytes": float(self.buffer.extras_bytes),
            "batches_out": float(len(self.leases)),
            "staleness_bound": float(self.leases.bound),
        }
        batch = Batch(
            id=context.batches,
            version=self.clock.current,
            samples=tuple(with_all_rows(samples)),
            group_sizes=tuple(sizes.values()),
            metrics=metrics,
            logprob_kind=self.engines.logprob_kind,
            branches=dict(self.clock.branches),
        )
        context.batches += 1
        self.leased[batch.id] = tuple(sample for members in groups.values() for sample in members)
        context.out.append(do.Deliver(batch))

    def _batch_committed(self, event: ev.BatchCommitted) -> None:
        if event.batch_id not in self.leased:
            raise InvariantError(f"batch {event.batch_id} was committed twice, or never delivered")
        self._commit([event.batch_id])
        self._replan()

    def _staleness_lowered(self, event: ev.StalenessLowered) -> None:
        if not 0 <= event.bound <= self.leases.bound:
            raise InvariantError(f"the bound of {self.leases.bound} was lowered to {event.bound}")
        self.leases.bound = event.bound

    def _commit(self, batch_ids: list[int]) -> None:
        self.leases.commit(batch_ids)
        self.counters["committed_batches"] += len(batch_ids)

    def _replan(self) -> None:
        """Plan the deadlines again after a commit or update; the running step may draw more prompts now."""
        if self.step is not None:
            self.step.filled = False
            self._plan_deadlines()

    # ---------------------------------------------------------------- starting work

    def _fill(self) -> None:
        """Start queued samples and calls, then draw prompts if more work is wanted."""
        if self._continues:
            return
        if self.buffer.aside or self.buffer.unbegun:
            self._begin_waiting_groups()
        if self.over_sampler.training.waiting or self.over_sampler.evaluations.waiting:
            self._start_waiting(training=True)
        step = self.step
        assert step is not None
        # without refill, prompts are drawn at the beginning of a step, and later only to replace dropped groups
        if step.filled and self.context.settings.refill is NO_REFILL and self.buffer.units >= self.buffer.batch:
            return
        if self._continues:
            return
        queue = self.over_sampler
        granted = min(queue.granted, self.buffer.fits) if queue.granted and not queue.requested else 0
        count = granted or queue.prompts_to_draw(
            ready=self.monitor.ready,
            in_work=self.buffer.units - self.monitor.ready,
            free_places=self.context.places.startable() - self.over_sampler.training.waiting,
            step_start=not step.filled,
            only_missing=step.long_round,
            fits=lambda: self.buffer.fits,
            room=lambda: self.buffer.room(self.tokens.held),
        )
        if count:
            queue.requested = min(count, max(1, MOST_SAMPLES // self.settings.n_samples_per_prompt))
            queue.granted, queue.bound = count - queue.requested, self.leases.lowered
            self.context.out.append(do.DrawPrompts(queue.requested))
        elif not self.over_sampler.requested:
            step.filled = True

    def _begin_waiting_groups(self) -> None:
        """Queue groups that waited for a round like the present one (tail batching).

        A long round has up to ``rollout_batch_size`` groups in work, first those that were put aside. So does every
        round once the prompts have ended. A short round has up to ``over_sampling_batch_size`` other groups in work.
        """
        assert self.step is not None
        long = self.step.long_round or self.over_sampler.exhausted
        most = self.buffer.batch if long else self.settings.groups_wanted
        while (group := self.buffer.next_waiting(long=long, most=most)) is not None:
            for sample in group.members:
                self.over_sampler.push(sample)

    def _start_waiting(self, *, training: bool) -> None:
        """Start queued samples and calls of evaluations, and then, if ``training``, those of training."""
        context, queue, trains = self.context, self.over_sampler, training or self._trains
        while (work := queue.first(context.places, training=trains)) is not None:
            sample = work if isinstance(work, Sample) else work.sample
            if not training and sample.evaluation is None:
                return
            if len(context.out) >= MOST_COMMANDS:
                self._continue_later()
                return
            engine = self.engines.pick(self.clock.current)
            if engine is None:
                self._watch_outage(training=training)
                start = self._make_room(work) if self._continuous and sample.evaluation is not None else None
                if start is None:
                    return
                work = start
            queue.forget(work)
            if isinstance(work, Sample):
                context.places.reserve(work)
                context.change_state(work, SampleState.RUNNING, "rollout function started")
                context.out.append(do.StartSample(work))
            elif not self.calls.complete_if_out_of_budget(work):
                cached = self.engines.cached_on(work.chain.cached_on, work.chain.cache_key)
                assert engine is not None
                if work.avoid_engine or cached:
                    engine = self.engines.pick(self.clock.current, work.avoid_engine, cached) or engine
                self._attempt_results.submit(work, engine.limits.name)
                self._recovery.start_checks(engine.limits.name)

    def _make_room(self, work: Sample | GenerateCall) -> Sample | GenerateCall | None:
        """Interrupt requests of training for evaluations that have less than their share of the full engines.

        The newest requests are interrupted, as they have generated least since their prefill; they are continued later.
        Return a sample of an evaluation to start now, so that its call is queued before an engine is free, or None.
        """
        context, states, places = self.context, self.engines.states, self.context.places
        queue, pending = self.over_sampler.evaluations, context.aborts.pending
        lacking = min(
            places.share_of_evaluations - len(context.attempts.of_evaluations), places.free_for_evaluations
        )
        count = min(lacking, queue.calls_waiting) - pending
        if count > 0 and any(state.may_make_room for state in states.values()):
            newest = itertools.islice(reversed(self.attempts.values()), count + pending + NEWEST_REQUESTS)
            able = [a for a in newest if a.id not in context.aborts and states[a.engine].may_make_room]
            able.sort(key=lambda a: a.sample.urgent)  # a stable sort: not urgent before urgent, then the newest first
            context.stop(able[:count])
        waiting = places.reserved_by_evaluations + queue.calls_waiting
        if isinstance(work, Sample):
            return work if waiting < places.share_of_evaluations else None
        return queue.starts[0][-1] if queue.starts and waiting < lacking else None

    def _prompts_drawn(self, event: ev.PromptsDrawn) -> None:
        context = self.context
        self.over_sampler.requested = 0
        self.over_sampler.exhausted |= event.exhausted
        if event.exhausted or event.error is not None:
            self.over_sampler.granted = 0
        elif self.over_sampler.granted and not self._continues:
            self._continue_later()
        for prompt in event.prompts:
            context.prompts.observe(1)
            self.counters["prompts_drawn"] += 1
            n = self.settings.n_samples_per_prompt
            quorum, bound = self.settings.quorum(n), self.over_sampler.bound
            group = Group(context.groups_drawn, prompt, n, self.clock.current, quorum=quorum, bound=bound)
            group.oldest_known = True
            context.groups_drawn += 1
            if len(prompt.token_ids) >= self.engines.max_context:
                self._drop_long_prompt(group)
                continue
            self._long_in_a_row = 0
            self.buffer.add(group)
            if self._comes_late:
                self.buffer.put_aside(group, begun=False)
                continue
            for sample in group.samples:
                self.over_sampler.push(sample)
        if event.error is not None:
            context.failure = event.error

    @property
    def _comes_late(self) -> bool:
        """True if a prompt that was drawn for a short round has no place in the present round (tail batching)."""
        step = self.step
        if not self.settings.tail_batching or (step is not None and not step.long_round):
            return False
        return step is None or self.buffer.units > self.buffer.batch

    def _drop_long_prompt(self, group: Group) -> None:
        """Drop a prompt that leaves no room for a response; the settings say whether the step fails."""
        self.prompts.drop(1, DropReason.TOO_LONG)
        self.counters["prompts_too_long"] += 1
        self._long_in_a_row += 1
        if self.settings.on_long_prompt is OnLongPrompt.ERROR:
            self.context.failure = (
                f"prompt {group.id} has {len(group.prompt.token_ids)} tokens, so there is no room for a response in "
                f"the engines' context of {self.engines.max_context}; shorten the prompt or set on_long_prompt: skip"
            )
        elif self._long_in_a_row >= TOO_LONG_IN_A_ROW:
            self.context.failure = (
                f"{self._long_in_a_row} prompts in a row leave no room for a response in the engines' context of "
                f"{self.engines.max_context}; check whether it is meant to be that small"
            )
            self._long_in_a_row = 0

    # ---------------------------------------------------------------- bugs in the user's functions

    def _sample_failed(self, event: ev.SampleFailed) -> None:
        # a function whose bug affects every sample fails the step; between steps the failure is not recorded, since the
        # function will fail again in the next step
        if self._function_results.sample_failed(event) and self.step is not None:
            self.context.failure = f"{event.sample}: {event.error}"

    def _group_judged(self, event: ev.GroupJudged) -> None:
        if self._function_results.group_judged(event) and self.step is not None:
            self.context.failure = event.error

    # ---------------------------------------------------------------- pauses, versions, engines

    def _pause_requested(self, event: ev.PauseRequested) -> None:
        self.pause_held = self._pause_asked = True
        self._stop_everything()

    def _evaluation_requested(self, event: ev.EvaluationRequested) -> None:
        self._evaluations.requested(event, behind=max(self.updates.numbers, default=0))
        if not self._continuous:
            self._stop_everything()

    def _resumed(self, event: ev.Resumed) -> None:
        self.pause_held = self._pause_asked = False

    def _continue_later(self) -> None:
        self._continues = True
        self.context.out.append(do.Continue())

    def _continued(self, event: ev.Continued) -> None:
        self._continues = False
        self._mark_urgent()

    def _new_weights(self, version: PolicyVersion, trained: int | None) -> None:
        if version < self.clock.current:
            raise InvariantError(f"weights went back from version {self.clock.current} to {version}")
        if trained is not None:
            self._commit(self.leases.delivered_through(trained))
        self.clock.current = version
        self.lifecycle.restart_or_drop_stale()
        self._replan()

    def _plan_deadlines(self) -> None:
        """Give priority to the groups or samples that this step must deliver, so that they do not get too old."""
        before, urgent = self.context.urgent, dict[int, Unit]()
        if self.settings.tail_batching:  # no sample is continued under newer weights, so none gets too old
            return
        for unit in self.monitor.plan(self.buffer.slacks(), self.buffer.horizon):
            # no sample of an open group can be delivered before the group's quorum is reached, so all are urgent
            group = unit.group if isinstance(unit, Sample) else unit
            first = group if group.state is OPEN else unit
            urgent[id(first)] = first
        for unit in [unit for key, unit in before.items() if key not in urgent]:
            for sample in unit.members:
                sample.urgent = False
        self._unmarked = {k: unit for k, unit in urgent.items() if k not in before or k in self._unmarked}
        self.context.urgent = urgent
        self._mark_urgent()

    def _mark_urgent(self) -> None:
        """Mark some of the samples to which the latest plan gives priority; nothing starts before all are marked."""
        for key in list(itertools.islice(self._unmarked, MOST_SAMPLES)):
            for sample in self._unmarked.pop(key).members:
                sample.urgent = True
                works: list[Sample | GenerateCall] = [sample, *(c.calls[-1] for c in sample.chains if c.calls)]
                for work in works:
                    if work.ticket:  # it is queued, and goes further to the front now
                        self.over_sampler.forget(work)
                        self.over_sampler.push(work)
        if self._unmarked and not self._continues:
            self._continue_later()

    def _timer_fired(self, event: ev.TimerFired) -> None:
        timer = event.timer
        if timer.kind is TimerKind.RETRY:
            self._function_results.retry_timer_fired(timer.number)
        elif timer.kind is TimerKind.OUTAGE:
            self._outage_over(timer.number)
        elif timer.kind is TimerKind.ABORTS:
            self._ask_again_for_ends(timer)
        else:
            self._recovery.timer_fired(timer)

    def _ask_again_for_ends(self, timer: Timer) -> None:
        # while nothing new starts, each engine may be told to end all its requests with one abort
        quiet = (self.paused or self.step is None or self.step.stopping) and not self.context.evaluations
        commands, late = self.aborts.timer_fired(timer, self.engines.in_flight() if quiet else {})
        self.context.out += commands
        for attempt in late:
            self.context.counts(attempt.sample)["fenced_attempts"] += 1
            self.context.engine_failed(attempt.engine)

    def _tokens_unused(self, event: ev.TokensUnused) -> None:
        self.tokens.observe(event.count)
        self.tokens.drop(event.count, event.reason)

    def _engine_call_ended(self, event: ev.EngineCallEnded) -> None:
        state = self.engines.state_of(event.engine)
        was = state.gate, state.weights
        if not self._engine_calls.ended(event):
            self.counters["late_events"] += 1
        elif state.recovering:
            self._recovery.call_ended(event, was)
        else:
            self.updates.call_ended(event)

    def _attempt_failed(self, event: ev.AttemptFailed) -> None:
        """Handle the failure of an attempt, then record what it says about the engine: weights lost, or busy."""
        attempt = self.context.attempts.get(event.attempt_id)
        self._attempt_results.attempt_failed(event)
        if attempt is not None and event.kind is AttemptFailure.WEIGHTS_WRITTEN:
            self.engines.states[attempt.engine].lose_weights()
        if attempt is not None and event.kind is AttemptFailure.BUSY:
            self._recovery.busy(attempt.engine, event)

    def _watch_outage(self, *, training: bool) -> None:
        """Start the outage timer if no engine is usable; the step or evaluation fails when the timer fires.

        ``training`` is False while only evaluations may start; evaluations fail at once if no engine can come back.
        """
        if not training and self._evaluations.no_engine_can_return:
            self._evaluations.fail_without_engine()
        elif not self._outage and not self.engines.usable(self.clock.current):
            self._outage = True
            self._outage_timer = self.context.start_timer(TimerKind.OUTAGE, self.settings.outage_deadline_s)

    def _outage_over(self, timer: int) -> None:
        if timer == self._outage_timer and self._outage:
            self._outage, evaluating = False, any(self._evaluations.running)
            if not evaluating and (self.step is None or self.step.stopping or self.paused):
                return  # nobody waits for an engine
            if any(s.in_flight and not s.quarantined for s in self.engines.states.values()):
                return  # an engine that had been busy for long has accepted a request
            if evaluating:
                self._evaluations.fail_without_engine()
                return
            self.context.failure = (
                f"no engine with the current weights was healthy for {self.settings.outage_deadline_s:g} s; april "
                f"keeps all responses: {self.engines.remedy(self.clock.current)} and ask for the batch again"
            )


def _group_of(command: do.Command) -> Group | None:
    """Return the group whose user functions get this command; None for other commands."""
    if isinstance(command, do.CallCompleted):
        return command.call.sample.group
    if isinstance(command, do.ScoreSample):
        return command.sample.group
    return command.group if isinstance(command, (do.ScoreGroup, do.JudgeGroup)) else None
