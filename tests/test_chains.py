"""Samples of several conversations: what a call continues, what is kept, and the rows of the batch that they become."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chain_machine import FIRST, ChainMachine, P, check_rows
from core_machine import A, B, settings

from april.core import commands as do
from april.core import events as ev
from april.core.batch import Batch
from april.core.types import FinishReason, OnStale, SampleId, SampleState
from april.corrections.advantages import Method


def began(engines: tuple[Any, ...] = (A,), *, auto_score: bool = True, **changes: Any) -> ChainMachine:
    """The trainer has asked for a batch; one group of one sample, unless ``changes`` say more."""
    changes = {"n": 1, "samples": 1, "max_in_flight": 16} | changes
    m = ChainMachine(settings(**changes), engines=engines, auto_score=auto_score)
    m.ask()
    return m


def delivered(m: ChainMachine) -> Batch:
    """The one batch, whose rows are what the weights wrote; nothing is held or lost."""
    (batch,) = m.batches
    check_rows(batch)
    m.check_ledger()
    return batch


# ---------------------------------------------------------------- which conversation a call continues


def test_equal_calls_side_by_side_open_two() -> None:
    """Neither is the answer of the other; each is heard where it was asked, whatever comes first."""
    m = began()
    a, b = m.call(P), m.call(P)
    assert {m.of_call(n).request.sampling.seed for n in (a, b)} == {m.of_call(n).request.sampling.seed for n in (b, a)}
    assert m.of_call(a).request.sampling.seed != m.of_call(b).request.sampling.seed
    second, first = m.complete(b, 5), m.complete(a, 2)
    assert [len(first.tokens), len(second.tokens)] == [2, 5]
    assert (first.chain, second.chain) == (0, 1)
    c, d = m.call([*first.conversation, 7]), m.call([*second.conversation, 7])
    assert [m.of_call(n).call.chain.number for n in (c, d)] == [0, 1]
    m.complete(c)
    m.complete(d)
    m.returns()
    assert [row.chain for row in delivered(m).samples] == [0, 1]


def test_the_first_conversation_may_be_another_than_the_prompt() -> None:
    """A client that writes its own system prompt has one row, with that prompt; the data are the group's."""
    m = began()
    m.say([50, 51, 52])
    m.returns()
    (row,) = delivered(m).samples
    assert row.chain == 0
    assert row.prompt.token_ids.tolist() == [50, 51, 52]
    assert row.prompt.data is m.core.leased[0][0].group.prompt.data


def test_what_the_function_writes_into_afterwards_is_its_own() -> None:
    """The tokens of a call are copied: a client may use its array again."""
    m = began()
    for ids in (np.array([50, 51], np.int32), np.array([60, 61], np.int32)):
        m.made[FIRST] += 1
        m.asked[FIRST, m.made[FIRST]] = ids.tolist()
        m.post(ev.CallMade(SampleId(0, 0), m.sampling, ids, m.made[FIRST], any_chain=True))
        ids[:] = 0
    assert [ids[:2] for ids in m.conversations()] == [[50, 51], [60, 61]]


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("most", [1, 3])
def test_a_sample_has_max_chains_conversations(most: int) -> None:
    """As many as that are served, however often each is continued; one more fails the sample by the setting's name."""
    m = began(max_chains=most)
    for i in range(most):
        m.say([*m.say([*P, 20 + i]), 9])
    m.call([*P, 90])
    (drop,) = [c for c in m.commands if isinstance(c, do.ReportDrop)]
    assert f"max_chains={most}" in drop.why
    assert m.dropped == {"failed": 6 * most}


def test_what_was_asked_before_a_restart_and_is_not_now_takes_no_room() -> None:
    """A function that asks otherwise after a restart has its max_chains conversations anew."""
    m = began(max_chains=2)
    for i in (20, 21):
        m.say([*P, i])
    again = m.restarted()
    again.ask()
    for i in (30, 31):
        again.say([*P, i])
    again.returns()
    assert [row.prompt.token_ids[-1] for row in delivered(again).samples] == [30, 31]
    assert again.dropped == {"replay_diverged": 6}


