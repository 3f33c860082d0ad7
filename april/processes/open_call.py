"""A call that one rank makes together with the others, until its caller has heard its end.

An interrupted call stays open, here and for the others: made again, it goes on where it was. So each thing that happens
in it is noted by one assignment, right after it has happened, and whatever is done again changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from april.driver.loop_thread import Reply
from april.errors import RolloutError


class OpenCall:
    """Call number ``number``, whose name and arguments are ``what``."""

    def __init__(self, number: int, what: str) -> None:
        self.number = number
        self.what = what
        self.steps = 0
        """Steps that this rank has carried out, and said so."""
        self.carried = 0
        """Those that it has carried out."""
        self.failed: Exception | None = None
        """What a step has raised on another rank."""
        self.outcome = Reply[Any]()
        """For the caller; there when the call has ended here and for the others."""
        self.wanted = True
        """Somebody waits for it, in whatever thread."""
        self.over = False
        """It has ended for all by an interrupt of this rank in a step, and cannot go on."""
        self._runner: int | None = None

    def run(self, body: Callable[[OpenCall], Any], leave: Callable[[int], None]) -> None:
        """Carry it out, or wait for the thread that does; an interrupt leaves it open."""
        if self._runner is not None:
            if self._runner == threading.get_ident():
                raise RolloutError(f"{self.what} was called in the middle of itself, by a signal handler")
            self.outcome.wait()
        if self.outcome.done():
            return
        self._runner = threading.get_ident()
        try:
            self.outcome.give(body(self))
        except Exception as error:
            self.outcome.give(None, error)
        except BaseException:
            leave(self.number)
            raise
        finally:
            self._runner = None

    def ended(self) -> tuple[Any, BaseException | None]:
        """What came of it, to be returned or raised."""
        error = self.outcome.error()
        return (None if error is not None else self.outcome.result()), error
