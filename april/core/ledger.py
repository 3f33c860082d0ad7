"""Accounts for every token and every prompt of a run, and for the lengths of its responses.

Invariant: ``observed == delivered + held + sum(dropped)`` for tokens, and
``drawn == delivered + held + sum(dropped)`` for prompts. Batches that are delivered and not yet trained count as
delivered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from april.core.value_checks import count_of


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
    """The rollout function ended, or its client left, before the answer was read."""
    LATE = "late"
    """The tokens arrived after their sample had continued without the request that generated them."""
    NO_EXTRAS = "no_extras"
    """The tokens arrived without the requested extras, as the request broke off before its engine returned them."""
    PUT_ASIDE = "put_aside"
    """The round ended before the prompt was finished, and a later round begins it again (tail batching)."""
    CUT_GRAMMAR = "cut_grammar"
    """The request had a grammar and was cut; engines cannot continue a grammar, so the call begins again."""


@dataclass(slots=True)
class Ledger:
    """Counts tokens or prompts; ``held`` is counted apart from the other numbers, so that a lost token is noticed."""

    observed: int = 0
    delivered: int = 0
    held: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)

    def observe(self, count: int) -> None:
        """Count tokens or prompts that april has received and now holds."""
        self.observed += count
        self.held += count

    def deliver(self, count: int) -> None:
        """Count held tokens or prompts that were delivered to the trainer."""
        self.held -= count
        self.delivered += count

    def drop(self, count: int, reason: DropReason) -> None:
        """Count held tokens or prompts that were dropped for ``reason``."""
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


FINEST = 3
"""Number of leading bits of a length that select its bucket. Lengths up to 7 have a bucket each; from then on, lengths
from one power of two to the next share four buckets."""
LONGEST = 1 << 40
"""Longest response that a snapshot may contain, in tokens."""


def bucket_of(length: int) -> int:
    """Return the number of the bucket of a length (0 or more); buckets are in the order of lengths, without gaps."""
    shift = max(length.bit_length() - FINEST, 0)
    return (shift << (FINEST - 1)) + (length >> shift)


def shortest_of(bucket: int) -> int:
    """Return the shortest length in a bucket; the longest is one less than the shortest of the next bucket."""
    shift = max((bucket >> (FINEST - 1)) - 1, 0)
    return (bucket - (shift << (FINEST - 1))) << shift


@dataclass(slots=True)
class Lengths:
    """Histogram of response lengths: number of responses per bucket (:func:`bucket_of`), and their total tokens."""

    buckets: Counter[int] = field(default_factory=Counter)
    tokens: int = 0

    def add(self, length: int, count: int = 1) -> None:
        """Add ``count`` responses of this length; a negative count removes them."""
        self.buckets[bucket_of(length)] += count
        self.tokens += count * length

    def add_all(self, lengths: Iterable[int]) -> None:
        """Add a response of each of these lengths."""
        self.buckets.update(map(bucket_of, lengths))
        self.tokens += sum(lengths)

    @property
    def samples(self) -> int:
        """Number of responses."""
        return self.buckets.total()

    @property
    def mean(self) -> float:
        """Mean number of generated tokens per response; 0 without responses."""
        return self.tokens / samples if (samples := self.samples) else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the histogram as plain values."""
        return {"tokens": self.tokens, "buckets": {str(b): n for b, n in sorted(self.buckets.items()) if n}}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Lengths:
        """Return the histogram of a snapshot; raises ValueError, TypeError or LookupError for impossible values."""
        buckets, tokens = {int(b): count_of(n) for b, n in state["buckets"].items()}, count_of(state["tokens"])
        if any(not 0 <= b <= bucket_of(LONGEST) for b in buckets):
            raise ValueError(f"lengths in the buckets {sorted(buckets)}")
        least = sum(shortest_of(b) * n for b, n in buckets.items())
        if not least <= tokens <= sum((shortest_of(b + 1) - 1) * n for b, n in buckets.items()):
            raise ValueError(f"{sum(buckets.values())} responses cannot have {tokens} tokens")
        return cls(Counter(buckets), tokens)


@dataclass(slots=True)
class LengthLedger:
    """Counts the lengths of the run's responses, to show whether trained and generated responses differ in length.

    A response counts once: when it is finished, or dropped while it waits for its reward. Being carried over steps does
    not change its count, so only drops make trained and generated lengths differ. Responses that were dropped before
    they were complete have no known length and are counted separately. Evaluations do not count.

    Invariant, for every bucket of lengths: ``generated == trained + held + sum(dropped)``, where ``held``
    counts finished responses that are not delivered yet.
    """

    generated: Lengths = field(default_factory=Lengths)
    """Lengths of all complete responses."""
    trained: Lengths = field(default_factory=Lengths)
    """Lengths of delivered responses, those in untrained batches included."""
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

    def wrong(self, finished: Iterable[int]) -> str | None:
        """Describe a violation of the invariant, given the lengths of finished and held responses; None if it holds."""
        accounted = self._accounted(finished)
        if accounted == self.generated:  # counters that differ in buckets without responses are equal
            return None
        return f"lengths generated: {self.generated.as_dict()}; trained, held or dropped: {accounted.as_dict()}"

    def _accounted(self, finished: Iterable[int]) -> Lengths:
        lengths = Lengths(self.trained.buckets.copy(), self.trained.tokens)
        for dropped in self.dropped.values():
            lengths.buckets.update(dropped.buckets)
            lengths.tokens += dropped.tokens
        for length in finished:
            lengths.add(length)
        return lengths

    # ---------------------------------------------------------------- snapshots

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as plain values, without ``generated``, which :meth:`restore` computes again."""
        dropped = {str(reason): lengths.as_dict() for reason, lengths in self.dropped.items()}
        unfinished = {str(reason): count for reason, count in self.unfinished.items()}
        return {"trained": self.trained.as_dict(), "dropped": dropped, "unfinished": unfinished}

    def restore(self, state: Mapping[str, Any], finished: Iterable[int]) -> None:
        """Restore the counts of a snapshot, given the lengths of its finished and held responses; an empty ``state`` is
        allowed, as old snapshots had none. Raises like :meth:`Lengths.from_dict`."""
        if state:
            self.trained = Lengths.from_dict(state["trained"])
            self.dropped = {DropReason(reason): Lengths.from_dict(part) for reason, part in state["dropped"].items()}
            self.unfinished.update({DropReason(r): count_of(n) for r, n in state["unfinished"].items()})
        self.generated = self._accounted(finished)
