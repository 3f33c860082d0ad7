"""Runs blocking functions in worker threads, from coroutines on a real or virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def can_be_woken(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether threads can wake the loop. A loop with a virtual clock skips ahead and does not wait for them."""
    return bool(getattr(loop, "threads_wake_it", True))


async def run_in_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Run a function in a worker thread, or inline if threads cannot wake the loop, and return its result."""
    if can_be_woken(asyncio.get_running_loop()):
        return await asyncio.to_thread(function, *arguments, **named)
    return function(*arguments, **named)
