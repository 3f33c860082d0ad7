"""Tail batching (partial_rollout: false, N' > N): long prompts begin again in rounds of their own, at staleness 0."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from core_machine import CoreMachine, settings
from seeds import seeds

from april.core import commands as do
from april.core import events as ev
from april.core import snapshot
from april.core.types import AttemptFailure, GroupState, OnDataEnd, OnFailedSample, OnStale
from april.errors import CheckpointError


def machine(length: object, prompts: int | None = None, n: int = 2, over: int = 4, **changes: object) -> CoreMachine:
    """A run with tail batching, with the settings that april.Config gives the core."""
    tail = {"partial_rollout": False, "max_staleness": 0, "on_stale": OnStale.RESTART}
    return CoreMachine(settings(n=n, over=over, **{"samples": 2, **tail, **changes}), length, prompts)


def judge(m: CoreMachine, group: int, *, keep: bool, since: int | None = None) -> None:
    """The filter answers what it was asked last, or when the group's state was ``since``."""
    judgement = m.core.buffer.groups[group].since if since is None else since
    m.post(ev.GroupJudged(group=group, keep=keep, judgement=judgement))


def first_round(**changes: object) -> CoreMachine:
    """Groups 0 to 3 have begun; 2 and 3 are delivered, while 0 and 1 have generated 5 tokens per response."""
    m = machine({0: 90, 1: 90}, **changes)
    m.ask()
    for attempt in list(m.in_flight.values()):
        m.tokens(attempt.id, 3)
    m.finish(2, 3)
    m.finish_aborts()
    assert sorted(set(m.delivered())) == [2, 3]
    return m


def test_unfinished_prompts_are_put_aside_without_their_tokens() -> None:
    """What a round discards is dropped as put_aside; the prompts are held, and the metrics say how many."""
    m = first_round()
    assert m.dropped == {"put_aside": 4 * 3}
    assert (list(m.core.buffer.aside), m.core.tokens.held, m.core.prompts.held) == ([0, 1], 0, 2)
    metrics = m.batches[0].metrics
    assert [metrics[name] for name in ("groups_put_aside", "aside_groups", "long_round")] == [2.0, 2.0, 0.0]
    assert metrics["held_tokens"] == 0.0
    m.check_ledger()


def test_groups_that_were_put_aside_fill_a_round_of_their_own() -> None:
    """With N groups aside the next round has these alone, waits for all of them, and is trained at staleness 0."""
    m = first_round()
    m.next_step()
    assert m.groups() == [0, 1]
    assert m.core.prompts.observed == 4
    m.finish(0)
    assert len(m.batches) == 1
    m.finish(1)
    assert sorted(set(m.delivered())) == [0, 1]
    assert m.batches[1].metrics["long_round"] == 1.0
    assert {s.staleness for batch in m.batches for s in batch.samples} == {0}
    assert m.dropped == {"put_aside": 12}


def test_a_short_round_does_not_touch_what_is_aside() -> None:
    """Fewer than N groups aside wait, and the round draws N' new prompts."""
    m = machine({0: 90}, over=3)
    m.ask()
    m.finish(1, 2)
    m.finish_aborts()
    m.update()
    assert do.DrawPrompts(3) in m.ask()
    assert m.groups() == [3, 4, 5]


@pytest.mark.parametrize("restarts", [False, True])
def test_prompts_that_never_began_are_started_in_the_next_short_round(restarts: bool) -> None:
    """The engines had no room for them, so nothing says that they are long; with them, a short round has N' prompts."""
    few = {"samples": 1, "over": 6, "max_in_flight": 2}
    m = machine(9, **few)
    m.ask()
    m.finish(0, 1)
    m.finish_aborts()
    assert (list(m.core.buffer.aside), list(m.core.buffer.unbegun)) == ([2, 3], [4, 5])
    assert [m.batches[0].metrics[name] for name in ("groups_put_aside", "aside_groups")] == [2.0, 2.0]
    m.update()
    m = m.restarted() if restarts else m
    m.ask()
    assert m.groups() == [2, 3]
    m.finish(2, 3)
    m.update()
    assert do.DrawPrompts(4) in m.ask()
    assert m.groups() == [4, 5]
    assert m.core.buffer.units == 6


