"""What goes wrong: broken attempts, corrupt numbers, late events, deaf engines, failing functions and rewards."""

from __future__ import annotations

import random
from typing import Any

import pytest
from core_machine import EOS, A, B, CoreMachine, asked, timers

from april.core import commands as do
from april.core import events as ev
from april.core.settings import EngineLimits
from april.core.tape import AttemptCounts
from april.core.types import (
    DropReason,
    EngineFinish,
    OnLongPrompt,
    SampleId,
    TimerKind,
)
from april.core.versions import FIRST_VERSION
from april.errors import InvariantError

# ---------------------------------------------------------------- attempts that break off


def test_engine_that_breaks_after_every_few_tokens_costs_no_group() -> None:
    """Attempts that brought tokens do not count as failures of their sample: it goes on from them."""
    m = asked(max_attempt_failures=2)
    for _ in range(4):
        m.tokens(m.only.id, 3)
        m.fail(m.only)
        m.probed("a")  # it may have been quarantined
    m.finish(0)
    assert len(m.batches[0].samples[0].tokens) == 20
    assert m.prompts_dropped == {}


@pytest.mark.parametrize("end", [{"finish": EngineFinish.ABORT}, {"error": "reset"}], ids=["ended", "failed"])
def test_end_of_an_attempt_says_what_it_has_brought(end: dict[str, Any]) -> None:
    """The core decides by the counts in the event; tokens that these do not name stop it, before any is lost."""
    m = asked()
    attempt = m.only
    m.tokens(attempt.id, 7)
    assert attempt.counts() == AttemptCounts(((FIRST_VERSION, 7),))
    with pytest.raises(InvariantError, match=r"g0\.s0 has 7 new tokens, but its last event says otherwise"):
        m.core.handle((ev.AttemptFailed if "error" in end else ev.AttemptEnded)(attempt_id=attempt.id, **end))


# ---------------------------------------------------------------- prompts without room


@pytest.mark.parametrize("policy", list(OnLongPrompt))
@pytest.mark.parametrize("prompts", [3, None])
def test_prompt_without_room_is_refused_by_policy(policy: OnLongPrompt, prompts: int | None) -> None:
    """on_long_prompt: error tells which prompt; skip counts it and takes the next, and no more than 1,000 in a row."""
    m = asked(on_long_prompt=policy, engines=(EngineLimits("a", 2, None, (EOS,)),), prompts=prompts)
    if policy is OnLongPrompt.ERROR:
        assert "prompt 0 has 2 tokens" in m.errors[0]
    elif prompts is None:
        assert "1000 prompts in a row leave no room" in m.errors[0]
        assert m.prompts_dropped == {"too_long": 1000}
    else:
        assert m.ended
        assert m.prompts_dropped == {"too_long": 3}


# ---------------------------------------------------------------- functions and rewards


def test_groups_failing_in_a_row_end_the_step_with_a_reason_and_keep_the_rest() -> None:
    """No endless retry: after max_failed_groups dead groups in a row the trainer is told; a new step may follow."""
    m = asked(9, max_attempt_failures=1, max_failed_groups=4)
    for _ in range(4):
        m.probed("a")
        m.fail(m.only)
    assert m.errors == ["4 groups failed in a row; the last error is: g3.s0: reset"]
    assert m.core.step is None
    assert m.prompts_dropped == {"failed": 4}
    m.errors.clear()
    m.probed("a")
    assert m.step(random.Random(0)) is not None


def test_function_that_makes_no_call() -> None:
    """One that returns is a named failure, as it must call llm.generate; one that raises gives its place back."""
    m = asked(auto_call=False)
    m.post(ev.SampleReturned(m.to_call.pop()))
    assert "without awaiting a call of llm.generate" in m.core.story(SampleId(0, 0))
    assert m.prompts_dropped == {"failed": 1}

    m = asked(samples=2, max_in_flight=1, auto_call=False)
    (first,) = m.to_call
    m.post(ev.SampleFailed(first, "boom"))
    assert len(m.core.context.places.reserved) == 1
    assert m.to_call == [first, first]


def test_two_calls_at_once_are_refused_with_the_story() -> None:
    """One sample has one conversation."""
    m = asked()
    with pytest.raises(InvariantError, match=r"(?s)g0.s0 called generate twice.*running \(in_flight\).*story of g0.s0"):
        m.core.handle(ev.CallMade(SampleId(0, 0), m.sampling))


def test_a_reward_is_asked_again_after_a_pause() -> None:
    """Longer each time; the group is given up only after the last of them."""
    m = asked(3, max_attempt_failures=4, retry_pause_s=4.0, auto_score=False)
    m.finish(0)
    pauses = []
    for _ in range(3):
        commands = m.post(ev.SampleFailed(SampleId(0, 0), "no answer"))
        assert not any(isinstance(c, do.ScoreSample) for c in commands)
        (timer,) = timers(commands, TimerKind.RETRY)
        pauses.append(timer.seconds)
        assert [type(c) for c in m.fire(timer)] == [do.ScoreSample]
        assert m.fire(timer) == []  # once
    assert pauses == [4.0, 32.0, 32.0]
    m.post(ev.SampleFailed(SampleId(0, 0), "no answer"))
    assert m.prompts_dropped == {"failed": 1}


