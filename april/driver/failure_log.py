"""Failures in the log: one line each; the traceback of a kind of failure comes with its first line only.

One mistake in a reward function fails every sample, three times each: hundreds of equal tracebacks would hide it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType

from april.driver.user_code import describe
from april.errors import UsageError

log = logging.getLogger("april")

_HOUSE = str(Path(__file__).parent.parent)


class FailureLog:
    """Warns of failures. Of one kind are failures of the same type that were raised in the same line."""

    def __init__(self) -> None:
        self._seen: set[tuple[object, ...]] = set()

    def warn(self, error: BaseException, what: str, *where: object, once: bool = False) -> None:
        """``what % where``, and what is wrong; ``once``: the first of its kind only."""
        trace, place = error.__traceback__, ""
        while trace is not None and trace.tb_next is not None:
            place = _place_of(trace) or place
            trace = trace.tb_next
        kind = (type(error), *((trace.tb_frame.f_code, trace.tb_lineno) if trace is not None else (what,)))
        first = kind not in self._seen
        self._seen.add(kind)
        if isinstance(error, UsageError):  # its sentence says all, but where; what follows would be april's own lines
            trace = None
        if first or not once:
            what += ": %s%s" if trace is None else ": %s"
            told = (describe(error), place) if trace is None else (describe(error),)
            log.warning(what, *where, *told, exc_info=error if first and trace is not None else None)


def _place_of(trace: TracebackType) -> str:
    """The line, if it is not april's."""
    file = trace.tb_frame.f_code.co_filename
    return "" if file.startswith(_HOUSE) else f" (line {trace.tb_lineno} of {Path(file).name})"
