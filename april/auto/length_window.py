"""The response lengths of the latest batches, and whether they are others than before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

BATCHES = 16
"""Kept at most."""
UNLIKE, FACTOR = 4.0, 1.15
"""A batch is unlike those before if its mean is off by so many standard errors, and by this factor."""

Floats = NDArray[np.float64]


class LengthWindow:
    """Of each batch the response lengths by group."""

    def __init__(self) -> None:
        self._batches: deque[dict[int, list[int]]] = deque(maxlen=BATCHES)

    def add(self, lengths: Iterable[tuple[int, int]]) -> None:
        """A batch: (group, response tokens) of every response in it."""
        groups: dict[int, list[int]] = {}
        for group, length in lengths:
            if length:
                groups.setdefault(group, []).append(length)
        self._batches.append(groups)

    def forget_before(self, batches: int) -> None:
        """Keep the latest ``batches`` only."""
        while len(self._batches) > batches:
            self._batches.popleft()

    @property
    def rows(self) -> list[list[int]]:
        """One per group, which may have come in several batches."""
        found: dict[int, list[int]] = {}
        for groups in self._batches:
            for group, lengths in groups.items():
                found.setdefault(group, []).extend(lengths)
        return list(found.values())

    def changed(self, latest: int) -> bool:
        """Whether the ``latest`` batches are unlike those before them, of which there are at least as many."""
        if len(self._batches) < 2 * latest:
            return False
        batches = list(self._batches)
        old, new = _means(batches[:-latest]), _means(batches[-latest:])
        if len(old) < 2 or len(new) < 2:
            return False
        # responses of a prompt are alike, so its mean is what is independent
        error = math.sqrt(float(old.var(ddof=1)) / len(old) + float(new.var(ddof=1)) / len(new))
        difference = abs(float(new.mean() - old.mean()))
        return difference > math.log(FACTOR) and difference > UNLIKE * error


def _means(batches: Iterable[dict[int, list[int]]]) -> Floats:
    """Mean logarithm of the lengths of each group."""
    return np.array([np.log(lengths).mean() for groups in batches for lengths in groups.values()], np.float64)
