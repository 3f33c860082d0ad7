"""Steps of the core: what starts, what is delivered, what is kept."""

from __future__ import annotations

import random

import numpy as np
import pytest
from core_machine import OLD_TIMER, CoreMachine, settings

from april.core import commands as do
from april.core import events as ev
from april.core.types import CallState, OnLongPrompt, Prompt, Refill, SampleState
from april.errors import InvariantError


def lengths(table: dict[int, int], default: int = 5):
    """Length by group; all samples of a group alike."""
    return lambda group, index: table.get(group, default)


def test_sync_step_delivers_n_groups_and_leaves_nothing() -> None:
    """N' = N: every sample is finished, nothing is aborted, nothing is held."""
    m = CoreMachine(settings(n=3, samples=2), lengths({1: 50}))

    batch = m.step(random.Random(0))

    assert batch is not None
    assert batch.group_sizes == (2, 2, 2)
    assert not any(isinstance(c, do.Abort) for c in m.commands)
    assert m.core.tokens.held == 0
    assert len(m.core.buffer) == 0


def test_skipped_prompts_are_replaced_until_the_step_has_begun_with_all_it_wants() -> None:
    """on_long_prompt: skip: N' groups are in work however many of the first prompts had no room."""
    m = CoreMachine(settings(n=2, samples=1, over=4, on_long_prompt=OnLongPrompt.SKIP), lengths({}), prompts=0)
    long, short = Prompt(np.zeros(4096, np.int32)), Prompt(np.zeros(2, np.int32))
    (draw,) = m.core.handle(ev.StepRequested())
    assert draw == do.DrawPrompts(4)
    commands = m.core.handle(ev.PromptsDrawn([long, short, long, short], False))
    assert [c for c in commands if isinstance(c, do.DrawPrompts)] == [do.DrawPrompts(2)]
    m.core.handle(ev.PromptsDrawn([short, short], False))

    assert len(m.core.buffer) == 4
    assert m.core.over_sampler.asked == 0


def test_over_sampling_stops_at_n_and_keeps_partials_and_finished_siblings() -> None:
    """N' = 2N: at N complete groups the rest is aborted; tokens of partials and of finished siblings are kept."""
    m = CoreMachine(settings(n=2, samples=2, over=4), lambda g, i: 100 if (g, i) in {(2, 0), (3, 1)} else 4)
    m.post(ev.StepRequested())
    ids = {a.sample.id: a.id for a in m.in_flight.values()}
    for key in [(2, 1), (0, 0), (0, 1), (3, 0), (1, 0)]:
        m.end(ids[key])
    m.tokens(ids[(2, 0)], 30)
    m.end(ids[(1, 1)])

    assert m.abort_asked == {ids[(2, 0)], ids[(3, 1)]}
    assert not m.batches
    m.finish_aborts()

    assert [s.id.group for s in m.batches[0].samples] == [0, 0, 1, 1]
    kept = {s.id: (s.open_call.state if s.open_call else s.state, len(s.tape)) for s in m.core.buffer.samples()}
    assert kept == {
        (2, 0): (CallState.QUEUED, 30),
        (2, 1): (SampleState.FINISHED, 4),
        (3, 0): (SampleState.FINISHED, 4),
        (3, 1): (CallState.QUEUED, 0),
    }
    m.check_ledger()


def test_groups_that_finish_while_aborts_are_under_way_are_surplus_and_go_first() -> None:
    """A group that completes after the target was reached is delivered first in the next step, never lost."""
    m = CoreMachine(settings(n=1, samples=1, over=3), lengths({0: 4, 1: 6, 2: 90}))
    m.post(ev.StepRequested())
    ids = {a.sample.id.group: a.id for a in m.in_flight.values()}
    m.end(ids[0])
    m.end(ids[1])  # finished in the moment of the abort
    m.finish_aborts()
    m.update()

    m.post(ev.StepRequested())

    assert [b.samples[0].id.group for b in m.batches] == [0, 1]
    assert m.batches[1].samples[0].staleness == 1
    assert not m.in_flight


