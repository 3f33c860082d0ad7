"""Where the time went, in random lives of trainers: against seconds counted from requests, calls and answers outside of
the core, and each cause against what must be true outside if it is the cause."""

from __future__ import annotations

from collections import Counter

import pytest
from test_run_times import check
from trainer_lives import Life

from april.core import commands as do
from april.core import events as ev
from april.core.partial_buffer import Idle
from april.core.run_times import RunTimes, TrainerTime
from april.core.types import GenerationMode, OnStale, Refill

LIVES = 32


class TimedLife(Life):
    """Some time passes before each event; the witness counts it by what is known outside of the core."""

    def new_process(self) -> None:
        super().new_process()
        self.now_s = 0.0
        self.counted: Counter[str] = Counter()
        """Seconds, and place-seconds, since the last delivery."""
        self.exhausted = False
        self.depth = 0
        self.holds: tuple[TrainerTime, int, int] | None = None
        self.times = RunTimes(self.core)
        self.causes_seen = getattr(self, "causes_seen", Counter())

    def post(self, event: ev.Event) -> None:
        """An event that follows from another one comes at the same instant."""
        if not self.depth:
            self.passes(self.rng.choice([0.0, 0.25, 1.0, 7.5]))
        if isinstance(event, ev.PromptsDrawn):
            self.exhausted |= event.exhausted
        self.depth += 1
        super().post(event)
        self.depth -= 1
        self.times.look(self.now_s)
        if not self.depth and self.begun:
            self.holds = self.what_holds()
            self.evidence()

    def what_holds(self) -> tuple[TrainerTime, int, int]:
        """Until the next event: what the trainer does, requests of training and of evaluations."""
        if self.updates:
            now = TrainerTime.UPDATES
        elif self.evaluations:
            now = TrainerTime.EVALUATES
        elif self.wanted and not self.core.train_first:
            now = TrainerTime.AHEAD if self.books.out else TrainerTime.WAITS
        else:
            now = TrainerTime.TRAINS if self.books.out else TrainerTime.OTHER
        training = sum(request.key[0] >= 0 for request in self.running.values())
        return now, training, len(self.running) - training

    def passes(self, seconds: float) -> None:
        """Counted under what has held since the last event; nothing is before the first request."""
        self.now_s += seconds
        if self.holds is not None:
            now, training, evaluating = self.holds
            self.counted["step_s"] += seconds
            self.counted["busy"] += seconds * training
            self.counted["evaluating"] += seconds * evaluating
            self.counted[now] += seconds

    def on_Deliver(self, command: do.Deliver) -> None:
        """The account of the step against the one kept here."""
        found = self.times.delivered(self.now_s)
        places = self.times.places
        for name in ("step_s", *TrainerTime):
            assert found[name] == pytest.approx(self.counted[name]), (name, found, self.counted)
        assert found["engines_busy"] * found["step_s"] * places == pytest.approx(self.counted["busy"])
        assert found["idle_evaluation"] * found["step_s"] * places >= self.counted["evaluating"] - 1e-6
        check(found)
        self.counted.clear()
        super().on_Deliver(command)

    def evidence(self) -> None:
        """Of the cause that empty places have now."""
        if self.times._free <= 0:
            return
        why, s = self.times._why, self.settings
        self.causes_seen[why] += 1
        overbooked = s.on_stale is not OnStale.FINISH and s.groups_at_a_time > (s.delivery_bound + 1) * (
            s.rollout_batch_size
        )
        bound = min(s.delivery_bound, self.books.bound)
        in_time = (bound - len(self.books.out) + 1) * s.rollout_batch_size
        known = {
            Idle.UPDATE: bool(self.updates) or self.core.updates.half_updated is not None,
            Idle.PAUSE: self.held,
            Idle.EVALUATION: bool(self.evaluations) and not self.continuous,
            Idle.TRAINER: self.core.context.failure is not None or not self.wanted,
            Idle.BOUND: self.core.train_first or s.refill is Refill.NONE
            or self.groups_held >= in_time,
            Idle.STOP: bool(self.to_end) and not self.continuous,
            Idle.ENGINES: any(f == "waiting" for f in self.functions.values()) or self.core.over_sampler.waiting > 0,
            Idle.FUNCTIONS: not [r for r in self.running.values() if r.key[0] >= 0],
            Idle.PROMPTS: bool(self.to_draw) or self.exhausted,
            Idle.HELD: s.max_held_tokens is not None,
            Idle.OVER_SAMPLING: overbooked or s.refill is not Refill.SAMPLE,
        }  # fmt: skip
        assert known[why], f"{why}: {self.core!r}"


@pytest.mark.no_cover
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_second_is_counted_once_and_under_its_cause(mode: GenerationMode) -> None:
    """Fetched ahead, cut, evaluated, paused, restarted, with engines that die: to the last batch."""
    seen: Counter[Idle] = Counter()
    for number in range(LIVES):
        life = TimedLife(number, mode)
        life.happen(300)
        life.end_well()
        seen += life.causes_seen
    never = {Idle.EVALUATION, Idle.STOP} if mode is GenerationMode.CONTINUOUS else set()
    assert set(seen) >= set(Idle) - never
