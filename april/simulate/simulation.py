"""Simulates a run: the real core with simulated engines on virtual time, without asyncio.

All token ids are 0, but counts and times are exact. As in a real run, every decision is made by the core
(:class:`april.core.rollout_core.RolloutCore`). The engines are discrete-event models
(:mod:`april.engines.simulated.decoder_model`). The same arguments give the same result, to the last bit, on every
Python version and for every hash seed.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from april.auto.question import TuningAnswer, TuningQuestion
from april.auto.tuner import AutoTuner, Decision
from april.core import commands as do
from april.core import events as ev
from april.core.batch import Batch
from april.core.event_pump import EventPump, RequestLog
from april.core.rollout_core import RolloutCore
from april.core.run_times import RunTimes
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings, EngineLimits
from april.core.types import MAX_SAMPLES_FACTOR, Attempt, EngineFinish, OnWeightUpdate, Prompt, Sample, SampleId
from april.core.versions import PolicyVersion
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.decoder_model import SimulatedDecoder
from april.engines.simulated.fitted_cost import Requests, fit
from april.engines.simulated.response_lengths import ResponseLengths
from april.errors import InvariantError, RolloutError
from april.record.file import RunRecord
from april.record.recorder import Recorder


@dataclass(slots=True)
class _RunningAttempt:
    """A request in a decoder. If it is not aborted, it gets ``count`` tokens, which may make the response complete."""

    attempt: Attempt
    count: int
    complete: bool


class SimulatedEngines:
    """Executes the core's commands for all engines of a simulation, and reports the engines' events.

    Args:
        decoders: decoder of each engine, by name.
        length: function that returns a sample's full response length in tokens; each restart draws another length.
        longest: largest number of tokens in a response.
        now: function that returns the virtual time in seconds.
        version: function that returns the policy version of the engines' weights.
        post: function that is called with every event.
    """

    def __init__(
        self,
        decoders: dict[str, SimulatedDecoder],
        *,
        length: Callable[[Sample], int],
        longest: int,
        now: Callable[[], float],
        version: Callable[[], PolicyVersion],
        post: Callable[[ev.Event], None],
    ) -> None:
        self.decoders = decoders
        self._length, self._now, self._version, self._post = length, now, version, post
        self._blank = np.zeros(longest, np.int32)
        self._blank_logprobs = np.zeros(longest, np.float32)
        self._running: dict[str, _RunningAttempt] = {}
        self.executors: dict[type[do.Command], Callable[[Any], None]] = {
            do.Submit: self._submit,
            do.Abort: self._abort,
            do.PauseEngine: self._complete_call,
            do.LoadEngine: self._complete_call,
            do.ResumeEngine: self._complete_call,
        }

    @property
    def next_s(self) -> float:
        """Time of the engines' next event; inf if there is none."""
        return min(decoder.next_event_time() for decoder in self.decoders.values())

    def run_next_event(self) -> None:
        """Process the engines' next event, whose time the caller has set; at equal times, the first engine is first."""
        self._advance(min(self.decoders, key=lambda name: self.decoders[name].next_event_time()))

    def catch_up(self) -> None:
        """Advance all decoders to the current time."""
        for engine in self.decoders:
            self._advance(engine)

    def tokens_in_flight(self) -> list[tuple[SampleId, int]]:
        """Return (sample, number of generated tokens) of every running request; the core does not know these tokens."""
        return [
            (r.attempt.sample.id, self.decoders[r.attempt.engine].tokens_of(attempt_id))
            for attempt_id, r in self._running.items()
        ]

    # ---------------------------------------------------------------- commands

    def _advance(self, engine: str) -> None:
        """Advance one engine to the current time, and post the end of each request that has finished."""
        for finished in self.decoders[engine].advance(self._now()):
            running = self._running.pop(finished.request_id)
            self._append(running.attempt, running.count)
            finish = EngineFinish.STOP if running.complete else EngineFinish.LENGTH
            self._post(ev.AttemptEnded.of(running.attempt, finish))

    def _submit(self, command: do.Submit) -> None:
        attempt = command.attempt
        self._advance(attempt.engine)
        left = self._length(attempt.sample) - len(attempt.call.chain.tape)
        count = min(left, attempt.request.sampling.max_tokens)
        self.decoders[attempt.engine].add(attempt.id, len(attempt.request.token_ids), count)
        self._running[attempt.id] = _RunningAttempt(attempt, count, complete=count == left)

    def _abort(self, command: do.Abort) -> None:
        self._advance(command.engine)
        for attempt_id, count in self.decoders[command.engine].abort(command.attempt_ids).items():
            running = self._running.pop(attempt_id)
            self._append(running.attempt, count)
            self._post(ev.AttemptEnded.of(running.attempt, EngineFinish.ABORT))

    def _complete_call(self, command: do.PauseEngine | do.LoadEngine | do.ResumeEngine) -> None:
        self._post(ev.EngineCallEnded(command.engine, command.call, ev.CallResult.DONE))

    def _append(self, attempt: Attempt, count: int) -> None:
        """Append ``count`` tokens to the tape (the recorded tokens of a response) of an attempt that has ended."""
        attempt.tape.append(self._blank[:count], self._blank_logprobs[:count], self._version())


