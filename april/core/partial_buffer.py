"""Partial-rollout buffer: the versioned store of everything that april holds.

Every group that was drawn and is not settled is in here, whatever its samples are doing: partials, finished
siblings, surplus. The buffer knows what is too old, what is held, and when it is full.
"""

from __future__ import annotations

from collections.abc import Iterator

from april.core.settings import CoreSettings
from april.core.types import Group, OnStale, Sample
from april.core.versions import VersionClock

UNBOUNDED = 1 << 30


class PartialBuffer:
    """Groups by number, in the order in which they were drawn."""

    def __init__(self, settings: CoreSettings, clock: VersionClock) -> None:
        self._settings = settings
        self._clock = clock
        self.groups: dict[int, Group] = {}

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups.values())

    def add(self, group: Group) -> None:
        """A prompt was drawn."""
        self.groups[group.id] = group

    def remove(self, group: Group) -> None:
        """A group was settled."""
        del self.groups[group.id]

    def samples(self) -> Iterator[Sample]:
        """Every held sample, oldest group first."""
        for group in self.groups.values():
            yield from group.samples

    def room(self, held_tokens: int) -> int:
        """Prompts that may be drawn beyond what the step cannot do without.

        0 while ``max_held_tokens`` is reached. With ``on_stale: finish`` at most (max_staleness + 1) * N
        groups are held: more could not all be delivered in time.
        """
        s = self._settings
        if s.max_held_tokens is not None and held_tokens >= s.max_held_tokens:
            return 0
        if s.on_stale is not OnStale.FINISH:
            return UNBOUNDED
        return max(0, (s.delivery_bound + 1) * s.rollout_batch_size - len(self))

    def staleness(self, sample: Sample) -> int:
        """Weight updates since the sample's oldest token; 0 without tokens."""
        oldest = sample.tape.oldest_version
        return 0 if oldest is None else self._clock.staleness(oldest)

    @property
    def horizon(self) -> int:
        """Slack from which on a group sets no deadline: with ``on_stale: finish`` steps ahead are planned."""
        s = self._settings
        return max(1, s.delivery_bound) if s.on_stale is OnStale.FINISH else 1

    def slacks(self) -> Iterator[tuple[Group, int]]:
        """Each group with the number of weight updates after which it must have been delivered."""
        s = self._settings
        for group in self:
            slack = s.max_age - self._clock.staleness(group.drawn_under)
            if s.on_stale is OnStale.FINISH:
                slack = min(slack, s.max_staleness - max(self.staleness(sample) for sample in group.samples))
            elif any(sample.resumes > s.max_resumes for sample in group.samples):
                slack = 0  # on_stale: finish has its own deadlines, which this would overrule
            yield group, slack

    def too_old(self) -> list[Sample]:
        """Samples that exceed max_staleness, where the policy acts on held samples (restart, drop)."""
        if self._settings.on_stale not in (OnStale.RESTART, OnStale.DROP):
            return []
        limit = self._settings.max_staleness
        return [s for s in self.samples() if self.staleness(s) > limit]
