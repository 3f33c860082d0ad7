"""Signal handlers at every place of a call at which Python may run one, one place after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def interrupt() -> None:
    """What Ctrl-C does."""
    raise KeyboardInterrupt


def with_a_signal(place: int, handler: Callable[[], Any], function: Callable[[], T]) -> tuple[T, bool]:
    """Call ``function``, with ``handler`` where it enters its ``place``-th function or comes back from it.

    That is where Python runs the handlers of signals (loops apart, which call something too). Returns what the function
    did, and whether there were so many places; raises what the function or the handler raised.
    """
    left = place

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event not in ("call", "c_return") or frame.f_code.co_name in ("_remove", "__del__"):
            return  # what the end of an object calls swallows every exception
        left -= 1
        if left < 0:
            sys.setprofile(None)
            handler()

    sys.setprofile(profile)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return result, left < 0
