"""Shortens the tracebacks of errors that april raises to its caller, so that they show only the user's own lines."""

from __future__ import annotations

import logging
from traceback import walk_tb
from types import TracebackType

from april.driver.user_code import is_user_file
from april.errors import InvariantError

log = logging.getLogger("april")

FEW = 3
"""Maximum number of frames that are not worth logging; a shortened traceback gets a few new frames on its way to the
caller."""


def shorten(error: BaseException) -> None:
    """Remove april's own frames from an error that is about to be raised to april's caller.

    A cause keeps its frames from the user's code on; without such frames it is removed, as the error's message quotes
    it. The whole traceback is logged at level DEBUG. An InvariantError, which is a bug in april, keeps all frames.
    """
    if isinstance(error, InvariantError):
        return
    cause = error.__cause__
    users = None if cause is None else _from_user_code(cause.__traceback__)
    cut = cause is not None and users is not cause.__traceback__
    if cut or sum(1 for _ in walk_tb(error.__traceback__)) > FEW:
        log.debug("the whole traceback of an error", exc_info=error)
    error.__traceback__ = None
    error.__cause__ = None if cause is None or users is None else cause.with_traceback(users)
    error.__suppress_context__ = True


def _from_user_code(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first frame in the user's code on; None if it has no such frame."""
    while trace is not None and not is_user_file(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace
