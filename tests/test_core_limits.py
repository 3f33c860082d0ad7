"""Limits: nothing circles for ever, nobody waits for ever, and a step that has enough ends only if it still has."""

from __future__ import annotations

import random

import numpy as np
import pytest
from core_machine import EOS, OLD_TIMER, CoreMachine, settings, timers

from april.core import commands as do
from april.core import events as ev
from april.core.over_sampler import OverSampler
from april.core.settings import EngineLimits
from april.core.types import AttemptFailure, CallState, EngineFinish, Group, OnStale, Prompt, SampleId, TimerKind
from april.core.versions import PolicyVersion

MODES = pytest.mark.parametrize("on_stale", list(OnStale))


def starved(on_stale: OnStale, **changes: object) -> CoreMachine:
    """Group 0 is long; one short group after the other is delivered instead of it."""
    return CoreMachine(
        settings(n=1, samples=1, over=2, on_stale=on_stale, max_staleness=9, **changes),
        lambda g, i: 500 if g == 0 else 3,
    )


def pass_by(m: CoreMachine, tokens: int = 2) -> None:
    """A step in which group 0 gains a few tokens, and a young group is delivered."""
    m.post(ev.StepRequested())
    for attempt in list(m.in_flight.values()):
        if attempt.sample.id.group == 0:
            m.tokens(attempt.id, tokens)
        else:
            m.end(attempt.id)
    m.finish_aborts()
    m.update()


def waits_for_group_0(m: CoreMachine) -> bool:
    """Whether a step goes on although another group is complete; ends with group 0 delivered."""
    m.post(ev.StepRequested())
    first = next(iter(m.in_flight.values()))
    assert first.sample.id.group == 0  # it goes first
    for attempt in list(m.in_flight.values()):
        if attempt.sample.id.group != 0:
            m.end(attempt.id)
    if m.abort_asked:
        m.finish_aborts()
        return False
    assert first.urgent
    m.end(first.id)
    m.finish_aborts()
    assert m.batches[-1].samples[0].id.group == 0
    return True


@MODES
def test_group_older_than_max_age_is_waited_for(on_stale: OnStale) -> None:
    """max_age updates after it was drawn a group goes first, and the step waits for it, whatever on_stale says."""
    m = starved(on_stale, max_age=3)
    for _ in range(3):
        pass_by(m)
    assert waits_for_group_0(m)


@MODES
def test_younger_group_is_not_waited_for(on_stale: OnStale) -> None:
    """One update before the limit nothing waits for it."""
    m = starved(on_stale, max_age=9)
    for _ in range(2):
        pass_by(m)
    assert not waits_for_group_0(m)


@pytest.mark.parametrize("on_stale", [m for m in OnStale if m is not OnStale.FINISH])
def test_sample_continued_too_often_is_waited_for(on_stale: OnStale) -> None:
    """More than max_resumes continuations of one response: the same."""
    m = starved(on_stale, max_resumes=2)
    for _ in range(3):
        pass_by(m)
    assert m.core.buffer.groups[0].samples[0].resumes == 2
    pass_by(m)
    assert waits_for_group_0(m)


def test_continuations_do_not_overrule_the_staleness_bound() -> None:
    """on_stale: finish has its own deadlines; a young sample that was cut often takes no place of one that is due."""
    m = starved(OnStale.FINISH, max_resumes=2)
    for _ in range(5):
        pass_by(m)
    assert m.core.buffer.groups[0].samples[0].resumes > 2
    assert not waits_for_group_0(m)


def test_age_counts_from_the_draw_also_without_a_token() -> None:
    """A group that never got a place has no token that could get old, and yet its time comes."""
    m = CoreMachine(
        settings(n=1, samples=1, over=3, max_in_flight=2, on_stale=OnStale.MASK, max_age=2),
        lambda g, i: 3 + 50 * (g == 0),
    )
    pass_by(m)
    pass_by(m)
    assert waits_for_group_0(m)


