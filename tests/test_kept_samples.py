"""What adapters keep of samples: there for every state that may ask for it, and gone when nobody can."""

from __future__ import annotations

from typing import Any

from april.adapters.common.deliveries import KeptSamples
from april.core.types import SampleId

HELD, DROPPED, NEW = SampleId(1, 0), SampleId(2, 0), SampleId(5, 0)


def test_groups_that_were_dropped_are_there_for_one_more_batch() -> None:
    """A state that was taken just before the drop asks for its samples just after it; a reward that comes after the
    drop goes, too. What is held stays, and so does a group that was drawn after the look at the books."""
    first: dict[SampleId, Any] = {HELD: "a", DROPPED: "b", NEW: "c"}
    second: dict[SampleId, Any] = {}
    kept = KeptSamples(first, second)
    kept.forget_dropped({1})
    assert first.keys() == {HELD, DROPPED, NEW}
    late = DROPPED._replace(index=1)
    second[late] = "late"
    for there in ({late}, set(), set()):
        kept.forget_dropped({1, 5})
        assert (first.keys(), second.keys()) == ({HELD, NEW}, there)
