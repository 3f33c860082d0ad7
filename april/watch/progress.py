"""One line of progress within ``next_batch``, drawn by rich's own thread: no timer of april's, no line in logs.

Invariant: whatever happens to the terminal, the wait for the batch does not hear of it.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from april.errors import ConfigError
from april.extras import require
from april.record.standing import Standing
from april.watch.line import Line

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger("april")

PER_SECOND = 1.0
"""Times that the line is drawn, and that the loop is asked how things stand."""
_SHOWN = threading.Lock()
"""A process shows one line at a time."""

Tell = Callable[[float, Standing], None]


class Progress:
    """The line on one console.

    Args:
        console: where it is shown.
        ask: has how things stand told, soon, from whatever thread.
    """

    def __init__(self, console: Console, ask: Callable[[Tell], None]) -> None:
        self._console, self._ask = console, ask

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The line is there inside, and gone afterwards."""
        if not _SHOWN.acquire(blocking=False):
            yield
            return
        try:
            from rich.live import Live

            # the trainer's own streams are left alone: what it prints is not to go through rich
            live = Live(
                console=self._console, get_renderable=_Wait(self._ask).drawn, refresh_per_second=PER_SECOND,
                transient=True, redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            try:
                _quietly(live.start)
                yield
            finally:
                _quietly(live.stop)
        finally:
            _SHOWN.release()


class _Wait:
    """What is shown in one wait: asked for when it is drawn, and there when it is drawn again."""

    def __init__(self, ask: Callable[[Tell], None]) -> None:
        self._ask, self._line = ask, Line()
        self._text = ""
        self._asked = False
        """It has not been told yet: a loop that is busy is not asked twice."""

    def drawn(self) -> Any:
        """For rich, in its thread."""
        from rich.text import Text

        if not self._asked:
            self._asked = True
            self._ask(self._take)
        return Text(self._text, no_wrap=True, overflow="ellipsis")

    def _take(self, time_s: float, standing: Standing) -> None:
        self._line.take(time_s, standing)
        self._text, self._asked = str(self._line), False


def progress_on(wanted: Any, ask: Callable[[Tell], None]) -> Progress | None:
    """The line where one is to be shown; ``wanted``: as the scheduler's ``progress``.

    Raises:
        ConfigError: it is none of these, or rich is not installed though a line is asked for.
    """
    if wanted is None or isinstance(wanted, bool):
        if wanted is True:
            require("progress=True", "rich", extra="cli")
        console = None if wanted is False else _own_console()
    elif hasattr(wanted, "is_terminal"):
        console = wanted
    else:
        raise ConfigError(f"progress must be True, False, None or a rich Console, got {type(wanted).__name__}")
    return None if console is None else Progress(console, ask)


def _own_console() -> Console | None:
    """Standard error, if it is a terminal, or the notebook; None: nobody looks, or there is no rich."""
    if find_spec("rich") is None:
        return None
    if "ipykernel" in sys.modules:
        from rich.console import Console

        console = Console()
        return console if console.is_jupyter and find_spec("ipywidgets") is not None else None
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    from rich.console import Console

    console = Console(stderr=True)
    return console if console.is_interactive else None


def _quietly(function: Callable[[], object]) -> None:
    """A terminal that is gone ends no wait."""
    try:
        function()
    except Exception:
        log.debug("the line of progress could not be drawn", exc_info=True)
