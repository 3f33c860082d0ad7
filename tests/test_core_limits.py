"""Limits: nothing circles for ever, nobody waits for ever, and a step that has enough ends only if it still has."""

from __future__ import annotations

import random
from typing import Any

import pytest
from core_machine import EOS, OLD_TIMER, CoreMachine, asked, settings, timers

from april.core import commands as do
from april.core import events as ev
from april.core.engine_table import EngineWeights
from april.core.over_sampler import OverSampler
from april.core.settings import EngineLimits
from april.core.types import OnStale, OnWeightUpdate, SampleId, TimerKind

MODES = pytest.mark.parametrize("on_stale", list(OnStale))


def starved(on_stale: OnStale, passes: int, over: int = 2, **changes: Any) -> CoreMachine:
    """Group 0 is long and gains a few tokens a step; ``passes`` young groups were delivered instead of it."""
    m = CoreMachine(settings(n=1, samples=1, over=over, on_stale=on_stale, max_staleness=9, **changes), {0: 500})
    for _ in range(passes):
        m.ask()
        for attempt in list(m.in_flight.values()):
            m.tokens(attempt.id, 2) if attempt.sample.id.group == 0 else m.end(attempt.id)
        m.finish_aborts()
        m.update()
    return m


def waits_for_group_0(m: CoreMachine) -> bool:
    """Whether a step goes on although another group is complete; ends with group 0 delivered."""
    m.ask()
    first = next(iter(m.in_flight.values()))
    assert first.sample.id.group == 0  # it goes first
    m.finish(*(group for group in m.groups() if group))
    if m.abort_asked:
        m.finish_aborts()
        return False
    assert first.request.priority == 0
    m.finish(0)
    m.finish_aborts()
    assert m.delivered() == [0]
    return True


@MODES
@pytest.mark.parametrize(("max_age", "passes"), [(3, 3), (9, 2)])
def test_group_older_than_max_age_is_waited_for(on_stale: OnStale, max_age: int, passes: int) -> None:
    """max_age updates after it was drawn a group goes first and the step waits, whatever on_stale; before not."""
    assert waits_for_group_0(starved(on_stale, passes, max_age=max_age)) == (passes >= max_age)


@MODES
def test_sample_continued_too_often_is_waited_for(on_stale: OnStale) -> None:
    """More than max_resumes continuations: the same; but on_stale: finish has deadlines that this does not overrule."""
    assert starved(on_stale, 3, max_resumes=2).sample(0).resumes == 2
    assert waits_for_group_0(starved(on_stale, 4, max_resumes=2)) == (on_stale is not OnStale.FINISH)


def test_age_counts_from_the_draw_also_without_a_token() -> None:
    """A group that never got a place has no token that could get old, and yet its time comes."""
    assert waits_for_group_0(starved(OnStale.MASK, 2, over=3, max_in_flight=2, max_age=2))


def test_steps_ahead_of_the_deadline_are_planned() -> None:
    """Two groups that come due together and one delivery per step: the step before waits for the first of them."""
    m = asked({0: 500, 1: 500}, over=3, max_staleness=2)
    m.tokens(m.attempt(0).id, 2)
    m.tokens(m.attempt(1).id, 2)
    m.finish(2)
    m.next_step()
    m.finish(3)
    assert not m.abort_asked
    assert len(m.batches) == 1
    m.finish(1)
    m.finish_aborts()
    assert m.delivered() == [1]


def test_group_that_is_given_up_is_owed_no_longer() -> None:
    """The step does not wait for a group that failed while it was waited for."""
    m = starved(OnStale.FINISH, 1, max_age=1, max_attempt_failures=1)
    m.ask()
    (other,) = set(m.groups()) - {0}
    m.finish(other)
    assert not m.abort_asked
    m.post(ev.SampleFailed(SampleId(0, 0), "raised"))
    m.finish_aborts()
    assert m.delivered() == [other]


def test_places_are_held_back_only_while_the_buffer_has_no_room() -> None:
    """What the buffer once had no room for is no reason for the places that stay empty later."""
    queue = OverSampler(settings(n=2, samples=1, over=4))
    for ready, room, draws, held_back in ((0, 3, 3, True), (4, 0, 0, False)):
        count = queue.prompts_to_draw(
            ready=ready, in_work=0, free_places=9, step_start=True, only_missing=False, fits=lambda: 9,
            room=lambda room=room: room,
        )  # fmt: skip
        assert (count, queue.held_back) == (draws, held_back)


