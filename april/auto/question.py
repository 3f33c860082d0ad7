"""Defines the question that a run with ``auto`` settings sends to the simulation process, and the answer, as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from april.core.events import WorkChanged
from april.core.settings import CoreSettings
from april.core.types import OnStale, Refill, Work
from april.engines.simulated.decode_cost import DecodeCost

GAIN = 0.03
"""Smallest relative gain in speed that is worth a change."""
SMALLEST_QUORUM = 0.75
"""Smallest ``group_quorum`` that april chooses, because the reward fell in some trainings with 0.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSettings:
    """The settings that decide how much work is in flight, under their names in the configuration."""

    over_sampling_batch_size: int
    refill: Refill
    max_in_flight: int
    group_quorum: float

    @classmethod
    def of(cls, settings: CoreSettings) -> WorkSettings:
        """Return the current values of the core's settings."""
        return cls(**{str(name): getattr(settings, name) for name in Work})

    def change_event(self, settings: CoreSettings) -> WorkChanged:
        """Return the event that changes those of the core's settings that are ``auto`` to these values."""
        return WorkChanged(**{str(name): getattr(self, name) for name in settings.auto})

    def __str__(self) -> str:
        quorum = f", group_quorum {self.group_quorum:g}" if self.group_quorum != 1.0 else ""
        if self.refill is Refill.NONE:
            return f"N' = {self.over_sampling_batch_size:.0f}{quorum}"
        return f"refill: {self.refill}, {self.max_in_flight:.0f} in flight{quorum}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningQuestion:
    """Description of a run, with the settings that may be changed.

    Attributes:
        groups, samples: number of groups in a batch, and of responses in a group.
        max_response_len, prompt_len: lengths in tokens.
        max_staleness, on_stale, max_off_policy_share: limits that the answer must keep.
        continuous: whether generation goes on while the trainer trains.
        train_s: training time of a batch, in seconds.
        fetch_ahead: number of batches that the trainer requests before it has finished training one.
        engines: number of engines; all are taken to have the same ``cost``.
        cost: mean cost of an engine.
        lengths: response lengths in tokens, one list per group.
        places: largest possible number of samples in flight.
        below: number of samples in flight below which the answer must stay; None means no bound.
        told: whether ``cost`` also holds for more samples in flight than the run has had; if not, it is a lower bound
            for these.
        free: settings that may be changed.
        now: current settings.
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
    cost: DecodeCost
    lengths: list[list[int]]
    places: int
    below: int | None = None
    told: bool = True
    free: tuple[Work, ...]
    now: WorkSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningAnswer:
    """The best settings that the simulation found, with its predictions for them.

    Attributes:
        best: best settings.
        tokens_per_s: predicted trained tokens per second, all engines together.
        off_policy_share: predicted off-policy share of the trained tokens.
        speed_up: predicted speed of ``best`` divided by the predicted speed of the current settings.
        share_now: predicted off-policy share with the current settings.
    """

    best: WorkSettings
    tokens_per_s: float
    off_policy_share: float
    speed_up: float
    share_now: float
