"""Runs the core without a clock: attempts gain tokens when the test says so. Counts tokens on its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from april.core import commands as do
from april.core import events as ev
from april.core.batch import Batch
from april.core.event_pump import EventPump
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings, EngineLimits
from april.core.state import RolloutCore
from april.core.types import Attempt, EngineFinish, Prompt, Timer, TimerKind
from april.core.versions import PolicyVersion

EOS = 1
OLD_TIMER = ev.TimerFired(Timer(TimerKind.ABORTS, 99))
"""One that nobody waits for any more: the core does what is due, and no more."""


def timers(commands: Sequence[do.Command], *kinds: TimerKind) -> list[do.StartTimer]:
    """The timers of these kinds that were started."""
    return [c for c in commands if isinstance(c, do.StartTimer) and c.timer.kind in kinds]


def settings(n: int = 2, samples: int = 2, over: int | None = None, **changes: Any) -> CoreSettings:
    """Small settings; ``over`` is N'."""
    over = over or n
    values: dict[str, Any] = {
        "rollout_batch_size": n,
        "n_samples_per_prompt": samples,
        "over_sampling_batch_size": over,
        "max_response_len": 1000,
        "max_in_flight": max(n, over) * samples,
    }
    return CoreSettings(**(values | changes))


class CoreMachine:
    """The core with everything around it played by the test.

    ``length(group, index)`` is the true length of a response (EOS included). Rewards are ``group + index / 8``
    unless ``reward`` says otherwise. Token ``t`` of a response is ``10 + t``, the last one EOS.
    """

    def __init__(
        self,
        core_settings: CoreSettings,
        length: Any,
        prompts: int | None = None,
        engines: tuple[EngineLimits, ...] = (EngineLimits("e0", 4096, None, (EOS,)),),
        auto_score: bool = True,
        auto_call: bool = True,
    ) -> None:
        self.core = RolloutCore(core_settings, engines, check=True)
        self.length = length
        self.prompts_left = prompts
        self.auto_score, self.auto_call = auto_score, auto_call
        self.sampling = SamplingParams(max_tokens=core_settings.max_response_len)
        self.in_flight: dict[str, Attempt] = {}
        self.abort_asked: set[str] = set()
        self.to_score: list[tuple[int, int]] = []
        self.to_call: list[Any] = []
        self.batches: list[Batch] = []
        self.commands: list[do.Command] = []
        self.errors: list[str] = []
        self.ended = False
        self.generated = 0
        self._pump = EventPump(self.core, dict.fromkeys(do.Command.__subclasses__(), self._execute))

    def post(self, event: ev.Event) -> list[do.Command]:
        """One event and everything that follows from it at once; returns the commands."""
        before = len(self.commands)
        self._pump.post(event)
        return self.commands[before:]

    def _execute(self, command: do.Command) -> None:
        self.commands.append(command)
        match command:
            case do.DrawPrompts(count):
                if self.prompts_left is not None:
                    count = min(count, self.prompts_left)
                    self.prompts_left -= count
                exhausted = self.prompts_left == 0
                self._pump.post(ev.PromptsDrawn([Prompt(np.array([5, 6], np.int32))] * count, exhausted))
            case do.StartSample(sample):
                self.to_call.append(sample.id)
                if self.auto_call:
                    self._pump.post(ev.CallMade(self.to_call.pop(), self.sampling))
            case do.Submit(attempt):
                assert attempt.id not in self.in_flight
                self.in_flight[attempt.id] = attempt
            case do.Abort(_, attempt_ids, _):
                self.abort_asked.update(attempt_ids)
            case do.Fence(_, attempt_ids):
                for attempt_id in attempt_ids:
                    self.abort_asked.discard(attempt_id)
                    attempt = self.in_flight.pop(attempt_id)
                    self._pump.post(ev.AttemptEnded.of(attempt, EngineFinish.ABORT, fenced=True))
            case do.CallCompleted(call):
                self._pump.post(ev.SampleReturned(call.sample.id))
            case do.ScoreSample(sample):
                self.to_score.append(sample.id)
                if self.auto_score:
                    self.score(self.to_score.pop())
            case do.ScoreGroup(group):
                rewards = [(s.id.index, group.id + s.id.index / 8) for s in group.samples]
                self._pump.post(ev.Scored(group.id, rewards))
            case do.Deliver(batch):
                self.batches.append(batch)
            case do.EndOfData():
                self.ended = True
            case do.Fail(error):
                self.errors.append(error)
            case _:
                pass

    def score(self, sample_id: Any) -> None:
        """Hand in the reward of one sample."""
        self.post(ev.Scored(sample_id[0], [(sample_id[1], sample_id[0] + sample_id[1] / 8)]))

    def tokens(self, attempt_id: str, count: int) -> bool:
        """Let an attempt gain up to ``count`` tokens; True when its response is now complete."""
        attempt = self.in_flight[attempt_id]
        have = len(attempt.token_ids) - len(attempt.sample.group.prompt.token_ids) + attempt.tape.parsed
        end = self.length(*attempt.sample.id)
        budget = attempt.sampling.max_tokens - attempt.tape.parsed
        count = min(count, end - have, budget)
        if attempt.tape.stopped:
            attempt.tape.after_stop += count
            self.generated += count
            return have + count == end or count == budget
        ids = np.arange(10 + have, 10 + have + count, dtype=np.int32)
        if count and have + count == end:
            ids[-1] = EOS
        attempt.tape.append(ids, np.full(count, -0.5, np.float32), self.core.clock.current)
        self.generated += count
        return have + count == end or count == budget

    def end(self, attempt_id: str, count: int = 10**6) -> list[do.Command]:
        """Let an attempt run to its end (or gain ``count`` tokens and be aborted)."""
        complete = self.tokens(attempt_id, count)
        attempt = self.in_flight.pop(attempt_id)
        self.abort_asked.discard(attempt_id)
        last = attempt.tape.packed()[0][-1:] if attempt.tape.count else []
        whole = EngineFinish.STOP if len(last) and last[0] == EOS else EngineFinish.LENGTH
        return self.post(ev.AttemptEnded.of(attempt, whole if complete else EngineFinish.ABORT))

    def finish_aborts(self) -> None:
        """Every aborted attempt hands over what it has."""
        while self.abort_asked:
            self.end(min(self.abort_asked), 0)

    def step(self, rng: random.Random, chunk: int = 7) -> Batch | None:
        """Run one step to its end; attempts advance in random order."""
        before = len(self.batches)
        self.post(ev.StepRequested())
        while len(self.batches) == before and not self.ended and not self.errors:
            assert self.in_flight, f"stuck: {self.core!r}"
            attempt_id = rng.choice(sorted(self.in_flight))
            if attempt_id in self.abort_asked:
                self.end(attempt_id, rng.choice([0, 1, chunk]))
            elif self.tokens(attempt_id, rng.randint(1, chunk)):
                self.end(attempt_id, 0)
        return self.batches[-1] if len(self.batches) > before else None

    def update(self) -> None:
        """One weight update."""
        for batch_id in list(self.core.leased):
            self.post(ev.BatchCommitted(batch_id))
        current = self.core.clock.current
        self.post(ev.WeightsUpdated(PolicyVersion(current.incarnation, current.n + 1)))

    def check_ledger(self) -> None:
        """The core's books against the count kept here."""
        t = self.core.tokens
        running = sum(a.tape.parsed for a in self.in_flight.values())
        assert t.observed + running == self.generated
        assert t.observed == t.delivered + t.held + sum(t.dropped.values())
