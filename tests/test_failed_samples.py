"""What a sample that fails for good costs: group rewards, a quorum, deadlines, nothing but failures."""

from __future__ import annotations

from typing import Any

import pytest
from core_machine import CoreMachine, asked, timers

from april.core import commands as do
from april.core import events as ev
from april.core.types import (
    AttemptFailure,
    EngineFinish,
    GroupState,
    OnFailedSample,
    SampleId,
    SampleState,
    TimerKind,
)

DROP_GROUP, REPLACE, SHRINK = OnFailedSample
POLICIES = [DROP_GROUP, REPLACE, SHRINK]
Key = tuple[int, int]


def machine(policy: OnFailedSample, **changes: Any) -> CoreMachine:
    """N = 1, asked for a batch; everything in flight at once; a sample fails for good with its first failure."""
    values = {"samples": 4, "max_in_flight": 64, "max_attempt_failures": 1, "on_failed_sample": policy}
    return asked(9, **(values | changes))


def fail(m: CoreMachine, key: Key) -> list[do.Command]:
    """The rollout function of a sample raises."""
    commands = m.post(ev.SampleFailed(SampleId(*key), "broken"))
    m.finish_aborts()
    return commands


def of(m: CoreMachine, batch: int = 0) -> list[Key]:
    """Samples of a batch."""
    return [(s.id.group, s.id.index) for s in m.batches[batch].samples]


# ---------------------------------------------------------------- group rewards


def test_the_rest_of_a_shrunk_group_is_scored_when_the_last_one_that_was_awaited_is_given_up() -> None:
    """All others had returned and waited for it: nobody else would ask for their rewards."""
    m = machine(SHRINK, group_reward=True)
    m.finish((0, 0), (0, 1), (0, 2))
    assert not m.batches
    fail(m, (0, 3))
    assert of(m) == [(0, 0), (0, 1), (0, 2)]
    assert {len(s.baseline_rewards) for s in m.batches[0].samples} == {2}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_reward_that_fails_for_good_costs_the_group(policy: OnFailedSample) -> None:
    """No single sample is to blame: others in its place would fail at the same judge, and fewer would too."""
    m = machine(policy, group_reward=True, max_attempt_failures=3)
    nan = [(index, float("nan")) for index in range(4)]
    for index in range(3):
        m.finish((0, index))
    attempt = m.only
    m.tokens(attempt.id, 9)
    m.in_flight.pop(attempt.id)
    m.core.handle(ev.AttemptEnded.of(attempt, EngineFinish.STOP))
    commands = m.core.handle(ev.SampleReturned(attempt.sample.id))
    for _ in range(3):
        assert [type(c) for c in commands if isinstance(c, do.ScoreGroup)] == [do.ScoreGroup]
        assert 0 in m.core.buffer.groups
        commands = m.core.handle(ev.Scored(0, nan))
    assert 0 not in m.core.buffer.groups
    assert m.prompts_dropped == {"failed": 1}
    assert m.core.counters["replaced_samples"] == m.core.counters["samples_dropped_failed"] == 0


def test_a_pause_before_the_next_try_is_not_waited_for_twice() -> None:
    """A group that pauses before its reward is asked for again may shrink: it is asked at once, the pause is void."""
    m = machine(SHRINK, group_reward=True, max_attempt_failures=2, retry_pause_s=4.0, min_group_size=1)
    m.finish((0, 0), (0, 1), (0, 2))
    group = m.core.buffer.groups[0]
    assert [s.state for s in group.samples] == [SampleState.SCORING] * 3 + [SampleState.RUNNING]
    m.core.handle(ev.SampleFailed(SampleId(0, 0), "the judge was away"))
    (timer,) = timers(m.core.context.out, TimerKind.RETRY)
    fail(m, (0, 3))
    fail(m, (0, 3))
    assert of(m) == [(0, 0), (0, 1), (0, 2)]
    assert not [c for c in m.post(ev.TimerFired(timer.timer)) if isinstance(c, do.ScoreGroup)]


# ---------------------------------------------------------------- quorum and deadlines


