"""The real core on virtual time: no asyncio, no tokens worth reading, exact counts and times.

Every decision is made by :class:`april.core.state.RolloutCore`; the engines are discrete-event models
(:mod:`april.engines.simulated.clockwork`). The same arguments give the same result, to the last bit, on every
Python version and for every hash seed.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np

from april.auto.auto_work import AutoWork, Decision
from april.auto.question import Answer, Question
from april.core import commands as do
from april.core import events as ev
from april.core.batch import Batch
from april.core.event_pump import EventPump, RequestLog
from april.core.run_times import RunTimes
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings, EngineLimits
from april.core.state import RolloutCore
from april.core.types import Attempt, EngineFinish, OnWeightUpdate, Prompt, SampleId
from april.core.versions import PolicyVersion
from april.engines.simulated.clockwork import SimulatedDecoder
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.fitted_cost import Requests, fit
from april.engines.simulated.response_lengths import ResponseLengths, uniforms
from april.errors import InvariantError, RolloutError
from april.record.file import RunRecord
from april.record.recorder import Recorder


@dataclass(slots=True)
class _Running:
    """An attempt in a decoder, with the tokens it will have if it is left alone."""

    attempt: Attempt
    count: int
    complete: bool
    had: int = 0
    """Tokens on its tape, from before a weight update that it has lived through."""


class SimulatedEngines:
    """All engines of a simulation: they carry out commands and post events to the core.

    An event costs the same however many engines there are.

    Args:
        decoders: the engines by name.
        length: gives the length of a sample's true response.
        longest: most tokens of a response.
        now: virtual time, in seconds.
        version: gives the version of the engines' weights.
        post: is called with every event.
        shares_prompts: an engine prefills the prompt of a group once per version, not once per sample.
    """

    def __init__(
        self,
        decoders: dict[str, SimulatedDecoder],
        *,
        length: Callable[[SampleId], int],
        longest: int,
        now: Callable[[], float],
        version: Callable[[], PolicyVersion],
        post: Callable[[ev.Event], None],
        shares_prompts: bool = False,
    ) -> None:
        self.decoders = decoders
        self._prompts: dict[str, set[int]] | None = {name: set() for name in decoders} if shares_prompts else None
        """Groups whose prompts each engine has in its cache."""
        self._length, self._now, self._version, self._post = length, now, version, post
        self._blank = np.zeros(longest, np.int32)
        self._blank_logprobs = np.zeros(longest, np.float32)
        self._running: dict[str, _Running] = {}
        self._order = {name: place for place, name in enumerate(decoders)}
        self._touched: set[str] = set()
        """Engines whose next event may have moved since it was put on the agenda."""
        self._agenda: list[tuple[float, int, str]] = []
        """Heap of next events, some of them outdated; ties go by the order of the engines."""
        self.executors: dict[type[do.Command], Callable[[Any], None]] = {
            do.Submit: self._submit,
            do.Abort: self._abort,
            do.PauseEngine: self._paused,
            do.LoadEngine: self._loaded,
            do.ResumeEngine: self._called,
        }

    @property
    def next_s(self) -> float:
        """Time of the engines' next event; inf if there is none."""
        agenda = self._agenda
        for engine in self._touched:
            heappush(agenda, (self.decoders[engine].next_event_time(), self._order[engine], engine))
        self._touched.clear()
        while agenda and agenda[0][0] != self.decoders[agenda[0][2]].next_event_time():
            heappop(agenda)
        return agenda[0][0] if agenda else math.inf

    def run_next_event(self) -> None:
        """Let the next event happen; the time is ``next_s``."""
        self._advance(self._agenda[0][2])

    def catch_up(self) -> None:
        """Bring all decoders to now."""
        for engine in self.decoders:
            self._advance(engine)

    def tokens_in_flight(self) -> list[tuple[SampleId, int]]:
        """Return (sample, tokens made and not in the core's books yet) of every running request."""
        return [
            (r.attempt.sample.id, self.decoders[r.attempt.engine].tokens_of(attempt_id))
            for attempt_id, r in self._running.items()
        ]

    # ---------------------------------------------------------------- commands

    def _advance(self, engine: str) -> None:
        """Bring one engine's clock to now; what ended meanwhile ended at the same instant."""
        self._touched.add(engine)
        for finished in self.decoders[engine].advance(self._now()):
            running = self._running.pop(finished.request_id)
            self._append(running, running.count)
            finish = EngineFinish.STOP if running.complete else EngineFinish.LENGTH
            self._post(ev.AttemptEnded.of(running.attempt, finish))

    def _submit(self, command: do.Submit) -> None:
        attempt = command.attempt
        self._advance(attempt.engine)
        left = self._length(attempt.sample.id) - len(attempt.call.chain.tape)
        count = min(left, attempt.sampling.max_tokens)
        cached, group = 0, attempt.sample.id.group
        if self._prompts is not None:
            there = self._prompts[attempt.engine]
            cached = len(attempt.call.chain.prompt) if group in there else 0
            there.add(group)
        self.decoders[attempt.engine].add(attempt.id, len(attempt.token_ids), count, cached)
        self._running[attempt.id] = _Running(attempt, count, complete=count == left)

    def _abort(self, command: do.Abort) -> None:
        self._advance(command.engine)
        for attempt_id, count in self.decoders[command.engine].abort(command.attempt_ids).items():
            running = self._running.pop(attempt_id)
            self._append(running, count)
            self._post(ev.AttemptEnded.of(running.attempt, EngineFinish.ABORT))

    def _paused(self, command: do.PauseEngine) -> None:
        """What requests have at this moment is of the weights of before, if they live through the update."""
        silent: list[str] = []
        if command.in_flight is not OnWeightUpdate.RESUBMIT:
            self._advance(command.engine)
            for attempt_id, running in self._running.items():
                if running.attempt.engine == command.engine:
                    self._append(running, self.decoders[command.engine].tokens_of(attempt_id))
                    silent += [] if running.had else [attempt_id]
        done = ev.CallResult.DONE
        self._post(ev.EngineCallEnded(command.engine, command.call, done, silent=tuple(silent)))

    def _loaded(self, command: do.LoadEngine) -> None:
        if self._prompts is not None:
            self._prompts[command.engine].clear()
        self._called(command)

    def _called(self, command: do.LoadEngine | do.ResumeEngine) -> None:
        self._post(ev.EngineCallEnded(command.engine, command.call, ev.CallResult.DONE))

    def _append(self, running: _Running, count: int) -> None:
        """Put what is new of so many tokens onto its tape."""
        new, running.had = count - running.had, count
        running.attempt.tape.append(self._blank[:new], self._blank_logprobs[:new], self._version())