def test_a_conversation_without_room_in_the_context_fails_by_name() -> None:
    """The engines' context bounds the prompt of every conversation."""
    m = began()
    m.say(P)
    m.call([7] * 4096)
    (drop,) = [c for c in m.commands if isinstance(c, do.ReportDrop)]
    assert "a conversation of 4096 tokens does not fit" in drop.why


def test_each_row_has_the_budget_to_itself() -> None:
    """``max_response_len`` bounds what follows the prompt of a row, environment included; then answers are empty."""
    m = began(max_response_len=10)
    number = m.call(P)
    m.end(m.of_call(number).id)
    one = m.heard[FIRST, number]
    assert (len(one.tokens), one.finish) == (10, FinishReason.LENGTH)
    over = m.heard[FIRST, m.call([*one.conversation, 7, 8])]
    assert (over.tokens, over.finish, over.chain) == ([], FinishReason.LENGTH, 0)
    fork = m.say([*P, 20], 4)
    number = m.call([*fork, *[7] * 4])
    m.end(m.of_call(number).id)
    assert len(m.heard[FIRST, number].tokens) == 2
    cut = m.heard[FIRST, m.call([*fork, *[7] * 4, *m.heard[FIRST, number].tokens, *[8] * 30])]
    assert (cut.tokens, cut.finish, cut.chain) == ([], FinishReason.LENGTH, 1)
    m.returns()
    assert [len(row.tokens) for row in delivered(m).samples] == [10, 10]


def test_all_conversations_share_the_sample_s_budget() -> None:
    """``max_sample_tokens`` bounds what is generated in all, tool results not counted; then answers are empty."""
    m = began(max_sample_tokens=10)
    one = m.say(P, 4)
    two = m.call([*P, 20])
    assert m.of_call(two).request.sampling.max_tokens == 6
    m.end(m.of_call(two).id)
    assert (len(m.heard[FIRST, two].tokens), m.heard[FIRST, two].finish) == (6, FinishReason.LENGTH)
    for ids in ([*one, 7, 8], [*P, 30]):
        over = m.heard[FIRST, m.call(ids)]
        assert (over.tokens, over.finish) == ([], FinishReason.LENGTH)
    m.returns()
    assert sorted(int(row.loss_mask.sum()) for row in delivered(m).samples) == [4, 6]


def test_a_call_that_waits_while_others_use_the_budget_up_is_answered_with_nothing() -> None:
    """Whoever has no place yet gets an empty answer, and is never sent."""
    m = began(max_sample_tokens=5, max_in_flight=1)
    one, two = m.call([*P, 20]), m.call([*P, 21])
    attempt = m.of_call(one)
    m.end(attempt.id)
    assert len(m.heard[FIRST, one].tokens) == 5
    assert (m.heard[FIRST, two].tokens, m.heard[FIRST, two].finish) == ([], FinishReason.LENGTH)
    m.returns()
    assert [len(row.tokens) for row in delivered(m).samples] == [5]


def test_a_long_conversation_has_what_the_context_leaves_it() -> None:
    """Room is counted from its own prompt, not from the group's."""
    m = began()
    assert m.of_call(m.call([7] * 4090)).request.sampling.max_tokens == 6
    assert m.of_call(m.call(P)).request.sampling.max_tokens == 1000


def test_where_nothing_was_generated_there_is_a_row_all_the_same() -> None:
    """A sample has its reward and its place among its siblings, even if no answer of it has a token."""
    m = began(samples=2)
    for i in (20, 21):
        attempt = m.of_call(m.call([*P, i]))
        m.stops(attempt)
    m.say(P, 2, (0, 1))
    m.returns()
    m.returns((0, 1))
    batch = delivered(m)
    assert [(tuple(row.id), len(row.tokens)) for row in batch.samples] == [((0, 0), 0), ((0, 1), 2)]
    assert batch.group_sizes == (2,)
    assert np.isfinite(batch.advantages()).all()


# ---------------------------------------------------------------- aborted and continued


