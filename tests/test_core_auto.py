"""How much is in work changes while a run goes on: the core keeps everything it promises, before, meanwhile, after."""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import pytest
from core_machine import A, CoreMachine, asked, settings
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from april.core import events as ev
from april.core import snapshot
from april.core.rollout_core import RolloutCore
from april.core.settings import CoreSettings
from april.core.types import OnFailedSample, OnStale, Refill, SampleId, Work
from april.errors import CheckpointError, InvariantError

ALL = tuple(Work)
LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "80"))
"""A quarter of these are run, as each life is long."""


def machine(length: Any = 50, **changes: Any) -> CoreMachine:
    """A step of N = 2 groups of 4 has begun, everything auto."""
    return asked(length, **({"n": 2, "samples": 4, "auto": ALL} | changes))


def some_work(rng: random.Random, s: CoreSettings) -> ev.WorkChanged:
    """Any change that a configuration could have had from the beginning."""
    n = s.rollout_batch_size
    return ev.WorkChanged(
        over_sampling_batch_size=rng.choice([None, rng.randint(1, (s.max_staleness + 1) * n)]),
        refill=rng.choice([None, Refill.NONE, Refill.SAMPLE]),
        max_in_flight=rng.choice([None, rng.randint(1, 40)]),
        group_quorum=rng.choice([None, 1.0, 0.75]),
    )


