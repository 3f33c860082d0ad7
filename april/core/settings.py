"""Defines the settings of the core, which :class:`april.config.Config` has checked, and the limits of engines."""

from __future__ import annotations

import math
from dataclasses import dataclass

from april.core.types import (
    GenerationMode,
    OnDataEnd,
    OnFailedSample,
    OnLongPrompt,
    OnStale,
    OnWeightUpdate,
    Refill,
    Work,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """Settings of the core, under their names in the configuration."""

    rollout_batch_size: int
    n_samples_per_prompt: int
    over_sampling_batch_size: int
    max_response_len: int
    max_in_flight: int
    partial_rollout: bool = True
    evaluation_share: float = 0.5
    """Share of ``max_in_flight`` that evaluations may have in flight besides training. When the engines are full,
    evaluations get this share of all requests in flight."""
    group_quorum: float = 1.0
    """Share of a group's samples that must finish before its finished samples can be delivered; with 1, groups are
    delivered whole."""
    on_failed_sample: OnFailedSample = OnFailedSample.DROP_GROUP
    min_group_size: int = 1
    """Minimum number of samples of a group, with on_failed_sample: shrink."""
    generation: GenerationMode = GenerationMode.STEPWISE
    on_weight_update: OnWeightUpdate = OnWeightUpdate.RESUBMIT
    refill: Refill = Refill.NONE
    max_staleness: int = 5
    on_stale: OnStale = OnStale.FINISH
    attachments: tuple[str, ...] = ()
    """Kinds of attachments that prompts may have; every engine must take them."""
    extras: tuple[str, ...] = ()
    """Names of the per-token arrays that every engine must return with training tokens."""
    max_age: int = 24
    """Number of weight updates after which a group has priority and the step waits for it, whatever on_stale is."""
    max_resumes: int = 100
    """Number of times that a sample is continued before its group has priority and the step waits for the group; not
    used with on_stale: finish."""
    on_long_prompt: OnLongPrompt = OnLongPrompt.ERROR
    on_data_end: OnDataEnd = OnDataEnd.SHORT
    max_chains: int = 64
    """Maximum number of conversations of a sample."""
    max_sample_tokens: int | None = None
    """Maximum number of tokens that all conversations of a sample may generate together; None means no limit."""
    max_held_tokens: int | None = None
    """Undelivered tokens at which no prompts are drawn beyond the needs of the step; None means no limit."""
    max_extras_bytes: int | None = None
    """Undelivered bytes of extras at which no prompts are drawn beyond the needs of the step; None means no limit."""
    group_reward: bool = False
    has_reward: bool = True
    has_filter: bool = False
    max_filtered_groups: int = 1000
    """Number of groups that the filter may reject in a row before the step fails."""
    max_attempt_failures: int = 3
    """Number of failures after which a sample fails for good: requests in a row that broke off at the same token, or
    failures of its functions in total."""
    retry_pause_s: float = 0.0
    """Seconds before the first retry of a failed reward function or filter; 0 means no pause."""
    max_failed_groups: int = 8
    """Number of groups that may fail in a row before the step fails."""
    abort_deadline_s: float = 30.0
    abort_resend_s: float = 1.0
    outage_deadline_s: float = 600.0
    """Seconds without a healthy engine with the current weights after which the step fails."""
    auto: tuple[Work, ...] = ()
    """Settings that april may change during a run; all others are fixed."""
    max_off_policy_share: float = 1.0
    """Limit on the share of off-policy tokens for the automatic choice of settings; the core does not use it."""
    run_seed: int = 0
    run_id: int = 0
    """Number in attempt ids that makes them unique between runs; it has no other effect."""

    @property
    def whole_groups(self) -> bool:
        """True if a batch counts groups; False if it counts samples."""
        return self.group_quorum == 1.0 and Work.QUORUM not in self.auto

    @property
    def units_per_group(self) -> int:
        """Number of units per prompt. A unit is what a batch counts: the group, or each of its samples."""
        return 1 if self.whole_groups else self.n_samples_per_prompt

    @property
    def target(self) -> int:
        """Number of units in a batch: ``rollout_batch_size`` groups, or as many samples as these groups have."""
        return self.rollout_batch_size * self.units_per_group

    def quorum(self, size: int) -> int:
        """Return how many finished samples make a group of ``size`` samples complete.

        With a group quorum below 1 this is ceil(group_quorum * n_samples_per_prompt), otherwise all.
        """
        if self.whole_groups:
            return size
        return min(size, quorum_of(self.group_quorum, self.n_samples_per_prompt))

    @property
    def groups_wanted(self) -> int:
        """Number of groups in progress when a step starts: the smallest multiple of ``over_sampling_batch_size`` that
        is at least ``rollout_batch_size``."""
        portion = self.over_sampling_batch_size
        return -(-self.rollout_batch_size // portion) * portion

    @property
    def tail_batching(self) -> bool:
        """True if groups that an over-sampling step did not deliver begin again later, without their tokens."""
        return not self.partial_rollout and self.groups_wanted > self.rollout_batch_size

    @property
    def groups_at_a_time(self) -> int:
        """Number of groups in progress at once: ``groups_wanted``, or more if needed to fill ``max_in_flight``."""
        return max(self.groups_wanted, -(-self.max_in_flight // self.n_samples_per_prompt))

    @property
    def delivery_bound(self) -> int:
        """Number of weight updates within which every group is delivered, with on_stale: finish."""
        return min(self.max_staleness, self.max_age)


LEAST_QUORUM = 3
"""Smallest number of samples that may form a quorum: each response then has two others for its baseline."""


def quorum_of(share: float, n_samples: int) -> int:
    """Return ceil(share * n_samples); the product is rounded first, so that 0.3 * 10 gives 3."""
    return math.ceil(round(share * n_samples, 9))


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits and abilities of an engine that the core must know."""

    name: str
    max_context: int
    max_in_flight: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    logprob_kind: str = "temperature"
    vocab_size: int = 2**31 - 1
    """Size of the vocabulary; all token ids are smaller."""
    unverified: bool = False
    """True if the engine cannot report which weights it has."""
    first_unverified: bool = False
    """True if the engine cannot report its first weights, but reports all later ones."""
    remote: bool = False
    """True for a server, which may be restarted and is probed for its weights and load while it works."""
    own_weights: bool = False
    """True for an engine that is not a server but has weights of its own, apart from the trainer's."""
    in_flight_updates: tuple[OnWeightUpdate, ...] = ()
    """Policies besides ``resubmit`` that the engine supports for requests in flight at a weight update."""
    streams: bool = True
    """True if tokens arrive while they are made. If False, all arrive at the end, together with the version of each if
    the weights changed meanwhile."""
    stop_strings: bool = False
    """True if the engine ends a request at a stop string in the tokens that the request has generated."""
    attachments: tuple[str, ...] = ()
    """Kinds of attachments that the engine accepts."""
    extras: tuple[str, ...] = ()
    """Names of the per-token arrays that the engine can return with its tokens."""
    cuts_single_requests: bool = True
    """True if an abort can end single requests. Only then are requests of training interrupted for evaluations."""
    written: bool = False
    """True if an earlier run may have written the engine's weights: until the first update, its version is unknown."""
