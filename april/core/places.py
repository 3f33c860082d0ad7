"""Counts the places for requests in flight over all engines, and how many rollout functions may start.

``over_sampler`` decides which work takes a free place, and how many prompts to draw for places without work.
"""

from __future__ import annotations

from april.core.attempt_book import AttemptBook
from april.core.types import Sample, SampleId


class Places:
    """Counts the places (slots for requests in flight), and how many are free.

    Each attempt takes a place until it has ended. A started rollout function has a place reserved until its first call
    or its end, so that no more functions are started than can generate. Reservations limit the start of functions, not
    calls, so a function may wait for a tool or a client for any time. Evaluations ignore the reservations of training.
    """

    def __init__(self, total: int, attempts: AttemptBook) -> None:
        self.total = self.max_taken = total
        """``max_taken`` is the largest valid ``taken``: requests from before ``total`` was lowered are not cut."""
        self._attempts = attempts
        self.reserved: set[SampleId] = set()
        """Ids of samples whose function was started and has not made a call yet."""
        self._of_evaluations = 0
        """Number of samples in ``reserved`` that belong to evaluations."""

    @property
    def free(self) -> int:
        """Number of requests that may be sent; below 0 while too many are in flight."""
        return self.total - self.taken

    @property
    def taken(self) -> int:
        """Number of requests in flight, including evaluations."""
        attempts = self._attempts
        return len(attempts.in_flight) + len(attempts.of_evaluations)

    def startable(self, *, evaluation: bool = False) -> int:
        """Return how many rollout functions of training, or of an evaluation, may be started."""
        return self.free - (self._of_evaluations if evaluation else len(self.reserved))

    def reserve(self, sample: Sample) -> None:
        """Reserve a place for a sample whose rollout function is being started."""
        self.reserved.add(sample.id)
        self._of_evaluations += sample.evaluation is not None

    def change(self, total: int) -> None:
        """Set the number of places."""
        self.total, self.max_taken = total, max(total, self.taken)

    def release(self, sample: Sample) -> None:
        """Release the sample's reservation, if it has one: its function made a call or ended."""
        if sample.id in self.reserved:
            self.reserved.remove(sample.id)
            self._of_evaluations -= sample.evaluation is not None