def test_next_step_resumes_carry_before_new_prompts_oldest_first() -> None:
    """Partials and unstarted siblings of old groups are submitted before any new prompt, in the order drawn."""
    m = CoreMachine(settings(n=1, samples=2, over=3), lambda g, i: 4 if g == 1 else 60)
    m.post(ev.StepRequested())
    for attempt in list(m.in_flight.values()):
        if attempt.sample.id.group == 1:
            m.end(attempt.id)
        else:
            m.tokens(attempt.id, 10 + attempt.sample.id.index)
    m.finish_aborts()
    m.update()

    submitted = [c.attempt.sample.id for c in m.post(ev.StepRequested()) if isinstance(c, do.Submit)]

    assert submitted == [(0, 0), (0, 1), (2, 0), (2, 1), (3, 0), (3, 1)]


@pytest.mark.parametrize(("over", "expected"), [(2, 6), (3, 6), (4, 8), (5, 5), (9, 9)])
def test_portions_when_over_sampling_is_below_n(over: int, expected: int) -> None:
    """N' below N means portions of N' until N are in work; N' above N means N' at once."""
    m = CoreMachine(settings(n=5, samples=1, over=over, max_in_flight=20), lengths({}))

    m.post(ev.StepRequested())

    assert len(m.in_flight) == expected


def test_refill_group_starts_a_group_whenever_one_finishes() -> None:
    """With refill: group the number of groups in work stays N' until the target is reached."""
    m = CoreMachine(settings(n=3, samples=2, over=4, refill=Refill.GROUP, max_in_flight=99), lengths({}))
    m.post(ev.StepRequested())
    for _ in range(2):
        group = min(a.sample.id.group for a in m.in_flight.values())
        for attempt in [a for a in m.in_flight.values() if a.sample.id.group == group]:
            m.end(attempt.id)
        assert len({a.sample.id.group for a in m.in_flight.values()}) == 4


def test_refill_sample_keeps_the_number_in_flight_constant() -> None:
    """With refill: sample a place is filled as soon as it is free."""
    m = CoreMachine(settings(n=4, samples=4, refill=Refill.SAMPLE, max_in_flight=10), lengths({}))
    m.post(ev.StepRequested())
    while not m.abort_asked:
        assert len(m.in_flight) == 10
        m.end(min(m.in_flight))


@pytest.mark.parametrize("refill", list(Refill))
def test_never_more_in_flight_than_allowed(refill: Refill) -> None:
    """The cap holds in every mode, whatever N' is (validate() checks it after every event)."""
    rng = random.Random(3)
    m = CoreMachine(
        settings(n=3, samples=4, over=6, refill=refill, max_in_flight=5), lambda g, i: (g * 7 + i * 3) % 40 + 1
    )
    for _ in range(6):
        assert m.step(rng) is not None
        m.update()


@pytest.mark.parametrize("refill", list(Refill))
@pytest.mark.parametrize("over", [2, 3, 6])
def test_every_prompt_is_settled_exactly_once(refill: Refill, over: int) -> None:
    """A finite source: each prompt is delivered once, the last batch is short, then the data ends."""
    rng = random.Random(5)
    m = CoreMachine(settings(n=3, samples=2, over=over, refill=refill), lambda g, i: 1 + (g * 31 + i * 17) % 80, 20)
    while m.step(rng) is not None:
        m.update()
        m.check_ledger()

    delivered = [s.id for b in m.batches for s in b.samples]
    assert m.ended
    assert sorted(delivered) == [(g, i) for g in range(20) for i in range(2)]
    assert m.core.prompts.as_dict() == {"observed": 20, "delivered": 20, "held": 0, "dropped": {}}


def test_group_rewards_are_asked_for_once_all_siblings_have_returned() -> None:
    """group_reward: one ScoreGroup per group, and the group is complete with it."""
    m = CoreMachine(settings(n=1, samples=3, group_reward=True), lengths({}))
    batch = m.step(random.Random(1))

    assert batch is not None
    assert sum(isinstance(c, do.ScoreGroup) for c in m.commands) == 1
    assert [s.reward for s in batch.samples] == pytest.approx([0.0, 0.125, 0.25])


