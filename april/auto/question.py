"""What a run asks of the simulation, and what it is answered: plain data, as JSON between two processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from april.core.events import WorkChanged
from april.core.settings import CoreSettings
from april.core.types import OnStale, Refill, Work

GAIN = 0.03
"""By less than this faster than what is in work is not worth a change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InWork:
    """How much is in work; the names are those of the configuration."""

    over_sampling_batch_size: int
    refill: Refill
    max_in_flight: int
    group_quorum: float

    @classmethod
    def of(cls, settings: CoreSettings) -> InWork:
        """As it is now."""
        return cls(**{str(name): getattr(settings, name) for name in Work})

    def change(self, settings: CoreSettings) -> WorkChanged:
        """How to get there, as far as that is auto."""
        return WorkChanged(**{str(name): getattr(self, name) for name in settings.auto})

    def __str__(self) -> str:
        quorum = f", group_quorum {self.group_quorum:g}" if self.group_quorum != 1.0 else ""
        if self.refill is Refill.NONE:
            return f"N' = {self.over_sampling_batch_size:.0f}{quorum}"
        return f"refill: {self.refill}, {self.max_in_flight:.0f} in flight{quorum}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A run as it is, and what may be changed in it.

    Attributes:
        groups, samples: N groups of n responses in a batch.
        max_response_len, prompt_len: tokens.
        max_staleness, on_stale, max_off_policy_share: what the answer must stay within.
        continuous: generation goes on while the trainer trains.
        train_s: seconds that a batch takes the trainer.
        fetch_ahead: batches that it asks for before it is done with one.
        engines: how many, all like the one whose cost this is.
        cost: (base_s, per_sequence_s, per_kv_token_s, per_prefill_token_s) of :class:`.decode_cost.DecodeCost`.
        lengths: response tokens, those of a group together.
        places: most samples in flight that are possible.
        below: so many in flight, or more, are not to be tried now; None: any number may.
        told: the cost is known beyond the number in flight that was seen; else it is the least that it may be there.
        free: settings that may be changed.
        now: how much is in work.
    """

    groups: int
    samples: int
    max_response_len: int
    prompt_len: int
    max_staleness: int
    on_stale: OnStale
    max_off_policy_share: float
    continuous: bool
    train_s: float
    fetch_ahead: int
    engines: int
    cost: tuple[float, float, float, float]
    lengths: list[list[int]]
    places: int
    below: int | None = None
    told: bool = True
    free: tuple[Work, ...]
    now: InWork

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    def check(self, answer: Answer) -> None:
        """Raise ValueError for what is no answer to this: the core takes what it is told."""
        best, free = answer.best, self.free
        figures = (answer.tokens_per_s, answer.off_policy_share, answer.speed_up, answer.share_now)
        wrong, most = "", (self.max_staleness + 1) * self.groups
        if not all(math.isfinite(figure) for figure in figures):
            wrong = "what it expects is no number"
        elif fixed := [name for name in Work if name not in free and getattr(best, name) != getattr(self.now, name)]:
            wrong = f"{fixed[0]} is not to be chosen"
        elif best.refill not in (self.now.refill, Refill.NONE, Refill.SAMPLE):
            wrong = "refill"
        elif best == self.now:  # whatever it is
            return
        elif Work.OVER_SAMPLING in free and not self.groups <= best.over_sampling_batch_size <= most:
            wrong = "over_sampling_batch_size"
        elif Work.IN_FLIGHT in free and not 1 <= best.max_in_flight <= self.places:
            wrong = "max_in_flight"
        elif not 0.0 < best.group_quorum <= 1.0:
            wrong = "group_quorum"
        if wrong:
            raise ValueError(f"the answer cannot be ({wrong}): {answer}")

    @classmethod
    def decode(cls, data: bytes) -> Question:
        """From JSON; raises msgspec.ValidationError."""
        return msgspec.json.decode(data, type=cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is best, and what is expected of it.

    Attributes:
        best: how much should be in work.
        tokens_per_s: trained, expected of it, all engines together.
        off_policy_share: of the trained tokens, expected of it.
        speed_up: its tokens per second over those expected of what is in work now.
        share_now: off-policy share expected of that.
    """

    best: InWork
    tokens_per_s: float
    off_policy_share: float
    speed_up: float
    share_now: float

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Answer:
        """From JSON; raises msgspec.ValidationError."""
        return msgspec.json.decode(data, type=cls)
