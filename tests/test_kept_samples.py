"""What adapters keep of samples: there for every state that may ask for it, and gone when nobody can."""

from __future__ import annotations

from typing import Any

from april.adapters.common.deliveries import KeptSamples
from april.core.types import SampleId

HELD, DROPPED = SampleId(1, 0), SampleId(2, 0)


def test_a_group_that_was_dropped_is_there_for_one_more_batch() -> None:
    """A state that was taken just before the drop asks for its samples just after it; what is held stays."""
    table: dict[SampleId, Any] = {HELD: "a", DROPPED: "b"}
    kept = KeptSamples(table)
    kept.forget_dropped({1})
    assert table == {HELD: "a", DROPPED: "b"}
    for _ in range(5):
        kept.forget_dropped({1})
        assert table == {HELD: "a"}


def test_what_comes_after_the_drop_goes_too() -> None:
    """A reward that was on its way; of several tables each."""
    first: dict[SampleId, Any] = {DROPPED: "a"}
    second: dict[SampleId, Any] = {}
    kept = KeptSamples(first, second)
    kept.forget_dropped({1})
    late = second[DROPPED._replace(index=1)] = "late"
    kept.forget_dropped({1})
    assert (first, list(second.values())) == ({}, [late])
    kept.forget_dropped({1})
    assert second == {}


def test_a_group_that_was_drawn_after_the_look_at_the_books_stays() -> None:
    """Its first reward may come before the tables are looked at."""
    table: dict[SampleId, Any] = {HELD: "a", SampleId(5, 0): "new"}
    kept = KeptSamples(table)
    kept.forget_dropped({1})
    kept.forget_dropped({1, 5})
    assert len(table) == 2
