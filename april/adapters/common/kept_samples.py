"""Deletes the values that a trainer's adapter keeps for samples, when the samples' groups were dropped."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from april.core.types import SampleId


class KeptSamples:
    """Removes the values of samples whose group was dropped, one batch after april has dropped the group.

    The values are kept for one more batch because a state saved just before the drop may need them, and a reward may
    arrive just after it.

    Args:
        tables: Dicts of values by sample. The adapter adds values and removes delivered ones, also in other threads.
    """

    def __init__(self, *tables: dict[SampleId, Any]) -> None:
        self._tables = tables
        self._dropped: set[SampleId] = set()

    def forget_dropped(self, held_groups: Set[int]) -> None:
        """Remove the samples whose groups are not in ``held_groups`` for the second time; called once per batch."""
        out = {sample for table in self._tables for sample in list(table) if sample.group not in held_groups}
        for sample in out & self._dropped:
            for table in self._tables:
                table.pop(sample, None)
        self._dropped = out
