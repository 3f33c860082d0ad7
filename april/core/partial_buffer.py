"""Implements the partial-rollout buffer: it stores every group (a prompt with its samples) until delivery or drop.

The samples may be partial, finished, or surplus from an earlier step. The buffer computes which samples are too old and
how many more prompts may be drawn. :class:`Leases` keeps the batches that are delivered and not yet trained.
``AttemptBook.open`` makes the requests that continue partial samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import cache

from april.core.completion_monitor import Unit
from april.core.settings import CoreSettings
from april.core.tape import SegmentKind
from april.core.types import NO_DEADLINE, SETTLED, Group, OnStale, OnWeightUpdate, Sample
from april.core.versions import PolicyVersion, VersionClock

RESUBMIT = OnWeightUpdate.RESUBMIT
MOST_OUT = 64
"""Maximum number of delivered, untrained batches even if ``max_staleness`` allows more, as each takes memory."""


class Leases:
    """Keeps the batches that are out (delivered and not yet trained), and computes how old tokens will be in training.

    One weight update is expected after each batch, in the order of delivery. So after u updates and with b batches out,
    the next batch is trained at version u + b, whether the trainer waits for each batch or fetches batches ahead.
    """

    def __init__(self, clock: VersionClock, max_staleness: int) -> None:
        self._clock = clock
        self._configured = max_staleness
        self.bound = max_staleness
        """Limit on staleness for prompts drawn from now on; it may be lowered during a run."""
        self.batches: dict[int, tuple[Sample, ...]] = {}
        """Samples of every batch that is out, by batch id, in the order of delivery."""
        self._generated = self._stale = self._oldest = 0

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def lowered(self) -> int:
        """The limit on staleness if it was lowered during the run; otherwise NO_DEADLINE."""
        return self.bound if self.bound < self._configured else NO_DEADLINE

    @property
    def full(self) -> bool:
        """True if so many batches are out that tokens generated now would be too old when they are trained."""
        out = len(self.batches)
        return out > self.bound or out > MOST_OUT

    def why_full(self) -> str:
        """Return the error text for a trainer that asks for a batch while :attr:`full` is True."""
        newest = max(self.batches)
        return (
            f"{len(self.batches)} batches are delivered but not trained (the newest is {newest}), and at most "
            f"{min(self.bound, MOST_OUT)} weight updates may come between generation and training (max_staleness, at "
            f"most {MOST_OUT}). Train first: call weight_update() after each batch, weight_update(trained=batch.id) if "
            "one update trains several, or commit(batch.id) after a batch without a weight update"
        )

    @property
    def current(self) -> PolicyVersion:
        return self._clock.current

    def age(self, version: PolicyVersion) -> int:
        """Return the number of weight updates between ``version`` and the training of the next batch."""
        return self._clock.staleness(version) + len(self.batches)

    def commit(self, batch_ids: Iterable[int]) -> None:
        """Remove batches that were trained at the present version, after recording the ages of their tokens."""
        for batch_id in batch_ids:
            for sample in self.batches.pop(batch_id):
                for segment in sample.segments:
                    if segment.kind is SegmentKind.GENERATED:
                        age = self._clock.staleness(segment.version)
                        self._generated += segment.count
                        self._stale += segment.count if age else 0
                        self._oldest = max(self._oldest, age)
                sample.release_tokens()

    def delivered_through(self, batch_id: int) -> list[int]:
        """Return the ids of the batches that are out, up to and including ``batch_id``."""
        return [b for b in self.batches if b <= batch_id]

    def recorded(self) -> dict[str, float]:
        """Return metrics on the ages of the tokens in batches committed since the last call, and reset them."""
        if not self._generated:
            return {}
        record = {
            "committed_staleness_max": float(self._oldest),
            "committed_off_policy_share": self._stale / self._generated,
        }
        self._generated = self._stale = self._oldest = 0
        return record


AHEAD = 8
"""Limit on held groups, as a multiple of ``groups_at_a_time``, even if ``max_staleness`` allows more."""
ROWS_COUNTED_AGAIN = 16
"""The bytes of extras (per-token arrays) are recounted once the number of held tokens has changed by a share of
1 / ROWS_COUNTED_AGAIN, and not more often, as a recount visits every sample."""


class IdleCause(StrEnum):
    """Reasons why a place (a slot for a request in flight) is unused."""

    UPDATE = "update"
    """A weight update is running: requests end, engines pause, load and resume."""
    PAUSE = "pause"
    """Generation is paused, to load a state or for a trainer that changes the weights itself (AReaL)."""
    EVALUATION = "evaluation"
    """An evaluation uses the place, or training waits for it to end."""
    TRAINER = "trainer"
    """The trainer has not asked for a batch."""
    BOUND = "bound"
    """``max_staleness`` allows no more work, as more could not be trained in time."""
    STOP = "stop"
    """The batch is complete, and the remaining requests are being ended."""
    ENGINES = "engines"
    """Work is queued, but every engine has its maximum of requests, pauses because it was busy, or is quarantined."""
    FUNCTIONS = "functions"
    """A rollout function that has made no request yet holds the place, or the batch waits only for user functions."""
    PROMPTS = "prompts"
    """Prompts are being drawn, or there are no more prompts."""
    HELD = "held"
    """The limit of undelivered work (``max_held_tokens``, ``max_extras_bytes`` or :data:`AHEAD`) is reached."""
    OVER_SAMPLING = "over_sampling"
    """As many groups are in progress as over-sampling asks for, and the refill mode adds no more."""


class PartialBuffer:
    """Holds the undelivered groups by number, in the order of drawing, and limits their number.

    A unit of a batch is a group or, with a group quorum below 1, a sample. With tail batching, a group that has
    begun and is not delivered at the end of its round (step) is put aside: it loses its tokens and begins again in a
    *long round*, which generates only such groups.
    """

    def __init__(self, settings: CoreSettings, leases: Leases) -> None:
        self.settings = settings
        self._leases = leases
        self.groups: dict[int, Group] = {}
        self.aside: dict[int, Group] = {}
        """The groups in :attr:`groups` that were put aside and wait for a long round; they have no tokens."""
        self.unbegun: dict[int, Group] = {}
        """The groups in :attr:`groups` whose round ended before they began; they wait for the next short round."""
        self.limit_cause = IdleCause.BOUND
        """Reason for the limit that the last call of :meth:`room` applied."""
        self.batch = settings.target
        """Number of units in a batch: groups or, with a group quorum below 1, samples."""
        self._whole_groups = settings.whole_groups
        self._per_group = settings.units_per_group
        self._rows_counted = 0, 0
        """(Held tokens, bytes of held extras) when the extras were last counted."""
        self.units = 0
        """Number of units of the present round that are neither delivered nor dropped."""

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups.values())

    def add(self, group: Group) -> None:
        self.groups[group.id] = group
        self.units += 1 if self._whole_groups else group.held

    def remove(self, group: Group) -> None:
        """Remove a group whose samples are all delivered or dropped."""
        del self.groups[group.id]
        if self.in_round(group):
            self.units -= self._whole_groups
        else:
            self._waiting_like(group).pop(group.id)

    def put_aside(self, group: Group, *, begun: bool) -> None:
        """Let a group without tokens wait for a later round: a long round if it had ``begun``, else a short round."""
        group.put_aside = begun
        self._waiting_like(group)[group.id] = group
        self.units -= 1

    def _waiting_like(self, group: Group) -> dict[int, Group]:
        return self.aside if group.put_aside else self.unbegun

    def in_round(self, group: Group) -> bool:
        """Return True if the present round generates the group, False if the group waits for a later round."""
        return group.id not in self._waiting_like(group)

    def next_waiting(self, *, long: bool, most: int) -> Group | None:
        """Move a waiting group into this round and return it; None if none waits or the round has ``most`` units.

        Groups that were put aside are used only if ``long`` is True.
        """
        waiting = self.aside or self.unbegun if long else self.unbegun
        if not waiting or self.units >= most:
            return None
        self.units += 1
        return waiting.pop(next(iter(waiting)))

    @property
    def in_long_round(self) -> bool:
        """True if the present round is a long round, or if it has no groups yet and those put aside fill a batch."""
        present = [group for group in self if self.in_round(group)]
        return any(group.put_aside for group in present) if present else len(self.aside) >= self.batch

    def change_held_count(self, group: Group, by: int) -> None:
        group.held += by
        group.oldest_known = False
        if not self._whole_groups:
            self.units += by

    def samples(self) -> Iterator[Sample]:
        """Yield every held sample, oldest group first."""
        for group in self.groups.values():
            for sample in group.samples:
                if sample.state not in SETTLED:
                    yield sample

    @property
    def attachment_bytes(self) -> int:
        """Bytes of memory that all held attachments take, each counted once."""
        if not self.settings.attachments:
            return 0
        attached = (p.attachment for s in self.samples() for chain in s.chains for p in chain.attached)
        return sum({a.digest: a.held_bytes for a in attached}.values())

    @property
    def extras_bytes(self) -> int:
        if not self.settings.extras:
            return 0
        return sum(rows.nbytes for s in self.samples() for chain in s.chains for rows in chain.extras.values())

    def room(self, held_tokens: int) -> int:
        """Return how many prompts may be drawn beyond the needs of the step.

        The result is 0 while ``max_held_tokens`` or ``max_extras_bytes`` is reached.
        """
        most = self.settings.max_held_tokens
        if (most is not None and held_tokens >= most) or (self.settings.extras and self._full_of_rows(held_tokens)):
            self.limit_cause = IdleCause.HELD
            return 0
        capacity, self.limit_cause = self._most()
        return self._free(capacity)

    def _full_of_rows(self, held_tokens: int) -> bool:
        """Return True if ``max_extras_bytes`` was reached at the latest count (see ROWS_COUNTED_AGAIN)."""
        most = self.settings.max_extras_bytes
        if most is None:
            return False
        tokens, _ = self._rows_counted
        if abs(held_tokens - tokens) * ROWS_COUNTED_AGAIN >= tokens:
            self._rows_counted = held_tokens, self.extras_bytes
        return self._rows_counted[1] >= most

    @property
    def fits(self) -> int:
        """Maximum number of prompts that may be drawn now without exceeding :attr:`capacity`."""
        return self._free(self.capacity)

    def _free(self, capacity: int) -> int:
        return max(0, capacity - -(-self.units // self._per_group))

    @property
    def capacity(self) -> int:
        """Maximum number of held groups; if there were more, some could not be delivered in time."""
        return self._most()[0]

    def _most(self) -> tuple[int, IdleCause]:
        """Return the capacity in groups, and the reason that limits it."""
        s = self.settings
        if self._overbooked:
            return self._wanted, IdleCause.OVER_SAMPLING
        bound = min(self._leases.bound, s.max_age)
        in_time = max(bound - len(self._leases) + 1, 1) * s.rollout_batch_size
        ahead = AHEAD * s.groups_at_a_time
        return (in_time, IdleCause.BOUND) if in_time <= ahead else (ahead, IdleCause.HELD)

    @property
    def _wanted(self) -> int:
        s = self.settings
        return s.groups_at_a_time if s.on_stale is OnStale.DROP else s.groups_wanted

    @property
    def _overbooked(self) -> bool:
        """True if the settings ask for more work than can be delivered in time, and so accept losing some of it."""
        s = self.settings
        return s.on_stale is not OnStale.FINISH and self._wanted > (s.delivery_bound + 1) * s.rollout_batch_size

    def age(self, sample: Sample) -> int:
        """Return the age, in weight updates, that the sample's oldest token has when the next batch is trained.

        The result is 0 for a sample without tokens.
        """
        oldest = self.oldest(sample)
        return 0 if oldest is None else self._leases.age(oldest)

    def oldest(self, sample: Sample) -> PolicyVersion | None:
        """Return the version of the sample's oldest token, including those of its requests in flight."""
        chains = sample.chains
        oldest = chains[0].tape.oldest_version if len(chains) == 1 else sample.oldest_version  # saves a call
        if self.settings.on_weight_update is RESUBMIT or (sent := sample.submitted_under) is None:
            return oldest
        return oldest if sent == self._leases.current else min(sent, oldest or sent)

    @property
    def horizon(self) -> int:
        """Slack (see :meth:`slack`) from which on a unit has no deadline; with ``on_stale: drop`` that is 1."""
        s = self.settings
        if s.on_stale is OnStale.DROP:
            return 1
        # all held units are delivered within this many steps, so larger slacks do not matter
        return max(1, min(s.delivery_bound - len(self._leases), self.units // self.batch + 1))

    def slack(self, unit: Unit, age: Callable[[PolicyVersion], int] | None = None) -> int:
        """Return the number of batches after which the unit's oldest token is too old.

        A unit without tokens counts as if its oldest token had the present version. ``age`` may be a cached
        ``Leases.age``, for callers that ask about many units.
        """
        oldest = self._oldest_of(unit)
        out = len(self._leases.batches)
        return self.bound(unit) - (out if oldest is None else max(out, (age or self._leases.age)(oldest)))

    def _oldest_of(self, unit: Unit) -> PolicyVersion | None:
        """Return the version of the unit's oldest token; groups cache the version, as each plan needs it."""
        if isinstance(unit, Sample):
            return self.oldest(unit)
        if not unit.oldest_known or self.settings.on_weight_update is not RESUBMIT:
            versions = [v for v in map(self.oldest, unit.members) if v is not None]
            unit.oldest, unit.oldest_known = max(versions, key=self._leases.age, default=None), True
        return unit.oldest

    def wrong_oldest(self, group: Group) -> str | None:
        """Describe the error if the version cached in ``group.oldest`` is wrong; None if it is right or not cached."""
        if not group.oldest_known or self.settings.on_weight_update is not RESUBMIT:
            return None
        ages = [self._leases.age(v) for v in map(self.oldest, group.members) if v is not None]
        kept = [] if group.oldest is None else [self._leases.age(group.oldest)]
        return None if kept == ([max(ages)] if ages else []) else f"its oldest token is not of version {group.oldest}"

    def bound(self, unit: Unit) -> int:
        """Return the limit on the unit's staleness that applied when its prompt was drawn."""
        group = unit if isinstance(unit, Group) else unit.group
        return min(group.bound, self.settings.max_staleness)

    def slacks(self) -> Iterator[tuple[Unit, int]]:
        """Yield each unit with the number of batches after which it must have been delivered."""
        s, age, whole = self.settings, cache(self._leases.age), self.settings.whole_groups
        for group in self:
            in_time = s.max_age - age(group.drawn_under)
            for unit in (group,) if whole else group.members:
                slack, by_tokens = in_time, self.slack(unit, age)
                # With on_stale: drop, old samples are discarded, not waited for. Samples that are too old already
                # have no deadline if the settings accept that some work is lost.
                if s.on_stale is not OnStale.DROP and (by_tokens >= 0 or not self._overbooked):
                    slack = min(slack, by_tokens)
                if s.on_stale is not OnStale.FINISH and any(x.resumes > s.max_resumes for x in unit.members):
                    slack = 0  # with on_stale: finish, such samples would come before those that are nearly too old
                yield unit, slack

    def delivery_order(self, unit: Unit) -> int:
        """Return the key that sorts complete units without a deadline: slack, or 0 with ``on_stale: finish``."""
        return 0 if self.settings.on_stale is OnStale.FINISH else self.slack(unit)

    def too_old(self) -> list[Sample]:
        """Return the samples older than max_staleness if ``on_stale`` is restart or drop; otherwise none.

        All uses of ``on_stale`` are listed in :class:`~april.core.types.OnStale`.
        """
        if self.settings.on_stale not in (OnStale.RESTART, OnStale.DROP):
            return []
        return [s for s in self.samples() if self.age(s) > self.bound(s)]