class SimulatedRewards:
    """Rewards on virtual time: all take equally long.

    Args:
        seconds: time that one reward takes; 0 means that it is there at once.
        at_once: most rewards that are computed at the same time; None means no limit.
        ended: is called with each sample whose reward is there.
    """

    def __init__(self, seconds: float, at_once: int | None, ended: Callable[[SampleId], None]) -> None:
        self._seconds, self._ended = seconds, ended
        self._free = [0.0] * at_once if at_once else None
        """Time at which each computing place becomes free."""
        self._running: deque[tuple[float, SampleId]] = deque()

    def begin(self, sample: SampleId, now: float) -> None:
        """Compute the reward of a sample, after those that came before it."""
        if not self._seconds:
            self._ended(sample)
            return
        if self._free is not None:
            now = max(now, self._free.pop(0))
            self._free.append(now + self._seconds)
        self._running.append((now + self._seconds, sample))

    @property
    def next_s(self) -> float:
        """Time at which the next reward is there; inf if none is computed."""
        return self._running[0][0] if self._running else math.inf

    def end_next(self) -> None:
        """Report the next reward; the time is ``next_s``."""
        self._ended(self._running.popleft()[1])


class SimulatedTrainer:
    """A trainer on virtual time: it trains its batches one after the other, and each ends with a weight update.

    Args:
        train_s: seconds per batch.
        fetch_ahead: batches that it asks for before it has trained the current one; 0 means it asks after the update.
    """

    def __init__(self, train_s: float, fetch_ahead: int) -> None:
        self._train_s, self._fetch_ahead = train_s, fetch_ahead
        self._batches: deque[Batch] = deque()
        self.ends_s = math.inf
        """Time at which the current batch is trained; inf while the trainer waits for one."""

    @property
    def wants_more(self) -> bool:
        """True if the trainer asks for a batch now."""
        return len(self._batches) <= self._fetch_ahead

    def add(self, batch: Batch, now: float) -> None:
        """Train a delivered batch, after those before it."""
        self._batches.append(batch)
        if len(self._batches) == 1:
            self.ends_s = now + self._train_s

    def pop_trained(self) -> Batch:
        """Remove and return the batch that is done; the next one begins at the same instant."""
        done = self._batches.popleft()
        self.ends_s = self.ends_s + self._train_s if self._batches else math.inf
        return done


