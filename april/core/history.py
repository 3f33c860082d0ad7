"""What happened to each sample, for people: a bounded log, filtered by ``story(sample_id)``."""

from __future__ import annotations

from collections import deque

from april.core.types import WHOLE_GROUP, SampleId

HISTORY_EVENTS = 100_000
"""Enough for several steps of a large run; 16 to 32 MB, by what the notes say (measured)."""


class History:
    """Transitions as (event number, sample, what)."""

    def __init__(self, most: int | None = HISTORY_EVENTS) -> None:
        # flat, so that the garbage collector need not walk it
        self.log: deque[tuple[int, int, int, str]] = deque(maxlen=most)

    def note(self, event_number: int, sample: SampleId, what: str) -> None:
        """Remember one transition."""
        self.log.append((event_number, sample.group, sample.index, what))

    def story(self, sample: SampleId) -> str:
        """One line per transition of this sample and of its group, oldest first."""
        own, all_of_it = tuple(sample), (sample[0], WHOLE_GROUP)
        lines = [f"  event {n}: {what}" for n, *of, what in self.log if tuple(of) in (own, all_of_it)]
        return "\n".join([f"story of {sample}:", *(lines or ["  nothing remembered"])])
