"""Formats the progress line of ``next_batch`` and ``april watch``, and shows it while ``next_batch`` waits.

The line is redrawn by rich in a thread, or printed from time to time if there is no terminal. Invariant: an error of
the terminal never reaches the caller of ``next_batch``.
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
from april.record.run_status import RunStatus, WaitReason
from april.text.install_command import require
from april.text.server_text import clean

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger("april")

WINDOW_S = 10.0
"""Seconds over which tokens per second are averaged."""
MIN_SHOWN_WAIT_S = 3.0
"""Shortest wait in seconds whose length is shown on the line."""
PER_SECOND = 1.0
"""Number of times per second that the line is redrawn and the event loop is asked for the state of the run."""
FIRST_PRINT_S = 10.0
"""Seconds before the first line is printed, if lines cannot be redrawn; each further pause is twice as long."""
STATE_TIMEOUT_S = 1.0
"""Maximum wait in seconds for the current state of the run; after that the last known state is printed."""
_line_lock = threading.Lock()
"""Lock that is held while a line is shown, as a process shows only one line at a time."""

StatusReceiver = Callable[[float, RunStatus], None]
"""Function that is called with a time in seconds and the state of the run at that time."""


class ProgressLine:
    """Formats the state of a run as one line, with the most important facts first.

    Args:
        window_s: seconds over which tokens per second are averaged.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()
        self._latest: RunStatus | None = None
        self._began = self._waits_since = 0.0

    def add(self, time_s: float, status: RunStatus) -> None:
        """Add the state of the run at ``time_s``; the times of the calls must not decrease."""
        if self._latest is not None and status.observed < self._latest.observed:
            self._seen.clear()  # a saved state was loaded
        if self._latest is None or status.step != self._latest.step:
            self._began = self._waits_since = time_s
        elif status.waits != self._latest.waits:
            self._waits_since = time_s
        self._waits_since = min(self._waits_since, time_s - status.waited_s)
        self._latest = status
        self._seen.append((time_s, status.observed))
        while len(self._seen) > 2 and time_s - self._seen[1][0] >= self._window_s:
            self._seen.popleft()

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second over the latest ``window_s``; None with fewer than two states."""
        if len(self._seen) < 2 or (passed := self._seen[-1][0] - self._seen[0][0]) <= 0:
            return None
        return (self._seen[-1][1] - self._seen[0][1]) / passed

    def __str__(self) -> str:
        return self.at(self._seen[-1][0]) if self._seen else ""

    def at(self, time_s: float, *, over: bool = False) -> str:
        """Return the line for ``time_s``, made from the latest state; ``over`` means that the run has ended."""
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
        if now.waits != WaitReason.RESPONSES:  # the usual wait is not worth a mention
            waited = time_s - self._waits_since
            verb = "waited" if over else "waits"
            seconds = f" ({waited:.0f} s)" if waited >= MIN_SHOWN_WAIT_S else ""
            parts.append(f"{verb} for {clean(now.waits, 100)}{seconds}")
        return "  ".join(parts)


def short(number: float) -> str:
    """Format a number in at most five characters, such as 12.3k."""
    for least, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= least:
            return f"{number / least:.1f}{letter}" if number < 100 * least else f"{number / least:.0f}{letter}"
    return f"{number:.0f}"


class RedrawnProgress:
    """Redraws the progress line on a rich console.

    Args:
        console: console on which the line is shown.
        ask: function that asks for the run's state, and later calls its argument with it; may be called in any thread.
    """

    def __init__(self, console: Console, ask: Callable[[StatusReceiver], None]) -> None:
        self._console, self._ask = console, ask

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the line inside the ``with`` block; it is erased afterwards."""
        if not _line_lock.acquire(blocking=False):
            yield
            return
        try:
            from rich.live import Live

            # the trainer's own prints must not pass through rich, so its streams are not redirected
            live = Live(
                console=self._console, get_renderable=_WaitDisplay(self._ask).render, refresh_per_second=PER_SECOND,
                transient=True, redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            try:
                _log_errors(live.start)
                yield
            finally:
                _log_errors(live.stop)
        finally:
            _line_lock.release()


class PrintedProgress:
    """Prints lines to standard error if a line cannot be redrawn (stderr is a file or a pipe, or rich is missing).

    The first line is printed once a wait has become long, and further lines at growing intervals.
    """

    def __init__(self, ask: Callable[[StatusReceiver], None]) -> None:
        self._ask = ask
        self._wait_lock: threading.Lock | None = None
        """Lock that is held until the current wait ends; None between waits."""

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Print lines while the ``with`` block runs."""
        # uses a bare lock and thread, as a KeyboardInterrupt inside Event or Thread.start would break them and get lost
        wait_lock = self._wait_lock = threading.Lock()
        wait_lock.acquire()
        try:
            _thread.start_new_thread(self._write, (wait_lock,))
            yield
        finally:
            self._wait_lock = None
            wait_lock.release()

    def _write(self, wait_lock: threading.Lock) -> None:
        wait, pause_s = _WaitDisplay(self._ask), FIRST_PRINT_S
        wait.latest_line()
        while not wait_lock.acquire(timeout=pause_s):
            wait.latest_line()
            if wait_lock.acquire(timeout=STATE_TIMEOUT_S) or self._wait_lock is not wait_lock:
                return
            if text := wait.latest_line():
                _log_errors(partial(print, f"april: {text}", file=sys.stderr, flush=True))
            pause_s *= 2


class _WaitDisplay:
    """Draws the line of one wait. Each drawing asks for the run's state, which the next drawing shows."""

    def __init__(self, ask: Callable[[StatusReceiver], None]) -> None:
        self._ask, self._line, self._text = ask, ProgressLine(), ""
        self._asked = False
        """True while an answer is awaited, so that a busy event loop is not asked twice."""

    def render(self) -> Any:
        """Return the line as rich's Text; called in rich's thread."""
        from rich.text import Text

        return Text(self.latest_line(), no_wrap=True, overflow="ellipsis")

    def latest_line(self) -> str:
        """Return the line for the latest answer, and ask for the next state."""
        if not self._asked:
            self._asked = True
            self._ask(self._answered)
        return self._text

    def _answered(self, time_s: float, status: RunStatus) -> None:
        self._line.add(time_s, status)
        self._text, self._asked = str(self._line), False


def progress_on(wanted: Any, ask: Callable[[StatusReceiver], None]) -> RedrawnProgress | PrintedProgress | None:
    """Return the object that shows the progress of a wait; None if ``wanted`` (the scheduler's ``progress``) is False.

    Raises:
        ConfigError: ``wanted`` has an unknown type, or is True and rich is not installed.
    """
    if wanted is False:
        return None
    if hasattr(wanted, "is_terminal"):
        return RedrawnProgress(wanted, ask)
    if wanted is not None and wanted is not True:
        raise ConfigError(f"progress must be True, False, None or a rich Console, got {type(wanted).__name__}")
    if wanted:
        require("progress=True", "rich", extra="cli")
    console = _own_console()
    return PrintedProgress(ask) if console is None else RedrawnProgress(console, ask)


def _own_console() -> Console | None:
    """Return a console for the notebook or the terminal at stderr; None if there is neither, or rich is missing."""
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


def _log_errors(function: Callable[[], object]) -> None:
    """Call a drawing function; its exceptions are only logged, as a lost terminal must not end a wait."""
    try:
        function()
    except Exception:
        log.debug("the progress line could not be drawn", exc_info=True)