class SimulatedTrainer:
    """Trains batches one after the other on virtual time; a weight update follows each batch.

    Args:
        train_s: seconds per batch.
        fetch_ahead: number of further batches that the trainer requests while it trains one; 0 means that it requests
            a batch only after the weight update.
    """

    def __init__(self, train_s: float, fetch_ahead: int) -> None:
        self._train_s, self._fetch_ahead = train_s, fetch_ahead
        self._batches: deque[Batch] = deque()
        self.ends_s = math.inf
        """Time at which the training of the current batch ends; inf while the trainer waits for a batch."""

    @property
    def wants_more(self) -> bool:
        """True if the trainer should request a batch now."""
        return len(self._batches) <= self._fetch_ahead

    def add(self, batch: Batch, now: float) -> None:
        """Queue a delivered batch for training."""
        self._batches.append(batch)
        if len(self._batches) == 1:
            self.ends_s = now + self._train_s

    def pop_trained(self) -> Batch:
        """Remove and return the batch that is now trained; training of the next batch begins at the same instant."""
        done = self._batches.popleft()
        self.ends_s = self.ends_s + self._train_s if self._batches else math.inf
        return done


log = logging.getLogger("april")
IGNORED: tuple[type[do.Command], ...] = (
    do.StartTimer, do.Fence, do.UpdateEnded,  # aborts and updates are instantaneous here
    do.ScoreSample, do.ScoreGroup, do.JudgeGroup, do.CancelSample, do.ReportDrop, do.EndOfData, do.Paused,
    do.ProbeEngine, do.HandOver, do.Restore, do.Warn, do.EvaluationDone, do.EvaluationFailed,
)  # fmt: skip
"""Commands that need no action here: there are no evaluations, no transfers and no failing engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Figures of one step, which lasts from one delivery to the next; times are seconds of virtual time."""

    start_s: float
    """Time at which the previous batch was delivered."""
    end_s: float
    generated_tokens: int
    trained_tokens: int
    busy_slot_s: float
    metrics: dict[str, float]
    token_ages: dict[int, int]
    """Number of trained tokens by age, which is the number of weight updates between generation and training."""
    lengths: list[int]
    """Number of response tokens of each delivered sample."""


@dataclass(slots=True)
class SimulationResult:
    """The result of a simulation: a record of each step, and a digest of all deliveries."""

    slots: int
    steps: list[StepRecord] = field(default_factory=list)
    digest: str = ""

    def summary(self, skip: int = 0) -> dict[str, float]:
        """Return totals and rates over the steps after the first ``skip`` steps, in which the engines fill up.

        Raises:
            RolloutError: the steps took no time.
        """
        steps = self.steps[skip:]
        wall = math.fsum(s.end_s - s.start_s for s in steps)  # fsum gives the same result on every Python version
        if not wall:
            raise RolloutError(
                f"{len(steps)} steps after a ramp of {skip} took no time: all that they delivered had been generated "
                f"before; simulate more steps"
            )
        trained = sum(s.trained_tokens for s in steps)
        generated = sum(s.generated_tokens for s in steps)
        weighted = math.fsum(s.metrics["off_policy_share"] * s.trained_tokens for s in steps)
        return {
            "steps": float(len(steps)),
            "rollout_s": wall,
            "trained_tokens": float(trained),
            "generated_tokens": float(generated),
            "trained_tokens_per_s": trained / wall,
            "generated_tokens_per_s": generated / wall,
            "reprefill_tokens": sum(s.metrics["reprefill_tokens"] for s in steps),
            "bubble": 1.0 - math.fsum(s.busy_slot_s for s in steps) / (self.slots * wall),
            "off_policy_share": weighted / trained,
            "staleness_mean": math.fsum(s.metrics["staleness_mean"] for s in steps) / len(steps),
            "staleness_max": max(s.metrics["staleness_max"] for s in steps),
        }


