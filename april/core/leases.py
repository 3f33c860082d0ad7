"""Batches that are out: delivered, and not yet trained. They say at which version the next batch will be trained.

Each batch that is out brings one weight update, in the order of delivery: with u updates made and ``out`` batches out,
the next batch is trained at version u + out. A delivery moves that version by one, the update of a batch does not, so
one rule holds for trainers that wait for each batch and for those that fetch ahead.
"""

from __future__ import annotations

from collections.abc import Iterable

from april.core.tape import SegmentKind
from april.core.types import NO_DEADLINE, Sample
from april.core.versions import PolicyVersion, VersionClock

MOST_OUT = 64
"""Batches that may be out whatever ``max_staleness`` says: each is kept until it is trained."""


class Leases:
    """The batches that are out, and how old tokens are at the version at which the next batch is trained."""

    def __init__(self, clock: VersionClock, max_staleness: int) -> None:
        self._clock = clock
        self._configured = max_staleness
        self.bound = max_staleness
        """Of what is drawn from now on; it may be lowered while the run goes on."""
        self.batches: dict[int, tuple[Sample, ...]] = {}
        """Samples of every batch that is delivered and not committed, in the order of delivery."""
        self._generated = self._stale = self._oldest = 0

    def __len__(self) -> int:
        """Batches that are out."""
        return len(self.batches)

    @property
    def lowered(self) -> int:
        """The bound, if it was lowered; else none of its own."""
        return self.bound if self.bound < self._configured else NO_DEADLINE

    @property
    def full(self) -> bool:
        """So many batches are out that whatever is generated now is too old when it is trained."""
        return len(self.batches) > min(self.bound, MOST_OUT)

    def why_full(self) -> str:
        """For the trainer, where :attr:`full`."""
        newest = max(self.batches)
        return (
            f"train first: {len(self.batches)} batches are out (delivered and not trained; the newest is {newest}), "
            f"and no more than {min(self.bound, MOST_OUT)} weight updates may come between generation and training "
            f"(max_staleness, at most {MOST_OUT}). Call weight_update() after each batch, "
            "weight_update(trained=batch.id) if one update trains several, or commit(batch.id) after a batch that no "
            "update follows"
        )

    def age(self, version: PolicyVersion) -> int:
        """Weight updates between ``version`` and the training of the next batch."""
        return self._clock.staleness(version) + len(self.batches)

    def commit(self, batch_ids: Iterable[int]) -> None:
        """These batches were trained at the present version; what that means for their tokens is recorded."""
        for batch_id in batch_ids:
            for sample in self.batches.pop(batch_id):
                for segment in sample.tape.segments:
                    if segment.kind is SegmentKind.GENERATED:
                        age = self._clock.staleness(segment.version)
                        self._generated += segment.count
                        self._stale += segment.count if age else 0
                        self._oldest = max(self._oldest, age)

    def through(self, batch_id: int) -> list[int]:
        """The batches that are out, up to ``batch_id``."""
        return [b for b in self.batches if b <= batch_id]

    def recorded(self) -> dict[str, float]:
        """Of the batches committed since the last call: what their tokens' ages were when they were trained."""
        if not self._generated:
            return {}
        record = {
            "committed_staleness_max": float(self._oldest),
            "committed_off_policy_share": self._stale / self._generated,
        }
        self._generated = self._stale = self._oldest = 0
        return record