@pytest.mark.parametrize("policy", POLICIES)
def test_a_straggler_that_fails_takes_no_sibling_along_that_counts(policy: OnFailedSample) -> None:
    """Its cohort is fixed, and some of it is delivered: whatever the policy says of groups, the others can go."""
    m = machine(policy, over=2, group_quorum=0.75, min_group_size=4 if policy is SHRINK else 1)
    m.finish((0, 0), (0, 1), (0, 2))
    fail(m, (0, 3))
    replaced = [(0, 4)] if policy is REPLACE else []
    m.finish(*replaced, (1, 0), (1, 1), (1, 2))
    m.finish_aborts()
    assert of(m)[:3] == [(0, 0), (0, 1), (0, 2)]
    assert len(m.batches[0]) == 4
    assert m.core.prompts.dropped == {}
    assert m.core.counters["groups_dropped_failed"] == 0
    m.check_ledger()


def test_what_takes_the_place_of_an_urgent_sample_is_urgent() -> None:
    """The step waits for its group; with the next plan that may be over."""
    m = machine(REPLACE, samples=2, over=2, max_staleness=1)
    m.finish((1, 0), (0, 0), (0, 1))
    m.finish_aborts()
    m.update()
    m.ask()
    (attempt,) = [c.attempt for c in fail(m, (1, 1)) if isinstance(c, do.Submit)]
    assert (tuple(attempt.sample.id), attempt.request.priority == 0) == ((1, 2), True)
    m.finish((1, 2))
    m.finish_aborts()
    assert of(m, 1) == [(1, 0), (1, 2)]
    m.update()
    m.ask()
    assert all(group.id != 1 for group in m.core.context.urgent.values())


# ---------------------------------------------------------------- nothing but failures


@pytest.mark.parametrize("quorum", [1.0, 0.75])
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_but_failures_ends_the_step_with_a_sentence(policy: OnFailedSample, quorum: float) -> None:
    """max_failed_groups counts groups, and every group comes to an end: after n replacements, or at min_group_size."""
    m = machine(policy, group_quorum=quorum, max_attempt_failures=2, max_failed_groups=3, min_group_size=2)
    failures = 0
    while not m.errors:
        running = [s for s in m.core.buffer.samples() if s.state is SampleState.RUNNING]
        assert running, f"stuck: {m.core!r}"
        fail(m, tuple(running[0].id))  # type: ignore[arg-type]
        failures += 1
        assert failures < 100
    assert m.errors == [f"3 groups failed in a row; the last error is: {m.errors[0].rpartition('error is: ')[2]}"]
    assert m.errors[0].endswith("broken")
    # each of two tries: the first; n replaced and the first beyond; the third, which would leave one
    assert failures == 3 * 2 * {DROP_GROUP: 1, REPLACE: 5, SHRINK: 3}[policy]
    assert m.prompts_dropped == {"failed": 3}
    m.check_ledger()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_is_refused_ends_too(policy: OnFailedSample) -> None:
    """A prompt that a server does not take is refused for every sample: its group ends, and generates nothing."""
    m = machine(policy, max_failed_groups=100, max_in_flight=4, min_group_size=2)
    refused = 0
    while 0 in m.core.buffer.groups:
        attempt = next(a for a in m.in_flight.values() if a.sample.id.group == 0)
        m.fail(attempt, "HTTP 400", kind=AttemptFailure.REFUSED)
        m.finish_aborts()
        refused += 1
    assert refused == {DROP_GROUP: 1, REPLACE: 5, SHRINK: 3}[policy]
    m.finish(1)
    assert of(m) == [(1, i) for i in range(4)]


@pytest.mark.parametrize("policy", [REPLACE, SHRINK])
def test_people_hear_of_a_sample_that_is_given_up(policy: OnFailedSample) -> None:
    """With what was wrong with it, as of a group that is dropped."""
    m = machine(policy)
    fail(m, (0, 3))
    (warning,) = [c.message for c in m.commands if isinstance(c, do.Warn)]
    assert warning == (
        f"g0.s3: broken; the sample is given up, and its group continues with {4 if policy is REPLACE else 3} samples"
    )


def test_a_straggler_that_fails_while_the_filter_thinks_costs_itself() -> None:
    """How long the filter takes decides nothing: the quorum of the group is finished."""
    m = machine(DROP_GROUP, group_quorum=0.75, has_filter=True)
    m.finish((0, 0), (0, 1), (0, 2))
    assert m.core.buffer.groups[0].state is GroupState.BEING_JUDGED
    fail(m, (0, 3))
    assert 0 in m.core.buffer.groups
    assert m.core.counters["samples_dropped_failed"] == 1
