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
    did, and whether there were so many places; raises what the function or the handler raised. At the end of an object
    (``__del__``, a generator that is dropped) Python itself swallows what the handler raised: the function goes on.
    """
    left = place
    raised: list[BaseException] = []
    tell = sys.unraisablehook

    def tell_others(unraisable: Any) -> None:
        if unraisable.exc_value not in raised:
            tell(unraisable)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event not in ("call", "c_return"):
            return
        left -= 1
        if left < 0:
            sys.setprofile(None)
            try:
                handler()
            except BaseException as error:
                raised.append(error)
                raise

    sys.unraisablehook = tell_others
    sys.setprofile(profile)
    try:
        result = function()
    finally:
        sys.setprofile(None)
        sys.unraisablehook = tell
    return result, left < 0