def test_slow_rewards_do_not_hold_up_the_abort_and_count_when_they_arrive() -> None:
    """A group whose reward is late is not complete; it becomes surplus when the reward comes between steps."""
    m = CoreMachine(settings(n=1, samples=1, over=2), lengths({0: 3, 1: 6}), auto_score=False)
    m.post(ev.StepRequested())
    ids = {a.sample.id.group: a.id for a in m.in_flight.values()}
    m.end(ids[0])
    assert not m.batches
    m.end(ids[1])
    m.score((1, 0))
    m.post(OLD_TIMER)
    assert [s.id.group for s in m.batches[0].samples] == [1]

    m.post(ev.Scored(0, [(0, 0.5)]))
    m.update()
    m.post(ev.StepRequested())

    assert [s.id.group for s in m.batches[1].samples] == [0]


def test_no_step_before_the_last_one_is_delivered() -> None:
    """Two trainers cannot ask at once."""
    m = CoreMachine(settings(), lengths({}))
    m.post(ev.StepRequested())
    with pytest.raises(InvariantError, match="while another one is running"):
        m.post(ev.StepRequested())


def test_batch_is_leased_until_committed_and_committed_once() -> None:
    """Lease and commit: a second commit is an error."""
    m = CoreMachine(settings(n=1, samples=1), lengths({}))
    batch = m.step(random.Random(0))
    assert batch is not None
    assert list(m.core.leased) == [batch.id]
    m.post(ev.BatchCommitted(batch.id))
    assert not m.core.leased
    with pytest.raises(InvariantError, match="committed twice"):
        m.post(ev.BatchCommitted(batch.id))


def test_repr_is_the_dashboard() -> None:
    """One line says where everything is."""
    m = CoreMachine(settings(n=1, samples=2, over=2), lengths({}))
    m.post(ev.StepRequested())
    m.end(min(m.in_flight))

    assert "version=0.0 step=running groups=2 ready=0 finished=1 running=3 in_flight=3" in repr(m.core)
    assert "observed=5 delivered=0 held=5 dropped=0" in repr(m.core)


def test_story_tells_one_samples_history() -> None:
    """story(sample) lists its transitions in order; an unknown sample has none."""
    m = CoreMachine(settings(n=1, samples=1, over=2), lengths({0: 30, 1: 4}))
    m.post(ev.StepRequested())
    ids = {a.sample.id.group: a.id for a in m.in_flight.values()}
    m.tokens(ids[0], 8)
    m.end(ids[1])
    m.finish_aborts()
    story = m.core.story(m.core.buffer.groups[0].samples[0].id)

    assert story.index("rollout function started") < story.index("attempt") < story.index("partial after 8 tokens")
    assert "nothing remembered" in m.core.story((77, 0))  # type: ignore[arg-type]


def test_pause_ends_everything_in_flight_and_resume_goes_on() -> None:
    """PauseRequested aborts what runs; Paused comes when all is accounted for; the step goes on after Resumed."""
    m = CoreMachine(settings(n=1, samples=2), lengths({0: 40}))
    m.post(ev.StepRequested())
    for attempt_id in list(m.in_flight):
        m.tokens(attempt_id, 11)
    m.post(ev.PauseRequested())
    assert m.abort_asked == set(m.in_flight)
    m.finish_aborts()
    assert isinstance(m.commands[-1], do.Paused)
    m.update()

    resumed = [c.attempt for c in m.post(ev.Resumed()) if isinstance(c, do.Submit)]
    assert [len(a.token_ids) for a in resumed] == [2 + 11, 2 + 11]
    for attempt in resumed:
        m.end(attempt.id)
    assert {tuple(v) for s in m.batches[0].samples for v in s.versions.tolist()} == {(0, 0), (0, 1)}


@pytest.mark.parametrize(("bound", "drawn"), [(None, [1]), (31, [1]), (30, [])])
def test_held_token_bound_stops_drawing_beyond_the_need(bound: int | None, drawn: list[int]) -> None:
    """max_held_tokens: at the bound no prompt is drawn that the step can do without."""
    m = CoreMachine(
        settings(n=1, samples=1, over=3, refill=Refill.GROUP, max_in_flight=9, max_held_tokens=bound),
        lengths({0: 50, 1: 50, 2: 4}),
    )
    m.post(ev.StepRequested())
    ids = {a.sample.id.group: a.id for a in m.in_flight.values()}
    m.tokens(ids[0], 15)
    m.tokens(ids[1], 15)
    m.end(ids[2])
    m.finish_aborts()
    m.update()

    assert [c.count for c in m.post(ev.StepRequested()) if isinstance(c, do.DrawPrompts)] == drawn