def test_steps_ahead_of_the_deadline_are_planned() -> None:
    """Two groups that come due together and one delivery per step: the step before waits for the first of them."""
    m = CoreMachine(settings(n=1, samples=1, over=3, max_staleness=2), lambda g, i: 3 if g > 1 else 500)
    m.post(ev.StepRequested())
    for attempt in list(m.in_flight.values()):
        if attempt.sample.id.group < 2:
            m.tokens(attempt.id, 2)
    m.end(next(a.id for a in m.in_flight.values() if a.sample.id.group == 2))
    m.finish_aborts()
    m.update()
    m.post(ev.StepRequested())
    m.end(next(a.id for a in m.in_flight.values() if a.sample.id.group == 3))

    assert not m.abort_asked
    assert len(m.batches) == 1
    m.end(next(a.id for a in m.in_flight.values() if a.sample.id.group == 1))
    m.finish_aborts()
    assert m.batches[1].samples[0].id.group == 1


def test_group_that_is_given_up_is_owed_no_longer() -> None:
    """The step does not wait for a group that failed while it was waited for."""
    m = starved(OnStale.FINISH, max_age=1, max_attempt_failures=1)
    pass_by(m)
    m.post(ev.StepRequested())
    long, other = sorted(m.in_flight.values(), key=lambda a: a.sample.id.group)
    m.end(other.id)
    assert not m.abort_asked
    m.post(ev.SampleFailed(long.sample.id, "raised"))
    m.finish_aborts()
    assert [s.id.group for s in m.batches[-1].samples] == [other.sample.id.group]


def test_empty_queue_has_nothing_next() -> None:
    """Entries that became void are passed over."""
    queue = OverSampler(settings())
    sample = Group(0, Prompt(np.array([1], np.int32)), 1).samples[0]
    queue.push(sample)
    queue.forget(sample)
    assert queue.first() is None
    assert queue.waiting == 0


def test_places_are_held_back_only_while_the_buffer_has_no_room() -> None:
    """What the buffer once had no room for is no reason for the places that stay empty later."""
    queue = OverSampler(settings(n=2, samples=1, over=4))

    def draws(ready: int, room: int) -> int:
        return queue.prompts_to_draw(
            ready=ready, in_work=0, free_places=9, step_start=True, fits=lambda: 9, room=lambda: room
        )

    assert draws(ready=0, room=3) == 3
    assert queue.held_back
    assert draws(ready=4, room=0) == 0
    assert not queue.held_back


# -------------------------------------------------------------------- a step that has enough, and then no longer


@pytest.mark.parametrize("on_stale", [OnStale.RESTART, OnStale.DROP])
def test_step_whose_ready_group_gets_too_old_before_its_end_goes_on(on_stale: OnStale) -> None:
    """A weight update while aborts are under way takes the only ready group away: no empty batch, no end of data."""
    m = CoreMachine(settings(n=1, samples=1, over=2, on_stale=on_stale, max_staleness=0), lambda g, i: 4)
    m.post(ev.StepRequested())
    m.end(next(a.id for a in m.in_flight.values() if a.sample.id.group == 0))
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


def outage(m: CoreMachine) -> do.StartTimer:
    """All engines break; returns the timer of the wait for one."""
    m.post(ev.StepRequested())
    while not all(s.quarantined for s in m.core.engines.states.values()):
        attempt_id = min(m.in_flight)
        del m.in_flight[attempt_id]
        m.post(ev.AttemptFailed(attempt_id=attempt_id, error="reset"))
    m.post(OLD_TIMER)
    (timer,) = timers(m.commands, TimerKind.OUTAGE)
    return timer


def broken(engines: int = 1) -> CoreMachine:
    limits = tuple(EngineLimits(f"e{i}", 99, None, (EOS,)) for i in range(engines))
    chosen = settings(n=3, samples=2, outage_deadline_s=50.0, max_attempt_failures=9)
    return CoreMachine(chosen, lambda g, i: 4, None, limits)


@pytest.mark.parametrize("engines", [1, 2])
def test_outage_of_all_engines_ends_the_step_with_a_reason(engines: int) -> None:
    """After outage_deadline_s the trainer is told; all is kept, and the next step goes on when an engine is well."""
    m = broken(engines)
    timer = outage(m)
    assert timer.seconds == 50.0
    m.post(ev.TimerFired(timer.timer))
    assert "no engine with the current weights has been well for 50 s" in m.errors[0]
    assert m.core.step is None
    assert len(m.core.buffer) == 3

    m.errors.clear()
    m.post(ev.EngineReady("e0"))
    assert m.step(random.Random(0)) is not None
    assert m.core.prompts.as_dict()["dropped"] == {}


