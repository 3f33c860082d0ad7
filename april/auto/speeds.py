"""How fast the latest batches were, and whether that is another speed than before: by more than chance does."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from april.core.run_times import TrainerTime

BATCHES = 16
"""Kept at most."""
LATEST = 6
"""Batches that are compared with those before them."""
SPREAD = 0.1
"""Of the speeds of single batches, relative, as long as there are too few to see it."""
UNLIKE, FACTOR = 5.0, 1.25
"""Batches are unlike those before if they are off by so many standard errors, and by this factor."""


class Speeds:
    """Of batches that were made in the same way: tokens that came and were kept, and seconds that it took.

    What is delivered and what is held more than before are both counted: a batch that cuts long responses is as fast
    as one that waits for them, if as much is generated. Saving and evaluating take no part in it.
    """

    def __init__(self) -> None:
        self._batches: deque[tuple[float, float]] = deque(maxlen=BATCHES)

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, metrics: Mapping[str, float], held_before: float) -> None:
        """A batch, and how many tokens were held at the delivery of the one before it."""
        seconds = metrics["step_s"] - metrics[TrainerTime.EVALUATES] - metrics[TrainerTime.OTHER]
        if seconds > 0.0:
            tokens = metrics["trained_tokens"] - metrics["masked_tokens"] + metrics["held_tokens"] - held_before
            self._batches.append((tokens, seconds))

    @property
    def tokens_per_s(self) -> float:
        """Of all of them; 0 if there are none."""
        seconds = sum(seconds for _, seconds in self._batches)
        return sum(tokens for tokens, _ in self._batches) / seconds if seconds else 0.0

    def against(self, before: Speeds) -> tuple[float, float]:
        """How many times as fast as those ``before`` they are, and its standard error."""
        ratio = self.tokens_per_s / before.tokens_per_s
        return ratio, ratio * self.error(before, len(self))

    def error(self, before: Speeds, count: int) -> float:
        """Standard error, relative, of the ratio of ``count`` batches like these to those ``before``."""
        off = np.concatenate([self._off, before._off])
        free = len(off) - (len(self) > 0) - (len(before) > 0)
        spread = float(np.sqrt(np.square(off).sum() / free)) if free > 0 else SPREAD
        return spread * float(np.sqrt(1.0 / max(1, count) + 1.0 / max(1, len(before))))

    def unlike(self, before: Speeds) -> bool:
        """Whether they are faster or slower than those ``before`` by more than chance does."""
        if min(self.tokens_per_s, before.tokens_per_s) <= 0.0:
            return False
        off = abs(math.log(self.tokens_per_s / before.tokens_per_s))
        return off > math.log(FACTOR) and off > UNLIKE * self.error(before, len(self))

    @property
    def changed(self) -> bool:
        """Whether the latest are unlike those before them, of which there are at least as many."""
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
    def _off(self) -> NDArray[np.float64]:
        """By how much the tokens of each were more than expected of its time, relative to those of a mean batch."""
        if not self._batches:
            return np.zeros(0)
        tokens, seconds = np.array(self._batches).T
        return np.asarray((tokens - self.tokens_per_s * seconds) / max(1.0, float(tokens.mean())))
