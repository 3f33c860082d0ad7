"""What a run is answered whose settings are auto: which candidates there are, and which of them is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from auto_questions import NOW, question

from april.core.types import OnStale, Refill, Work
from april.simulate.choose import choose, space_of, workload_of
from april.simulate.plan import Row, coarse, neighbours
from april.simulate.workload import Schedule, Workload


def rows(monkeypatch: pytest.MonkeyPatch, value: Callable[[Schedule], tuple[float, float]]) -> None:
    """Simulations of which is known what they give: (speed, off-policy share)."""

    def expected(workload: Workload, schedule: Schedule) -> Row:
        speed, share = value(schedule)
        return Row(
            schedule=schedule, tokens_per_s=speed, off_policy_share=share, staleness_mean=1.0, staleness_max=2,
            step_s=1.0, held_tokens=0.0,
        )  # fmt: skip

    monkeypatch.setattr("april.simulate.plan._row", expected)


def test_what_is_hardly_better_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 % may be noise, and a change costs a few steps."""
    rows(monkeypatch, lambda s: (102.0 if s.over == 6 else 100.0, 0.1))
    found = choose(question())
    assert found.best == NOW
    assert found.speed_up == 1.0


def test_what_is_better_is_chosen_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a margin to it; and what is beyond it is left, though it is faster."""
    rows(monkeypatch, lambda s: (100.0 + 10 * s.over, s.over / 16))
    found = choose(question(max_off_policy_share=0.5))
    assert found.best.over_sampling_batch_size == 7
    assert found.off_policy_share <= 0.97 * 0.5
    beyond = choose(question(max_off_policy_share=0.5, now=replace(NOW, over_sampling_batch_size=12)))
    assert beyond.best.over_sampling_batch_size == 7
    at_limit = replace(NOW, over_sampling_batch_size=8, max_in_flight=32)
    assert choose(question(max_off_policy_share=0.5, now=at_limit)).best == at_limit


def test_at_the_same_speed_the_younger_tokens_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less in work is chosen where it is as fast; for a little younger ones nothing changes."""
    now = replace(NOW, over_sampling_batch_size=8, max_in_flight=32)
    rows(monkeypatch, lambda s: (100.0, 0.0 if s == space_of(question()).base else 0.5))
    assert choose(question(now=now)).best == NOW
    rows(monkeypatch, lambda s: (100.0, 0.5 + s.over / 160))
    assert choose(question(now=now)).best == now
    rows(monkeypatch, lambda s: (98.0 if s == space_of(question()).base else 100.0, 0.0))
    assert choose(question(now=now)).best == now


@pytest.mark.parametrize("below", [17, 21, 33])
def test_what_is_not_to_be_tried_is_no_candidate(below: int) -> None:
    """With so many in flight, or more; what is in work now is one, however many it has."""
    q = question(below=below)
    found = coarse(workload_of(q), space_of(q))
    assert max(s.in_flight for s in found) == below - 1
    many = replace(NOW, over_sampling_batch_size=12, max_in_flight=48)
    assert space_of(replace(q, now=many)).base in coarse(workload_of(q), space_of(replace(q, now=many)))


@pytest.mark.parametrize(
    ("free", "refill", "kinds"),
    [
        (tuple(Work), Refill.NONE, {Refill.NONE, Refill.SAMPLE}),
        ((Work.OVER_SAMPLING, Work.IN_FLIGHT), Refill.NONE, {Refill.NONE}),
        ((Work.OVER_SAMPLING,), Refill.NONE, {Refill.NONE}),
        ((Work.IN_FLIGHT,), Refill.SAMPLE, {Refill.SAMPLE}),
        ((Work.QUORUM,), Refill.SAMPLE, {Refill.SAMPLE}),
        ((Work.QUORUM,), Refill.NONE, {Refill.NONE}),
    ],
)
def test_candidates_differ_in_what_is_free(free: tuple[Work, ...], refill: Refill, kinds: set[Refill]) -> None:
    """And in nothing else; never more in flight than there are places."""
    now = replace(NOW, refill=refill, over_sampling_batch_size=6, max_in_flight=20)
    q = question(free=free, now=now, places=30)
    space, workload = space_of(q), workload_of(q)
    found = coarse(workload, space)
    found += neighbours(workload, found[-1], found, space)
    assert found[0] == space.base
    assert {s.refill for s in found} == kinds
    assert max(s.in_flight for s in found) <= (30 if Work.IN_FLIGHT in free else 20)
    if Work.QUORUM not in free:
        assert {s.quorum for s in found} == {1.0}
    if free == (Work.QUORUM,):
        assert {(s.over, s.in_flight) for s in found} == {(6, 20)}
        assert {s.quorum for s in found} == {1.0, 0.75}
    assert len(found) > 1


def test_continuous_generation_stays_continuous() -> None:
    """Its candidates keep the bound of the run, and are simulated with the trainer beside them."""
    q = question(
        continuous=True, train_s=3.0, free=(Work.IN_FLIGHT, Work.QUORUM), now=replace(NOW, refill=Refill.SAMPLE)
    )  # fmt: skip
    workload = workload_of(q)
    assert workload.separate
    assert {s.continuous for s in coarse(workload, space_of(q))} == {3}


def test_a_run_that_allows_no_old_tokens_can_ask() -> None:
    """max_staleness 0: only what is delivered with its own step can be in work."""
    q = question(max_staleness=0)
    assert {s.over for s in coarse(workload_of(q), space_of(q)) if s.refill is Refill.NONE} == {4}


@pytest.mark.parametrize("on_stale", [OnStale.MASK, OnStale.DROP])
def test_what_would_be_refused_is_not_proposed(on_stale: OnStale) -> None:
    """More groups than can be trained in time are no candidates, also where the configuration would take them."""
    q = question(max_staleness=1, on_stale=on_stale)
    found = coarse(workload_of(q), space_of(q))
    assert max(s.over for s in found if s.refill is Refill.NONE) == 8


def test_what_is_in_work_is_always_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a quorum without more in work, with which a run begins: or another would pass for it."""
    rows(monkeypatch, lambda s: (100.0 + s.over, 0.1))
    now = replace(NOW, group_quorum=0.5)
    q = question(now=now, samples=8, free=(Work.OVER_SAMPLING, Work.IN_FLIGHT))
    assert coarse(workload_of(q), space_of(q))[0] == space_of(q).base
    found = choose(q)
    assert found.best.over_sampling_batch_size > 4
    assert found.speed_up == pytest.approx(112.0 / 104.0)
    strict = replace(q, max_staleness=0)
    assert choose(strict).best == now


def test_what_cannot_be_in_work_any_more_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """max_staleness was lowered below what N' needs: the best of the others, however little faster it is."""
    rows(monkeypatch, lambda s: (100.0, 0.1))
    q = question(max_staleness=1, now=replace(NOW, over_sampling_batch_size=12, max_in_flight=48))
    assert space_of(q).base not in coarse(workload_of(q), space_of(q))
    assert choose(q).best.over_sampling_batch_size <= 8
