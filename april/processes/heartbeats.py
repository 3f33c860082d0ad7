"""Who has been heard of when. Time is given; own pauses are nobody else's death."""

from __future__ import annotations

from collections.abc import Iterable


class Heartbeats:
    """Deadlines of some others, of whom something is to be heard every ``interval_s`` at least."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.interval_s = deadline_s / 6
        self._heard: dict[int, float] = {}
        self._looked: float | None = None

    def hear(self, whom: int, now: float) -> None:
        """Anything was heard."""
        self._heard[whom] = now

    def forget(self, whom: int) -> None:
        """Nothing more is expected."""
        self._heard.pop(whom, None)

    def silent(self, now: float) -> Iterable[int]:
        """Those whose deadline is over. If this process itself did not run for a while, they all begin anew."""
        paused = self._looked is not None and now - self._looked > self.deadline_s / 2
        self._looked = now
        if paused:
            self._heard = dict.fromkeys(self._heard, now)
        return [whom for whom, heard in self._heard.items() if now - heard > self.deadline_s]

    @property
    def sentence(self) -> str:
        """What is wrong with a silent one."""
        return (
            f"nothing was heard of it for {self.deadline_s:g} s (rank_deadline_s); its process is stopped, or does not "
            "let april's thread run"
        )
