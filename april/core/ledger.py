"""The ledgers: of tokens, of prompts, and of the lengths of responses.

Invariant, at all times: ``observed == delivered + held + sum(dropped)`` for tokens, and for prompts
``drawn == delivered + held + sum(dropped)``. Delivered counts leased batches too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from april.core.numbers import count_of


class DropReason(StrEnum):
    """Reasons for giving up tokens or a prompt; every drop has one."""

    STALE = "stale"
    """Older than max_staleness, with on_stale: drop or restart."""
    FAILED = "failed"
    """The rollout, the reward or the engine failed too often."""
    CORRUPT = "corrupt"
    """The engine sent numbers that cannot be true."""
    UNKNOWN_WEIGHTS = "unknown_weights"
    """The engine lost its weights, or they were written, while the request ran."""
    AFTER_STOP = "after_stop"
    """The engine generated them before it heard that a stop string was complete."""
    TOO_LONG = "too_long"
    """The prompt leaves no room for a response."""
    FILTERED = "filtered"
    """The dynamic-sampling filter rejected the scored group."""
    REPLAY_DIVERGED = "replay_diverged"
    """After a restart, the rollout function did not ask what it had asked before."""
    UNHEARD = "unheard"
    """The rollout function ended, or its client left, before the answer was heard."""
    LATE = "late"
    """The tokens came when their sample had gone on without the request that generated them."""
    NO_EXTRAS = "no_extras"
    """They came without the rows that were asked for with them: the request broke off before its engine gave those."""
    OVER_BUDGET = "over_budget"
    """The server generated them beyond the limit that it was given."""


@dataclass(slots=True)
class Ledger:
    """Counts of one kind of thing; ``held`` is counted on its own, never derived, so that a loss shows."""

    observed: int = 0
    delivered: int = 0
    held: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)

    def observe(self, count: int) -> None:
        """Newly seen; april holds it."""
        self.observed += count
        self.held += count

    def deliver(self, count: int) -> None:
        """Handed to the trainer."""
        self.held -= count
        self.delivered += count

    def drop(self, count: int, reason: DropReason) -> None:
        """Given up for ``reason``."""
        self.held -= count
        self.dropped[reason] += count

    @property
    def balanced(self) -> bool:
        """True when every observed thing is accounted for."""
        return self.observed == self.delivered + self.held + sum(self.dropped.values())

    def as_dict(self) -> dict[str, object]:
        """Plain form for reports."""
        return {
            "observed": self.observed,
            "delivered": self.delivered,
            "held": self.held,
            "dropped": {str(reason): count for reason, count in sorted(self.dropped.items()) if count},
        }


FINEST = 3
"""Bits of a length that its bucket keeps: up to 7 each length has a bucket, from there on each doubling has 4."""
LONGEST = 1 << 40
"""No response of a snapshot is longer."""


def bucket_of(length: int) -> int:
    """Number of the bucket of a length (0 or more), without gaps, in the order of lengths."""
    shift = max(length.bit_length() - FINEST, 0)
    return (shift << (FINEST - 1)) + (length >> shift)


def shortest_of(bucket: int) -> int:
    """The shortest length in a bucket; the longest is one less than that of the next."""
    shift = max((bucket >> (FINEST - 1)) - 1, 0)
    return (bucket - (shift << (FINEST - 1))) << shift


@dataclass(slots=True)
class Lengths:
    """Generated tokens of some responses: how many responses by :func:`bucket_of`, and the tokens of all of them."""

    buckets: Counter[int] = field(default_factory=Counter)
    tokens: int = 0

    def add(self, length: int, count: int = 1) -> None:
        """So many more responses of this length; fewer if negative."""
        self.buckets[bucket_of(length)] += count
        self.tokens += count * length

    @property
    def samples(self) -> int:
        """Responses."""
        return self.buckets.total()

    @property
    def mean(self) -> float:
        """Generated tokens per response; 0 without any."""
        return self.tokens / samples if (samples := self.samples) else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain form."""
        return {"tokens": self.tokens, "buckets": {str(b): n for b, n in sorted(self.buckets.items()) if n}}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Lengths:
        """Out of a snapshot; raises ValueError, TypeError or LookupError for what cannot be."""
        buckets, tokens = {int(b): count_of(n) for b, n in state["buckets"].items()}, count_of(state["tokens"])
        if any(not 0 <= b <= bucket_of(LONGEST) for b in buckets):
            raise ValueError(f"lengths in the buckets {sorted(buckets)}")
        least = sum(shortest_of(b) * n for b, n in buckets.items())
        if not least <= tokens <= sum((shortest_of(b + 1) - 1) * n for b, n in buckets.items()):
            raise ValueError(f"{sum(buckets.values())} responses cannot have {tokens} tokens")
        return cls(Counter(buckets), tokens)


@dataclass(slots=True)
class LengthLedger:
    """Lengths of the run's responses, those that were trained and those that were not.

    A response counts once: when it is finished, or given up while its reward is awaited. Carried over however long, it
    counts the same, so only drops make the trained lengths differ from the generated ones. The length of a response
    that was given up before it was complete is unknown; these are counted apart. Evaluations do not count.

    Invariant, for every bucket of lengths: ``generated == trained + finished and held + sum(dropped)``.
    """

    generated: Lengths = field(default_factory=Lengths)
    """Lengths of all complete responses."""
    trained: Lengths = field(default_factory=Lengths)
    """Lengths in batches, those that are out included."""
    dropped: dict[DropReason, Lengths] = field(default_factory=dict)
    """Lengths of responses that were complete and given up."""
    unfinished: Counter[DropReason] = field(default_factory=Counter)
    """Responses that were given up between their first request and the return of their rollout function."""

    def drop(self, length: int, reason: DropReason, *, counted: bool) -> None:
        """A complete response was given up; ``counted``: it was finished before, and not only awaiting its reward."""
        if not counted:
            self.generated.add(length)
        self.dropped.setdefault(reason, Lengths()).add(length)

    def metrics(self, batch: Iterable[int]) -> dict[str, float]:
        """The metrics of a batch with these lengths."""
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
        """Describe what is wrong, where responses of these lengths are finished and held; None means nothing."""
        accounted, generated = self._accounted(finished).as_dict(), self.generated.as_dict()
        if accounted == generated:
            return None
        return f"lengths generated: {generated}; trained, finished and held, or dropped: {accounted}"

    def _accounted(self, finished: Iterable[int]) -> Lengths:
        lengths = deepcopy(self.trained)
        for dropped in self.dropped.values():
            lengths.buckets.update(dropped.buckets)
            lengths.tokens += dropped.tokens
        for length in finished:
            lengths.add(length)
        return lengths

    # ---------------------------------------------------------------- snapshots

    def as_dict(self) -> dict[str, Any]:
        """Plain form; what was generated follows from it and from what is held."""
        dropped = {str(reason): lengths.as_dict() for reason, lengths in self.dropped.items()}
        unfinished = {str(reason): count for reason, count in self.unfinished.items()}
        return {"trained": self.trained.as_dict(), "dropped": dropped, "unfinished": unfinished}

    def restore(self, state: Mapping[str, Any], finished: Iterable[int]) -> None:
        """Out of a snapshot with which responses of these lengths are finished and held; an empty one is of a state
        that had no lengths. Raises as :meth:`Lengths.from_dict`."""
        if state:
            self.trained = Lengths.from_dict(state["trained"])
            self.dropped = {DropReason(reason): Lengths.from_dict(part) for reason, part in state["dropped"].items()}
            self.unfinished.update({DropReason(r): count_of(n) for r, n in state["unfinished"].items()})
        self.generated = self._accounted(finished)