@pytest.mark.parametrize("aside", [2, 3])
def test_a_group_that_fails_in_a_long_round_is_replaced(aside: int) -> None:
    """Groups that are aside replace it first, then exactly the missing new prompts, as the round waits for all."""
    m = machine(dict.fromkeys(range(aside), 90), over=2 + aside, max_attempt_failures=1)
    m.ask()
    m.finish(aside, aside + 1)
    m.finish_aborts()
    m.next_step()
    assert m.groups() == [0, 1]
    commands = m.post(ev.SampleFailed(m.attempt(0).sample.id, "broken"))
    m.finish_aborts()
    drawn = [c for c in commands if isinstance(c, do.DrawPrompts)]
    assert (drawn, m.groups()) == (([do.DrawPrompts(1)], [1, 4]) if aside == 2 else ([], [1, 2]))
    assert m.prompts_dropped == {"failed": 1}


def test_a_filtered_group_is_replaced_in_a_short_round() -> None:
    """Dynamic sampling: rejected groups are replaced by new prompts once N accepted ones are out of reach."""
    m = machine(4, over=3, has_filter=True)
    m.ask()
    for group in range(3):
        m.finish(group)
        judge(m, group, keep=group == 2)
    assert m.groups() == [3, 4]
    assert m.prompts_dropped == {"filtered": 2}


def test_a_verdict_on_a_group_that_was_put_aside_meanwhile_does_not_count() -> None:
    """The filter saw responses that are gone; the group is judged again when it has finished again."""
    m = machine(4, n=1, over=2, has_filter=True)
    m.ask()
    m.finish(0, 1)
    since = m.core.buffer.groups[0].since
    judge(m, 1, keep=True)
    judge(m, 0, keep=False, since=since)
    assert list(m.core.buffer.aside) == [0]
    m.next_step()
    assert (m.groups(), m.prompts_dropped) == ([0], {})


@pytest.mark.parametrize("of", ["reward", "filter"])
def test_nothing_is_asked_about_a_group_that_the_same_event_puts_aside(of: str) -> None:
    """The last request of a round fails, so that its group is complete without this sample, and begins again."""
    m = machine(
        {(0, 0): 5, (0, 1): 5, (1, 0): 3}, n=1, over=2, on_failed_sample=OnFailedSample.SHRINK, min_group_size=1,
        max_attempt_failures=1, **({"group_reward": True} if of == "reward" else {"has_filter": True}),
    )  # fmt: skip
    m.ask()
    m.finish((1, 0), (0, 0), (0, 1))
    if of == "filter":
        judge(m, 0, keep=True)
    asked = len(m.commands)
    m.fail(m.attempt(1, 1), kind=AttemptFailure.CORRUPT)
    assert list(m.core.buffer.aside) == [1]
    assert not [c for c in m.commands[asked:] if isinstance(c, (do.ScoreGroup, do.JudgeGroup))]


def test_a_restart_keeps_what_is_aside_and_goes_on_with_a_long_round() -> None:
    """In a short round's end, and in the middle of a long round, whose tokens are kept as the weights are the same."""
    m = first_round()
    m.update()
    again = m.restarted()
    assert list(again.core.buffer.aside) == [0, 1]
    again.ask()
    assert again.groups() == [0, 1]
    for attempt in list(again.in_flight.values()):
        again.tokens(attempt.id, 5)
    third = again.restarted()
    assert (third.core.tokens.held, third.core.prompts.held) == (20, 2)
    third.ask()
    assert (third.groups(), third.core.prompts.observed) == ([0, 1], 4)
    third.finish(0, 1)
    assert third.batches[0].metrics["long_round"] == 1.0
    fourth = third.restarted()  # before the batch was trained, so that it is delivered again
    fourth.ask()
    assert (fourth.delivered(), fourth.batches[0].metrics["long_round"]) == ([0, 0, 1, 1], 1.0)


def test_a_restart_without_tail_batching_treats_them_like_others() -> None:
    """The groups that were aside are the oldest, so they are generated first."""
    m = first_round()
    m.update()
    again = m.restarted(partial_rollout=True, max_staleness=5, on_stale=OnStale.FINISH)
    assert not again.core.buffer.aside
    again.ask()
    assert again.groups() == [0, 1, 4, 5]


