"""Failures in the log: one line each; the traceback of a kind of failure comes with its first line only.

One mistake in a reward function fails every sample, three times each: hundreds of equal tracebacks would hide it.
"""

from __future__ import annotations

import logging

from april.driver.user_code import describe
from april.errors import UsageError

log = logging.getLogger("april")


class FailureLog:
    """Warns of failures. Of one kind are failures of the same type that were raised in the same line."""

    def __init__(self) -> None:
        self._seen: set[tuple[object, ...]] = set()

    def warn(self, error: BaseException, what: str, *where: object, told: str = "", once: bool = False) -> None:
        """``what % where``, and what is wrong, in the words ``told``; ``once``: the first of its kind only."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        kind = (type(error), *((trace.tb_frame.f_code, trace.tb_lineno) if trace is not None else (what,)))
        first = kind not in self._seen
        self._seen.add(kind)
        if isinstance(error, UsageError):  # its sentence says all; what follows would be april's own lines
            trace = None
        if first or not once:
            traced = error if first and trace is not None else None
            log.warning(f"{what}: %s", *where, told or describe(error), exc_info=traced)
