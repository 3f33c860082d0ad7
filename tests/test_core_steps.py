"""Steps of the core: what starts, what is delivered, what is kept, and what the end of the data makes of it."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest
from core_machine import CoreMachine, asked, settings

from april.core import commands as do
from april.core import events as ev
from april.core.types import OnDataEnd, OnLongPrompt, OnStale, Prompt, Refill
from april.errors import InvariantError


def test_skipped_prompts_are_replaced_until_the_step_has_begun_with_all_it_wants() -> None:
    """on_long_prompt: skip: N' groups are in work however many of the first prompts had no room."""
    m = CoreMachine(settings(n=2, samples=1, over=4, on_long_prompt=OnLongPrompt.SKIP), 5)
    long, short = Prompt(np.zeros(4096, np.int32)), Prompt(np.zeros(2, np.int32))
    assert m.core.handle(ev.StepRequested()) == [do.DrawPrompts(4)]
    commands = m.core.handle(ev.PromptsDrawn([long, short, long, short], False))
    assert [c for c in commands if isinstance(c, do.DrawPrompts)] == [do.DrawPrompts(2)]
    m.core.handle(ev.PromptsDrawn([short, short], False))

    assert len(m.core.buffer) == 4
    assert m.core.over_sampler.requested == 0


def test_next_step_resumes_carry_before_new_prompts_oldest_first() -> None:
    """Partials and unstarted siblings of old groups are submitted before any new prompt, in the order drawn."""
    m = asked({0: 60, 1: 4, 2: 60}, samples=2, over=3)
    for attempt in list(m.in_flight.values()):
        m.tokens(attempt.id, 10 + attempt.sample.id.index) if attempt.sample.id.group != 1 else m.end(attempt.id)
    submitted = [c.attempt.sample.id for c in m.next_step() if isinstance(c, do.Submit)]
    assert submitted == [(0, 0), (0, 1), (2, 0), (2, 1), (3, 0), (3, 1)]


@pytest.mark.parametrize(("over", "expected"), [(2, 6), (3, 6), (4, 8), (5, 5), (9, 9)])
def test_portions_when_over_sampling_is_below_n(over: int, expected: int) -> None:
    """N' below N means portions of N' until N are in work; N' above N means N' at once."""
    assert len(asked(n=5, over=over, max_in_flight=20).in_flight) == expected


def test_refill_group_starts_a_group_whenever_one_finishes() -> None:
    """With refill: group the number of groups in work stays N' until the target is reached."""
    m = asked(n=3, samples=2, over=4, refill=Refill.GROUP, max_in_flight=99)
    for _ in range(2):
        m.finish(m.groups()[0])
        assert len(m.groups()) == 4


def test_refill_sample_keeps_the_number_in_flight_constant() -> None:
    """With refill: sample a place is filled as soon as it is free."""
    m = asked(5, n=4, samples=4, refill=Refill.SAMPLE, max_in_flight=10)
    while not m.abort_asked:
        assert len(m.in_flight) == 10
        m.end(min(m.in_flight))


def test_no_step_before_the_last_one_is_delivered() -> None:
    """Two trainers cannot ask at once."""
    with pytest.raises(InvariantError, match="while another one is running"):
        asked().ask()


