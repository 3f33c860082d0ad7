"""What goes wrong: broken attempts, corrupt numbers, late events, deaf engines, failing rewards."""

from __future__ import annotations

import random
from typing import Any

import pytest
from core_machine import EOS, OLD_TIMER, CoreMachine, settings, timers

from april.core import commands as do
from april.core import events as ev
from april.core.engine_table import FAILURES_BEFORE_QUARANTINE
from april.core.settings import EngineLimits
from april.core.tape import AttemptCounts
from april.core.types import (
    AttemptFailure,
    CallState,
    DropReason,
    EngineFinish,
    OnLongPrompt,
    SampleId,
    Timer,
    TimerKind,
)
from april.core.versions import FIRST_VERSION
from april.errors import InvariantError

TWO_ENGINES = (EngineLimits("a", 4096, None, (EOS,)), EngineLimits("b", 4096, None, (EOS,)))


def fail(m: CoreMachine, attempt_id: str, **how: object) -> list[do.Command]:
    """Let an attempt break off."""
    return m.post(ev.AttemptFailed.of(m.in_flight.pop(attempt_id), "connection reset", **how))


def test_broken_attempt_keeps_its_tokens_and_continues_elsewhere() -> None:
    """Tokens seen before the break are kept; the next attempt has a new id and continues from them."""
    m = CoreMachine(settings(n=1, samples=1), lambda g, i: 20, engines=TWO_ENGINES)
    m.post(ev.StepRequested())
    first = next(iter(m.in_flight.values()))
    m.tokens(first.id, 7)
    (command,) = [c for c in fail(m, first.id) if isinstance(c, do.Submit)]

    assert command.attempt.id != first.id
    assert len(command.attempt.token_ids) == 2 + 7
    m.end(command.attempt.id)
    assert len(m.batches[0].samples[0].tokens) == 20
    m.check_ledger()


def test_corrupt_attempt_is_dropped_with_a_reason_and_never_trained() -> None:
    """Numbers that cannot be true: the attempt's tokens and the rejected ones are dropped, earlier ones stay."""
    m = CoreMachine(settings(n=1, samples=1), lambda g, i: 20)
    m.post(ev.StepRequested())
    (first,) = m.in_flight
    m.tokens(first, 5)
    fail(m, first)
    m.post(ev.EngineReady("e0"))
    (second,) = m.in_flight
    m.tokens(second, 6)
    fail(m, second, kind=AttemptFailure.CORRUPT, rejected=3)

    assert m.core.tokens.as_dict() == {"observed": 14, "delivered": 0, "held": 5, "dropped": {"corrupt": 9}}
    (third,) = m.in_flight.values()
    assert len(third.token_ids) == 2 + 5


def test_engine_that_breaks_after_every_few_tokens_costs_no_group() -> None:
    """Attempts that brought tokens do not count as failures of their sample: it goes on from them."""
    m = CoreMachine(settings(n=1, samples=1, max_attempt_failures=2), lambda g, i: 20)
    m.post(ev.StepRequested())
    for _ in range(4):
        (attempt_id,) = m.in_flight
        m.tokens(attempt_id, 3)
        fail(m, attempt_id)
        m.post(ev.EngineReady("e0"))  # it may have been quarantined
    m.end(min(m.in_flight))

    assert len(m.batches[0].samples[0].tokens) == 20
    assert m.core.prompts.as_dict()["dropped"] == {}


def test_endless_source_of_long_prompts_ends_the_step_with_a_reason() -> None:
    """With on_long_prompt: skip nothing is drawn for ever: after 1,000 in a row the trainer is told."""
    m = CoreMachine(
        settings(n=1, samples=1, on_long_prompt=OnLongPrompt.SKIP), lambda g, i: 5,
        engines=(EngineLimits("a", 2, None, (EOS,)),),
    )  # fmt: skip
    m.post(ev.StepRequested())

    assert "1000 prompts in a row leave no room" in m.errors[0]
    assert m.core.prompts.as_dict()["dropped"] == {"too_long": 1000}


