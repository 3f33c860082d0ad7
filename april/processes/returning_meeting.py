"""The meeting of ranks that may die and come back under their numbers, and of which none carries the calls out."""

from __future__ import annotations

from april.errors import RankError
from april.processes.meeting import Meeting


class ReturningMeeting(Meeting):
    """A :class:`april.processes.meeting.Meeting` that a lost rank breaks only if it does not come back in time."""

    def __init__(self, ranks: int, timeout_s: float) -> None:
        super().__init__(ranks, timeout_s)
        self._missed: dict[int, tuple[float, str]] = {}
        """Since when, and why."""

    def miss(self, rank: int, why: str, now: float) -> bool:
        """A rank's process is gone; whether that ends a step that all carry out."""
        if self.broken is not None or rank in self.closed:
            return False
        self._missed[rank] = now, why
        self.leave(rank, self.call, now)
        if self.step is None or rank in self._done:
            return False
        self.step_failed = RankError(f"rank {rank} was lost in its {self.step}: {why}", (rank,))
        self.step = self._since = None
        return True

    def back(self, rank: int) -> None:
        """It is there, for the first time or again."""
        self._missed.pop(rank, None)
        self.closed.discard(rank)

    def leave(self, rank: int, call: int, now: float) -> None:
        """See Meeting; none of them is waited for in a call that has begun."""
        if not self.began:
            super().leave(rank, call, now)

    def tick(self, now: float) -> None:
        """See Meeting."""
        for rank, (since, why) in self._missed.items():
            if now - since >= self.timeout_s:
                again = f"it has not come back within {self.timeout_s:g} s (rank_timeout_s)"
                self._break(f"rank {rank} is gone: {why}; {again}", (rank,))
        super().tick(now)
