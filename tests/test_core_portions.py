"""Thousands of samples are started, drawn, delivered and given priority in portions, which do not hold the loop."""

from __future__ import annotations

import random
from typing import Any

import pytest
from core_machine import OLD_TIMER, PROMPT, CoreMachine, settings

from april.core import commands as do
from april.core import events as ev
from april.core import rollout_core, snapshot
from april.core.batch import DeliveredSample, deliver_sample
from april.core.saved_state import SavedCore
from april.core.types import GenerationMode, OnStale, Refill, Sample, SampleId

STARTS = (do.StartSample, do.Submit)
MANY = settings(n=12, samples=4, over=24)


def in_portions(monkeypatch: pytest.MonkeyPatch, commands: int = 4, samples: int = 8) -> None:
    """Set portions so small that the test needs no thousands."""
    monkeypatch.setattr(rollout_core, "MOST_COMMANDS", commands)
    monkeypatch.setattr(rollout_core, "MOST_SAMPLES", samples)


def commands_of_each_event(m: CoreMachine) -> list[list[do.Command]]:
    """Return a list to which the commands of each further event are added."""
    found: list[list[do.Command]] = []
    handle = m.core.handle

    def handled(event: ev.Event) -> list[do.Command]:
        found.append(handle(event))
        return found[-1]

    m.core.handle = handled  # type: ignore[method-assign]
    return found


def test_no_event_starts_more_than_a_portion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does an event draw more; in the end everything is in flight, oldest first."""
    in_portions(monkeypatch)
    m = CoreMachine(MANY, 5)
    found = commands_of_each_event(m)
    m.ask()
    assert max(sum(isinstance(c, STARTS) for c in commands) for commands in found) == 4
    assert [c.count for commands in found for c in commands if isinstance(c, do.DrawPrompts)] == [2] * 12
    assert [a.sample.id for a in m.in_flight.values()] == [(group, index) for group in range(24) for index in range(4)]


def test_nothing_is_started_until_the_next_portion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between Continue and Continued the loop runs what else is due, and events of that time start nothing."""
    in_portions(monkeypatch, samples=1000)
    core = CoreMachine(MANY, 5).core
    core.handle(ev.StepRequested())
    first = core.handle(ev.PromptsDrawn([PROMPT] * 24, exhausted=False))
    assert [type(command) for command in first] == [do.StartSample] * 4 + [do.Continue]
    assert core.handle(OLD_TIMER) == []
    assert [type(command) for command in core.handle(ev.Continued())] == [do.StartSample] * 4 + [do.Continue]


def test_a_portion_of_prompts_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow source may take long; events of that time ask for no other prompts, and an unusable prompt ends it."""
    in_portions(monkeypatch)
    core = CoreMachine(MANY, 5).core
    assert core.handle(ev.StepRequested()) == [do.DrawPrompts(2)]
    assert core.handle(OLD_TIMER) == []
    core.handle(ev.PromptsDrawn([PROMPT] * 2, exhausted=False))
    assert do.DrawPrompts(2) in core.handle(ev.Continued()) + core.handle(ev.Continued())
    core.handle(ev.PromptsDrawn([], exhausted=False, error="unusable"))
    assert core.over_sampler.granted == 0


def test_a_pause_holds_the_portions_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is started after the pause; a Continued that comes meanwhile is harmless."""
    in_portions(monkeypatch, samples=1000)
    core = CoreMachine(MANY, 5).core
    core.handle(ev.StepRequested())
    core.handle(ev.PromptsDrawn([PROMPT] * 24, exhausted=False))
    core.handle(ev.PauseRequested())
    assert core.handle(ev.Continued()) == []
    assert [type(command) for command in core.handle(ev.Resumed())] == [do.StartSample] * 4 + [do.Continue]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("refill", [Refill.NONE, Refill.SAMPLE])
