"""Runs ``april watch``: reads the record of a run as it grows, and shows the run on a terminal (with rich).

Invariant: text from a record is shown as plain text, never as markup or as an escape sequence.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from april.errors import RecordError
from april.record.file import BATCH, CLOSED, CUT_OFF, STATUS, Line, LineReader, end_text, refuse_other_formats
from april.record.run_status import RunStatus
from april.text.server_text import clean
from april.view.progress import ProgressLine, short

SHOWN_BATCHES = 8
"""Number of latest batches that are shown."""
READ_BYTES = 1 << 22
"""Number of bytes that are read at a time."""
MAX_LINE_BYTES = 1 << 28
"""Largest size of a line in bytes; lines with a saved state are long."""
READ_EVERY_S = 0.5
"""Seconds between two reads of the file."""
WINDOW_S = 60.0
"""Seconds over which tokens per second are averaged. A record gets the tokens of a request only when the request ends,
so the figure would jump with a shorter window."""
SILENT_S = 30.0
"""Seconds without a new line after which the screen warns of the silence."""
MAX_SHOWN_ENGINES = 16
COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("seconds", "step_s", lambda v: f"{v:.1f}"),
    ("busy", "engines_busy", lambda v: f"{v:.0%}"),
    ("tokens", "trained_tokens", short),
    ("off-policy", "off_policy_share", lambda v: f"{v:.0%}"),
    ("staleness", "staleness_mean", lambda v: f"{v:.2f}"),
    ("at most", "staleness_max", lambda v: f"{v:.0f}"),
    ("reward", "reward_mean", lambda v: f"{v:.3g}"),
)
"""Heading, metric and format function of each column."""
_ENGINE = "engine/"
_DROPPED = "_dropped_"
"""Part of the names of all metrics that count dropped prompts or responses."""


@dataclass(slots=True)
class WatchedRun:
    """State of a run after the lines of its record that were read so far.

    Attributes:
        lines: number of lines that were read.
        seconds: time of the last line.
        status: latest status of the run.
        line: progress line, made of every status so far.
        batches: latest batches, as (number, metrics, sentence on the bottleneck).
        dropped: number of prompts and responses dropped so far, by the name of the metric.
        end: sentence that says how the run ended; None while it runs.
    """

    lines: int = 0
    seconds: float = 0.0
    status: RunStatus | None = None
    line: ProgressLine = field(default_factory=lambda: ProgressLine(WINDOW_S))
    batches: deque[tuple[int, dict[str, float], str]] = field(default_factory=lambda: deque(maxlen=SHOWN_BATCHES))
    dropped: Counter[str] = field(default_factory=Counter)
    end: str | None = None


class RecordFollower:
    """Reads the lines that are appended to a record. If a new run replaces the file, the new file is read.

    Args:
        path: path of the record; the file need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._begin()

    def _begin(self) -> None:
        self._reader = LineReader(self._path, (BATCH, CUT_OFF, CLOSED, STATUS))
        self._rest = b""
        self.seen = WatchedRun()

    def read_more(self) -> bool:
        """Read the next lines, if there are any; return True if further lines may be readable at once.

        Raises:
            RecordError: the file is not a record, has another version's format, is damaged or cannot be read.
        """
        try:
            if self._file is None or self._was_replaced():
                self.close()
                self._file = self._path.open("rb")
                self._begin()
            piece = self._file.read(READ_BYTES)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise RecordError(f"{self._path} cannot be read: {error.strerror}") from None
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > (MAX_LINE_BYTES if self._reader.number else READ_BYTES):
            raise RecordError(f"{self._path} is not a record of april: one of its lines has no end")
        for raw in lines:
            if (line := self._reader.read(raw + b"\n")) is not None:
                self._add(line)
        self.seen.lines = self._reader.number
        return len(piece) == READ_BYTES

    @property
    def exists(self) -> bool:
        """True if the file was found."""
        return self._file is not None

    @property
    def notice(self) -> str:
        """A sentence that says why the record does not grow (no file yet, or no writer); empty otherwise."""
        if self._file is None:
            return f"{clean(self._path)} does not exist yet"
        if self.seen.end is None and self._is_abandoned(self._file):
            return "no process on this machine writes the record: the run was killed, or runs on another machine"
        return ""

    @staticmethod
    def _is_abandoned(file: BinaryIO) -> bool:
        """Return True if no process on this machine writes the record, as the writer would hold a lock on the file."""
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # the file is locked, or the file system has no locks
            return False
        fcntl.flock(file, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Close the record's file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _was_replaced(self) -> bool:
        """Return True if the path now names another file, or the file is shorter than the part that was read."""
        assert self._file is not None
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        here = os.fstat(self._file.fileno())
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino) or there.st_size < self._file.tell()

    def _add(self, line: Line) -> None:
        seen, parts = self.seen, line.fields
        seen.seconds = line.time_s
        try:
            if line.number == 1:
                refuse_other_formats(self._path, parts)
            elif line.kind == STATUS:
                seen.status = msgspec.convert(parts, RunStatus)
                seen.line.add(line.time_s, seen.status)
            elif line.kind == BATCH:
                metrics = {str(name): float(value) for name, value in parts["metrics"].items()}
                seen.batches.append((int(parts["id"]), metrics, str(parts["bottleneck"])))
                seen.dropped.update({n: int(v) for n, v in metrics.items() if _DROPPED in n and v})
            else:
                seen.end = end_text(line.kind, parts)
        except RecordError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise RecordError(
                f"line {line.number} of {self._path} is not valid: {type(error).__name__}: {error}"
            ) from None


