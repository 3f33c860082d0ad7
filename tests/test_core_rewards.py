"""Group rewards that are asked for more than once, and rewards that come more than once."""

from __future__ import annotations

import pytest
from core_machine import CoreMachine, settings

from april.core import commands as do
from april.core import events as ev
from april.core.types import DropReason, EngineFinish, OnStale, SampleId


def scored_anew() -> CoreMachine:
    """Group rewards; sample (0, 1) was finished and scored, began again, and has returned: rewards are awaited anew."""
    m = CoreMachine(
        settings(n=1, samples=2, over=2, group_reward=True, on_stale=OnStale.RESTART, max_staleness=0),
        lambda g, i: 3,
    )
    m.post(ev.StepRequested())
    for key in [(1, 0), (1, 1), (0, 0), (0, 1)]:
        m.end(next(a.id for a in m.in_flight.values() if a.sample.id == key))
    assert {s.id.group for s in m.batches[0].samples} == {1}
    group = m.core.buffer.groups[0]
    m.core.lives.begin_again(group.samples[1], DropReason.STALE)
    m.post(ev.BatchCommitted(0))
    m.post(ev.StepRequested())
    attempt_id = next(a.id for a in m.in_flight.values() if a.sample.id == (0, 1))
    m.tokens(attempt_id, 3)
    m.core.handle(ev.AttemptEnded.of(m.in_flight.pop(attempt_id), EngineFinish.STOP))
    (command,) = m.core.handle(ev.SampleReturned(group.samples[1].id))
    assert isinstance(command, do.ScoreGroup)
    return m


@pytest.mark.parametrize("how", ["raises", "first is no number", "second is no number"])
def test_failed_rewards_of_a_group_that_is_scored_anew_are_asked_for_again(how: str) -> None:
    """A finished sibling may be the first of the group: its failure must not leave the others waiting for ever."""
    m = scored_anew()
    nan = float("nan")
    failure = {
        "raises": ev.SampleFailed(SampleId(0, 0), "raised"),
        "first is no number": ev.Scored(0, [(0, nan), (1, 1.0)]),
        "second is no number": ev.Scored(0, [(0, 1.0), (1, nan)]),
    }[how]
    (command,) = m.core.handle(failure)
    assert isinstance(command, do.ScoreGroup)

    m.post(ev.Scored(0, [(0, 5.0), (1, 6.0)]))
    m.finish_aborts()
    assert [s.reward for s in m.batches[-1].samples] == [5.0, 6.0]


def test_rewards_that_come_twice_change_nothing() -> None:
    """A group that is complete keeps the rewards that completed it, and that its filter has seen."""
    m = CoreMachine(settings(n=1, samples=2, over=2, group_reward=True), lambda g, i: 3)
    m.post(ev.StepRequested())
    for key in [(1, 0), (1, 1), (0, 0), (0, 1)]:
        m.end(next(a.id for a in m.in_flight.values() if a.sample.id == key))
    m.post(ev.Scored(0, [(0, 7.0), (1, float("nan"))]))

    assert [s.reward for s in m.core.buffer.groups[0].samples] == [0.0, 0.125]
    assert m.core.counters["late_events"] == 2
