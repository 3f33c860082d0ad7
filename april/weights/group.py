"""Process groups of one sender and the workers of engines, apart from the default group of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from april.engines.weight_routes import Meeting


class Group(Protocol):
    """The sender's end of a group: rank 0. Used by one thread, but for :meth:`close`."""

    def connect(self, goes_on: Callable[[], None]) -> None:
        """Wait for the workers; ``goes_on`` is called now and then and may raise, as may a time limit."""
        ...

    def broadcast(self, tensors: Sequence[Any], goes_on: Callable[[], None]) -> None:
        """Send one bucket, as connect waits."""
        ...

    def close(self) -> None:
        """Let go of the workers: those that wait for this end fail at once, where the back-end can."""
        ...


def open_group(
    backend: str, handshake: str, addresses: Sequence[str], world_size: int, timeout_s: float
) -> tuple[Group, Meeting]:
    """Open a group; the meeting's ``rank_offset`` is 1, to be replaced for each engine."""
    raise NotImplementedError