def test_a_conversation_goes_where_its_prefix_is_cached() -> None:
    """Each remembers its own engine."""
    m = began((A, B))
    a, b = m.call([*P, 20]), m.call([*P, 21])
    where = {n: m.of_call(n).engine for n in (a, b)}
    assert set(where.values()) == {"a", "b"}
    ids = {n: m.complete(n).conversation for n in (a, b)}
    for n in (b, a):
        assert m.of_call(m.call([*ids[n], 7])).engine == where[n]


# ---------------------------------------------------------------- functions that are lost


def test_a_function_that_asks_for_one_conversation_now_begins_again() -> None:
    """Calls without content cannot be matched with several conversations."""
    m = began()
    m.say(P)
    m.say([*P, 20])
    m.lose(0)
    m.asked[FIRST, 0] = P
    m.post(ev.CallMade(SampleId(0, 0), m.sampling, None))
    assert m.sample(0).state is SampleState.RUNNING
    m.returns()
    assert m.dropped == {"replay_diverged": 6}
    assert m.alive == {FIRST}
    assert m.sample(0).restarts == 1


# ---------------------------------------------------------------- states


def test_a_finished_sample_is_so_after_a_restart() -> None:
    """Its rows are kept without its function, also where its last answer was heard by nobody."""
    m = began(n=2)
    m.say(P, 3)
    m.end(m.of_call(m.call([*P, 20], max_tokens=2)).id)
    m.say([*P, 21])
    m.unheard(3)
    m.returns()
    again = m.restarted()
    again.ask()
    assert again.sample(0).state is SampleState.FINISHED
    assert again.sample(0).finish is FinishReason.LENGTH
    assert (0, 0) not in again.alive
    again.say(P, of=(1, 0))
    again.returns((1, 0))
    assert [len(row.tokens) for row in again.rows()] == [3, 2]


# ---------------------------------------------------------------- answers that nobody hears


def test_without_an_answer_that_was_heard_a_function_fails() -> None:
    """Nothing is left to be trained on; the tokens have left under their own name."""
    m = began(max_attempt_failures=1)
    m.say(P, 3)
    m.unheard(1)
    assert m.sample(0).finish is None
    m.returns()
    (drop,) = [c for c in m.commands if isinstance(c, do.ReportDrop)]
    assert "returned without awaiting a call" in drop.why
    assert m.dropped == {"unheard": 3}
    m.check_ledger()


def test_what_comes_too_late_changes_nothing() -> None:
    """A call of a function that has returned, was lost, or is unknown."""
    m = began(auto_score=False, n=2)
    m.say(P, 3)
    m.unheard(77)
    number = m.call([*P, 20])
    m.lose(0)
    m.unheard(1, number)
    assert m.dropped == {}
    m.finish_aborts()
    assert m.alive == {(0, 0), (1, 0)}
    m.say(P)
    m.returns()
    m.unheard(1)
    assert m.sample(0).state is SampleState.SCORING
    m.score((0, 0))
    m.unheard(1)
    assert m.sample(0).generated == 3


# ---------------------------------------------------------------- rows of a batch


def three_samples(**changes: Any) -> ChainMachine:
    """Two groups of two; samples (0, 1) and (1, 0) have several rows."""
    m = began(n=2, samples=2, **changes)
    m.say(P, 2, (0, 0))
    for i in (20, 21, 22):
        m.say([*P, i], i - 17, (0, 1))
    m.say([*m.say(P, 3, (1, 0)), 7], 2, (1, 0))
    m.say([60], 4, (1, 0))
    m.say(P, 1, (1, 1))
    for key in sorted(m.alive):
        m.returns(key)
    return m