def test_engines_with_old_weights_are_an_outage_too() -> None:
    """Nobody confirmed the current version: the step does not wait for ever either."""
    m = broken(2)
    m.post(ev.WeightsUpdated(PolicyVersion(0, 1), ["e0"]))
    m.post(ev.WeightsUpdated(PolicyVersion(0, 2), []))
    timer = timers(m.post(ev.StepRequested()) + m.commands, TimerKind.OUTAGE)[0]
    m.post(ev.WeightsUpdated(PolicyVersion(0, 2), ["e1"]))
    assert m.post(ev.TimerFired(timer.timer)) == []
    assert m.in_flight


def test_outage_that_ends_in_time_is_none() -> None:
    """One engine is well again: its timer is void, and a later outage has a deadline of its own."""
    m = broken()
    timer = outage(m)
    m.post(ev.EngineReady("e0"))
    assert m.post(ev.TimerFired(timer.timer)) == []
    for _ in range(3):
        attempt_id = min(m.in_flight)
        del m.in_flight[attempt_id]
        m.post(ev.AttemptFailed(attempt_id=attempt_id, error="reset"))
    second = timers(m.commands, TimerKind.OUTAGE)[-1]
    assert second.timer != timer.timer
    assert m.post(ev.TimerFired(timer.timer)) == []
    assert not m.errors


def test_outage_is_nobodys_business_when_the_step_has_enough() -> None:
    """A step that only waits for its aborted attempts needs no engine: it ends with its batch."""
    m = CoreMachine(settings(n=1, samples=1, over=3), lambda g, i: 4, auto_score=False)
    m.post(ev.StepRequested())
    done, broken_off, silent = sorted(m.in_flight)
    m.end(done)
    del m.in_flight[broken_off]
    (timer,) = timers(m.post(ev.AttemptFailed(attempt_id=broken_off, error="reset")), TimerKind.OUTAGE)
    m.score(m.to_score.pop())
    m.post(ev.TimerFired(timer.timer))

    assert not m.errors
    assert m.abort_asked == {silent}
    m.finish_aborts()
    assert len(m.batches) == 1


def test_outage_is_nobodys_business_during_a_pause() -> None:
    """An evaluation or a long transfer holds the engines: the step has waited for nothing; afterwards it waits anew."""
    m = broken()
    timer = outage(m)
    m.post(ev.PauseRequested())
    m.post(ev.TimerFired(timer.timer))
    assert not m.errors
    (again,) = timers(m.post(ev.Resumed()), TimerKind.OUTAGE)
    m.post(ev.TimerFired(again.timer))
    assert len(m.errors) == 1


def test_outage_is_nobodys_business_between_steps() -> None:
    """Its timer runs out when no step waits: the next step waits as long as any."""
    m = broken()
    timer = outage(m)
    m.core.context.failure = "something else"
    m.post(OLD_TIMER)
    assert m.errors == ["something else"]
    m.post(ev.TimerFired(timer.timer))
    m.post(ev.StepRequested())
    assert m.errors == ["something else"]
    assert m.core.step is not None
    assert timers(m.commands, TimerKind.OUTAGE)[-1].timer != timer.timer


def test_failure_between_steps_is_told_in_the_next_one() -> None:
    """Rewards that fail while the trainer trains: the next request for a batch says so."""
    m = CoreMachine(
        settings(n=1, samples=1, over=2, max_attempt_failures=1, max_failed_groups=1), lambda g, i: 4, auto_score=False
    )
    m.post(ev.StepRequested())
    for attempt_id in list(m.in_flight):
        m.end(attempt_id)
    m.score((0, 0))
    m.post(OLD_TIMER)
    assert len(m.batches) == 1
    m.post(ev.SampleFailed(SampleId(1, 0), "reward raised"))
    assert not m.errors
    m.post(ev.StepRequested())
    assert m.errors == ["1 groups failed in a row, the last one: g1.s0: reward raised"]
    assert m.core.step is None