def test_a_pause_that_is_overtaken() -> None:
    """Rewards of a group are not asked for while one of its samples has begun again since."""
    m = asked(3, samples=2, group_reward=True, retry_pause_s=4.0)
    group = m.core.buffer.groups[0]
    for attempt in list(m.in_flight.values()):
        m.tokens(attempt.id, 3)
        m.core.handle(ev.AttemptEnded.of(m.in_flight.pop(attempt.id), EngineFinish.STOP))
        m.core.handle(ev.SampleReturned(attempt.sample.id))
    (first,) = timers(m.core.handle(ev.SampleFailed(SampleId(0, 0), "no answer")), TimerKind.RETRY)
    m.core.lifecycle.restart(group.samples[1], DropReason.STALE)
    commands = m.core.handle(ev.TimerFired(first.timer))
    assert not any(isinstance(c, do.ScoreGroup) for c in commands)  # the other one is to return first


def test_function_that_fails_in_flight_leaves_its_attempt_behind() -> None:
    """The sample begins again at once; its old attempt's tokens are dropped by name when it ends, never mixed in."""
    m = asked(max_in_flight=4)
    first = m.only
    m.tokens(first.id, 7)
    m.post(ev.SampleFailed(SampleId(0, 0), "cancelled"))
    assert m.abort_asked == {first.id}
    second = next(a for a in m.in_flight.values() if a.id != first.id)
    assert second.request.token_ids.tolist() == [5, 6]
    assert second.request.sampling.seed != first.request.sampling.seed
    m.end(first.id, 7)  # it had gone on for a while
    assert m.dropped == {"failed": 14}
    m.end(second.id)
    assert m.batches[0].samples[0].tokens.tolist() == [*range(10, 29), EOS]
    m.check_ledger()


# ---------------------------------------------------------------- engines that do not end what they should


def test_deaf_engine_is_asked_again_then_fenced_and_quarantined() -> None:
    """Abort is confirmed by the end of the attempt, asked again until the deadline, then fenced; tokens are kept."""
    m = asked({0: 3, 1: 500}, over=2, abort_deadline_s=3.0, abort_resend_s=1.0, engines=(A, B))
    deaf = m.attempt(1)
    m.tokens(deaf.id, 40)
    m.finish(0)
    seen = []
    while not m.batches:
        timer = timers(m.commands, TimerKind.ABORTS)[-1]
        assert timer.seconds == 1.0
        seen.append([type(c) for c in m.fire(timer)])

    assert seen == [
        [do.Abort, do.StartTimer], [do.Abort, do.StartTimer], [do.Fence, do.StartTimer, do.Deliver],
    ]  # fmt: skip
    assert [t.timer.engine for t in timers(m.commands, TimerKind.PROBE)] == [deaf.engine]
    state = m.core.engines.states[deaf.engine]
    assert state.quarantined
    assert len(m.sample(1).chains[0].tape) == 40
    assert m.post(ev.AttemptEnded(deaf.id, EngineFinish.STOP)) == []
    assert m.fire(timers(m.commands, TimerKind.ABORTS)[0]) == []  # one that outlived its abort
    m.update()
    m.ask()
    assert {a.engine for a in m.in_flight.values()} == {"a", "b"} - {deaf.engine}
    m.probed(deaf.engine)
    assert not state.quarantined


def silent_siblings(**changes: object) -> tuple[CoreMachine, list[str]]:
    """Two samples of one group at an engine that neither sends nor ends anything."""
    m = asked(50, samples=2, max_attempt_failures=1, abort_deadline_s=1.0, **changes)
    return m, sorted(m.in_flight)


def fire_last(m: CoreMachine) -> list[do.Command]:
    """The timer of the aborts that was started last runs out."""
    return m.fire(timers(m.commands, TimerKind.ABORTS)[-1])


def test_function_that_returns_when_its_group_was_just_given_up_is_late() -> None:
    """One fence completes a sample and gives its group up for the sibling: what the first then says is late."""
    m, (first, second) = silent_siblings()
    m.tokens(first, 5)
    m.in_flight[first].tape.stopped = True
    m.post(ev.PauseRequested())
    m.post(ev.AttemptStalled(second))
    commands = fire_last(m)
    assert [type(c) for c in commands][:4] == [do.Fence, do.StartTimer, do.CallCompleted, do.ReportDrop]
    assert m.core.counters["late_events"] == 1
    assert m.dropped == {"failed": 5}
    assert m.post(ev.CallMade(SampleId(0, 0), m.sampling)) == []


def test_abort_that_joins_a_running_timer_has_its_whole_deadline() -> None:
    """The timer of an earlier abort may fire at once; no engine is quarantined for that."""
    m, (first, second) = silent_siblings(abort_resend_s=1.0)
    m.post(ev.AttemptStalled(first))
    timer = timers(m.commands, TimerKind.ABORTS)[-1]
    m.end(first, 50)
    m.post(ev.AttemptStalled(second))
    assert [type(c) for c in m.fire(timer)] == [do.Abort, do.StartTimer]
    assert not m.core.engines.states["a"].quarantined
    assert [type(c) for c in fire_last(m)][:2] == [do.Fence, do.StartTimer]
    assert len(timers(m.commands, TimerKind.PROBE)) == 1