class Simulation:
    """Simulates a run whose trainer repeatedly takes a batch, trains it and updates the weights.

    Args:
        settings: settings of the core, without reward and filter.
        cost: decode cost of one engine.
        lengths: full response lengths by (group, sample).
        engines: number of engines.
        prompt_len: number of tokens in every prompt.
        train_s, fetch_ahead: see :class:`SimulatedTrainer`.
        choose: function that finds the best settings, in no virtual time; required if a setting is ``auto``.
        most_in_flight: number of decode slots of all engines together; None means max_in_flight, which does not suffice
            if max_in_flight may grow.
        check: whether to cross-check the core's ledgers after every event.
        record: file in which to record the simulation like a real run; None means no record.
        config: configuration for the record.
    """

    def __init__(
        self,
        settings: CoreSettings,
        cost: DecodeCost,
        lengths: ResponseLengths,
        *,
        engines: int = 1,
        prompt_len: int = 128,
        train_s: float = 0.0,
        fetch_ahead: int = 0,
        choose: Callable[[TuningQuestion], TuningAnswer] | None = None,
        most_in_flight: int | None = None,
        check: bool = False,
        record: RunRecord | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if settings.has_reward or settings.has_filter or settings.on_weight_update is not OnWeightUpdate.RESUBMIT:
            raise ValueError("a simulation has no rewards and no filter, and weight updates abort its requests")
        if settings.auto and choose is None:
            raise ValueError(f"{', '.join(settings.auto)} is auto, and nobody chooses; give choose")
        slots = -(-(most_in_flight or settings.max_in_flight) // engines)
        context = prompt_len + settings.max_response_len
        names = [f"engine{i}" for i in range(engines)]
        self.core = RolloutCore(settings, [EngineLimits(n, context, slots) for n in names], check=check)
        self.decoders = {name: SimulatedDecoder(cost, slots) for name in names}
        self.now = 0.0
        self.result = SimulationResult(slots * engines)
        self._lengths = lengths
        self._prompt = Prompt(np.zeros(prompt_len, np.int32))
        self._sampling = SamplingParams(max_tokens=settings.max_response_len)
        self._group_lengths: dict[int, list[int]] = {}
        self.engines = SimulatedEngines(
            self.decoders, length=self._length, longest=settings.max_response_len, now=lambda: self.now,
            version=lambda: self.core.clock.current, post=lambda event: self._pump.post(event),
        )  # fmt: skip
        self._requests = RequestLog(self.core, lambda: self.now)
        self._recorder = None
        if record is not None:
            self._recorder = Recorder(record, self.core, lambda: self.now, self._requests, config)
        self._auto, self._choose = AutoTuner(self.core) if choose else None, choose
        observers = [o for o in (self._recorder, self._requests if choose or record else None) if o is not None]
        self._pump = EventPump(self.core, {
            **dict.fromkeys(IGNORED, lambda command: None),
            **self.engines.executors,
            do.StartSample: lambda c: self._pump.post(ev.CallMade(c.sample.id, self._sampling)),
            do.CallCompleted: lambda c: self._pump.post(ev.SampleReturned(c.call.sample.id)),
            do.Continue: lambda _: self._pump.post(ev.Continued()),
            do.DrawPrompts: lambda c: self._pump.post(ev.PromptsDrawn([self._prompt] * c.count, exhausted=False)),
            do.Deliver: self._deliver,
            do.Fail: self._fail,
        }, observers)  # fmt: skip
        self._trainer = SimulatedTrainer(train_s, fetch_ahead)
        self._batch_requested = False
        self._batch: Batch | None = None
        self._waited: dict[str, float] = {}
        """Metrics about the step that ended with the delivery of ``_batch``."""
        self._updates = 0
        self._delivered_s, self._delivered_totals = 0.0, self._totals()
        self._times = RunTimes(self.core)
        self._digest = hashlib.blake2b(digest_size=16)

    def run(self, steps: int) -> SimulationResult:
        """Simulate until ``steps`` more batches are delivered. Raises RolloutError if the core gives up."""
        for _ in range(steps):
            while (batch := self._batch) is None:
                self._request_or_wait()
            self._batch, self._batch_requested = None, False
            self._record(batch)
            self._ask_for_settings()
            self._trainer.add(batch, self.now)
            if self._trainer.ends_s <= self.now:  # training takes no time
                self._update_weights()
                self._times.update(self.now)
        self.result.digest = self._digest.hexdigest()
        return self.result

    def _ask_for_settings(self) -> None:
        """Ask for better ``auto`` settings if a question is due."""
        auto = self._auto
        if auto is None or self._choose is None or not auto.question_due:
            return
        fitted = (fit(Requests.of(ended)) for _, ended in self._requests)
        question = auto.question(found for found in fitted if found is not None)
        if question is not None:
            self._apply_decision(auto.decide(question, self._choose(question)))

    def _apply_decision(self, decision: Decision | None) -> None:
        """Log a decision and change the settings accordingly; None does nothing."""
        if decision is not None:
            log.info("auto, after %d batches: %s", len(self.result.steps), decision.text)
            if (change := decision.change) is not None:
                self._pump.post(change)

    def close(self) -> None:
        """Close the record, if there is one."""
        if self._recorder is not None:
            self._recorder.close()

    def _request_or_wait(self) -> None:
        if not self._batch_requested and self._trainer.wants_more:
            self._batch_requested = True
            self._pump.post(ev.StepRequested())
            self._times.update(self.now)
            return
        at = self.engines.next_s  # at equal times, the trainer goes last
        if self._trainer.ends_s < at:
            self._trainer.ends_s = self.now = max(self.now, self._trainer.ends_s)
            self._update_weights()
        elif math.isinf(at):
            raise RolloutError(f"the simulation is stuck: {self.core!r}")
        else:
            self.now = at
            self.engines.run_next_event()
        self._times.update(self.now)

    def _update_weights(self) -> None:
        """Update the weights after a batch was trained; check that its token ages were computed for this version."""
        batch = self._trainer.pop_trained()
        if batch.trained_at != self.core.clock.current:
            raise InvariantError(f"batch {batch.id} was planned for {batch.trained_at}, not {self.core.clock.current}")
        self._updates += 1
        self._pump.post(ev.UpdateRequested(update=self._updates, trained=batch.id))

    def held_lengths(self) -> list[int]:
        """Return the present length of each undelivered response with tokens, including tokens of running requests."""
        lengths = {sample.id: sample.tokens for sample in self.core.buffer.samples()}
        for sample_id, count in self.engines.tokens_in_flight():
            lengths[sample_id] += count
        return [length for length in lengths.values() if length]

    def _totals(self) -> tuple[float, ...]:
        self.engines.catch_up()
        counters = [d.counters() for d in self.decoders.values()]
        return (
            sum(c.generated_tokens for c in counters),
            math.fsum(c.busy_slot_time_s for c in counters),
        )

    def _record(self, batch: Batch) -> None:
        totals = self._totals()
        start, before = self._delivered_s, self._delivered_totals
        self._delivered_s, self._delivered_totals = self.now, totals
        spent = tuple(a - b for a, b in zip(totals, before, strict=True))
        trained = int(batch.metrics["trained_tokens"])
        ages: dict[int, int] = {}
        lengths = [len(sample.tokens) for sample in batch.samples]
        metrics = {**batch.metrics, **self._waited}
        out = int(metrics["batches_out"])
        self.result.steps.append(
            StepRecord(
                start_s=start,
                end_s=self.now,
                generated_tokens=int(spent[0]),
                trained_tokens=trained,
                busy_slot_s=spent[1],
                metrics=metrics,
                token_ages=ages,
                lengths=lengths,
            )
        )
        for sample in batch.samples:
            self._group_lengths.pop(sample.id.group, None)
            for segment in sample.segments:
                age = self.core.clock.staleness(segment.version) + out
                ages[age] = ages.get(age, 0) + segment.count
            spans = [(s.count, s.version, s.engine) for s in sample.segments]
            self._digest.update(repr((self.now, sample.id, len(sample.tokens), spans)).encode())

    def _deliver(self, command: do.Deliver) -> None:
        self._batch, self._waited = command.batch, self._times.delivered(self.now)
        whole = replace(command.batch, metrics={**command.batch.metrics, **self._waited})
        if self._recorder is not None:
            self._recorder.record_batch(whole)
        if self._auto is not None:
            self._apply_decision(self._auto.add_batch(whole))
            self._waited |= self._auto.metrics()

    def _fail(self, command: do.Fail) -> None:
        raise RolloutError(command.error)

    def _length(self, sample: Sample) -> int:
        group, index = sample.id
        row, n = self._group_lengths.get(group), self.core.settings.n_samples_per_prompt
        # a response that begins again is another draw for the same prompt
        index += sample.restarts * (MAX_SAMPLES_FACTOR * n + 1)
        if row is None or len(row) <= index:  # the row is not drawn yet, or the sample began again or replaces another
            row = self._group_lengths[group] = self._lengths.group(group, max(n, index + 1)).tolist()
        return row[index]