def test_sample_that_fails_too_often_takes_its_group_along_and_is_replaced() -> None:
    """max_attempt_failures: the group is dropped for the reason failed, its siblings are aborted, N is still met."""
    m = CoreMachine(settings(n=1, samples=2, max_attempt_failures=2), lambda g, i: 20)
    m.post(ev.StepRequested())
    m.tokens(next(a.id for a in m.in_flight.values() if a.sample.id == (0, 1)), 4)
    for _ in range(2):
        fail(m, next(a.id for a in m.in_flight.values() if a.sample.id == (0, 0)))
        m.post(ev.EngineReady("e0"))

    assert m.core.prompts.as_dict()["dropped"] == {"failed": 1}
    assert {a.sample.id.group for a in m.in_flight.values() if a.id not in m.abort_asked} == {1}
    m.finish_aborts()
    assert m.core.tokens.as_dict()["dropped"] == {"failed": 4}
    for attempt_id in list(m.in_flight):
        m.end(attempt_id)
    assert m.batches[0].group_sizes == (2,)
    m.check_ledger()


def test_late_and_repeated_events_of_an_attempt_change_nothing() -> None:
    """Fencing by attempt id: an attempt is accounted for once."""
    m = CoreMachine(settings(n=1, samples=1), lambda g, i: 20)
    m.post(ev.StepRequested())
    (first,) = m.in_flight
    fail(m, first)
    before = repr(m.core)

    assert m.post(ev.AttemptEnded(first, EngineFinish.STOP)) == []
    assert m.post(ev.AttemptFailed(attempt_id=first, error="again")) == []
    assert m.post(ev.AttemptEnded("unknown", EngineFinish.STOP)) == []
    assert repr(m.core) == before
    assert m.core.counters["late_events"] == 3


def test_late_rewards_and_failures_of_settled_samples_change_nothing() -> None:
    """A reward that arrives twice, or for a group that is gone, is counted and ignored."""
    m = CoreMachine(settings(n=1, samples=1, over=2), lambda g, i: 3 + g * 50)
    m.step(random.Random(0))
    m.post(ev.Scored(0, [(0, 9.0)]))
    m.post(ev.SampleFailed(SampleId(0, 0), "late"))

    assert m.core.counters["late_events"] == 2
    assert m.batches[0].samples[0].reward == 0.0


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_reward_that_is_no_finite_number_is_retried_then_given_up(reward: float) -> None:
    """NaN never reaches a batch: the reward is asked for again, then the group is dropped and replaced."""
    m = CoreMachine(settings(n=1, samples=1, max_attempt_failures=3), lambda g, i: 3, auto_score=False)
    m.post(ev.StepRequested())
    m.end(min(m.in_flight))
    for _ in range(3):
        m.post(ev.Scored(0, [(0, reward)]))

    assert sum(isinstance(c, do.ScoreSample) for c in m.commands) == 3
    assert m.core.prompts.as_dict()["dropped"] == {"failed": 1}
    assert "the reward is" in m.core.story(SampleId(0, 0))
    m.end(min(m.in_flight))
    m.score((1, 0))
    m.post(OLD_TIMER)
    assert m.batches[0].samples[0].id == (1, 0)


def test_failing_rollout_function_begins_again_and_drops_what_it_had() -> None:
    """A rollout function that raises is started again from the prompt; its tokens are dropped by name."""
    m = CoreMachine(settings(n=1, samples=1), lambda g, i: 3, auto_score=False)
    m.post(ev.StepRequested())
    (attempt_id,) = m.in_flight
    m.tokens(attempt_id, 3)
    m.core.handle(ev.AttemptEnded.of(m.in_flight[attempt_id], EngineFinish.STOP))
    commands = m.core.handle(ev.SampleFailed(SampleId(0, 0), "boom"))

    assert [type(c) for c in commands] == [do.CancelSample, do.StartSample]
    assert m.core.tokens.as_dict()["dropped"] == {"failed": 3}


def test_groups_failing_in_a_row_end_the_step_with_a_reason_and_keep_the_rest() -> None:
    """No endless retry: after max_failed_groups dead groups in a row the trainer is told; a new step may follow."""
    m = CoreMachine(settings(n=1, samples=1, max_attempt_failures=1, max_failed_groups=4), lambda g, i: 9)
    m.post(ev.StepRequested())
    for _ in range(4):
        m.post(ev.EngineReady("e0"))
        fail(m, min(m.in_flight))

    assert m.errors == ["4 groups failed in a row, the last one: g3.s0: connection reset"]
    assert m.core.step is None
    assert m.core.prompts.as_dict()["dropped"] == {"failed": 4}
    m.errors.clear()
    m.post(ev.EngineReady("e0"))
    assert m.step(random.Random(0)) is not None


