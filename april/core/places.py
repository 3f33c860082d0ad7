"""Places in flight: how many more requests may be sent, to whatever engine (which one: ``EngineTable.pick``).

Each call in flight has one, until its attempt is accounted for (also where its sample went on without it). A rollout
function that was started has one reserved until it asks for something or ends, so that no more are started than
can generate.
"""

from __future__ import annotations

from april.core.attempt_book import AttemptBook
from april.core.types import Sample, SampleId


class Places:
    """``total`` of them: ``max_in_flight``."""

    def __init__(self, total: int, attempts: AttemptBook) -> None:
        self.total = self.most = total
        """``most``: so many may be taken. What was sent before there were fewer places is not cut for that."""
        self._attempts = attempts
        self.reserved: set[SampleId] = set()
        """Samples whose function was started and has asked for nothing yet."""

    @property
    def free(self) -> int:
        """How many requests may be sent, or functions started; below 0 while more are taken than there are now."""
        return self.total - self.taken

    @property
    def taken(self) -> int:
        """How many are in use."""
        attempts = self._attempts
        return len(attempts.in_flight) + len(attempts.of_evaluations) + len(self.reserved)

    def change(self, total: int) -> None:
        """So many there are from now on."""
        self.total, self.most = total, max(total, self.taken)

    def reserve(self, sample: Sample) -> None:
        """Its function is started."""
        self.reserved.add(sample.id)

    def give_back(self, sample: Sample) -> None:
        """Its function has asked for something, or is over; nothing happens if that was so before."""
        self.reserved.discard(sample.id)