@pytest.mark.parametrize("on_stale", [OnStale.RESTART, OnStale.DROP])
def test_step_whose_ready_group_gets_too_old_before_its_end_goes_on(on_stale: OnStale) -> None:
    """A weight update while aborts are under way takes the only ready group away: no empty batch, no end of data."""
    m = asked(4, over=2, on_stale=on_stale, max_staleness=0, on_weight_update=OnWeightUpdate.KEEP)
    m.finish(0)
    assert m.abort_asked
    m.update()
    assert m.core.monitor.ready == 0
    m.finish_aborts()
    assert not m.ended
    assert not m.batches
    m.end(min(m.in_flight))
    m.finish_aborts()
    assert [len(b) for b in m.batches] == [1]
    assert m.batches[0].samples[0].staleness == 0


# -------------------------------------------------------------------- outage


def broken(engines: int = 1) -> CoreMachine:
    """Nothing is asked for yet."""
    limits = tuple(EngineLimits(f"e{i}", 99, None, (EOS,)) for i in range(engines))
    return CoreMachine(settings(n=3, samples=2, outage_deadline_s=50.0, max_attempt_failures=9), 4, None, limits)


def outage(m: CoreMachine) -> do.StartTimer:
    """All engines break; returns the timer of the wait for one."""
    if m.core.step is None:
        m.ask()
    while not all(s.quarantined for s in m.core.engines.states.values()):
        m.fail(next(iter(m.in_flight.values())))
    m.post(OLD_TIMER)
    return timers(m.commands, TimerKind.OUTAGE)[-1]


@pytest.mark.parametrize("engines", [1, 2])
def test_outage_of_all_engines_ends_the_step_with_a_reason(engines: int) -> None:
    """After outage_deadline_s the trainer is told; all is kept, and the next step goes on when an engine is well."""
    m = broken(engines)
    timer = outage(m)
    assert timer.seconds == 50.0
    m.fire(timer)
    assert "no engine with the current weights was healthy for 50 s" in m.errors[0]
    assert m.core.step is None
    assert len(m.core.buffer) == 3
    m.errors.clear()
    m.probed("e0")
    assert m.step(random.Random(0)) is not None
    assert m.prompts_dropped == {}


def test_engines_with_old_weights_are_an_outage_too() -> None:
    """Nobody has the current version: the step does not wait for ever either."""
    m = broken(2)
    for state in m.core.engines.states.values():
        state.lose_weights(EngineWeights.UNKNOWN)
    (timer,) = timers(m.ask(), TimerKind.OUTAGE)
    m.update(unreachable="e0")
    assert m.fire(timer) == []
    assert {a.engine for a in m.in_flight.values()} == {"e1"}


def test_outage_that_ends_in_time_is_none() -> None:
    """One engine is well again: its timer is void, and a later outage has a deadline of its own."""
    m = broken()
    timer = outage(m)
    m.probed("e0")
    assert m.fire(timer) == []
    assert outage(m).timer != timer.timer
    assert m.fire(timer) == []
    assert not m.errors


def test_outage_is_nobodys_business_when_the_step_has_enough() -> None:
    """A step that only waits for its aborted attempts needs no engine: it ends with its batch."""
    m = asked(4, over=3, auto_score=False)
    m.finish(0)
    (timer,) = timers(m.fail(m.attempt(1)), TimerKind.OUTAGE)
    m.score(m.to_score.pop())
    m.fire(timer)
    assert not m.errors
    assert m.abort_asked == {m.attempt(2).id}
    m.finish_aborts()
    assert len(m.batches) == 1


def test_outage_is_nobodys_business_during_a_pause() -> None:
    """An evaluation or a long transfer holds the engines: the step has waited for nothing; afterwards it waits anew."""
    m = broken()
    timer = outage(m)
    m.post(ev.PauseRequested())
    m.fire(timer)
    assert not m.errors
    (again,) = timers(m.post(ev.Resumed()), TimerKind.OUTAGE)
    m.fire(again)
    assert len(m.errors) == 1


def test_outage_is_nobodys_business_between_steps() -> None:
    """Its timer runs out when no step waits: the next step waits as long as any."""
    m = broken()
    timer = outage(m)
    m.core.context.failure = "something else"
    m.post(OLD_TIMER)
    m.fire(timer)
    m.ask()
    assert m.errors == ["something else"]
    assert m.core.step is not None
    assert timers(m.commands, TimerKind.OUTAGE)[-1].timer != timer.timer


def test_failure_between_steps_is_told_in_the_next_one() -> None:
    """Rewards that fail while the trainer trains: the next request for a batch says so."""
    m = asked(4, over=2, max_attempt_failures=1, max_failed_groups=1, auto_score=False)
    m.finish(0, 1)
    m.score((0, 0))
    m.post(OLD_TIMER)
    assert len(m.batches) == 1
    m.post(ev.SampleFailed(SampleId(1, 0), "reward raised"))
    assert not m.errors
    m.ask()
    assert m.errors == ["1 groups failed in a row; the last error is: g1.s0: reward raised"]
    assert m.core.step is None
