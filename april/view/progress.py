"""The progress line within ``next_batch`` and in ``april watch``, drawn by rich's own thread, or written now and then.

Invariant: whatever happens to the terminal, the wait for the batch does not hear of it.
"""

from __future__ import annotations

import _thread
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from april.errors import ConfigError
from april.extras import require
from april.record.standing import Standing, Waits
from april.server_text import clean

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger("april")

WINDOW_S = 10.0
"""Tokens per second are a mean over so long."""
LEAST_WAIT_S = 3.0
"""Length of a wait from which on the line shows it."""
PER_SECOND = 1.0
"""Frequency at which the line is drawn and the loop is asked for the state of the run."""
WRITTEN_AFTER_S = 10.0
"""Length of a wait after which a line is written where none can be drawn; the next ones take twice as long each."""
ANSWER_S = 1.0
"""Longest wait for the state of the run, before an older one is written."""
_SHOWN = threading.Lock()
"""A process shows one line at a time."""

Tell = Callable[[float, Standing], None]


class Line:
    """The state of a run on one line, the most important first.

    Args:
        window_s: length of time over which tokens per second are averaged.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()
        self._latest: Standing | None = None
        self._began = self._waits_since = 0.0

    def add(self, time_s: float, standing: Standing) -> None:
        """Add the state of the run at a time; times do not go back."""
        if self._latest is not None and standing.observed < self._latest.observed:
            self._seen.clear()  # another state was loaded
        if self._latest is None or standing.step != self._latest.step:
            self._began = self._waits_since = time_s
        elif standing.waits != self._latest.waits:
            self._waits_since = time_s
        self._waits_since = min(self._waits_since, time_s - standing.waited_s)
        self._latest = standing
        self._seen.append((time_s, standing.observed))
        while len(self._seen) > 2 and time_s - self._seen[1][0] >= self._window_s:
            self._seen.popleft()

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second lately; None if too little was seen."""
        if len(self._seen) < 2 or (passed := self._seen[-1][0] - self._seen[0][0]) <= 0:
            return None
        return (self._seen[-1][1] - self._seen[0][1]) / passed

    def __str__(self) -> str:
        return self.at(self._seen[-1][0]) if self._seen else ""

    def at(self, time_s: float) -> str:
        """Return the line at a time since which nothing else was seen."""
        now = self._latest
        if now is None:
            return ""
        unit = "groups" if now.whole_groups else "samples"
        parts = [f"step {now.step}", f"{now.ready}/{now.target} {unit}", f"{time_s - self._began:.0f} s"]
        if (speed := self.tokens_per_s) is not None:
            parts.append(f"{short(speed)} tok/s")
        parts.append(f"{now.in_flight} in flight")
        if now.partials:
            parts.append(f"{now.partials} partial, oldest {now.oldest} update{'' if now.oldest == 1 else 's'}")
        if now.waits != Waits.RESPONSES:  # which need not be said
            waited = time_s - self._waits_since
            parts.append(f"waits for {clean(now.waits, 100)}{f' ({waited:.0f} s)' if waited >= LEAST_WAIT_S else ''}")
        return "  ".join(parts)


def short(number: float) -> str:
    """Return about this number in at most five characters."""
    for least, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= least:
            return f"{number / least:.1f}{letter}" if number < 100 * least else f"{number / least:.0f}{letter}"
    return f"{number:.0f}"


class Progress:
    """The line on one console.

    Args:
        console: console on which the line is shown.
        ask: called in any thread; has ``tell`` called soon with the state of the run.
    """

    def __init__(self, console: Console, ask: Callable[[Tell], None]) -> None:
        self._console, self._ask = console, ask

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the line inside; it is gone afterwards."""
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


class WrittenLines:
    """Lines on standard error, where none can be drawn over and over: a file, a pipe, or no rich.

    A wait writes its first one when it has become long, and further ones ever more rarely.
    """

    def __init__(self, ask: Callable[[Tell], None]) -> None:
        self._ask = ask
        self._goes_on: threading.Lock | None = None
        """Held while the present wait goes on."""

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Write lines while the wait inside goes on."""
        # a bare lock and thread: an interrupt inside Event or Thread.start breaks them, and hides the interrupt
        goes_on = self._goes_on = threading.Lock()
        goes_on.acquire()
        try:
            _thread.start_new_thread(self._write, (goes_on,))
            yield
        finally:
            self._goes_on = None
            goes_on.release()

    def _write(self, goes_on: threading.Lock) -> None:
        wait, pause_s = _Wait(self._ask), WRITTEN_AFTER_S
        wait.look()
        while not goes_on.acquire(timeout=pause_s):
            wait.look()
            if goes_on.acquire(timeout=ANSWER_S) or self._goes_on is not goes_on:
                return
            if text := wait.look():
                _quietly(partial(print, f"april: {text}", file=sys.stderr, flush=True))
            pause_s *= 2


class _Wait:
    """The line of one wait: the state is asked for when the line is drawn, and shown the next time."""

    def __init__(self, ask: Callable[[Tell], None]) -> None:
        self._ask, self._line, self._text = ask, Line(), ""
        self._asked = False
        """Set while an answer is due: a loop that is busy is not asked twice."""

    def drawn(self) -> Any:
        """Return the line for rich, in its thread."""
        from rich.text import Text

        return Text(self.look(), no_wrap=True, overflow="ellipsis")

    def look(self) -> str:
        """Return the line by the latest answer, and ask for the next one."""
        if not self._asked:
            self._asked = True
            self._ask(self._answered)
        return self._text

    def _answered(self, time_s: float, standing: Standing) -> None:
        self._line.add(time_s, standing)
        self._text, self._asked = str(self._line), False


def progress_on(wanted: Any, ask: Callable[[Tell], None]) -> Progress | WrittenLines | None:
    """Return what shows how a wait stands; ``wanted`` is the scheduler's ``progress``, and False wants nothing.

    Raises:
        ConfigError: ``wanted`` is of another kind, or rich is not installed though a line is asked for.
    """
    if wanted is False:
        return None
    if hasattr(wanted, "is_terminal"):
        return Progress(wanted, ask)
    if wanted is not None and wanted is not True:
        raise ConfigError(f"progress must be True, False, None or a rich Console, got {type(wanted).__name__}")
    if wanted:
        require("progress=True", "rich", extra="cli")
    console = _own_console()
    return WrittenLines(ask) if console is None else Progress(console, ask)


def _own_console() -> Console | None:
    """Return standard error if it is a terminal, or the notebook; None if it is neither, or rich is not installed."""
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
    """Call a function of the terminal; a terminal that is gone ends no wait."""
    try:
        function()
    except Exception:
        log.debug("the line of progress could not be drawn", exc_info=True)
