"""The end of the process waits a while for the user's functions that still run in threads.

A daemon thread that comes back from a native library while the interpreter ends is torn out of it, and C++ answers that
with ``abort()``: a good run would end with code 134. So the interpreter's end waits, and says for what. Then it raises
SystemExit in what still runs, which ends whatever comes back to Python; what never does cannot be torn out of anything.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

log = logging.getLogger("april")

EXIT_PATIENCE_S, TELL_S, INTERRUPT_S = 10.0, 2.0, 2.0
"""How long the end of the process waits for functions, when it says so, and how long for those it has interrupted."""
_running: dict[int, Callable[..., Any]] = {}
"""What runs in threads of april, by thread."""
_over = threading.Event()
"""What still ran was interrupted: the process ends now."""


@contextmanager
def waited_for(function: Callable[..., Any]) -> Iterator[None]:
    """The calling thread runs a function of the user."""
    me = threading.get_ident()
    _running[me] = function
    try:
        yield
    finally:
        _running.pop(me, None)


def stay_if_over() -> None:
    """Does not return once what ran was interrupted: nobody hears its answer, and what begins now would be torn out."""
    if _over.is_set():
        _running.pop(threading.get_ident(), None)
        threading.Event().wait()


def _wait() -> None:
    if not _ended_within(TELL_S):
        log.warning("the process ends when %s is done, after %g s at the latest", _names(), EXIT_PATIENCE_S)
    if not _ended_within(EXIT_PATIENCE_S - TELL_S):
        log.error("%s did not end; it is interrupted, and the process ends", _names())
        _over.set()  # before the look: what begins later sees it
        for thread in list(_running):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
        _ended_within(INTERRUPT_S)


def _ended_within(seconds: float) -> bool:
    end = time.monotonic() + seconds
    while _running and time.monotonic() < end:
        time.sleep(0.01)
    return not _running


def _name(function: Any) -> str:
    """Of what is called in the end: partials and helpers are given it as their first argument."""
    while isinstance(function, partial):
        function = function.args[0] if function.args and callable(function.args[0]) else function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _names() -> str:
    names = sorted(map(_name, _running.values()))
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")


atexit.register(_wait)
os.register_at_fork(after_in_child=_running.clear)
