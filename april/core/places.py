"""Places in flight: how many more requests may be sent, to whatever engine (which one: ``EngineTable.pick``).

Each call in flight has one, until its attempt is accounted for (also where its sample went on without it). A rollout
function that was started has one reserved until it asks for something or ends, so that no more are started than
can generate.
"""

from __future__ import annotations

from april.core.attempt_book import AttemptBook
from april.core.types import Sample, SampleId


class Places:
    """``max_in_flight`` of them."""

    def __init__(self, total: int, attempts: AttemptBook) -> None:
        self._total = total
        self._attempts = attempts
        self.reserved: set[SampleId] = set()
        """Samples whose function was started and has asked for nothing yet."""

    @property
    def free(self) -> int:
        """How many requests may be sent, or functions started."""
        attempts = self._attempts
        return self._total - len(attempts.in_flight) - len(attempts.of_evaluations) - len(self.reserved)

    def reserve(self, sample: Sample) -> None:
        """Its function is started."""
        self.reserved.add(sample.id)

    def give_back(self, sample: Sample) -> None:
        """Its function has asked for something, or is over; nothing happens if that was so before."""
        self.reserved.discard(sample.id)
