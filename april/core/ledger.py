"""The token ledger and the prompt ledger.

Invariant, at all times: ``observed == delivered + held + sum(dropped)``, for tokens and for prompts
(prompts: drawn == delivered + held + sum(dropped)). Delivered counts leased batches too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from april.core.types import DropReason


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
        """Whether every observed thing is accounted for."""
        return self.observed == self.delivered + self.held + sum(self.dropped.values())

    def as_dict(self) -> dict[str, object]:
        """Plain form for reports."""
        return {
            "observed": self.observed,
            "delivered": self.delivered,
            "held": self.held,
            "dropped": {str(reason): count for reason, count in sorted(self.dropped.items()) if count},
        }