def test_returning_without_generating_is_a_named_failure() -> None:
    """A rollout function must call llm.generate."""
    m = CoreMachine(settings(n=1, samples=1), lambda g, i: 3, auto_call=False)
    m.post(ev.StepRequested())
    m.post(ev.SampleReturned(m.to_call.pop()))

    assert "without a call of llm.generate" in m.core.story(SampleId(0, 0))
    assert m.core.prompts.as_dict()["dropped"] == {"failed": 1}


def test_function_that_fails_before_its_first_call_gives_its_place_back() -> None:
    """A started sample holds a place in flight; its failure frees it, and it starts again."""
    m = CoreMachine(settings(n=1, samples=2, max_in_flight=1), lambda g, i: 3, auto_call=False)
    m.post(ev.StepRequested())
    (first,) = m.to_call
    m.post(ev.SampleFailed(first, "boom"))

    assert len(m.core.context.places.reserved) == 1
    assert m.to_call == [first, first]


def test_two_calls_at_once_are_refused_with_the_story() -> None:
    """One sample has one conversation."""
    m = CoreMachine(settings(n=1, samples=1), lambda g, i: 30)
    m.post(ev.StepRequested())
    with pytest.raises(InvariantError, match=r"generate twice.*\n?.*story of g0.s0"):
        m.post(ev.CallMade(SampleId(0, 0), m.sampling))


def test_deaf_engine_is_asked_again_then_fenced_and_quarantined() -> None:
    """Abort is confirmed by the end of the attempt, asked again until the deadline, then fenced; tokens are kept."""
    m = CoreMachine(
        settings(n=1, samples=1, over=2, abort_deadline_s=3.0, abort_resend_s=1.0),
        lambda g, i: 3 if g == 0 else 500,
        engines=TWO_ENGINES,
    )
    m.post(ev.StepRequested())
    ids = {a.sample.id.group: a for a in m.in_flight.values()}
    m.tokens(ids[1].id, 40)
    m.end(ids[0].id)
    seen = []
    while not m.batches:
        timer = timers(m.commands, TimerKind.ABORTS)[-1]
        assert timer.seconds == 1.0
        seen.append([type(c) for c in m.post(ev.TimerFired(timer.timer))])

    assert seen == [
        [do.Abort, do.StartTimer], [do.Abort, do.StartTimer], [do.Fence, do.StartTimer, do.Deliver],
    ]  # fmt: skip
    assert [t.timer.engine for t in timers(m.commands, TimerKind.PROBE)] == [ids[1].engine]
    assert m.core.engines.states[ids[1].engine].quarantined
    assert len(m.core.buffer.groups[1].samples[0].tape) == 40
    assert m.post(ev.AttemptEnded(ids[1].id, EngineFinish.STOP)) == []
    m.in_flight.clear()
    m.update()
    other = ({"a", "b"} - {ids[1].engine}).pop()
    m.post(ev.StepRequested())
    assert {a.engine for a in m.in_flight.values()} == {other}
    m.post(ev.EngineReady(ids[1].engine))
    assert not m.core.engines.states[ids[1].engine].quarantined


def silent_siblings(**changes: object) -> tuple[CoreMachine, list[str]]:
    """Two samples of one group at an engine that neither sends nor ends anything."""
    m = CoreMachine(settings(n=1, samples=2, max_attempt_failures=1, **changes), lambda g, i: 50)
    m.post(ev.StepRequested())
    return m, sorted(m.in_flight)


def last_timer(m: CoreMachine) -> ev.TimerFired:
    """The timer of the aborts that was started last runs out."""
    return ev.TimerFired(timers(m.commands, TimerKind.ABORTS)[-1].timer)


def test_function_that_returns_when_its_group_was_just_given_up_is_late() -> None:
    """One fence completes a sample and gives its group up for the sibling: what the first then says is late."""
    m, (first, second) = silent_siblings(abort_deadline_s=1.0)
    m.tokens(first, 5)
    m.in_flight[first].tape.stopped = True
    m.post(ev.PauseRequested())
    m.post(ev.AttemptStalled(second))
    commands = m.post(last_timer(m))

    assert [type(c) for c in commands][:4] == [do.Fence, do.StartTimer, do.CallCompleted, do.ReportDrop]
    assert m.core.counters["late_events"] == 1
    assert m.core.tokens.as_dict()["dropped"] == {"failed": 5}
    assert m.post(ev.CallMade(SampleId(0, 0), m.sampling)) == []


def test_fenced_attempt_is_not_asked_to_end_once_more() -> None:
    """Two fences at once, the first of which gives up the group: the other attempt is accounted for already."""
    m, ids = silent_siblings(abort_deadline_s=1.0)
    m.post(ev.PauseRequested())
    for attempt_id in ids:
        m.post(ev.AttemptStalled(attempt_id))
    commands = m.post(last_timer(m))

    assert [c.attempt_ids for c in commands if isinstance(c, do.Fence)] == [tuple(ids)]
    assert not [c for c in commands if isinstance(c, do.Abort)]
    assert m.core.counters["aborted_attempts"] == 2
    assert m.core.aborts.pending == 0


@pytest.mark.parametrize("end", [{"finish": EngineFinish.ABORT}, {"error": "reset"}], ids=["ended", "failed"])
def test_end_of_an_attempt_says_what_it_has_brought(end: dict[str, Any]) -> None:
    """The core decides by the counts in the event; tokens that these do not name stop it, before any is lost."""
    m = CoreMachine(settings(n=1, samples=1), lambda g, i: 20)
    m.post(ev.StepRequested())
    (attempt,) = m.in_flight.values()
    m.tokens(attempt.id, 7)
    assert attempt.counts() == AttemptCounts(((FIRST_VERSION, 7),))
    with pytest.raises(InvariantError, match=r"g0\.s0 has 7 new tokens, its end says otherwise"):
        m.core.handle((ev.AttemptFailed if "error" in end else ev.AttemptEnded)(attempt_id=attempt.id, **end))


def test_abort_that_joins_a_running_timer_has_its_whole_deadline() -> None:
    """The timer of an earlier abort may fire at once; no engine is quarantined for that."""
    m, (first, second) = silent_siblings(abort_deadline_s=1.0, abort_resend_s=1.0)
    m.post(ev.AttemptStalled(first))
    timer = last_timer(m)
    m.end(first, 50)
    m.post(ev.AttemptStalled(second))
    commands = m.post(timer)

    assert [type(c) for c in commands] == [do.Abort, do.StartTimer]
    assert not m.core.engines.states["e0"].quarantined
    assert [type(c) for c in m.post(last_timer(m))][:2] == [do.Fence, do.StartTimer]
    assert len(timers(m.commands, TimerKind.PROBE)) == 1


def test_timers_of_an_earlier_abort_do_nothing() -> None:
    """A timer that outlives its abort is ignored."""
    m = CoreMachine(settings(n=1, samples=1, over=2), lambda g, i: 3 + g * 40)
    m.step(random.Random(0))
    timer = timers(m.commands, TimerKind.ABORTS)[0]
    assert m.post(ev.TimerFired(timer.timer)) == []


def test_engine_that_breaks_again_and_again_is_quarantined() -> None:
    """Three failures in a row are an engine's, not an accident; work goes to the other one."""
    m = CoreMachine(settings(n=4, samples=2, max_attempt_failures=9), lambda g, i: 30, engines=TWO_ENGINES)
    m.post(ev.StepRequested())
    bad = [a.id for a in m.in_flight.values() if a.engine == "a"]
    probes = []
    for attempt_id in bad[:FAILURES_BEFORE_QUARANTINE]:
        probes += timers(fail(m, attempt_id), TimerKind.PROBE)

    assert [p.timer.engine for p in probes] == ["a"]
    assert m.core.engines.states["a"].quarantined


def test_engine_with_old_weights_gets_nothing_until_it_confirms() -> None:
    """A sample resumes only on engines that confirmed the current version."""
    m = CoreMachine(settings(n=2, samples=2), lambda g, i: 5, engines=TWO_ENGINES)
    m.step(random.Random(0))
    current = m.core.clock.current
    m.post(ev.WeightsUpdated(current._replace(n=1), engines=["b"]))
    m.post(ev.StepRequested())
    assert {a.engine for a in m.in_flight.values()} == {"b"}


def test_attempts_go_to_the_least_loaded_engine_with_room() -> None:
    """Load is levelled, and an engine's own cap holds."""
    engines = (EngineLimits("a", 99, 1, (EOS,)), EngineLimits("b", 99, 4, (EOS,)))
    m = CoreMachine(settings(n=3, samples=3), lambda g, i: 5, engines=engines)
    m.post(ev.StepRequested())
    assert m.core.engines.in_flight() == {"a": 1, "b": 4}
    assert len(m.core.context.places.reserved) + m.core.over_sampler.waiting == 4


@pytest.mark.parametrize("policy", list(OnLongPrompt))
def test_prompt_without_room_is_refused_by_policy(policy: OnLongPrompt) -> None:
    """on_long_prompt: error tells the trainer which prompt; skip counts it and takes the next one."""
    m = CoreMachine(
        settings(n=1, samples=1, on_long_prompt=policy), lambda g, i: 5, engines=(EngineLimits("a", 2, None, (EOS,)),),
        prompts=3,
    )  # fmt: skip
    m.post(ev.StepRequested())
    if policy is OnLongPrompt.ERROR:
        assert "prompt 0 has 2 tokens" in m.errors[0]
    else:
        assert m.ended
        assert m.core.prompts.as_dict()["dropped"] == {"too_long": 3}


def test_invariant_errors_tell_the_story_of_the_sample() -> None:
    """validate() names what contradicts what, with the sample's history."""
    m = CoreMachine(settings(n=1, samples=1), lambda g, i: 30)
    m.post(ev.StepRequested())
    m.core.buffer.groups[0].samples[0].calls[0].state = CallState.QUEUED
    with pytest.raises(InvariantError, match=r"(?s)in flight without an attempt.*story of g0.s0.*<RolloutCore"):
        m.core.validate()


def test_lost_tokens_are_found_by_validate() -> None:
    """A token that is neither delivered, held nor dropped breaks the ledger."""
    m = CoreMachine(settings(n=1, samples=1, over=2), lambda g, i: 3 + 50 * g)
    m.step(random.Random(0), chunk=4)
    m.core.tokens.held -= 1
    with pytest.raises(InvariantError, match=r"a recount finds|lost or made up"):
        m.core.validate()


# ---------------------------------------------------------------- pauses between tries


def retry_timers(commands: list[do.Command]) -> list[tuple[Timer, float]]:
    return [(t.timer, t.seconds) for t in timers(commands, TimerKind.RETRY)]


def test_a_reward_is_asked_again_after_a_pause() -> None:
    """Longer each time; the group is given up only after the last of them."""
    m = CoreMachine(
        settings(n=1, samples=1, max_attempt_failures=4, retry_pause_s=4.0), lambda g, i: 3, auto_score=False
    )
    m.post(ev.StepRequested())
    m.end(min(m.in_flight))
    pauses = []
    for _ in range(3):
        commands = m.post(ev.SampleFailed(SampleId(0, 0), "no answer"))
        assert not any(isinstance(c, do.ScoreSample) for c in commands)
        ((timer, seconds),) = retry_timers(commands)
        pauses.append(seconds)
        assert [type(c) for c in m.post(ev.TimerFired(timer))] == [do.ScoreSample]
        assert m.post(ev.TimerFired(timer)) == []  # once
    assert pauses == [4.0, 32.0, 32.0]
    m.post(ev.SampleFailed(SampleId(0, 0), "no answer"))
    assert m.core.prompts.as_dict()["dropped"] == {"failed": 1}


def test_a_pause_that_is_overtaken() -> None:
    """Rewards of a group are not asked for while one of its samples has begun again since."""
    m = CoreMachine(settings(n=1, samples=2, group_reward=True, retry_pause_s=4.0), lambda g, i: 3)
    m.post(ev.StepRequested())
    group = m.core.buffer.groups[0]
    for key in [(0, 0), (0, 1)]:
        attempt_id = next(a.id for a in m.in_flight.values() if a.sample.id == key)
        m.tokens(attempt_id, 3)
        m.core.handle(ev.AttemptEnded.of(m.in_flight.pop(attempt_id), EngineFinish.STOP))
        m.core.handle(ev.SampleReturned(SampleId(*key)))
    ((first, _),) = retry_timers(m.core.handle(ev.SampleFailed(SampleId(0, 0), "no answer")))
    m.core.lives.begin_again(group.samples[1], DropReason.STALE)
    commands = m.core.handle(ev.TimerFired(first))
    assert not any(isinstance(c, do.ScoreGroup) for c in commands)  # the other one is to return first
