"""Trainers that do not wait, at random: they fetch ahead, train several batches at once, cancel, evaluate, crash.

And where their time went, against seconds counted from requests, calls and answers outside of april.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest
from seeds import seeds
from test_run_times import check
from trainer_lives import Life

from april.core import commands as do
from april.core import events as ev
from april.core.partial_buffer import IdleCause
from april.core.run_times import RunTimes, TrainerTime
from april.core.settings import CoreSettings
from april.core.types import GenerationMode, OnFailedSample, OnStale, Refill

LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "80"))
PARTS = 8
FIRST = 34
"""Lives whose events are counted."""
RARE = 106
"""Life in which a process is restarted after a straggler was delivered: none of the first 80 lives has that."""


def shrinks_with_a_quorum(settings: CoreSettings) -> bool:
    """Groups count in part, and go on with fewer samples."""
    return not settings.whole_groups and settings.on_failed_sample is OnFailedSample.SHRINK


def live(number: int, mode: GenerationMode, wanted: Callable[[CoreSettings], bool] = lambda settings: True) -> Life:
    """One life, to its good end."""
    life = Life(number, mode, wanted)
    life.happen(300)
    life.end_well()
    return life


@pytest.mark.no_cover
def test_the_first_lives_are_full_of_events() -> None:
    """Those that the tests below leave out: what lives are said to contain happens in a few dozen of them."""
    seen: Counter[str] = Counter()
    for number in range(FIRST):
        seen += live(number, GenerationMode.CONTINUOUS).seen
    for number in range(FIRST):
        seen += live(number, GenerationMode.CONTINUOUS, shrinks_with_a_quorum).seen
    for what in (
        "batches beside others", "one update of several", "committed without an update", "of several versions",
        "restarted", "the other mode", "other settings refused", "evaluated", "evaluation failed",
        "cancelled, loads=False", "cancelled, loads=True", "update: adopted=False", "handed over, broken=True",
        "died", "lost its weights", "stalled", "fenced", "failed", "function failed", "group dropped: filtered",
        "group dropped: failed", "part of a group", "straggler", "straggler given up", "sample replaced",
        "group shrunk", "bound lowered", "request: broke_off", "request: busy", "request: refused", "request: corrupt",
    ):  # fmt: skip
        assert seen[what], f"no life had: {what}"


@pytest.mark.parametrize("part", seeds(PARTS))
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_any_trainer_gets_all_it_should(mode: GenerationMode, part: int) -> None:
    """Every promise of the books, after every event, to the last prompt."""
    for number in range(part, LIVES // 2, PARTS):
        if mode is GenerationMode.STEPWISE or number >= FIRST:
            live(number, mode)


@pytest.mark.parametrize("part", seeds(PARTS))
def test_quorum_and_shrunk_groups_while_the_trainer_trains(part: int) -> None:
    """All three at once, until a restart brings other settings."""
    for number in {*range(FIRST + part, LIVES, PARTS), *([RARE] if part == 0 else [])}:
        live(number, GenerationMode.CONTINUOUS, shrinks_with_a_quorum)


TIMED = {GenerationMode.CONTINUOUS: 12, GenerationMode.STEPWISE: 30}
"""So many lives have every cause of an empty place that there can be."""


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
        self.times.update(self.now_s)
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
        return now, training, min(len(self.running) - training, self.times.places - training)

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
            IdleCause.UPDATE: bool(self.updates) or self.core.updates.half_updated is not None,
            IdleCause.PAUSE: self.held,
            IdleCause.EVALUATION: bool(self.evaluations) and not self.continuous,
            IdleCause.TRAINER: self.core.context.failure is not None or not self.wanted,
            IdleCause.BOUND: self.core.train_first or s.refill is Refill.NONE
            or self.groups_held >= in_time,
            IdleCause.STOP: bool(self.to_end) and not self.continuous,
            IdleCause.ENGINES: self.core.over_sampler.waiting > 0 or "waiting" in self.functions.values(),
            IdleCause.FUNCTIONS: not [r for r in self.running.values() if r.key[0] >= 0],
            IdleCause.PROMPTS: bool(self.to_draw) or self.exhausted,
            IdleCause.HELD: s.max_held_tokens is not None,
            IdleCause.OVER_SAMPLING: overbooked or s.refill is not Refill.SAMPLE,
        }  # fmt: skip
        assert known[why], f"{why}: {self.core!r}"


@pytest.mark.no_cover
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_second_is_counted_once_and_under_its_cause(mode: GenerationMode) -> None:
    """Fetched ahead, cut, evaluated, paused, restarted, with engines that die: to the last batch."""
    seen: Counter[IdleCause] = Counter()
    for number in range(TIMED[mode]):
        life = TimedLife(number, mode)
        life.happen(300)
        life.end_well()
        seen += life.causes_seen
    never = {IdleCause.EVALUATION, IdleCause.STOP} if mode is GenerationMode.CONTINUOUS else set()
    assert set(seen) >= set(IdleCause) - never
