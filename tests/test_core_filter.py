"""The dynamic-sampling filter: a group counts only once it is accepted, and a verdict only for what was judged."""

from __future__ import annotations

from typing import Any

import pytest
from core_machine import OLD_TIMER, CoreMachine, settings

from april.core import commands as do
from april.core import events as ev
from april.core.types import DropReason, Refill, SampleId


class Judged(CoreMachine):
    """Asks nobody: the test gives the verdicts."""

    def __init__(self, length: Any = 4, prompts: int | None = None, **changes: Any) -> None:
        values = {"n": 1, "samples": 2, **changes}
        super().__init__(
            settings(**values, has_filter=True), length if callable(length) else lambda g, i: length, prompts
        )
        self.asked: list[do.JudgeGroup] = []

    def _execute(self, command: do.Command) -> None:
        if isinstance(command, do.JudgeGroup):
            self.asked.append(command)
        super()._execute(command)

    def finish(self, group: int) -> do.JudgeGroup:
        """All responses of a group end; returns the question."""
        for attempt in [a for a in self.in_flight.values() if a.sample.id.group == group]:
            self.end(attempt.id)
        return self.asked[-1]

    def verdict(self, question: do.JudgeGroup, keep: bool = True, error: str | None = None) -> list[do.Command]:
        """The filter answers."""
        return self.post(ev.GroupJudged(group=question.group.id, judgement=question.judgement, keep=keep, error=error))


def test_group_counts_once_the_filter_has_accepted_it() -> None:
    """All samples finished and rewarded is not enough."""
    m = Judged()
    m.post(ev.StepRequested())
    question = m.finish(0)
    assert not m.batches
    assert m.core.monitor.ready == 0
    m.verdict(question)
    assert [s.id.group for s in m.batches[0].samples] == [0, 0]


def test_rejected_group_is_settled_by_name_and_replaced() -> None:
    """The prompt and its tokens are dropped as filtered, and N is still met."""
    m = Judged()
    m.post(ev.StepRequested())
    m.verdict(m.finish(0), keep=False)
    assert m.core.prompts.as_dict()["dropped"] == {"filtered": 1}
    assert m.core.tokens.as_dict()["dropped"] == {"filtered": 8}
    m.verdict(m.finish(1))

    assert [s.id.group for s in m.batches[0].samples] == [1, 1]
    assert m.batches[0].metrics["groups_dropped_filtered"] == 1
    m.check_ledger()


def test_rejected_group_never_ends_the_step() -> None:
    """N' > N: the target counts accepted groups only."""
    m = Judged(n=1, samples=1, over=3)
    m.post(ev.StepRequested())
    m.verdict(m.finish(0), keep=False)
    assert not m.abort_asked
    m.verdict(m.finish(1))
    m.finish_aborts()
    assert [s.id.group for s in m.batches[0].samples] == [1]


def test_failing_filter_is_asked_again_and_then_given_up() -> None:
    """An error is no verdict; after max_attempt_failures of them the group is dropped as failed."""
    m = Judged(max_attempt_failures=2)
    m.post(ev.StepRequested())
    first = m.finish(0)
    m.verdict(first, error="raised")
    second = m.asked[-1]
    assert second.judgement != first.judgement
    m.verdict(second, error="raised")

    assert m.core.prompts.as_dict()["dropped"] == {"failed": 1}
    assert "filter failed: raised" in m.core.story(SampleId(0, 0))


def test_answer_to_an_older_question_is_void() -> None:
    """After an error the filter is asked anew; what the first question still brings changes nothing."""
    m = Judged()
    m.post(ev.StepRequested())
    first = m.finish(0)
    m.verdict(first, error="raised")
    before = repr(m.core)
    assert m.verdict(first) == []
    assert m.verdict(first, keep=False) == []
    assert repr(m.core) == before
    assert m.core.counters["late_events"] == 2
    m.verdict(m.asked[-1])
    assert len(m.batches) == 1


def test_verdict_on_a_group_that_is_gone_is_void() -> None:
    """The group was delivered, or dropped meanwhile."""
    m = Judged()
    m.post(ev.StepRequested())
    question = m.finish(0)
    m.verdict(question)
    assert m.verdict(question, keep=False) == []
    assert m.core.counters["late_events"] == 1


@pytest.mark.parametrize("keep", [True, False])
def test_verdict_on_a_group_with_a_sample_that_began_again_is_void(keep: bool) -> None:
    """What was judged is not what will be delivered: the filter is asked again when the group is complete again."""
    m = Judged(samples=2, over=2, n=1)
    m.post(ev.StepRequested())
    question = m.finish(0)
    m.core.lives.begin_again(m.core.buffer.groups[0].samples[1], DropReason.STALE)
    m.post(OLD_TIMER)
    assert m.verdict(question, keep=keep) == []
    assert 0 in m.core.buffer.groups

    m.verdict(m.finish(1))
    m.finish_aborts()
    m.update()
    m.post(ev.StepRequested())
    again = m.finish(0)
    assert again.judgement != question.judgement
    m.verdict(again)
    m.finish_aborts()
    assert [s.id.group for s in m.batches[1].samples] == [0, 0]


def test_verdict_between_steps_makes_surplus() -> None:
    """A late verdict is not lost: the group is delivered first in the next step."""
    m = Judged(samples=1, over=2)
    m.post(ev.StepRequested())
    late = m.finish(0)
    m.verdict(m.finish(1))
    m.finish_aborts()
    m.update()
    assert m.verdict(late) == []
    m.post(ev.StepRequested())
    assert [s.id.group for s in m.batches[1].samples] == [0]


@pytest.mark.parametrize("refill", list(Refill))
def test_filter_that_rejects_everything_ends_the_step_with_a_reason(refill: Refill) -> None:
    """max_filtered_groups in a row: the trainer is told; everything else is kept, and a new step may follow."""
    m = Judged(samples=1, refill=refill, max_filtered_groups=5)
    m.post(ev.StepRequested())
    for group in range(5):
        assert not m.errors
        m.verdict(m.finish(group), keep=False)

    (error,) = m.errors
    assert "the filter rejected 5 groups in a row" in error
    assert "max_filtered_groups" in error
    assert m.core.step is None
    m.finish_aborts()
    m.post(ev.StepRequested())
    assert len(m.errors) == 1


def test_one_accepted_group_ends_the_row() -> None:
    """Only rejections in a row count."""
    m = Judged(n=2, samples=1, max_filtered_groups=3)
    m.post(ev.StepRequested())
    for group, keep in enumerate([False, False, True, False, False, True]):
        m.verdict(m.finish(group), keep=keep)
    assert not m.errors
    assert [s.id.group for s in m.batches[0].samples] == [2, 5]


def test_rejected_groups_are_replaced_together() -> None:
    """refill: none: fewer than N are left, and N' is filled up again instead of one group after the other."""
    m = Judged(n=2, samples=1, over=6)
    m.post(ev.StepRequested())
    for group in range(5):
        assert len(m.in_flight) == 6 - group
        m.verdict(m.finish(group), keep=False)
    assert sorted(a.sample.id.group for a in m.in_flight.values()) == [5, 6, 7, 8, 9, 10]
