"""Prompts, groups, samples and attempts, and the words for what can become of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from april.core.sampling import SamplingParams
from april.core.tape import AttemptTape, Int32, TokenTape

NO_DEADLINE = 1 << 30
"""Slack of a group that has no tokens, or no staleness bound."""


class SampleId(NamedTuple):
    """One response: ``index`` in [0, n_samples_per_prompt) of group ``group`` (numbered as drawn)."""

    group: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here

    def __str__(self) -> str:
        return f"g{self.group}.s{self.index}"


class SampleState(StrEnum):
    """Where a sample is; it is in exactly one of these."""

    NEW = "new"
    """Waits for its first start."""
    STARTED = "started"
    """Its rollout function runs and has not asked for tokens yet; holds a place in flight."""
    QUEUED = "queued"
    """Its rollout function is parked in a generate call that waits for a place; a partial if it has tokens."""
    IN_FLIGHT = "in_flight"
    """An engine generates for it."""
    OUTSIDE = "outside"
    """Its rollout function runs between two generate calls (a tool, an environment)."""
    SCORING = "scoring"
    """Its rollout function has returned; the reward is awaited."""
    FINISHED = "finished"
    """Complete; waits for its siblings or for delivery."""
    LEASED = "leased"
    """In a batch that was handed to the trainer."""
    DROPPED = "dropped"
    """Given up for a named reason."""


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """EOS, a stop token or a stop string."""
    LENGTH = "length"
    """Its budget, or the engine's context, is used up."""


class DropReason(StrEnum):
    """Why tokens or a prompt were given up; every drop has one."""

    STALE = "stale"
    """Older than max_staleness, with on_stale: drop or restart."""
    FAILED = "failed"
    """The rollout, the reward or the engine failed too often."""
    CORRUPT = "corrupt"
    """The engine sent numbers that cannot be true."""
    AFTER_STOP = "after_stop"
    """The engine generated them before it heard that a stop string was complete."""
    TOO_LONG = "too_long"
    """The prompt leaves no room for a response."""


class OnStale(StrEnum):
    """What happens to a sample that would exceed max_staleness."""

    FINISH = "finish"
    """It goes first and the step waits for it."""
    RESTART = "restart"
    """Its tokens are dropped and it begins again."""
    MASK = "mask"
    """Its too-old tokens carry no loss."""
    DROP = "drop"
    """Its group is dropped and replaced."""


class OnLongPrompt(StrEnum):
    """What happens to a prompt that leaves no room for a response."""

    ERROR = "error"
    SKIP = "skip"


class Refill(StrEnum):
    """When new work starts inside a step."""

    NONE = "none"
    """Once, at the beginning (the paper)."""
    GROUP = "group"
    """A new group whenever one finishes."""
    SAMPLE = "sample"
    """A constant number of samples in flight."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: ``token_ids`` int32 [P], and ``data`` for rewards and rollout functions (never looked into)."""

    token_ids: Int32
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class GenerateCall:
    """One ``llm.generate`` of a rollout function; it may take several attempts."""

    sampling: SamplingParams
    start: int
    """Response tokens that were there before the call."""


@dataclass(slots=True)
class Attempt:
    """One engine request for a sample. The layer above appends chunks to ``tape`` while it runs."""

    id: str
    sample: Sample
    engine: str
    token_ids: Int32
    """Prompt plus the response so far."""
    sampling: SamplingParams
    tape: AttemptTape
    urgent: bool = False


class Sample:
    """One response of a group."""

    __slots__ = (
        "attempt_id", "attempts", "call", "failures", "finish", "group", "id", "reward", "state", "tape", "ticket",
    )  # fmt: skip

    def __init__(self, sample_id: SampleId, group: Group) -> None:
        self.id = sample_id
        self.group = group
        self.state = SampleState.NEW
        self.tape = TokenTape()
        self.call: GenerateCall | None = None
        self.attempts = 0
        self.attempt_id = ""
        """Its latest attempt."""
        self.failures = 0
        self.finish: FinishReason | None = None
        self.reward = 0.0
        self.ticket = 0
        """Its latest place in the queue; older queue entries are void."""

    def __repr__(self) -> str:
        return f"<Sample {self.id} {self.state} tokens={len(self.tape)} attempts={self.attempts}>"


class Group:
    """A prompt with its samples."""

    __slots__ = ("dropped_for", "id", "prompt", "ready_at", "samples", "slack", "unfinished", "urgent")

    def __init__(self, group_id: int, prompt: Prompt, n_samples: int) -> None:
        self.id = group_id
        self.prompt = prompt
        self.samples = [Sample(SampleId(group_id, i), self) for i in range(n_samples)]
        self.unfinished = n_samples
        self.dropped_for: DropReason | None = None
        self.slack = NO_DEADLINE
        """Weight updates after which it is too old, as of the latest plan."""
        self.urgent = False
        """Goes before all others, because the step owes it."""
        self.ready_at = -1
        """Number of the event that completed it; -1 while open."""

    def __repr__(self) -> str:
        return f"<Group {self.id} unfinished={self.unfinished}/{len(self.samples)} urgent={self.urgent}>"
