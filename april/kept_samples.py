"""Values that an adapter keeps of samples beside april's books, and the time when they are forgotten."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from april.core.types import SampleId


class KeptSamples:
    """Forgets samples whose group left april's books without a batch, within two batches.

    Not for less: a state may have been taken just before, which asks for them, and a reward may come just after.

    Args:
        tables: by sample; others write into them and take out what they deliver, in other threads too.
    """

    def __init__(self, *tables: dict[SampleId, Any]) -> None:
        self._tables = tables
        self._out: set[SampleId] = set()

    def settle(self, held_groups: Set[int]) -> None:
        """Once per batch: forget those whose group was out of the books a batch ago."""
        out = {sample for table in self._tables for sample in list(table) if sample.group not in held_groups}
        for sample in out & self._out:
            for table in self._tables:
                table.pop(sample, None)
        self._out = out