log = logging.getLogger("april")
IGNORED: tuple[type[do.Command], ...] = (
    do.StartTimer, do.Fence, do.UpdateEnded,  # aborts and updates are instantaneous here
    do.ScoreGroup, do.JudgeGroup, do.CancelSample, do.ReportDrop, do.EndOfData, do.Paused,
    do.ProbeEngine, do.HandOver, do.Restore, do.Warn, do.EvaluationDone, do.EvaluationFailed,
)  # fmt: skip
"""Commands that never come, or of which nothing is seen: no evaluations, no transfers, no engine fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The figures between two deliveries; times in seconds of virtual time."""

    start_s: float
    """Delivery of the batch before."""
    end_s: float
    generated_tokens: int
    trained_tokens: int
    decode_steps: int
    busy_slot_s: float
    metrics: dict[str, float]
    token_ages: dict[int, int]
    """Trained tokens by age: weight updates between the token and its training."""
    lengths: list[int]
    """Response tokens of the delivered samples."""


@dataclass(slots=True)
class SimulationResult:
    """The result of a simulation: one record per step, and a digest of everything that was delivered."""

    slots: int
    steps: list[StepRecord] = field(default_factory=list)
    digest: str = ""

    def summary(self, skip: int = 0) -> dict[str, float]:
        """Totals and rates over all steps but the first ``skip`` (the ramp).

        Raises:
            RolloutError: they took no time.
        """
        steps = self.steps[skip:]
        wall = math.fsum(s.end_s - s.start_s for s in steps)  # fsum: the same on every Python version
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
            "decode_steps": float(sum(s.decode_steps for s in steps)),
            "bubble": 1.0 - math.fsum(s.busy_slot_s for s in steps) / (self.slots * wall),
            "off_policy_share": weighted / trained,
            "staleness_mean": math.fsum(s.metrics["staleness_mean"] for s in steps) / len(steps),
            "staleness_max": max(s.metrics["staleness_max"] for s in steps),
        }


