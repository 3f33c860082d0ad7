"""Defines the JSON messages between a run with ``auto`` settings and the simulation process: question and answer."""

from __future__ import annotations

from dataclasses import dataclass

from april.core.events import WorkChanged
from april.core.settings import CoreSettings
from april.core.types import OnStale, Refill, Work
from april.engines.simulated.decode_cost import DecodeCost

GAIN = 0.03
"""Smallest relative gain in speed that is worth a change."""
SMALLEST_QUORUM = 0.75
"""Smallest ``group_quorum`` that april chooses; with 0.5, the reward fell in some training runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSettings:
    """The settings that decide how much work is in flight, under their names in the configuration."""

    over_sampling_batch_size: int
    refill: Refill
    max_in_flight: int
    group_quorum: float

    @classmethod
    def of(cls, settings: CoreSettings) -> WorkSettings:
        """Return the values that these settings have in the core's settings."""
        return cls(**{str(name): getattr(settings, name) for name in Work})

    def change_event(self, settings: CoreSettings) -> WorkChanged:
        """Return an event that gives these values to the core's ``auto`` settings; other settings do not change."""
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
        groups, samples: number of groups (prompts) in a batch, and of responses in a group.
        max_response_len, prompt_len: largest response length and mean prompt length, in tokens.
        max_staleness, on_stale: bound on the age of tokens in weight updates, and what happens to older samples.
        max_off_policy_share: largest allowed share of the trained tokens that come from older weights.
        continuous: whether generation goes on while the trainer trains.
        train_s: training time of a batch, in seconds.
        fetch_ahead: number of further batches that the trainer requests while it trains one.
        engines: number of engines.
        cost: decode cost of one engine, averaged over the engines.
        lengths: response lengths in tokens, one list per group.
        places: number of samples that all engines together can run at the same time.
        below: exclusive upper bound of samples in flight in the answer; None means no bound.
        slope_known: whether the run shows how ``cost`` grows with the samples in flight; if not, a step is assumed to
            take the same time for any number.
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
    slope_known: bool = True
    free: tuple[Work, ...]
    now: WorkSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningAnswer:
    """The best settings that the simulation found, with its predictions for them.

    Attributes:
        best: best settings.
        tokens_per_s: predicted trained tokens per second, all engines together.
        off_policy_share: predicted share of the trained tokens that come from older weights.
        speed_up: predicted speed of ``best`` divided by the predicted speed of the current settings.
        share_now: predicted ``off_policy_share`` of the current settings.
    """

    best: WorkSettings
    tokens_per_s: float
    off_policy_share: float
    speed_up: float
    share_now: float