def screen(follower: RecordFollower, silent_s: float = 0.0) -> RenderableType:
    """Return the whole screen; ``silent_s`` is the number of seconds since the record last grew."""
    seen, notice = follower.seen, follower.notice
    if not follower.exists:
        return Text(notice)
    now = seen.seconds + (0.0 if notice else silent_s)  # a run that waits writes no lines, so count the silence
    parts: list[RenderableType] = [Text(seen.line.at(now, over=bool(notice)) or "nothing was generated yet")]
    if seen.end is not None:
        parts = [_one_line(f"{clean(seen.end)}, after {seen.seconds:.0f} s")]
    elif notice:
        parts.insert(0, Text(notice))
    if seen.end is None and silent_s > SILENT_S:
        parts.append(_one_line(f"nothing was written for {silent_s:.0f} s: the run is stuck, or its process has died"))
    if seen.batches:
        parts.append(_steps(seen))
        if why := seen.batches[-1][2]:
            parts.append(Text(clean(why)))
    if seen.dropped:
        dropped = ", ".join(f"{clean(name, 60)} {count}" for name, count in sorted(seen.dropped.items()))
        parts.append(Text(f"so far: {dropped}"))
    if seen.status is not None and seen.status.engines:
        parts.append(_engines(seen, seen.status.engines))
    return Group(*parts)


def _one_line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _steps(seen: WatchedRun) -> Table:
    """Return a table with a row for each of the latest batches."""
    out = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    out.add_column("step", justify="right")
    for heading, _, _ in COLUMNS:
        out.add_column(heading, justify="right", no_wrap=True)
    for number, metrics, _ in seen.batches:
        cells = [show(metrics[name]) if name in metrics else "" for _, name, show in COLUMNS]
        out.add_row(str(number), *map(Text, cells))
    return out


def _engines(seen: WatchedRun, in_flight: dict[str, int]) -> Table:
    """Return a table of engines: their requests in flight (now, or when the run ended) and latest metrics."""
    metrics = seen.batches[-1][1] if seen.batches else {}
    out = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for heading in ("engine", "in flight" if seen.end is None else "cut by its end", "cap", "memory", "weights"):
        out.add_column(heading, justify="left" if heading == "engine" else "right", no_wrap=heading != "engine")
    names = sorted(in_flight)
    for name in names[:MAX_SHOWN_ENGINES]:
        cap, memory = metrics.get(f"{_ENGINE}{name}/cap"), metrics.get(f"{_ENGINE}{name}/kv_usage")
        unverified = metrics.get(f"{_ENGINE}{name}/unverified_weights")
        out.add_row(
            Text(clean(name, 60)), f"{in_flight[name]}", "" if cap is None else f"{cap:.0f}",
            "" if memory is None else f"{memory:.0%}", "unverified" if unverified else "",
        )  # fmt: skip
    if len(names) > MAX_SHOWN_ENGINES:
        out.add_row(f"and {len(names) - MAX_SHOWN_ENGINES} more")
    return out


def watch(
    path: Path, console: Console, *, once: bool = False,
    now: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep,
) -> bool:  # fmt: skip
    """Show a record until it ends or Ctrl-C is pressed; with ``once``, only once. Return False if there is no file.

    Raises:
        RecordError: the file is not a record, has another version's format, is damaged or cannot be read.
    """
    follower = RecordFollower(path)
    try:
        if once:
            while follower.read_more():
                pass
            console.print(screen(follower))
            return follower.exists
        with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
            wrote, lines, said = now(), 0, ""
            while True:
                more = follower.read_more()
                if follower.seen.lines != lines:
                    wrote, lines = now(), follower.seen.lines
                # without a terminal, Live draws nothing
                if not console.is_terminal and not more and follower.notice not in ("", said):
                    said = follower.notice
                    console.print(said, soft_wrap=True)
                live.update(screen(follower, now() - wrote), refresh=True)
                if follower.seen.end is not None and not more:
                    return True
                if not more:
                    sleep(READ_EVERY_S)
    except KeyboardInterrupt:
        return True
    finally:
        follower.close()