def test_a_state_whose_aside_groups_have_tokens_is_refused() -> None:
    """Such a state was not saved by april."""
    m = first_round()
    state = snapshot.take(m.core, None)
    m.update()
    m.ask()
    m.tokens(m.attempt(0).id, 5)
    broken = snapshot.take(m.core, None) | {"aside": state["aside"], "long_round": []}
    with pytest.raises(CheckpointError, match="damaged"):
        snapshot.restore(machine(4).core, broken)
    with pytest.raises(CheckpointError, match="damaged"):
        snapshot.restore(machine(4).core, snapshot.take(m.core, None) | {"aside": [99]})


def test_a_state_with_groups_in_parts_is_refused_with_the_settings_that_it_needs() -> None:
    """Tail batching has no quorum, so both settings must be as they were."""
    rng = random.Random(1)
    m = CoreMachine(settings(n=2, samples=4, over=4, group_quorum=0.75), lambda group, i: 3 + 37 * group * i % 50)
    for _ in range(3):
        m.step(rng)
        m.finish_aborts()
        m.update()
    with pytest.raises(CheckpointError, match="set partial_rollout: true and group_quorum below 1, as they were"):
        snapshot.restore(machine(4, samples=4).core, snapshot.take(m.core, None))


@pytest.mark.parametrize("seed", seeds(60))
def test_random_epochs_train_every_prompt_once_at_staleness_0(seed: int) -> None:
    """Whatever fails, is rejected, evaluated, paused or restarted: each prompt is settled once, and no token is old."""
    rng = random.Random(seed)
    n, samples = rng.randint(1, 4), rng.randint(1, 3)
    changes = {
        "n": n, "samples": samples, "over": n + rng.randint(1, 2 * n), "has_filter": rng.random() < 0.5,
        "on_data_end": rng.choice([OnDataEnd.SHORT, OnDataEnd.WAIT]),
        "on_failed_sample": rng.choice(list(OnFailedSample)),
        "max_attempt_failures": 1, "max_failed_groups": 10**6, "max_in_flight": rng.choice([2, 5, 100]),
    }  # fmt: skip
    lengths = {g: int(min(60, rng.lognormvariate(1.5, 1.2))) + 1 for g in range(40)}
    m = machine(lengths, rng.randint(1, 25), **changes)
    total = m.prompts_left
    settled: Counter[int] = Counter()
    while not m.ended:
        m.ask()
        before = len(m.batches)
        while len(m.batches) == before and not m.ended:
            if rng.random() < 0.02:
                m = m.restarted()
                before = 0
                m.ask()
            elif rng.random() < 0.03 and not m.core.context.evaluations:
                m.evaluate(number=m.core.context.event_number)
            judged = [g for g in m.core.buffer if g.state is GroupState.BEING_JUDGED]
            if judged:
                group = rng.choice(judged)
                judge(m, group.id, keep=rng.random() < 0.7)
            elif m.in_flight:
                attempt_id = rng.choice(sorted(m.in_flight))
                if attempt_id in m.abort_asked:
                    m.end(attempt_id, rng.choice([0, 1, 7]))
                elif rng.random() < 0.01 and m.in_flight[attempt_id].sample.id.group >= 0:
                    m.post(ev.SampleFailed(m.in_flight[attempt_id].sample.id, "broken"))
                elif m.tokens(attempt_id, rng.randint(1, 7)):
                    m.end(attempt_id, 0)
            assert not m.errors
        if len(m.batches) > before:
            assert {s.staleness for s in m.batches[-1].samples} == {0}
            settled.update(set(m.delivered()))
            if rng.random() < 0.2:
                m.core.handle(ev.BatchCommitted(m.batches[-1].id))
                m = m.restarted()
            else:
                m.update()
    prompts = m.core.prompts
    assert set(settled.values()) <= {1}
    assert prompts.delivered == len(settled)
    waits = changes["on_data_end"] is OnDataEnd.WAIT
    assert prompts.observed == total == prompts.delivered + sum(prompts.dropped.values()) + prompts.held
    assert prompts.held < n if waits else not prompts.held
    assert not m.core.buffer.aside
