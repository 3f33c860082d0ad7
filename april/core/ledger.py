"""Accounts for every token and every prompt of a run, and for the lengths of its responses.

Invariant: ``observed == delivered + held + sum(dropped)``, for tokens and for prompts. A prompt counts as observed once
it is drawn. Batches count as delivered even before they are trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class DropReason(StrEnum):
    """Reasons for dropping tokens or prompts; every drop has one."""

    STALE = "stale"
    """The tokens were older than max_staleness allows, and on_stale is "drop" or "restart"."""
    FAILED = "failed"
    """The rollout function, the reward or the engine failed too often."""
    CORRUPT = "corrupt"
    """The engine sent impossible numbers."""
    UNKNOWN_WEIGHTS = "unknown_weights"
    """The engine lost its weights, or they were overwritten, while the request ran."""
    AFTER_STOP = "after_stop"
    """The engine generated the tokens after a complete stop string, before it was told to stop."""
    TOO_LONG = "too_long"
    """The prompt leaves no room for a response."""
    FILTERED = "filtered"
    """The dynamic-sampling filter rejected the scored group."""
    REPLAY_DIVERGED = "replay_diverged"
    """After a restart, the rollout function made other calls than before."""
    UNHEARD = "unheard"
    """Nobody read the answer: the rollout function had ended, or the agent that asked for it had disconnected."""
    LATE = "late"
    """The tokens arrived from a request after their sample had continued without this request."""
    NO_EXTRAS = "no_extras"
    """The tokens arrived without the requested per-token arrays (``extras``), because the request broke off first."""
    PUT_ASIDE = "put_aside"
    """The round ended before the prompt was finished, and a later round begins it again (tail batching)."""
    CUT_GRAMMAR = "cut_grammar"
    """The request had a grammar and was cut; engines cannot continue a grammar, so the call begins again."""


@dataclass(slots=True)
class Ledger:
    """Counts tokens or prompts; ``held`` is counted by itself, not computed, so that a lost token is noticed."""

    observed: int = 0
    delivered: int = 0
    held: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)

    def observe(self, count: int) -> None:
        self.observed += count
        self.held += count

    def deliver(self, count: int) -> None:
        self.held -= count
        self.delivered += count

    def drop(self, count: int, reason: DropReason) -> None:
        self.held -= count
        self.dropped[reason] += count

    @property
    def balanced(self) -> bool:
        """True if every observed token or prompt is delivered, held or dropped."""
        return self.observed == self.delivered + self.held + sum(self.dropped.values())

    def as_dict(self) -> dict[str, object]:
        """Return the counts as plain values, for reports and snapshots."""
        return {
            "observed": self.observed,
            "delivered": self.delivered,
            "held": self.held,
            "dropped": {str(reason): count for reason, count in sorted(self.dropped.items()) if count},
        }


@dataclass(slots=True)
class Lengths:
    """Number of responses, and their total tokens."""

    samples: int = 0
    tokens: int = 0

    def add(self, length: int, count: int = 1) -> None:
        """Add ``count`` responses of this length; a negative count removes them."""
        self.samples += count
        self.tokens += count * length

    @property
    def mean(self) -> float:
        """Mean number of generated tokens per response; 0 without responses."""
        return self.tokens / self.samples if self.samples else 0.0


@dataclass(slots=True)
class LengthLedger:
    """Counts the lengths of the run's responses, to show whether trained and generated responses differ in length.

    A response is complete once its rollout function has returned. It counts once: when it gets its reward or is
    dropped while it waits for the reward. So only drops make trained and generated lengths differ. Responses dropped
    before they were complete have no known length and are counted separately. Evaluations do not count.

    Invariant, for responses and for their tokens: ``generated == trained + held + sum(dropped)``, where ``held`` counts
    responses that have their reward and are not delivered yet.
    """

    generated: Lengths = field(default_factory=Lengths)
    """Lengths of all complete responses except those that still wait for their reward."""
    trained: Lengths = field(default_factory=Lengths)
    """Lengths of delivered responses, including those in batches that were not trained."""
    dropped: dict[DropReason, Lengths] = field(default_factory=dict)
    """Lengths of responses that were dropped after they were complete."""
    unfinished: Counter[DropReason] = field(default_factory=Counter)
    """Number of responses dropped between their first request and the return of their rollout function."""

    def drop(self, length: int, reason: DropReason, *, counted: bool) -> None:
        """Count a complete response that was dropped; ``counted`` means that ``generated`` counts it already."""
        if not counted:
            self.generated.add(length)
        self.dropped.setdefault(reason, Lengths()).add(length)

    def metrics(self, batch: Iterable[int]) -> dict[str, float]:
        """Return the length metrics of a batch with these lengths."""
        lengths = list(batch)
        generated, mean = self.generated.mean, sum(lengths) / len(lengths)
        unknown = self.unfinished.total()
        return {
            "length_mean_generated": generated,
            "length_mean_trained": self.trained.mean,
            "length_bias": mean / generated if generated else 1.0,
            "length_unknown": unknown / (unknown + self.generated.samples),
        }

    def accounted(self, finished: Iterable[int]) -> Lengths:
        """Return all trained, dropped and held responses; ``finished`` has the lengths of those held."""
        parts, held = (self.trained, *self.dropped.values()), list(finished)
        return Lengths(
            sum(part.samples for part in parts) + len(held), sum(part.tokens for part in parts) + sum(held)
        )

    def restore(self, saved: LengthLedger, finished: Iterable[int]) -> None:
        """Restore the counts of a saved core; ``finished`` has the lengths of its responses that are not delivered."""
        self.trained, self.dropped, self.unfinished = saved.trained, saved.dropped, saved.unfinished
        self.generated = self.accounted(finished)
