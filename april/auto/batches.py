"""The lengths and speeds of the latest batches, and whether they changed by more than chance does."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from april.core.run_times import TrainerTime

BATCHES = 16
"""Most batches that are kept."""
LENGTH_ERRORS, LENGTH_FACTOR = 4.0, 1.15
"""Lengths have changed if their mean is off by so many standard errors, and by this factor."""
LATEST = 6
"""Number of batches whose speed is compared with that of those before them."""
SPREAD = 0.1
"""Relative spread of the speeds of single batches, as long as there are too few to see it."""
SPEED_ERRORS, SPEED_FACTOR = 5.0, 1.25
"""Speeds differ if they are off by so many standard errors, and by this factor."""

Floats = NDArray[np.float64]


class LengthWindow:
    """The response lengths of each batch, by group."""

    def __init__(self) -> None:
        self._batches: deque[dict[int, list[int]]] = deque(maxlen=BATCHES)

    def add(self, lengths: Iterable[tuple[int, int]]) -> None:
        """Add a batch: (group, response tokens) of every response in it."""
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
        """The lengths of each group, which may have come in several batches."""
        found: dict[int, list[int]] = {}
        for groups in self._batches:
            for group, lengths in groups.items():
                found.setdefault(group, []).extend(lengths)
        return list(found.values())

    def changed(self, latest: int) -> bool:
        """Return whether the ``latest`` batches are unlike those before them, of which there are at least as many."""
        if len(self._batches) < 2 * latest:
            return False
        batches = list(self._batches)
        old, new = _means(batches[:-latest]), _means(batches[-latest:])
        if len(old) < 2 or len(new) < 2:
            return False
        # responses of a prompt are alike, so its mean is what is independent
        error = math.sqrt(float(old.var(ddof=1)) / len(old) + float(new.var(ddof=1)) / len(new))
        difference = abs(float(new.mean() - old.mean()))
        return difference > math.log(LENGTH_FACTOR) and difference > LENGTH_ERRORS * error


def _means(batches: Iterable[dict[int, list[int]]]) -> Floats:
    """Return the mean logarithm of the lengths of each group."""
    return np.array([np.log(lengths).mean() for groups in batches for lengths in groups.values()], np.float64)


class Speeds:
    """The speeds of batches made with the same settings: new tokens that were kept, over the seconds of the step.

    Delivered tokens and the growth of those held are both counted: a batch that cuts long responses is as fast as one
    that waits for them, if as much is generated. Saving and evaluating are left out.
    """

    def __init__(self) -> None:
        self._batches: deque[tuple[float, float]] = deque(maxlen=BATCHES)

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, metrics: Mapping[str, float], held_before: float) -> None:
        """Add a batch, with the number of tokens held at the delivery of the one before it."""
        seconds = metrics["step_s"] - metrics[TrainerTime.EVALUATES] - metrics[TrainerTime.OTHER]
        if seconds > 0.0:
            tokens = metrics["trained_tokens"] - metrics["masked_tokens"] + metrics["held_tokens"] - held_before
            self._batches.append((tokens, seconds))

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all batches; 0 if there are none."""
        seconds = sum(seconds for _, seconds in self._batches)
        return sum(tokens for tokens, _ in self._batches) / seconds if seconds else 0.0

    def against(self, before: Speeds) -> tuple[float, float]:
        """Return the ratio to the speed of those ``before``, and its standard error."""
        ratio = self.tokens_per_s / before.tokens_per_s
        return ratio, ratio * self.error(before, len(self))

    def error(self, before: Speeds, count: int) -> float:
        """Return the relative standard error of the ratio of ``count`` batches like these to those ``before``."""
        off = np.concatenate([self._off, before._off])
        free = len(off) - (len(self) > 0) - (len(before) > 0)
        spread = float(np.sqrt(np.square(off).sum() / free)) if free > 0 else SPREAD
        return spread * float(np.sqrt(1.0 / max(1, count) + 1.0 / max(1, len(before))))

    def unlike(self, before: Speeds) -> bool:
        """Return whether they are faster or slower than those ``before`` by more than chance does."""
        if min(self.tokens_per_s, before.tokens_per_s) <= 0.0:
            return False
        off = abs(math.log(self.tokens_per_s / before.tokens_per_s))
        return off > math.log(SPEED_FACTOR) and off > SPEED_ERRORS * self.error(before, len(self))

    @property
    def changed(self) -> bool:
        """True if the latest are unlike those before them, of which there are at least as many."""
        if len(self) < 2 * LATEST:
            return False
        batches = list(self._batches)
        old, new = Speeds(), Speeds()
        old._batches.extend(batches[:-LATEST])
        new._batches.extend(batches[-LATEST:])
        return new.unlike(old)

    def forget_old(self) -> None:
        """Keep the latest only."""
        while len(self._batches) > LATEST:
            self._batches.popleft()

    @property
    def _off(self) -> Floats:
        """The surplus of each batch's tokens over those expected of its time, relative to those of a mean batch."""
        if not self._batches:
            return np.zeros(0)
        tokens, seconds = np.array(self._batches).T
        return np.asarray((tokens - self.tokens_per_s * seconds) / max(1.0, float(tokens.mean())))
