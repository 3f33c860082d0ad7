"""What a failure of a user's function says of the function: its place in the user's code, and its kind."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from april.driver.user_code import code_of, describe
from april.errors import UsageError

_HOUSE = str(Path(__file__).parent.parent) + os.sep
_PLACES = filter(None, map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
_LIBRARIES = tuple(place + os.sep for place in _PLACES)
MOST_CAUSES = 16
"""Of an error that are looked at; some are their own cause."""


def is_users(file: str) -> bool:
    """Whether code is the user's: neither april's nor an installed library's."""
    return not file.startswith((_HOUSE, "<frozen", *_LIBRARIES))


def place_of(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """``line 7 of rewards.py``: where the user's code raised it, or else where ``function`` is; or nothing."""
    place, library, trace = "", "", error.__traceback__
    while trace is not None:
        file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        here = f"line {line} of {Path(file).name}"
        if is_users(file):
            place = here
        elif not file.startswith(_HOUSE):
            library = here
        trace = trace.tb_next
    if (found := place or library) or (code := code_of(function)) is None:
        return found
    return f"line {code.co_firstlineno} of {Path(code.co_filename).name}"


def told_of(error: BaseException, place: str) -> str:
    """What it says, and where."""
    said = f"{describe(error)} ({place})" if place else describe(error)
    if isinstance(error, ValueError) and "main thread" in str(error):  # signal.signal, and what is built on it
        said += (
            "; plain functions run in threads, which have no signals: set function_timeout_s, or let what needs an "
            "alarm run in a process of its own"
        )
    return said


def kind_of(error: BaseException, place: str) -> str:
    """Type and place of a failure that no other try mends; empty for what may pass, as an outage of a judge does.

    Only Python's own errors and april's refusals: classes of libraries and users may stand for a server that is away,
    and so may what is raised because of them.
    """
    if isinstance(error.__cause__, (StopIteration, StopAsyncIteration)):  # as which they cannot be passed on
        error = error.__cause__
    mistaken = isinstance(error, (UsageError, TypeError, AttributeError, NameError, ImportError, NotImplementedError))
    return f"{type(error).__name__}, {place}" if mistaken or not _passes(error) else ""


def _passes(error: BaseException, deep: int = MOST_CAUSES) -> bool:
    """It, or what it was raised for, may pass; of a group, any of its errors."""
    if isinstance(error, (OSError, EOFError, MemoryError)) or type(error).__module__ != "builtins":
        return True
    if isinstance(error, BaseExceptionGroup):
        return any(_passes(member, deep) for member in error.exceptions)
    by_hand = not isinstance(error, (LookupError, ArithmeticError, AssertionError))
    context = error.__context__ if by_hand and not error.__suppress_context__ else None
    before = error.__cause__ or context
    return before is not None and deep > 0 and _passes(before, deep - 1)
