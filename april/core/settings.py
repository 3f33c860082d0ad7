"""Settings of the core, checked by :class:`april.config.Config` before it gets here."""

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
    """Settings of the state machine; the names are those of the configuration."""

    rollout_batch_size: int
    n_samples_per_prompt: int
    over_sampling_batch_size: int
    max_response_len: int
    max_in_flight: int
    group_quorum: float = 1.0
    """Share of a group's samples that, finished, make the finished ones deliverable; 1: groups are delivered whole."""
    on_failed_sample: OnFailedSample = OnFailedSample.DROP_GROUP
    min_group_size: int = 1
    """With on_failed_sample: shrink, fewest samples of a group."""
    generation: GenerationMode = GenerationMode.STEPWISE
    on_weight_update: OnWeightUpdate = OnWeightUpdate.RESUBMIT
    refill: Refill = Refill.NONE
    max_staleness: int = 5
    on_stale: OnStale = OnStale.FINISH
    attachments: tuple[str, ...] = ()
    """Kinds of attachments that prompts may have; every engine must take them."""
    extras: tuple[str, ...] = ()
    """Names of the rows that engines give with the tokens of training; every engine must give them."""
    max_age: int = 24
    """Weight updates after which a group goes first and the step waits for it, whatever on_stale says."""
    max_resumes: int = 100
    """Attempts that continued one sample, after which the same holds, unless on_stale is finish."""
    on_long_prompt: OnLongPrompt = OnLongPrompt.ERROR
    on_data_end: OnDataEnd = OnDataEnd.SHORT
    max_chains: int = 64
    """Conversations that a sample has at most."""
    max_sample_tokens: int | None = None
    """Tokens that all of them together may generate at most."""
    max_held_tokens: int | None = None
    """Held tokens from which on no prompt is drawn beyond what the step needs."""
    max_extras_bytes: int | None = None
    """Bytes of held rows (extras) from which on the same holds."""
    group_reward: bool = False
    has_reward: bool = True
    has_filter: bool = False
    max_filtered_groups: int = 1000
    """Groups that the filter rejected in a row, without one accepted, after which the step fails."""
    max_attempt_failures: int = 3
    """Failures of a sample (attempts in a row at the same token; or its functions, in all) that give its group up."""
    retry_pause_s: float = 0.0
    """Pause before a reward function or filter that failed is asked again, the first time; 0 means no pause."""
    max_failed_groups: int = 8
    """Groups that failed in a row, without one completed, after which the step fails."""
    abort_deadline_s: float = 30.0
    abort_resend_s: float = 1.0
    outage_deadline_s: float = 600.0
    """Longest wait while no engine is well and has the current weights, after which the step fails."""
    auto: tuple[Work, ...] = ()
    """Settings that change while the run goes on; what the others say holds for all of it."""
    max_off_policy_share: float = 1.0
    """The largest off-policy share with which ``auto`` chooses; the core itself does not look at it."""
    run_seed: int = 0
    run_id: int = 0
    """Makes attempt ids unique between runs; decides nothing."""

    @property
    def whole_groups(self) -> bool:
        """True when a batch counts groups; else it counts samples."""
        return self.group_quorum == 1.0 and Work.QUORUM not in self.auto

    @property
    def units_per_group(self) -> int:
        """The units of a prompt: 1 group, or its samples."""
        return 1 if self.whole_groups else self.n_samples_per_prompt

    @property
    def target(self) -> int:
        """The units of a batch: N groups, or N * n samples."""
        return self.rollout_batch_size * self.units_per_group

    def quorum(self, size: int) -> int:
        """Finished samples that make a group of ``size`` complete: all, or ceil(quorum * n), at least 3."""
        if self.whole_groups:
            return size
        return min(size, quorum_of(self.group_quorum, self.n_samples_per_prompt))

    @property
    def groups_wanted(self) -> int:
        """Groups in work at the start of a step: N', or as many portions of N' as reach N."""
        target, portion = self.rollout_batch_size, self.over_sampling_batch_size
        return portion if portion >= target else -(-target // portion) * portion

    @property
    def groups_at_a_time(self) -> int:
        """Groups that are to be in work at once: those, or what fills ``max_in_flight``."""
        return max(self.groups_wanted, -(-self.max_in_flight // self.n_samples_per_prompt))

    @property
    def delivery_bound(self) -> int:
        """With on_stale: finish, weight updates within which every group is delivered."""
        return min(self.max_staleness, self.max_age)


LEAST_QUORUM = 3
"""Finished responses of a group: with one of them left out, two make a baseline."""


def quorum_of(share: float, n_samples: int) -> int:
    """k = ceil(share * n), where rounding does not make 0.3 * 10 more than 3."""
    return math.ceil(round(share * n_samples, 9))


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits and properties of an engine that the core must know."""

    name: str
    max_context: int
    max_in_flight: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    logprob_kind: str = "temperature"
    vocab_size: int = 2**31 - 1
    """Token ids are below."""
    unverified: bool = False
    """The engine does not show which weights it has."""
    remote: bool = False
    """A server: it may be started anew, and is asked for its weights and its load while it works."""
    own_weights: bool = False
    """No server, and yet its weights are not the trainer's own."""
    in_flight_updates: tuple[OnWeightUpdate, ...] = ()
    """What its requests in flight may do at a weight update, besides being cut."""
    attachments: tuple[str, ...] = ()
    """Kinds of attachments that it takes."""
    extras: tuple[str, ...] = ()
    """Names of the rows that it can give with its tokens."""
    written: bool = False
    """An update of an earlier run may have written its weights: they are not those of the start."""
