"""Shortens the tracebacks of errors that april raises to its caller, so that they show only the user's own lines."""

from __future__ import annotations

import logging
from traceback import walk_tb
from types import TracebackType

from april.driver.user_code import is_user_file
from april.errors import InvariantError

log = logging.getLogger("april")

UNLOGGED_FRAMES = 3
"""Maximum number of frames of a traceback that is not logged; an error that was shortened before has a few again."""


def shorten(error: BaseException) -> None:
    """Remove april's own frames from an error that is about to be raised to april's caller.

    The traceback of the error's cause then begins in the user's code. A cause without frames there is removed, as the
    error's message quotes it. The whole traceback is logged at level DEBUG. An InvariantError, which is a bug in april,
    keeps all frames.
    """
    if isinstance(error, InvariantError):
        return
    cause = error.__cause__
    users = None if cause is None else _from_user_code(cause.__traceback__)
    cut = cause is not None and users is not cause.__traceback__
    if cut or sum(1 for _ in walk_tb(error.__traceback__)) > UNLOGGED_FRAMES:
        log.debug("the whole traceback of an error", exc_info=error)
    error.__traceback__ = None
    error.__cause__ = None if cause is None or users is None else cause.with_traceback(users)
    error.__suppress_context__ = True


def _from_user_code(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins at its first frame in the user's code; None without such a frame."""
    while trace is not None and not is_user_file(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace
