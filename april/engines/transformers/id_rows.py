"""Stores a list of token ids for each decode slot: the stop ids or the banned ids of its request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class IdRows:
    """A matrix of ids with one row per slot, as wide as the longest row; shorter and unused rows are filled with -1."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows = np.full((slots, 1), -1, dtype=np.int64)

    def put(self, slot: int, ids: Sequence[int]) -> None:
        """Set the ids of a slot; ids outside the vocabulary are left out, because they cannot be sampled."""
        known = [i for i in ids if 0 <= i < self._vocab_size]
        slots, width = self._rows.shape
        if len(known) > width:
            wider = np.full((slots, len(known)), -1, dtype=np.int64)
            wider[:, :width] = self._rows
            self._rows = wider
        self._rows[slot] = -1
        self._rows[slot, : len(known)] = known

    def move(self, to: list[int], source: list[int]) -> None:
        """Copy the ids of slot ``source[i]`` to slot ``to[i]``."""
        self._rows[to] = self._rows[source]

    def of(self, lo: int, hi: int) -> NDArray[np.int64] | None:
        """Return the rows of these slots, int64 [hi - lo, K]; None if all are empty."""
        rows = self._rows[lo:hi]
        return rows if (rows >= 0).any() else None


def table_of(ids: Tensor, vocab_size: int) -> Tensor:
    """Return bool [B, V], true at the ids int64 [B, K] of each row."""
    # Missing ids point to one extra column, which is cut off again.
    columns = torch.where(ids < 0, vocab_size, ids)
    table = torch.zeros(len(ids), vocab_size + 1, dtype=torch.bool, device=ids.device)
    return table.scatter_(1, columns, True)[:, :vocab_size]