# -------------------------------------------------------------------- user functions that fail at any time


def test_function_that_fails_in_flight_leaves_its_attempt_behind() -> None:
    """The sample begins again at once; its old attempt's tokens are dropped by name when it ends, never mixed in."""
    m = CoreMachine(settings(n=1, samples=1, max_in_flight=4), lambda g, i: 20)
    m.post(ev.StepRequested())
    (first,) = m.in_flight.values()
    m.tokens(first.id, 7)
    commands = m.post(ev.SampleFailed(SampleId(0, 0), "cancelled"))
    assert [type(c) for c in commands[:2]] == [do.Abort, do.StartTimer]
    assert any(isinstance(c, do.CancelSample) for c in commands)
    assert m.abort_asked == {first.id}
    second = next(a for a in m.in_flight.values() if a.id != first.id)
    assert second.token_ids.tolist() == [5, 6]
    assert second.sampling.seed != first.sampling.seed

    first.tape.append(first.tape.packed()[0], first.tape.packed()[1], m.core.clock.current)  # it goes on for a while
    m.generated += 7
    del m.in_flight[first.id]
    m.post(ev.AttemptEnded.of(first, EngineFinish.ABORT))
    assert m.core.tokens.as_dict()["dropped"] == {"failed": 14}
    m.end(second.id)
    assert m.batches[0].samples[0].tokens.tolist() == [*range(10, 29), EOS]
    m.check_ledger()


@pytest.mark.parametrize("broke_off", [{}, {"kind": AttemptFailure.CORRUPT, "rejected": 2}])
def test_attempt_left_behind_may_break_off(broke_off: dict[str, object]) -> None:
    """It belongs to nobody: no failure of the sample, which goes on undisturbed."""
    m = CoreMachine(settings(n=1, samples=1, max_in_flight=4, max_attempt_failures=2), lambda g, i: 20)
    m.post(ev.StepRequested())
    (first,) = m.in_flight.values()
    m.tokens(first.id, 7)
    m.post(ev.SampleFailed(SampleId(0, 0), "cancelled"))
    del m.in_flight[first.id]
    m.abort_asked.clear()
    m.post(ev.AttemptFailed.of(first, "reset", **broke_off))  # type: ignore[arg-type]

    expected = {"corrupt": 9} if broke_off else {"failed": 7}
    assert m.core.tokens.as_dict()["dropped"] == expected
    assert m.core.buffer.groups[0].samples[0].open_call.state is CallState.IN_FLIGHT
    assert m.core.buffer.groups[0].samples[0].failures == 1


def test_attempt_left_behind_may_be_fenced() -> None:
    """An engine that is deaf to the abort: past the deadline its tokens are dropped by name as well."""
    m = CoreMachine(
        settings(n=1, samples=1, max_in_flight=4, abort_deadline_s=1.0), lambda g, i: 20,
        engines=(EngineLimits("a", 99, None, (EOS,)), EngineLimits("b", 99, None, (EOS,))),
    )  # fmt: skip
    m.post(ev.StepRequested())
    (first,) = m.in_flight.values()
    m.tokens(first.id, 7)
    commands = m.post(ev.SampleFailed(SampleId(0, 0), "cancelled"))
    m.post(ev.TimerFired(next(c.timer for c in commands if isinstance(c, do.StartTimer))))

    assert m.core.tokens.as_dict()["dropped"] == {"failed": 7}
    assert first.id not in m.core.attempts
    state = m.core.engines.states[first.engine]
    assert (state.quarantined, state.failures) == (True, 1)  # a fence is no request that ended in order


def test_cap_counts_attempts_left_behind() -> None:
    """They still use the engine: nothing new starts in their place before they have ended."""
    m = CoreMachine(settings(n=1, samples=1, max_in_flight=1), lambda g, i: 20)
    m.post(ev.StepRequested())
    (first,) = list(m.in_flight)
    m.post(ev.SampleFailed(SampleId(0, 0), "cancelled"))
    assert list(m.in_flight) == [first]
    m.finish_aborts()
    assert len(m.in_flight) == 1
    assert first not in m.in_flight
