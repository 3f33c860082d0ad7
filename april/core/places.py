"""Counts the free places (slots for requests in flight over all engines), and how many rollout functions may start.

``over_sampler`` decides which work takes a free place, and how many prompts to draw if there is no such work;
``EngineTable.pick`` chooses the engine.
"""

from __future__ import annotations

import math

from april.core.attempt_book import AttemptBook
from april.core.types import Sample, SampleId


class Places:
    """Counts the places of training and of evaluations, and how many are free.

    Each attempt (engine request) takes a place until it has ended. A started rollout function reserves a place until
    its first call or its end, so that no more functions are started than can generate. Reservations only limit how many
    functions start; calls ignore them, so a function that waits for a tool or a client delays no call. Evaluations
    ignore the reservations of training. They have places of their own in addition to training's ``total``, and may also
    use the places that training leaves free.

    ``share`` is the number of places that only evaluations take, as a share of ``total``. It is also the share of the
    requests in flight up to which evaluations go before training when the engines are full.
    """

    def __init__(self, total: int, share: float, attempts: AttemptBook) -> None:
        self._attempts, self._share = attempts, share
        self.reserved: set[SampleId] = set()
        """Ids of samples whose function was started and has not made a call yet."""
        self.reserved_by_evaluations = 0
        """Number of evaluations' samples in ``reserved``."""
        self.change(total)

    @property
    def free(self) -> int:
        """Number of requests of training that may be sent; below 0 while too many are in flight."""
        return self.total - self.taken

    @property
    def taken(self) -> int:
        """Number of training's places in use: by training, and by evaluations that have no free place of their own."""
        attempts = self._attempts
        beyond = len(attempts.of_evaluations) - self.own
        return len(attempts.in_flight) + beyond if beyond > 0 else len(attempts.in_flight)

    @property
    def free_for_evaluations(self) -> int:
        """Number of requests of evaluations that may be sent."""
        attempts = self._attempts
        return max(self.total - len(attempts.in_flight), self.own) - len(attempts.of_evaluations)

    @property
    def evaluations_have_their_share(self) -> bool:
        """True if the next request would give evaluations more than their share of the requests in flight."""
        return len(self._attempts.of_evaluations) >= self._share * (len(self._attempts) + 1)

    @property
    def share_of_evaluations(self) -> int:
        """Number of the requests in flight that may belong to evaluations when the engines are full."""
        return math.ceil(self._share * len(self._attempts))

    def startable(self, *, evaluation: bool = False) -> int:
        """Return how many rollout functions of training, or of an evaluation, may be started."""
        if evaluation:
            return self.free_for_evaluations - self.reserved_by_evaluations
        training = len(self._attempts.in_flight) + len(self.reserved) - self.reserved_by_evaluations
        evaluations = len(self._attempts.of_evaluations) + self.reserved_by_evaluations
        return self.total - training - max(evaluations - self.own, 0)

    def reserve(self, sample: Sample) -> None:
        """Reserve a place for a sample whose rollout function is being started."""
        self.reserved.add(sample.id)
        self.reserved_by_evaluations += sample.evaluation is not None

    def change(self, total: int) -> None:
        """Set the number of training's places."""
        self.total = total
        self.own = math.ceil(round(self._share * total, 9))
        """Number of places that only evaluations take."""
        self.max_taken = max(total, self.taken)
        """Largest valid ``taken``, which may exceed ``total``: requests go on when ``total`` is lowered."""

    def release(self, sample: Sample) -> None:
        """Release the sample's reservation, if it has one: its function made a call or ended."""
        if sample.id in self.reserved:
            self.reserved.remove(sample.id)
            self.reserved_by_evaluations -= sample.evaluation is not None
