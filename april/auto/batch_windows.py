"""Response lengths and speeds of a run's latest batches, with tests for significant changes; used by :mod:`.tuner`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from april.core.run_times import TrainerTime

BATCHES = 16
"""Largest number of batches in a window."""
LENGTH_ERRORS, LENGTH_FACTOR = 4.0, 1.15
"""Lengths count as changed if their geometric mean moves by this many standard errors and by this factor."""
LATEST_BATCHES = 6
"""Number of latest batches whose speed is compared with the speed of the batches before them."""
SPREAD = 0.1
"""Assumed relative standard deviation of a batch's speed while there are too few batches to measure it."""
SPEED_ERRORS, SPEED_FACTOR = 5.0, 1.25
"""Speeds count as different if they differ by this many standard errors and by this factor."""

Floats = NDArray[np.float64]


class LengthWindow:
    """Response lengths of the latest batches, by group."""

    def __init__(self) -> None:
        self._batches: deque[dict[int, list[int]]] = deque(maxlen=BATCHES)

    def add(self, lengths: Iterable[tuple[int, int]]) -> None:
        """Add a batch, given as (group, number of tokens) of each response in it."""
        groups: dict[int, list[int]] = {}
        for group, length in lengths:
            if length:
                groups.setdefault(group, []).append(length)
        self._batches.append(groups)

    def forget_before(self, batches: int) -> None:
        """Keep only this many of the latest batches."""
        while len(self._batches) > batches:
            self._batches.popleft()

    @property
    def rows(self) -> list[list[int]]:
        """Lengths of each group (the responses to one prompt), joined over the batches."""
        found: dict[int, list[int]] = {}
        for groups in self._batches:
            for group, lengths in groups.items():
                found.setdefault(group, []).extend(lengths)
        return list(found.values())

    def changed(self, latest: int) -> bool:
        """Return True if the lengths in the ``latest`` batches differ significantly from those in earlier batches.

        False while there are fewer than ``2 * latest`` batches.
        """
        if len(self._batches) < 2 * latest:
            return False
        batches = list(self._batches)
        old, new = _means(batches[:-latest]), _means(batches[-latest:])
        if len(old) < 2 or len(new) < 2:
            return False
        # responses to one prompt are correlated, but the means of different groups are independent
        error = math.sqrt(float(old.var(ddof=1)) / len(old) + float(new.var(ddof=1)) / len(new))
        difference = abs(float(new.mean() - old.mean()))
        return difference > math.log(LENGTH_FACTOR) and difference > LENGTH_ERRORS * error


def _means(batches: Iterable[dict[int, list[int]]]) -> Floats:
    """Return the mean logarithm of the lengths of each group."""
    return np.array([np.log(lengths).mean() for groups in batches for lengths in groups.values()], np.float64)


class Speeds:
    """Speeds in tokens per second of the latest batches that were generated with the same settings.

    Tokens generated for unfinished responses, which continue in a later batch, count like trained tokens. Otherwise
    batches that wait for long responses would seem faster. The time for evaluating and saving does not count.
    """

    def __init__(self) -> None:
        self._batches: deque[tuple[float, float]] = deque(maxlen=BATCHES)

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, metrics: Mapping[str, float], held_before: float) -> None:
        """Add a batch; ``held_before`` is the number of undelivered tokens after the delivery of the previous batch."""
        seconds = metrics["step_s"] - metrics[TrainerTime.EVALUATES] - metrics[TrainerTime.OTHER]
        if seconds > 0.0:
            tokens = metrics["trained_tokens"] - metrics["masked_tokens"] + metrics["held_tokens"] - held_before
            self._batches.append((tokens, seconds))

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all batches; 0 if there are no batches."""
        seconds = sum(seconds for _, seconds in self._batches)
        return sum(tokens for tokens, _ in self._batches) / seconds if seconds else 0.0

    def ratio_to(self, before: Speeds) -> tuple[float, float]:
        """Return the ratio of this speed to the speed ``before``, and the standard error of the ratio."""
        ratio = self.tokens_per_s / before.tokens_per_s
        return ratio, ratio * self.error(before, len(self))

    def error(self, before: Speeds, count: int) -> float:
        """Return the relative standard error of the ratio of the speed of ``count`` batches to the speed ``before``."""
        deviations = np.concatenate([self._deviations, before._deviations])
        freedom = len(deviations) - (len(self) > 0) - (len(before) > 0)
        spread = float(np.sqrt(np.square(deviations).sum() / freedom)) if freedom > 0 else SPREAD
        return spread * float(np.sqrt(1.0 / max(1, count) + 1.0 / max(1, len(before))))

    def differs_from(self, before: Speeds) -> bool:
        """Return True if the speed differs significantly from the speed ``before``."""
        if min(self.tokens_per_s, before.tokens_per_s) <= 0.0:
            return False
        difference = abs(math.log(self.tokens_per_s / before.tokens_per_s))
        return difference > math.log(SPEED_FACTOR) and difference > SPEED_ERRORS * self.error(before, len(self))

    @property
    def changed(self) -> bool:
        """True if the latest :data:`LATEST_BATCHES` batches are significantly faster or slower than the batches before.

        False while there are fewer than ``2 * LATEST_BATCHES`` batches.
        """
        if len(self) < 2 * LATEST_BATCHES:
            return False
        batches = list(self._batches)
        old, new = Speeds(), Speeds()
        old._batches.extend(batches[:-LATEST_BATCHES])
        new._batches.extend(batches[-LATEST_BATCHES:])
        return new.differs_from(old)

    def forget_old(self) -> None:
        """Keep only the latest :data:`LATEST_BATCHES` batches."""
        while len(self._batches) > LATEST_BATCHES:
            self._batches.popleft()

    @property
    def _deviations(self) -> Floats:
        """For each batch, its tokens minus the tokens expected for its duration, divided by the mean batch's tokens."""
        if not self._batches:
            return np.zeros(0)
        tokens, seconds = np.array(self._batches).T
        return np.asarray((tokens - self.tokens_per_s * seconds) / max(1.0, float(tokens.mean())))
