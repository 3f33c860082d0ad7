"""Virtual time with real sockets: the clock jumps only when no file has anything to say."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from april.testing.virtual_clock import VirtualClockLoop

T = TypeVar("T")
GRACE_S = 0.0005
"""Real seconds in which a packet gets through this machine's own network; a late one is a slow one."""


class _Files(selectors.DefaultSelector):
    def __init__(self, loop: SocketClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now, or soon; else the clock jumps."""
        found = super().select(0)
        if not found and (timeout is None or timeout > 0):
            found = super().select(GRACE_S)
            if not found:
                self._loop._jump()
        return found


class SocketClockLoop(VirtualClockLoop):
    """For programs whose both ends are on this loop."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Files(self)


def run_with_sockets(program: Coroutine[Any, Any, T]) -> T:
    """Run it to its end; whatever is left of its connections ends, too."""
    with asyncio.Runner(loop_factory=SocketClockLoop) as runner:
        return runner.run(program)
