"""The question of a run to the simulation, and the answer: plain data, as JSON between two processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from april.core.events import WorkChanged
from april.core.settings import CoreSettings
from april.core.types import OnStale, Refill, Work

GAIN = 0.03
"""Smallest relative gain in speed that is worth a change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InWork:
    """The settings of the amount of work; their names are those of the configuration."""

    over_sampling_batch_size: int
    refill: Refill
    max_in_flight: int
    group_quorum: float

    @classmethod
    def of(cls, settings: CoreSettings) -> InWork:
        """Return the present settings."""
        return cls(**{str(name): getattr(settings, name) for name in Work})

    def change(self, settings: CoreSettings) -> WorkChanged:
        """Return the change to these settings, as far as they are auto."""
        return WorkChanged(**{str(name): getattr(self, name) for name in settings.auto})

    def __str__(self) -> str:
        quorum = f", group_quorum {self.group_quorum:g}" if self.group_quorum != 1.0 else ""
        if self.refill is Refill.NONE:
            return f"N' = {self.over_sampling_batch_size:.0f}{quorum}"
        return f"refill: {self.refill}, {self.max_in_flight:.0f} in flight{quorum}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A run as it is, and the settings that may be changed.

    Attributes:
        groups, samples: N groups of n responses in a batch.
        max_response_len, prompt_len: lengths in tokens.
        max_staleness, on_stale, max_off_policy_share: limits of the answer.
        continuous: whether generation goes on while the trainer trains.
        train_s: training time of a batch, in seconds.
        fetch_ahead: number of batches that the trainer asks for before it is done with one.
        engines: number of engines, all with this cost.
        cost: (base_s, per_sequence_s, per_kv_token_s, per_prefill_token_s), see
            :class:`april.engines.simulated.decode_cost.DecodeCost`.
        lengths: response tokens, by group.
        places: largest possible number of samples in flight.
        below: number in flight from which on nothing may be tried now; None means no limit.
        told: whether the cost is known beyond the number in flight that was seen; else it is the least it may be there.
        free: settings that may be changed.
        now: present settings.
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

    def check(self, answer: Answer) -> None:
        """Raise ValueError for an impossible answer: the core believes what it is given."""
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
            raise ValueError(f"the answer is not possible ({wrong}): {answer}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best settings, and their expected figures.

    Attributes:
        best: best settings.
        tokens_per_s: expected trained tokens per second, all engines together.
        off_policy_share: expected off-policy share of the trained tokens.
        speed_up: ratio of its tokens per second to those expected of the present settings.
        share_now: off-policy share expected of the present settings.
    """

    best: InWork
    tokens_per_s: float
    off_policy_share: float
    speed_up: float
    share_now: float
