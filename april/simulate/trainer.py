"""A trainer on virtual time: where it is, how long it trains a batch, and when it wants another."""

from __future__ import annotations

import math
from collections import deque
from enum import StrEnum

from april.core.batch import Batch


class Placement(StrEnum):
    """Where the trainer's GPUs are."""

    COLOCATED = "colocated"
    """They are the engines', which stand still while it trains."""
    SEPARATE = "separate"
    """They are others."""


class SimulatedTrainer:
    """Trains the batches that it takes one after the other; each ends with a weight update.

    Args:
        train_s: seconds per batch.
        fetch_ahead: batches that it asks for before it has trained the one it works on; 0: it asks after the update.
    """

    def __init__(self, train_s: float, fetch_ahead: int) -> None:
        self._train_s, self._fetch_ahead = train_s, fetch_ahead
        self._batches: deque[Batch] = deque()
        self.ends_s = math.inf
        """Time at which the batch that it trains is done; inf while it waits for one."""

    @property
    def wants_more(self) -> bool:
        """It waits for a batch, or asks for one before it is done with those it has."""
        return len(self._batches) <= self._fetch_ahead

    def take(self, batch: Batch, now: float) -> None:
        """A batch was delivered."""
        self._batches.append(batch)
        if len(self._batches) == 1:
            self.ends_s = now + self._train_s

    def trained(self) -> Batch:
        """The batch that is done; the next one, if there is one, begins at the same instant."""
        done = self._batches.popleft()
        self.ends_s = self.ends_s + self._train_s if self._batches else math.inf
        return done