def test_rows_of_a_sample_are_together_and_have_its_reward_and_advantage() -> None:
    """Sizes of groups count rows; the numbers of samples and their means count samples."""
    batch = delivered(three_samples())
    assert [tuple(row.id) for row in batch.samples] == [(0, 0), *[(0, 1)] * 3, *[(1, 0)] * 2, (1, 1)]
    assert batch.group_sizes == (4, 3)
    assert batch.sample_numbers.tolist() == [0, 1, 1, 1, 2, 2, 3]
    assert batch.ragged()["sample_numbers"].tolist() == batch.padded()["sample_numbers"].tolist()
    assert not batch.one_row_each
    assert batch.share.samples == 4 == batch.metrics["samples"]
    assert batch.metrics["groups"] == 2
    assert batch.metrics["response_len_mean"] == (2 + 12 + 10 + 1) / 4
    assert batch.metrics["response_len_max"] == 12
    assert batch.metrics["reward_mean"] == (0 + 1 / 8 + 1 + 9 / 8) / 4
    assert batch.rewards.tolist() == [0.0, *[0.125] * 3, 1.0, 1.0, 1.125]
    methods: list[Method] = ["grpo", "dr_grpo", "rloo"]
    for method in methods:
        advantages = batch.advantages(method)
        for rows in ([1, 2, 3], [4, 5]):
            assert len(set(advantages[rows].tolist())) == 1
        assert advantages[0] == -advantages[1] != 0
        assert advantages[4] == -advantages[6] != 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_a_split_keeps_the_rows_of_a_sample_together(ranks: int, by: Any) -> None:
    """Each sample is in one share with all its rows; shares may be split again."""
    batch = delivered(three_samples())
    shares = batch.split(ranks, by)
    seen = [{tuple(row.id) for row in share.samples} for share in shares]
    assert sum(map(len, seen)) == 4 == len(set().union(*seen))
    assert sorted(id(row) for share in shares for row in share.samples) == sorted(id(row) for row in batch.samples)
    for share in shares:
        assert sum(share.group_sizes) == len(share)
        assert share.share.samples == 4
        whole = batch.advantages()[[list(map(id, batch.samples)).index(id(row)) for row in share.samples]]
        assert share.advantages().tolist() == whole.tolist()
        assert sum(len({tuple(row.id) for row in part.samples}) for part in share.split(2)) == len(
            {tuple(row.id) for row in share.samples}
        )
    if by == "samples":
        assert max(map(len, seen)) - min(map(len, seen)) <= 1


# ---------------------------------------------------------------- staleness


def with_an_old_row(**changes: Any) -> ChainMachine:
    """Group 0 has a row of version 0 and one of version 1; weights of version 1, and group 1 was delivered."""
    m = began(over=2, **changes)
    m.say(P, 3)
    number = m.call([*P, 20])
    m.say(P, 2, (1, 0))
    m.returns((1, 0))
    m.next_step()
    if (FIRST, number) in m.asked:
        m.complete(number, 4)
    return m


def test_a_sample_is_as_old_as_its_oldest_row() -> None:
    """Staleness and plans go by the oldest token of all of them."""
    m = with_an_old_row()
    sample = m.sample(0)
    assert [chain.tape.oldest_version.n for chain in sample.chains] == [0, 1]
    assert sample.oldest_version.n == 0
    assert m.core.buffer.age(sample) == 1
    m.say([*P, 30], 1)
    assert m.core.buffer.age(sample) == 1
    m.returns()
    check_rows(m.batches[-1])
    assert [row.staleness for row in m.rows()] == [1, 0, 0]
    assert m.batches[-1].metrics["staleness_max"] == m.batches[-1].metrics["staleness_mean"] == 1.0
    assert m.batches[-1].off_policy_share == 3 / 8


def test_mask_takes_the_loss_off_old_rows_only() -> None:
    """on_stale: mask; each row by its own tokens."""
    m = with_an_old_row(on_stale=OnStale.MASK, max_staleness=0)
    m.returns()
    old, new = m.rows()
    assert old.loss_mask.tolist() == [0, 0, 0]
    assert new.loss_mask.tolist() == [1, 1, 1, 1]
    assert m.batches[-1].metrics["masked_tokens"] == 3


def test_finish_waits_for_a_sample_with_an_old_row() -> None:
    """on_stale: finish; a batch is not complete before it, so nothing in it is older than the bound."""
    m = with_an_old_row(on_stale=OnStale.FINISH, max_staleness=1)
    assert m.sample(0).urgent
    others = [key for key in m.alive if key != FIRST]
    for key in others:
        m.say(P, 2, key)
        m.returns(key)
    assert len(m.batches) == 1
    m.returns()
    assert [row.staleness for row in m.rows()] == [1, 0]
