"""Partial-rollout buffer: the versioned store of everything that april holds.

Every group that was drawn and is not settled is in here, whatever its samples are doing: partials, finished
siblings, surplus. The buffer knows what is too old, what is held, and when it is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

from april.core.completion_monitor import Unit
from april.core.settings import CoreSettings
from april.core.tape import SegmentKind
from april.core.types import NO_DEADLINE, SETTLED, Group, OnStale, OnWeightUpdate, Sample
from april.core.versions import PolicyVersion, VersionClock

RESUBMIT = OnWeightUpdate.RESUBMIT
MOST_OUT = 64
"""Batches that may be out whatever ``max_staleness`` says: each is kept until it is trained."""


class Leases:
    """The batches that are out: delivered, and not yet trained. They say at which version the next one is trained.

    Each of them brings one weight update, in the order of delivery: with u updates made, the next batch is trained at
    version u + out. A delivery moves that version by one, the update of a batch does not, so one rule holds for
    trainers that wait for each batch and for those that fetch ahead.
    """

    def __init__(self, clock: VersionClock, max_staleness: int) -> None:
        self._clock = clock
        self._configured = max_staleness
        self.bound = max_staleness
        """The bound for prompts drawn from now on; it may be lowered while the run goes on."""
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
        out = len(self.batches)
        return out > self.bound or out > MOST_OUT

    def why_full(self) -> str:
        """Tell the trainer why no batch can be generated, where :attr:`full`."""
        newest = max(self.batches)
        return (
            f"train first: {len(self.batches)} batches are out (delivered and not trained; the newest is {newest}), "
            f"and no more than {min(self.bound, MOST_OUT)} weight updates may come between generation and training "
            f"(max_staleness, at most {MOST_OUT}). Call weight_update() after each batch, "
            "weight_update(trained=batch.id) if one update trains several, or commit(batch.id) after a batch that no "
            "update follows"
        )

    @property
    def current(self) -> PolicyVersion:
        """The present version."""
        return self._clock.current

    def age(self, version: PolicyVersion) -> int:
        """Weight updates between ``version`` and the training of the next batch."""
        return self._clock.staleness(version) + len(self.batches)

    def commit(self, batch_ids: Iterable[int]) -> None:
        """Record the tokens' ages of batches that were trained at the present version, and forget the batches."""
        for batch_id in batch_ids:
            for sample in self.batches.pop(batch_id):
                for segment in sample.segments:
                    if segment.kind is SegmentKind.GENERATED:
                        age = self._clock.staleness(segment.version)
                        self._generated += segment.count
                        self._stale += segment.count if age else 0
                        self._oldest = max(self._oldest, age)

    def through(self, batch_id: int) -> list[int]:
        """The batches that are out, up to ``batch_id``."""
        return [b for b in self.batches if b <= batch_id]

    def recorded(self) -> dict[str, float]:
        """Take the ages at training of the tokens in the batches committed since the last call."""
        if not self._generated:
            return {}
        record = {
            "committed_staleness_max": float(self._oldest),
            "committed_off_policy_share": self._stale / self._generated,
        }
        self._generated = self._stale = self._oldest = 0
        return record


AHEAD = 8
"""Most groups held, in units of the work that is wanted at a time, whatever ``max_staleness`` allows."""


ROWS_COUNTED_AGAIN = 16
"""Bytes of rows are counted when such a part of the held tokens has come or gone: counting looks at every sample."""


class Idle(StrEnum):
    """Reasons for which a place stands empty."""

    UPDATE = "update"
    """A weight update: what was in flight ends, engines pause, load and resume."""
    PAUSE = "pause"
    """Generation is paused, to load a state or by a trainer that changes the weights itself (AReaL)."""
    EVALUATION = "evaluation"
    """An evaluation has the place, or training waits for its end."""
    TRAINER = "trainer"
    """No batch is asked for."""
    BOUND = "bound"
    """``max_staleness``: with more work, some could not be trained in time."""
    STOP = "stop"
    """The batch is complete; what else is in flight ends."""
    ENGINES = "engines"
    """Work waits, and no engine takes it: full by its own measure, at rest, or quarantined."""
    FUNCTIONS = "functions"
    """A function has the place and has asked for nothing yet, or nothing is left but functions, to complete a batch."""
    PROMPTS = "prompts"
    """Prompts are being drawn, or have ended."""
    HELD = "held"
    """So much is held already: ``max_held_tokens``, ``max_extras_bytes``, or several times what is wanted in work."""
    OVER_SAMPLING = "over_sampling"
    """N' groups are in work, and the refill mode adds none."""