@hypothesis_settings(deadline=None, max_examples=LIVES // 4)
@given(seed=st.integers(0, 2**32))
def test_nothing_is_lost_however_often_it_changes(seed: int) -> None:
    """Bound, ledgers and exactly-once hold, batches are whole, and every prompt is settled; books checked each time."""
    rng = random.Random(seed)
    table: dict[tuple[int, int], int] = {}
    m = machine(
        lambda g, i: table.setdefault((g, i), rng.choice([1, 2, 8, 40, 200])), prompts=40,
        max_staleness=rng.randint(0, 3), on_stale=OnStale.FINISH, max_in_flight=rng.randint(1, 20),
    )  # fmt: skip
    while not m.ended:
        if rng.random() < 0.1:
            m.post(some_work(rng, m.core.settings))
        if m.core.step is None:
            if m.core.leased:
                m.update()
            m.post(ev.StepRequested())
        elif m.in_flight:
            name = rng.choice(sorted(m.in_flight))
            m.end(name, 0 if name in m.abort_asked else rng.choice([3, 10**6]))
    m.check_ledger()
    assert [len(batch) for batch in m.batches] == [8] * 20
    assert len({s.id for batch in m.batches for s in batch.samples}) == 160
    assert max(s.staleness for batch in m.batches for s in batch.samples) <= m.core.settings.max_staleness
    assert m.core.prompts.held == m.core.tokens.held == 0


def test_places_change_at_once_and_nothing_is_cut() -> None:
    """What is in flight comes to its end; nothing new goes before there is a place; new places are filled."""
    m = machine(refill=Refill.SAMPLE, max_in_flight=8)
    assert not m.post(ev.WorkChanged(max_in_flight=5))
    for left in (7, 6, 5, 5):
        m.end(next(iter(m.in_flight)))
        assert len(m.in_flight) == left
    assert m.core.context.places.free == 0
    m.post(ev.WorkChanged(max_in_flight=20))
    assert len(m.in_flight) == 20


def test_more_groups_begin_with_the_next_step() -> None:
    """Without refill; a step that runs draws nothing more."""
    m = machine(max_in_flight=8)
    m.post(ev.WorkChanged(over_sampling_batch_size=4, max_in_flight=16))
    assert len(m.core.buffer) == 2
    m.finish(0, 1)
    m.next_step()
    assert len(m.in_flight) == 16


def test_groups_keep_the_quorum_they_were_drawn_with() -> None:
    """A batch counts samples from the beginning, where the quorum is auto; the new one is for groups to come."""
    m = machine(over=3, max_in_flight=64)
    m.post(ev.WorkChanged(group_quorum=0.75))
    assert [group.quorum for group in m.core.buffer] == [4, 4, 4]
    assert not m.core.settings.whole_groups
    while len(m.batches) < 2:
        m.end(next(iter(m.in_flight)), 0 if m.abort_asked else 10**6)
        if m.core.step is None:
            m.next_step()
    assert {group.quorum for group in m.core.buffer} == {3}


@pytest.mark.parametrize(("drawn", "later", "k"), [(0.5, 1.0, 4), (1.0, 0.5, 7)])
def test_a_group_that_shrinks_keeps_the_quorum_it_was_drawn_with(drawn: float, later: float, k: int) -> None:
    """A baseline is of as many others as was said when the group was drawn, or of all that are left of it."""
    policy: dict[str, Any] = {"on_failed_sample": OnFailedSample.SHRINK, "max_attempt_failures": 1}
    m = machine(samples=8, group_quorum=drawn, max_in_flight=64, **policy)
    m.post(ev.WorkChanged(group_quorum=later))
    m.post(ev.SampleFailed(SampleId(0, 7), "the judge was away"))
    assert m.core.buffer.groups[0].quorum == k


def test_what_was_said_to_stay_stays() -> None:
    """A setting that is a number in the configuration cannot be changed."""
    m = machine(auto=(Work.IN_FLIGHT,))
    m.post(ev.WorkChanged(max_in_flight=3))
    with pytest.raises(InvariantError, match="over_sampling_batch_size cannot change while a run goes on"):
        m.post(ev.WorkChanged(over_sampling_batch_size=3))


# -------------------------------------------------------------------- restarts


def saved() -> tuple[CoreMachine, dict[str, Any]]:
    """A run in which something else is in work than at its beginning, and its state."""
    m = machine(lambda g, i: 9 + 5 * i, max_in_flight=8)
    m.post(ev.WorkChanged(over_sampling_batch_size=5, refill=Refill.SAMPLE, max_in_flight=20, group_quorum=0.75))
    return m, snapshot.take(m.core, None)


def restored(state: dict[str, Any], **changes: Any) -> RolloutCore:
    core = RolloutCore(settings(**({"n": 2, "samples": 4, "auto": ALL} | changes)), (A,))
    snapshot.restore(core, copy.deepcopy(state))
    return core


def test_a_restart_goes_on_with_what_was_in_work() -> None:
    """Not with what a run begins with."""
    m, state = saved()
    s = restored(state).settings
    assert [getattr(s, name) for name in Work] == [5, Refill.SAMPLE, 20, 0.75]
    assert [getattr(m.core.settings, name) for name in Work] == [5, Refill.SAMPLE, 20, 0.75]


def test_a_number_in_the_configuration_is_meant() -> None:
    """Also where the state has another one; and what was a number before is begun anew."""
    _, state = saved()
    core = restored(state, auto=(Work.QUORUM,), max_in_flight=12)
    assert (core.settings.max_in_flight, core.settings.group_quorum) == (12, 0.75)
    assert core.context.places.total == 12
    state["settings"]["auto"] = ["group_quorum"]
    assert restored(state).settings.over_sampling_batch_size == 2


def test_no_more_groups_than_can_be_delivered_in_time() -> None:
    """The bound may be lower than before the restart."""
    m = CoreMachine(settings(n=2, samples=4, auto=ALL), 4)
    m.post(ev.WorkChanged(over_sampling_batch_size=5))
    assert restored(snapshot.take(m.core, None), max_staleness=1).settings.over_sampling_batch_size == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_in_flight", 2.5), ("max_in_flight", "many"), ("refill", "now and then"), ("auto", ["everything"]),
        ("auto", 3),
    ],
)  # fmt: skip
def test_damaged_work_is_refused(name: str, value: Any) -> None:
    """Values must have the types of the settings."""
    _, state = saved()
    state["settings"][name] = value
    with pytest.raises(CheckpointError, match="the state is damaged"):
        restored(state)