def test_repr_is_the_dashboard_and_story_tells_one_samples_history() -> None:
    """One line says where everything is; a story lists a sample's transitions in order, an unknown one has none."""
    m = asked({0: 30, 1: 4}, samples=1, over=2)
    m.tokens(m.attempt(0).id, 8)
    assert "version=0.0 step=running groups=2 ready=0 running=2 in_flight=2" in repr(m.core)
    m.finish(1)
    m.finish_aborts()
    assert "observed=12 delivered=4 held=8 dropped=0" in repr(m.core)
    story = m.core.story(m.sample(0).id)
    assert story.index("rollout function started") < story.index("attempt") < story.index("partial after 8 tokens")
    assert "nothing remembered" in m.core.story((77, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(("bound", "drawn"), [(None, [1]), (31, [1]), (30, [])])
def test_held_token_bound_stops_drawing_beyond_the_need(bound: int | None, drawn: list[int]) -> None:
    """max_held_tokens: at the bound no prompt is drawn that the step can do without."""
    m = asked(
        {0: 50, 1: 50}, over=3, refill=Refill.GROUP, max_in_flight=9, max_held_tokens=bound
    )  # fmt: skip
    m.tokens(m.attempt(0).id, 15)
    m.tokens(m.attempt(1).id, 15)
    m.finish(2)
    assert [c.count for c in m.next_step() if isinstance(c, do.DrawPrompts)] == drawn


# ---------------------------------------------------------------- the end of the data


def run(m: CoreMachine) -> list[int]:
    """Steps until the data ends; the group ids of each batch's samples."""
    rng = random.Random(4)
    while m.step(rng) is not None:
        m.update()
    return [s.id.group for b in m.batches for s in b.samples]


def kept(m: CoreMachine) -> int:
    """Groups that the last word about the end of the data says are kept."""
    return next(c for c in reversed(m.commands) if isinstance(c, do.EndOfData)).kept


def more_prompts(m: CoreMachine, count: int) -> None:
    """The source has prompts again."""
    m.ended, m.prompts_left = False, count
    m.post(ev.SourceExtended())


@pytest.mark.parametrize("refill", list(Refill))
def test_rest_is_delivered_as_a_shorter_batch(refill: Refill) -> None:
    """on_data_end: short. 7 prompts in batches of 3 give 3, 3 and 1; that is not the end of the run."""
    m = CoreMachine(settings(n=3, samples=1, over=4, refill=refill), lambda g, i: 5 + g, prompts=7)
    assert sorted(run(m)) == list(range(7))
    assert ([len(b) for b in m.batches], kept(m)) == ([3, 3, 1], 0)
    more_prompts(m, 2)
    assert sorted(run(m)) == list(range(9))


def test_rest_waits_for_more_prompts() -> None:
    """on_data_end: wait. The rest is complete and kept; with more prompts it goes first."""
    m = CoreMachine(settings(n=3, samples=1, on_data_end=OnDataEnd.WAIT), lambda g, i: 5 + g, prompts=5)
    assert sorted(run(m)) == [0, 1, 2]
    assert kept(m) == 2
    m.ask()
    assert (kept(m), m.core.step) == (2, None)  # asked again without more prompts: the same answer, at once

    more_prompts(m, 2)
    assert sorted(run(m)) == [0, 1, 2, 3, 4, 5]
    assert ([len(b) for b in m.batches], kept(m)) == ([3, 3], 1)
    assert m.core.prompts.as_dict() == {"observed": 7, "delivered": 6, "held": 1, "dropped": {}}


def test_more_prompts_in_the_middle_of_the_last_step() -> None:
    """A step that had seen the end of the data goes on drawing."""
    m = asked(n=2, prompts=1)
    assert m.core.over_sampler.exhausted
    more_prompts(m, 1)
    m.finish(0, 1)
    assert [len(b) for b in m.batches] == [2]


def test_unusable_prompt_ends_the_step_and_the_good_ones_before_it_are_kept() -> None:
    """The source names the prompt; the next step goes on behind it."""
    m = CoreMachine(settings(n=2, samples=1), 5)
    m.core.handle(ev.StepRequested())
    commands = m.core.handle(ev.PromptsDrawn([], exhausted=False, error="prompt 0 is a str"))
    assert commands == [do.Fail("prompt 0 is a str")]
    assert m.step(random.Random(0)) is not None


def test_unusable_prompt_is_not_forgotten_between_steps() -> None:
    """The answer of a slow source comes when the step has failed for another reason: the next one says why."""
    m = asked(max_attempt_failures=1, max_failed_groups=1)
    failed = ev.AttemptFailed(attempt_id=m.only.id, error="reset")
    assert isinstance(m.core.handle(failed)[-1], do.Fail)
    assert m.core.handle(ev.PromptsDrawn([], exhausted=False, error="prompt 1 is a str")) == []
    assert m.core.handle(ev.StepRequested()) == [do.Fail("prompt 1 is a str")]


@pytest.mark.parametrize("on_stale", [None, OnStale.DROP, OnStale.RESTART])
def test_tokens_of_trained_dropped_and_restarted_samples_are_freed_at_once(on_stale: OnStale | None) -> None:
    """Samples and calls refer to each other, and tokens must not wait for the garbage collector to find that."""
    m = asked(4, n=1, samples=8) if on_stale is None else asked(20, over=9, on_stale=on_stale, max_staleness=0)
    if on_stale is not None:
        for group in range(1, 9):
            m.tokens(m.attempt(group).id, 10)
    m.finish(0)
    m.finish_aborts()
    samples = [sample for batch in m.core.leases.batches.values() for sample in batch] + [*m.core.buffer.samples()]
    chains = [chain for sample in samples for chain in sample.chains]
    tokens = [weakref.ref(chain.tape.tokens) for chain in chains]
    del samples, chains
    gc.disable()
    try:
        m.commands.clear()
        m.batches.clear()
        m.update()
        m.ask()  # queues may hold what they no longer need until something is started
        assert sum(array() is not None for array in tokens) <= 1 < len(tokens)  # the machine may hold the last one
    finally:
        gc.enable()
