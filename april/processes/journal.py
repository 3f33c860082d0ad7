"""What a rank that begins anew has missed: the calls that have ended since the oldest batch was delivered that is out.

A rank that was started anew asks for a batch first. It gets its share of the oldest one that is still out, and what
all ranks were answered after that, as long as it makes the same calls; then it is where they are.

Invariant: what is kept begins with the delivery of a batch that is out. No Ray, no asyncio.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from april.processes.rank_messages import Answer


@dataclass(frozen=True, slots=True)
class EndedCall:
    """A call that all ranks have made."""

    what: str
    """its name and arguments"""
    answer_of: Callable[[int], Answer]
    """what a rank was answered"""
    batch: int | None
    """the batch that it has delivered"""


class Journal:
    """See above; calls are numbered from 0."""

    def __init__(self) -> None:
        self._first = 0
        self._calls: list[EndedCall] = []

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def begins(self) -> int:
        """Number of the call with which a rank that begins anew goes on."""
        return self._first

    def ended(self, call: EndedCall, out: Collection[int]) -> None:
        """The next call has ended, and these batches are delivered and not trained."""
        self._calls.append(call)
        kept = next((i for i, c in enumerate(self._calls) if c.batch is not None and c.batch in out), len(self._calls))
        self._first += kept
        del self._calls[:kept]

    def find(self, number: int) -> EndedCall | None:
        """A call that is kept; None: it is yet to come, or nobody needs it any more."""
        place = number - self._first
        return self._calls[place] if 0 <= place < len(self._calls) else None