class Simulation:
    """A simulated run: a trainer takes a batch, trains it, updates the weights, and takes the next.

    Args:
        settings: of the core, without rewards and filter: neither takes time here.
        cost: of one engine.
        lengths: true response lengths by (group, sample).
        engines: how many.
        prompt_len: tokens of every prompt.
        train_s, fetch_ahead: see :class:`SimulatedTrainer`.
        choose: answers, in no time, what is best; needed where settings are ``auto``.
        most_in_flight: slots of all engines, where max_in_flight may change.
        shares_prompts: see :class:`SimulatedEngines`.
        failing: share of the samples, drawn for each by itself, whose reward raises at every try, once they are whole.
        reward_s: seconds that the reward of a sample takes, once it is whole.
        rewards_at_once: most rewards that are computed at the same time; None means no limit.
        check: cross-check the core's books after every event.
        record: where to record it, as a real run is.
        watch: called with the time (s) and the number of busy slots whenever something has happened at an engine.
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
        choose: Callable[[Question], Answer] | None = None,
        most_in_flight: int | None = None,
        shares_prompts: bool = False,
        failing: float = 0.0,
        reward_s: float = 0.0,
        rewards_at_once: int | None = None,
        check: bool = False,
        record: RunRecord | None = None,
        watch: Callable[[float, int], None] | None = None,
    ) -> None:
        if settings.has_reward or settings.has_filter:
            raise ValueError("a simulation has no rewards and no filter; set has_reward=False and has_filter=False")
        if not 0.0 <= failing < 1.0:
            raise ValueError(f"failing={failing:g} is a share of the samples, at least 0 and below 1")
        if failing or reward_s:  # the failed are asked again at once
            settings = replace(settings, has_reward=True, retry_pause_s=0.0)
        if settings.auto and choose is None:
            raise ValueError(f"{', '.join(settings.auto)} is auto, and nobody chooses; give choose")
        slots = -(-(most_in_flight or settings.max_in_flight) // engines)
        context = prompt_len + settings.max_response_len
        names = [f"engine{i}" for i in range(engines)]
        self.core = RolloutCore(settings, [EngineLimits(n, context, slots) for n in names], check=check)
        self.decoders = {name: SimulatedDecoder(cost, slots) for name in names}
        self.now = 0.0
        self.result = SimulationResult(slots * engines)
        self._lengths, self._failing = lengths, failing
        self._prompt = Prompt(np.zeros(prompt_len, np.int32))
        self._sampling = SamplingParams(max_tokens=settings.max_response_len)
        self._group_lengths: dict[int, list[int]] = {}
        self.engines = SimulatedEngines(
            self.decoders, length=self._length, longest=settings.max_response_len, now=lambda: self.now,
            version=lambda: self.core.clock.current, post=lambda event: self._pump.post(event),
            shares_prompts=shares_prompts,
        )  # fmt: skip
        self._requests = RequestLog(self.core, lambda: self.now)
        self._recorder = None
        if record is not None:
            self._recorder = Recorder(record, self.core, lambda: self.now, self._requests)
        self._auto, self._choose = AutoWork(self.core) if choose else None, choose
        observers = [o for o in (self._recorder, self._requests if choose or record else None) if o is not None]
        self._pump = EventPump(self.core, {
            **self.engines.executors,
            do.StartSample: lambda c: self._pump.post(ev.CallMade(c.sample.id, self._sampling)),
            do.CallCompleted: lambda c: self._pump.post(ev.SampleReturned(c.call.sample.id)),
            do.ScoreSample: lambda c: self._rewards.begin(c.sample.id, self.now),
            do.DrawPrompts: lambda c: self._pump.post(ev.PromptsDrawn([self._prompt] * c.count, exhausted=False)),
            do.Deliver: self._deliver,
            do.Fail: self._fail,
        }, IGNORED, observers)  # fmt: skip
        self._rewards = SimulatedRewards(reward_s, rewards_at_once, lambda s: self._pump.post(self._score(s)))
        self._trainer = SimulatedTrainer(train_s, fetch_ahead)
        self._asked = False
        self._batch: Batch | None = None
        self._waited: dict[str, float] = {}
        """Account of the time before that batch."""
        self._updates = 0
        self._delivered_s, self._delivered_totals = 0.0, self._totals()
        self._times = RunTimes(self.core)
        self._watch = watch
        self._digest = hashlib.blake2b(digest_size=16)

    def run(self, steps: int) -> SimulationResult:
        """Simulate until ``steps`` batches more are delivered; raises RolloutError when the core gives up."""
        for _ in range(steps):
            while (batch := self._batch) is None:
                self._ask_or_wait()
            self._batch, self._asked = None, False
            self._record(batch)
            self._ask_for_better()
            self._trainer.add(batch, self.now)
            if self._trainer.ends_s <= self.now:  # training takes no time
                self._update_weights()
                self._times.look(self.now)
        self.result.digest = self._digest.hexdigest()
        return self.result

    def _ask_for_better(self) -> None:
        """Ask whether something else should be in work."""
        auto = self._auto
        if auto is None or self._choose is None or not auto.asks:
            return
        fitted = (fit(Requests.of(ended)) for _, ended in self._requests)
        question = auto.question(found for found in fitted if found is not None)
        if question is not None:
            self._apply_decision(auto.answered(question, self._choose(question)))

    def _apply_decision(self, decision: Decision | None) -> None:
        """Change what is in work from now on."""
        if decision is not None:
            log.info("auto, after %d batches: %s", len(self.result.steps), decision.words)
            if (change := decision.change) is not None:
                self._pump.post(change)

    def close(self) -> None:
        """End its record, if it has one."""
        if self._recorder is not None:
            self._recorder.close()

    def _ask_or_wait(self) -> None:
        if not self._asked and self._trainer.wants_more:
            self._asked = True
            self._pump.post(ev.StepRequested())
            self._times.look(self.now)
            return
        at = min(self.engines.next_s, self._rewards.next_s)  # of these and the trainer, the trainer goes last
        if self._trainer.ends_s < at:
            self._trainer.ends_s = self.now = max(self.now, self._trainer.ends_s)
            self._update_weights()
        elif math.isinf(at):
            raise RolloutError(f"the simulation is stuck: {self.core!r}")
        elif self._rewards.next_s < self.engines.next_s:
            self.now = at
            self._rewards.end_next()
        else:
            self.now = at
            self.engines.run_next_event()
        self._times.look(self.now)
        if self._watch is not None:
            self._watch(self.now, sum(d.running for d in self.decoders.values()))

    def _update_weights(self) -> None:
        """The oldest batch is trained: new weights, at the version for which its ages were told."""
        batch = self._trainer.pop_trained()
        if batch.trained_at != self.core.clock.current:
            raise InvariantError(f"batch {batch.id} was planned for {batch.trained_at}, not {self.core.clock.current}")
        self._updates += 1
        self._pump.post(ev.UpdateRequested(update=self._updates, trained=batch.id))

    def held_lengths(self) -> list[int]:
        """Response tokens of everything that is held and has some, those of running requests included."""
        lengths = {sample.id: sample.tokens for sample in self.core.buffer.samples()}
        for sample_id, count in self.engines.tokens_in_flight():
            lengths[sample_id] += count
        return [length for length in lengths.values() if length]

    def _totals(self) -> tuple[float, ...]:
        self.engines.catch_up()
        counters = [d.counters() for d in self.decoders.values()]
        return (
            sum(c.generated_tokens for c in counters),
            sum(c.decode_steps for c in counters),
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
                decode_steps=int(spent[1]),
                busy_slot_s=spent[2],
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
            self._recorder.delivered(whole)
        if self._auto is not None:
            self._apply_decision(self._auto.delivered(whole))
            self._waited |= self._auto.metrics()

    def _fail(self, command: do.Fail) -> None:
        raise RolloutError(command.error)

    def _length(self, sample: SampleId) -> int:
        row = self._group_lengths.get(sample.group)
        if row is None or len(row) <= sample.index:  # or it takes the place of one that failed
            n = max(self.core.settings.n_samples_per_prompt, sample.index + 1)
            row = self._group_lengths[sample.group] = self._lengths.group(sample.group, n).tolist()
        return row[sample.index]

    def _score(self, sample: SampleId) -> ev.Scored | ev.SampleFailed:
        if uniforms("failing", 0, sample.group, sample.index + 1)[-1] < self._failing:
            return ev.SampleFailed(sample, "it is one of those that fail")
        return ev.Scored(sample.group, [(sample.index, 0.0)])