class PartialBuffer:
    """Groups by number, in the order in which they were drawn."""

    def __init__(self, settings: CoreSettings, leases: Leases) -> None:
        self.settings = settings
        self._leases = leases
        self.groups: dict[int, Group] = {}
        self.limit = Idle.BOUND
        """The limit of the last :meth:`room`."""
        self.batch = settings.target
        """The units of a batch."""
        self._whole_groups = settings.whole_groups
        self._per_group = settings.units_per_group
        self._rows_counted = 0, 0
        """Held tokens, and bytes of held rows, when these were counted last."""
        self.units = 0
        """Held units: groups, or with a quorum samples that are neither delivered nor given up."""

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups.values())

    def add(self, group: Group) -> None:
        """A prompt was drawn."""
        self.groups[group.id] = group
        self.units += 1 if self._whole_groups else group.held

    def remove(self, group: Group) -> None:
        """A group was settled."""
        del self.groups[group.id]
        self.units -= self._whole_groups

    def changes(self, group: Group, by: int) -> None:
        """So many more or fewer samples of a group are held."""
        group.held += by
        if not self._whole_groups:
            self.units += by

    def samples(self) -> Iterator[Sample]:
        """Every held sample, oldest group first."""
        for group in self.groups.values():
            for sample in group.samples:
                if sample.state not in SETTLED:
                    yield sample

    @property
    def attachment_bytes(self) -> int:
        """Bytes in memory of all attachments that are held, each once."""
        if not self.settings.attachments:
            return 0
        attached = (p.attachment for s in self.samples() for chain in s.chains for p in chain.attached)
        return sum({a.digest: a.held_bytes for a in attached}.values())

    @property
    def extras_bytes(self) -> int:
        """Bytes of all rows that are held."""
        if not self.settings.extras:
            return 0
        return sum(rows.nbytes for s in self.samples() for chain in s.chains for rows in chain.extras.values())

    def room(self, held_tokens: int) -> int:
        """Prompts that may be drawn beyond what the step cannot do without; 0 while ``max_held_tokens`` or
        ``max_extras_bytes`` is reached."""
        most = self.settings.max_held_tokens
        if (most is not None and held_tokens >= most) or (self.settings.extras and self._full_of_rows(held_tokens)):
            self.limit = Idle.HELD
            return 0
        capacity, self.limit = self._most()
        return self._free(capacity)

    def _full_of_rows(self, held_tokens: int) -> bool:
        """Return whether ``max_extras_bytes`` are held, by a count that is made anew when tokens have come or gone."""
        most = self.settings.max_extras_bytes
        if most is None:
            return False
        tokens, _ = self._rows_counted
        if abs(held_tokens - tokens) * ROWS_COUNTED_AGAIN >= tokens:
            self._rows_counted = held_tokens, self.extras_bytes
        return self._rows_counted[1] >= most

    @property
    def fits(self) -> int:
        """Prompts that may be drawn at all: with more, some could not be delivered in time."""
        return self._free(self.capacity)

    def _free(self, capacity: int) -> int:
        return max(0, capacity - -(-self.units // self._per_group))

    @property
    def capacity(self) -> int:
        """Most groups to be held, in every mode: more could not all be delivered in time."""
        return self._most()[0]

    def _most(self) -> tuple[int, Idle]:
        """The capacity, and what limits it."""
        s = self.settings
        if self._overbooked:
            return self._wanted, Idle.OVER_SAMPLING
        bound = min(self._leases.bound, s.max_age)
        in_time = max(bound - len(self._leases) + 1, 1) * s.rollout_batch_size
        ahead = AHEAD * s.groups_at_a_time
        return (in_time, Idle.BOUND) if in_time <= ahead else (ahead, Idle.HELD)

    @property
    def _wanted(self) -> int:
        s = self.settings
        return s.groups_at_a_time if s.on_stale is OnStale.DROP else s.groups_wanted

    @property
    def _overbooked(self) -> bool:
        """The settings want more in work than can be delivered in time: what they lose by that they want to lose."""
        s = self.settings
        return s.on_stale is not OnStale.FINISH and self._wanted > (s.delivery_bound + 1) * s.rollout_batch_size

    def age(self, sample: Sample) -> int:
        """Weight updates between the sample's oldest token and the training of the next batch; 0 without tokens."""
        oldest = self.oldest(sample)
        return 0 if oldest is None else self._leases.age(oldest)

    def oldest(self, sample: Sample) -> PolicyVersion | None:
        """Version of its oldest token, those on running attempts included that a weight update has not cut."""
        chains = sample.chains
        oldest = chains[0].tape.oldest_version if len(chains) == 1 else sample.oldest_version  # a call less
        if self.settings.on_weight_update is RESUBMIT or (sent := sample.submitted_under) is None:
            return oldest
        return oldest if sent == self._leases.current else min(sent, oldest or sent)

    @property
    def horizon(self) -> int:
        """Slack from which on a group sets no deadline; with ``on_stale: drop`` only the last chance does."""
        s = self.settings
        if s.on_stale is OnStale.DROP:
            return 1
        # what is held is delivered within so many steps, whatever max_staleness is
        return max(1, min(s.delivery_bound - len(self._leases), self.units // self.batch + 1))

    def slack(self, unit: Unit) -> int:
        """Batches after which its oldest token is too old; without tokens, as if that were of the present version."""
        return self.bound(unit) - max(len(self._leases.batches), *map(self.age, unit.members))

    def bound(self, unit: Unit) -> int:
        """Most weight updates between its oldest token and its training: that of when it was drawn."""
        group = unit if isinstance(unit, Group) else unit.group
        return min(group.bound, self.settings.max_staleness)

    def slacks(self) -> Iterator[tuple[Unit, int]]:
        """Each unit with the number of batches after which it must have been delivered."""
        s = self.settings
        for group in self:
            in_time = s.max_age - self._leases.age(group.drawn_under)
            for unit in (group,) if s.whole_groups else group.members:
                slack, by_tokens = in_time, self.slack(unit)
                # drop gives up what would be waited for; what is lost already is not, where that is no accident
                if s.on_stale is not OnStale.DROP and (by_tokens >= 0 or not self._overbooked):
                    slack = min(slack, by_tokens)
                if s.on_stale is not OnStale.FINISH and any(x.resumes > s.max_resumes for x in unit.members):
                    slack = 0  # on_stale: finish has its own deadlines, which this would overrule
                yield unit, slack

    def goes_first(self, unit: Unit) -> int:
        """Order of complete units that the step does not owe: where steps do not wait, what is too old soonest."""
        return 0 if self.settings.on_stale is OnStale.FINISH else self.slack(unit)

    def too_old(self) -> list[Sample]:
        """Samples that exceed max_staleness, where the policy acts on held samples (restart, drop)."""
        if self.settings.on_stale not in (OnStale.RESTART, OnStale.DROP):
            return []
        return [s for s in self.samples() if self.age(s) > self.bound(s)]
