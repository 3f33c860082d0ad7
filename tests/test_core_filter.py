"""Verdicts: a group counts once its filter has accepted it, and verdicts and rewards count for what was asked."""

from __future__ import annotations

import pytest
from core_machine import OLD_TIMER, CoreMachine, asked, settings

from april.core import commands as do
from april.core import events as ev
from april.core.types import DropReason, EngineFinish, OnStale, Refill, SampleId


class Judged(CoreMachine):
    """A step has begun, and the test gives the verdicts."""

    def __init__(self, n: int = 1, samples: int = 2, **changes: object) -> None:
        super().__init__(settings(n=n, samples=samples, **changes, has_filter=True), 4)
        self.ask()

    @property
    def question(self) -> do.JudgeGroup:
        return [c for c in self.commands if isinstance(c, do.JudgeGroup)][-1]

    def judge(self, group: int | do.JudgeGroup, keep: bool = True, error: str | None = None) -> list[do.Command]:
        """The filter answers; a group by number finishes first."""
        if isinstance(group, int):
            self.finish(group)
            group = self.question
        return self.post(ev.GroupJudged(group=group.group.id, judgement=group.judgement, keep=keep, error=error))


def test_failing_filter_is_asked_again_and_then_given_up() -> None:
    """An error is no verdict, and what an older question brings changes nothing; then the group fails."""
    m = Judged(max_attempt_failures=2)
    m.finish(0)
    first = m.question
    m.judge(first, error="raised")
    assert m.question.judgement != first.judgement
    before = repr(m.core)
    assert m.judge(first) == m.judge(first, keep=False) == []
    assert (repr(m.core), m.core.counters["late_events"]) == (before, 2)
    m.judge(m.question, error="raised")
    assert m.prompts_dropped == {"failed": 1}
    assert "filter failed: raised" in m.core.story(SampleId(0, 0))


@pytest.mark.parametrize("keep", [True, False])
def test_verdict_on_a_group_with_a_sample_that_began_again_is_void(keep: bool) -> None:
    """What was judged is not what will be delivered: the filter is asked again when the group is complete again."""
    m = Judged(over=2)
    m.finish(0)
    question = m.question
    m.core.lifecycle.restart(m.sample(0, 1), DropReason.STALE)
    m.post(OLD_TIMER)
    assert m.judge(question, keep=keep) == []
    assert 0 in m.core.buffer.groups

    m.judge(1)
    m.next_step()
    m.finish(0)
    assert m.question.judgement != question.judgement
    m.judge(m.question)
    m.finish_aborts()
    assert m.delivered(1) == [0, 0]


@pytest.mark.parametrize("refill", list(Refill))
def test_filter_that_rejects_everything_ends_the_step_with_a_reason(refill: Refill) -> None:
    """max_filtered_groups in a row: the trainer is told; everything else is kept, and a new step may follow."""
    m = Judged(samples=1, refill=refill, max_filtered_groups=5)
    for group in range(5):
        assert not m.errors
        m.judge(group, keep=False)
    (error,) = m.errors
    assert "the filter rejected 5 groups in a row" in error
    assert "max_filtered_groups" in error
    assert m.core.step is None
    m.finish_aborts()
    m.ask()
    assert len(m.errors) == 1


def test_rejected_groups_are_replaced_together() -> None:
    """refill: none: fewer than N are left, and N' is filled up again instead of one group after the other."""
    m = Judged(n=2, samples=1, over=6)
    for group in range(5):
        assert len(m.in_flight) == 6 - group
        m.judge(group, keep=False)
    assert m.groups() == [5, 6, 7, 8, 9, 10]


# ---------------------------------------------------------------- rewards that are asked for, or come, more than once


def two_groups(**changes: object) -> CoreMachine:
    """Group rewards; group 1 is delivered, group 0 complete."""
    m = asked(3, samples=2, over=2, group_reward=True, **changes)
    m.finish(1, 0)
    assert m.delivered() == [1, 1]
    return m


@pytest.mark.parametrize("how", ["raises", "first is no number", "second is no number"])
def test_failed_rewards_of_a_group_that_is_scored_anew_are_asked_for_again(how: str) -> None:
    """A finished sibling may be the first of the group: its failure must not leave the others waiting for ever."""
    m = two_groups(on_stale=OnStale.RESTART, max_staleness=0)
    m.core.lifecycle.restart(m.sample(0, 1), DropReason.STALE)
    m.post(ev.BatchCommitted(0))
    m.ask()
    attempt = m.attempt(0, 1)
    m.tokens(attempt.id, 3)
    m.core.handle(ev.AttemptEnded.of(m.in_flight.pop(attempt.id), EngineFinish.STOP))
    (command,) = m.core.handle(ev.SampleReturned(attempt.sample.id))
    assert isinstance(command, do.ScoreGroup)
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
