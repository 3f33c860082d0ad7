"""The end of the process waits a while for the user's functions that still run in threads.

A daemon thread that comes back from a native library while the interpreter ends is torn out of it, and C++ answers that
with ``abort()``: a good run would end with code 134. So the interpreter's end waits, says for what, and then leaves
without them.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

log = logging.getLogger("april")

EXIT_PATIENCE_S, TELL_S = 10.0, 2.0
"""How long the end of the process waits for functions, and after which time it says so."""
_running: dict[int, Callable[..., Any]] = {}
"""What runs in threads of april, by thread."""


@contextmanager
def waited_for(function: Callable[..., Any]) -> Iterator[None]:
    """The calling thread runs a function of the user."""
    me = threading.get_ident()
    _running[me] = function
    try:
        yield
    finally:
        _running.pop(me, None)


def _wait() -> None:
    begin, told = time.monotonic(), False
    while _running and (waited := time.monotonic() - begin) < EXIT_PATIENCE_S:
        if not told and waited > TELL_S:
            told = True
            log.warning("the process ends when %s is done, after %g s at the latest", _names(), EXIT_PATIENCE_S)
        time.sleep(0.01)
    if _running:
        log.error("%s did not end; the process ends without it", _names())
        atexit.unregister(_wait)
        with suppress(Exception):
            atexit._run_exitfuncs()  # those that were registered before this one
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(0 if getattr(sys, "last_value", None) is None else 1)


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