@pytest.mark.parametrize("quorum", [1.0, 0.75])
def test_portions_change_nothing_but_the_moment(
    seed: int, refill: Refill, quorum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same samples are in the same batches, and the same ones have priority."""

    def run() -> list[Any]:
        changes = {"max_staleness": 2, "refill": refill, "group_quorum": quorum}
        m = CoreMachine(settings(n=3, samples=4, over=8, **changes), lambda group, index: 3 + 37 * group * index % 50)
        rng, seen = random.Random(seed), list[Any]()
        for _ in range(4):
            batch = m.step(rng)
            assert batch is not None
            m.finish_aborts()
            m.update()
            seen.append([(s.id, s.tokens.tolist(), s.staleness, s.cohort) for s in batch.samples])
            seen.append(batch.metrics)
            seen.append(sorted(s.id for s in m.core.buffer.samples() if s.urgent))
        m.core.validate()
        return seen

    whole = run()
    in_portions(monkeypatch, samples=1)
    assert run() == whole


@pytest.mark.parametrize("updates", [False, True])
def test_the_rows_of_a_batch_are_made_in_portions(updates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were made before a weight update are made again, as their tokens are older now."""
    in_portions(monkeypatch, commands=64, samples=4)
    m = Waiting(settings(
        n=5, samples=2, generation=GenerationMode.CONTINUOUS, refill=Refill.SAMPLE, max_staleness=3
    ), 5)  # fmt: skip
    m.ask()
    made: list[SampleId] = []

    def counted(sample: Sample, *others: Any) -> list[DeliveredSample]:
        made.append(sample.id)
        return deliver_sample(sample, *others)

    monkeypatch.setattr(rollout_core, "deliver_sample", counted)
    m.waits = True
    m.finish(0, 1, 2, 3, 4)
    assert (len(made), m.batches) == (4, [])
    if updates:
        m.update()
    m.waits = False
    m.post(ev.Continued())
    assert len(made) == (14 if updates else 10)
    assert {s.staleness for s in m.batches[0].samples} == {int(updates)}
    m.core.validate()


def test_a_round_is_ended_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tail batching: the batch is delivered once all other prompts are aside, and nothing is started before."""
    monkeypatch.setattr(rollout_core, "MOST_SAMPLES", 4)
    tail = {"partial_rollout": False, "max_staleness": 0, "on_stale": OnStale.RESTART}
    m = CoreMachine(settings(n=2, over=12, samples=2, **tail), dict.fromkeys(range(2, 12), 50))
    m.ask()
    m.finish(0, 1)
    found = commands_of_each_event(m)
    m.finish_aborts()
    cancelled = [sum(isinstance(c, do.CancelSample) for c in commands) for commands in found]
    assert [count for count in cancelled if count] == [4] * 5
    assert isinstance(found[-1][-1], do.Deliver)
    assert not any(isinstance(c, (*STARTS, do.DrawPrompts)) for commands in found for c in commands)
    assert m.batches[0].metrics["aside_groups"] == 10.0


class Waiting(CoreMachine):
    """While ``waits``, further portions wait until the test posts Continued."""

    waits = False

    def _execute(self, command: Any) -> None:
        if not (self.waits and isinstance(command, do.Continue)):
            super()._execute(command)


class SlowSource(CoreMachine):
    """Prompts arrive only when the test says so."""

    wanted = 0

    def _execute(self, command: Any) -> None:
        if isinstance(command, do.DrawPrompts):
            self.wanted = command.count
        else:
            super()._execute(command)

    def prompts_arrive(self) -> None:
        """Answer the request for prompts that is open."""
        count, self.wanted = self.wanted, 0
        self.post(ev.PromptsDrawn([PROMPT] * count, exhausted=False))


@pytest.mark.parametrize("late", [False, True], ids=["between two rounds", "in a long round"])
def test_prompts_that_arrive_after_their_short_round_wait_for_a_later_one(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """They neither make a short round of the long one that is due, nor join it (tail batching)."""
    in_portions(monkeypatch, commands=64, samples=4)
    m = SlowSource(settings(
        n=2, over=6, samples=1, partial_rollout=False, max_staleness=0, on_stale=OnStale.RESTART
    ), 90)  # fmt: skip
    m.ask()
    m.prompts_arrive()
    assert m.wanted == 2
    m.finish(2, 3)
    m.finish_aborts()
    if not late:
        m.prompts_arrive()
    m.update()
    m.ask()
    if late:
        m.prompts_arrive()
    assert m.core.step is not None
    assert m.core.step.long_round
    assert m.groups() == [0, 1]
    assert (list(m.core.buffer.aside), list(m.core.buffer.unbegun)) == ([], [4, 5])


def test_a_step_draws_no_portions_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step asks anew whether the buffer has room: here it holds more tokens than it may."""
    in_portions(monkeypatch, commands=64, samples=4)
    m = SlowSource(settings(n=2, over=12, samples=1, max_held_tokens=10, max_staleness=9), 90)
    m.ask()
    m.prompts_arrive()
    for attempt in list(m.in_flight.values()):
        if attempt.sample.id.group < 2:
            m.tokens(attempt.id, 30)
    m.finish(2, 3)
    m.finish_aborts()
    m.prompts_arrive()
    m.update()
    m.ask()
    assert m.wanted == 0


def test_the_thread_that_makes_a_state_frees_what_was_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else 65,536 samples are freed at once, which holds the loop for 40 ms."""
    seen: list[tuple[SavedCore, int]] = []

    def to_state(saved: SavedCore) -> dict[str, Any]:
        seen.append((saved, len(saved.ready + saved.waiting)))
        return {}

    monkeypatch.setattr(snapshot, "to_state", to_state)
    m = CoreMachine(MANY, 5)
    m.ask()
    snapshot.take(m.core, None)
    [(saved, collected)] = seen
    assert collected == 24
    assert saved.ready == saved.waiting == []
