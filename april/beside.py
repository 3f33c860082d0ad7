"""Work that takes long, beside an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def threads_wake(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether a thread that ends wakes the loop: it does not wake one whose clock jumps as soon as all wait."""
    return bool(getattr(loop, "threads_wake_it", True))


async def in_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call the function in a thread, or at once on a loop that no thread can wake; returns and raises what it does."""
    if threads_wake(asyncio.get_running_loop()):
        return await asyncio.to_thread(function, *arguments, **named)
    return function(*arguments, **named)
