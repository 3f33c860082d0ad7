"""Links: ordered two-way connections between two processes of april, whatever carries them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

OnFrame = Callable[[bytes], None]
OnLost = Callable[[str], None]


class Link(Protocol):
    """One end of a connection; everything is called on the loop that it lives on."""

    peer: str
    """Where the other end is, for messages."""

    def open(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        """From now on frames are given to ``on_frame``, each once and in order; those that came before are first.

        ``on_lost(why)`` is called at most once, when the other end is gone, and nothing after it.
        """

    def send(self, frame: bytes) -> None:
        """Never waits. What the other end does not get, because the link is lost, is gone."""

    def close(self) -> None:
        """What was sent goes out, then the other end is told that the link is lost; here nothing is called any more."""


class MemoryLink:
    """One end of a link inside of a process; see :func:`memory_links`."""

    def __init__(self) -> None:
        self.peer = "this process"
        self._loop = asyncio.get_running_loop()
        self._other: MemoryLink | None = None
        self._on_frame: OnFrame | None = None
        self._on_lost: OnLost | None = None
        self._early: list[bytes] = []
        self._lost: str | None = None
        self._over = False

    def open(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        """See :class:`Link`."""
        self._on_frame, self._on_lost = on_frame, on_lost
        early, self._early = self._early, []
        for frame in early:
            self._loop.call_soon(self._receive, frame)
        if self._lost is not None:
            self._loop.call_soon(self._lose, self._lost)

    def send(self, frame: bytes) -> None:
        """See :class:`Link`."""
        if not self._over and self._other is not None:
            self._loop.call_soon(self._other._receive, frame)

    def close(self) -> None:
        """See :class:`Link`."""
        self.cut("the other end has closed the connection", here=False)

    def cut(self, why: str, *, here: bool = True) -> None:
        """Lose the connection; what is on its way still arrives. ``here``: this end is told, too."""
        other, self._other = self._other, None
        if other is None:
            return
        other._other = None
        self._loop.call_soon(other._lose, why)
        if here:
            self._loop.call_soon(self._lose, why)
        else:
            self._over = True

    def _receive(self, frame: bytes) -> None:
        if self._over:
            return
        if self._on_frame is None:
            self._early.append(frame)
        else:
            self._on_frame(frame)

    def _lose(self, why: str) -> None:
        if self._over:
            return
        if self._on_lost is None:
            self._lost = why
        else:
            self._over = True
            self._on_lost(why)


def memory_links() -> tuple[MemoryLink, MemoryLink]:
    """Both ends of a link on the running loop, a virtual one as well."""
    a, b = MemoryLink(), MemoryLink()
    a._other, b._other = b, a
    return a, b
