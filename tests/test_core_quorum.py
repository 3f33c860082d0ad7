"""Group quorum in the core: what is delivered when, with which baseline, and what becomes of the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_machine import A, CoreMachine, asked, settings

from april.core import commands as do
from april.core import events as ev
from april.core import snapshot
from april.core.batch import Batch
from april.core.completion_monitor import CompletionMonitor
from april.core.rollout_core import RolloutCore
from april.core.settings import quorum_of
from april.core.types import Group, OnFailedSample, Prompt, Refill, Work
from april.errors import CheckpointError


def machine(quorum: float = 0.75, **changes: Any) -> CoreMachine:
    """A step of N = 1 group of 4 has begun, everything in flight at once; responses have 9 tokens."""
    return asked(9, **({"samples": 4, "group_quorum": quorum, "max_in_flight": 64} | changes))


def of(batch: Batch) -> list[tuple[int, int]]:
    return [(s.id.group, s.id.index) for s in batch.samples]


def restored(m: CoreMachine, **changes: Any) -> RolloutCore:
    core = RolloutCore(settings(**({"n": 1, "samples": 4} | changes)), (A,))
    snapshot.restore(core, snapshot.take(m.core, None))
    return core


@pytest.mark.parametrize(("share", "n", "k"), [(1.0, 8, 8), (0.5, 8, 4), (0.3, 10, 3), (0.51, 8, 5), (0.7, 10, 7)])
def test_the_quorum_of_n(share: float, n: int, k: int) -> None:
    """k = ceil(share * n), not one more where a float is a little too large."""
    assert quorum_of(share, n) == k


def test_a_finished_sample_that_is_owed_makes_its_group_go_first() -> None:
    """A sample at its bound cannot go before its quorum: its siblings go before all others, and the step waits."""
    m = machine(over=2, max_staleness=1)
    m.finish((1, 0), (0, 0), (0, 1), (0, 2), (0, 3))
    m.finish_aborts()
    assert of(m.batches[0]) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    submitted = [c.attempt for c in m.next_step() if isinstance(c, do.Submit)]
    assert [(tuple(a.sample.id), a.request.priority == 0) for a in submitted[:4]] == [
        ((1, 1), True), ((1, 2), True), ((1, 3), True), ((2, 0), False),
    ]  # fmt: skip
    m.finish(2)
    assert len(m.batches) == 1, "four are ready, and the one that is owed is not among them"
    m.finish((1, 1), (1, 2))
    m.finish_aborts()
    assert (1, 0) in of(m.batches[1])


def test_a_filter_judges_the_first_k() -> None:
    """What finishes while the filter thinks counts with its verdict; the filter sees no more than before."""
    m = machine(over=2, has_filter=True)
    m.finish((0, 0), (0, 3), (0, 1))
    for error in ("away", None):
        judge = [c for c in m.commands if isinstance(c, do.JudgeGroup)][-1]
        assert [s.id.index for s in judge.group.first_finishers] == [0, 1, 3]
        if error:
            m.finish((0, 2))
            assert m.core.monitor.ready == 0
        m.post(ev.GroupJudged(group=0, judgement=judge.judgement, keep=not error, error=error))
    m.finish_aborts()
    assert of(m.batches[0]) == [(0, 0), (0, 3), (0, 1), (0, 2)]
    assert [index for index, _ in m.batches[0].samples[0].cohort] == [0, 3, 1]


# ---------------------------------------------------------------- restarts with another quorum


def test_restoring_into_whole_groups_is_refused_where_a_part_was_delivered() -> None:
    """The rest of such a group has no whole group to be delivered with."""
    m = machine(over=3)
    m.finish((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
    m.finish_aborts()
    m.update()
    with pytest.raises(CheckpointError, match="is delivered in parts"):
        restored(m, over=3)


@pytest.mark.parametrize("auto", [(), (Work.QUORUM,)], ids=["0.99", "auto"])
def test_restoring_into_whole_groups_is_refused_where_they_would_be_late(auto: tuple[Work, ...]) -> None:
    """As many samples as can be delivered in time may be of more groups than can, where groups have shrunk."""
    fails: dict[str, Any] = {"on_failed_sample": OnFailedSample.SHRINK, "max_attempt_failures": 1}
    changes: dict[str, Any] = {"n": 2, "over": 4, "max_staleness": 1, "refill": Refill.SAMPLE} | fails
    m = machine(1.0 if auto else 0.99, auto=auto, **changes)
    for _ in range(6):
        for attempt in list(m.in_flight.values()):
            if attempt.sample.id.index:
                m.post(ev.SampleFailed(attempt.sample.id, "the judge was away"))
        m.finish_aborts()
    for attempt_id in m.in_flight:
        m.tokens(attempt_id, 3)
    with pytest.raises(CheckpointError, match=r"of the 13 groups .* saved with .*; set these as they were"):
        restored(m, **changes)
    restored(m, group_quorum=0.75, **changes)


@pytest.mark.parametrize("late", [False, True])
def test_restoring_whole_groups_by_samples_is_never_in_the_way(late: bool) -> None:
    """Not even where groups were late before, as by a trainer that updates twice for a batch: a late group is
    n late samples."""
    m = machine(1.0, over=2, max_staleness=1)
    for attempt_id in m.in_flight:
        m.tokens(attempt_id, 3)
    m.post(ev.PauseRequested())
    m.finish_aborts()
    for _ in range(3 * late):
        m.update()
    assert restored(m, over=2, group_quorum=0.75, max_staleness=1).buffer.units == 8


def test_a_group_that_counts_since_a_restart_has_its_cohort_in_the_order_of_finishing() -> None:
    """A smaller quorum completes it: a straggler's baseline is of those that were first, not of the lowest indices."""
    m = machine(1.0)
    m.finish((0, 2), (0, 0), (0, 1))
    assert [index for index, _ in restored(m, group_quorum=0.75).buffer.groups[0].cohort] == [2, 0, 1]


def test_what_is_owed_goes_before_older_groups_and_the_rest_by_completion() -> None:
    """Three samples are complete and two are delivered: the one in its last chance, and the one that was first."""
    groups = [Group(number, Prompt(np.array([5], np.int32)), 2) for number in range(2)]
    units = [*groups[0].samples, groups[1].samples[0]]
    monitor = CompletionMonitor(target=2)
    assert monitor.plan(zip(units, (5, 5, 0), strict=True), horizon=3) == [units[2]]
    for since, unit in enumerate((units[1], units[0], units[2])):
        unit.since = since
        monitor.accept(unit)
    assert monitor.take() == [units[1], units[2]]
    assert list(monitor) == [units[0]]
