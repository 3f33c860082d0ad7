"""The end of the data: what is left is delivered short, or waits for more prompts; each prompt is settled once."""

from __future__ import annotations

import random

import pytest
from core_machine import CoreMachine, settings

from april.core import commands as do
from april.core import events as ev
from april.core.types import OnDataEnd, Refill


def run(m: CoreMachine) -> list[int]:
    """Steps until the data ends; the group ids of each batch's samples."""
    rng = random.Random(4)
    while m.step(rng) is not None:
        m.update()
    return [s.id.group for b in m.batches for s in b.samples]


def last_end(m: CoreMachine) -> do.EndOfData:
    return next(c for c in reversed(m.commands) if isinstance(c, do.EndOfData))


@pytest.mark.parametrize("refill", list(Refill))
def test_rest_is_delivered_as_a_shorter_batch(refill: Refill) -> None:
    """on_data_end: short. 7 prompts in batches of 3 give 3, 3 and 1."""
    m = CoreMachine(settings(n=3, samples=1, over=4, refill=refill), lambda g, i: 5 + g, prompts=7)
    assert sorted(run(m)) == list(range(7))
    assert [len(b) for b in m.batches] == [3, 3, 1]
    assert last_end(m).kept == 0


def test_rest_waits_for_more_prompts() -> None:
    """on_data_end: wait. The rest is complete and kept; with more prompts it goes first."""
    m = CoreMachine(settings(n=3, samples=1, on_data_end=OnDataEnd.WAIT), lambda g, i: 5 + g, prompts=5)
    assert sorted(run(m)) == [0, 1, 2]
    assert last_end(m).kept == 2
    m.post(ev.StepRequested())
    assert last_end(m).kept == 2  # asked again without more prompts: the same answer, at once
    assert m.core.step is None

    m.ended, m.prompts_left = False, 2
    m.post(ev.SourceExtended())
    assert sorted(run(m)) == [0, 1, 2, 3, 4, 5]
    assert [len(b) for b in m.batches] == [3, 3]
    assert last_end(m).kept == 1
    assert m.core.prompts.as_dict() == {"observed": 7, "delivered": 6, "held": 1, "dropped": {}}


def test_more_prompts_after_a_short_batch() -> None:
    """The end of the data is not the end of the run."""
    m = CoreMachine(settings(n=2, samples=1), lambda g, i: 5, prompts=3)
    run(m)
    m.ended, m.prompts_left = False, 2
    m.post(ev.SourceExtended())
    assert run(m) == [0, 1, 2, 3, 4]
    assert [len(b) for b in m.batches] == [2, 1, 2]


def test_more_prompts_in_the_middle_of_the_last_step() -> None:
    """A step that had seen the end of the data goes on drawing."""
    m = CoreMachine(settings(n=2, samples=1), lambda g, i: 5, prompts=1)
    m.post(ev.StepRequested())
    assert m.core.over_sampler.exhausted
    m.prompts_left = 1
    m.post(ev.SourceExtended())
    for attempt_id in list(m.in_flight):
        m.end(attempt_id)
    assert [len(b) for b in m.batches] == [2]


@pytest.mark.parametrize("policy", [OnDataEnd.SHORT, OnDataEnd.WAIT])
def test_filter_that_rejects_the_last_groups(policy: OnDataEnd) -> None:
    """No replacement is left: the rest is short or waits, and rejected groups are settled."""
    m = CoreMachine(settings(n=2, samples=1, has_filter=True, on_data_end=policy), lambda g, i: 5, prompts=2)
    m.post(ev.StepRequested())
    for attempt_id in list(m.in_flight):
        m.end(attempt_id)
    for command in [c for c in m.commands if isinstance(c, do.JudgeGroup)]:
        assert not m.batches
        assert not m.ended
        m.post(ev.GroupJudged(group=command.group.id, judgement=command.judgement, keep=command.group.id == 1))

    if policy is OnDataEnd.SHORT:
        assert [s.id.group for s in m.batches[0].samples] == [1]
    else:
        assert last_end(m).kept == 1
    assert m.core.prompts.as_dict()["dropped"] == {"filtered": 1}


def test_filter_that_rejects_all_of_the_last_groups_ends_the_data() -> None:
    """Nothing is left to deliver."""
    m = CoreMachine(settings(n=1, samples=1, has_filter=True), lambda g, i: 5, prompts=1)
    m.post(ev.StepRequested())
    m.end(min(m.in_flight))
    question = next(c for c in m.commands if isinstance(c, do.JudgeGroup))
    m.post(ev.GroupJudged(group=0, judgement=question.judgement, keep=False))
    assert last_end(m).kept == 0


def test_unusable_prompt_ends_the_step_and_the_good_ones_before_it_are_kept() -> None:
    """The source names the prompt; the next step goes on behind it."""
    m = CoreMachine(settings(n=2, samples=1), lambda g, i: 5)
    m.core.handle(ev.StepRequested())
    commands = m.core.handle(ev.PromptsDrawn([], exhausted=False, error="prompt 0 is a str"))
    assert commands == [do.Fail("prompt 0 is a str")]
    assert m.step(random.Random(0)) is not None


def test_unusable_prompt_is_not_forgotten_between_steps() -> None:
    """The answer of a slow source comes when the step has failed for another reason: the next one says why."""
    m = CoreMachine(settings(n=1, samples=1, max_attempt_failures=1, max_failed_groups=1), lambda g, i: 5)
    m.post(ev.StepRequested())
    m.prompts_left = 0
    (attempt_id,) = m.in_flight
    del m.in_flight[attempt_id]
    commands = m.core.handle(ev.AttemptFailed(attempt_id=attempt_id, error="reset"))
    assert isinstance(commands[-1], do.Fail)
    assert m.core.handle(ev.PromptsDrawn([], exhausted=False, error="prompt 1 is a str")) == []
    assert m.core.handle(ev.StepRequested()) == [do.Fail("prompt 1 is a str")]
