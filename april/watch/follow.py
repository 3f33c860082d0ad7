"""A record that is being written, read as it grows."""

from __future__ import annotations

import os
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from april.errors import RecordError
from april.record.lines import BATCH, CLOSED, OVER, STANDING, Line, LineReader, end_of, refuse_other_formats
from april.record.standing import Standing, standing_from

KEPT = 8
"""Latest batches that are remembered."""
PIECE = 1 << 22
"""Bytes that are read at a time."""
MOST_LINE = 1 << 28
"""Bytes of one line; that of a state is long."""


@dataclass(slots=True)
class Seen:
    """What a record says of its run so far.

    Attributes:
        lines: read.
        seconds: time of the last line.
        standing: the latest.
        standings: those since the last look, with their times.
        batches: the latest, as (number, metrics, sentence).
        dropped: prompts and responses so far, by the name of the metric.
        end: how it has ended; None: it has not.
    """

    lines: int = 0
    seconds: float = 0.0
    standing: Standing | None = None
    standings: list[tuple[float, Standing]] = field(default_factory=list)
    batches: deque[tuple[int, dict[str, float], str]] = field(default_factory=lambda: deque(maxlen=KEPT))
    dropped: Counter[str] = field(default_factory=Counter)
    end: str | None = None


class Follower:
    """Reads what has been added to a record since the last look. A new run in the same file is read from its start.

    Args:
        path: of the record, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._begin()

    def _begin(self) -> None:
        self._reader = LineReader(self._path, (BATCH, OVER, CLOSED, STANDING))
        self._rest = b""
        self.seen = Seen()

    def look(self) -> bool:
        """Take the next lines, if there are any; whether there may be more at once.

        Raises:
            RecordError: the file is no record, of another april, damaged, or cannot be read.
        """
        self.seen.standings.clear()
        try:
            if self._file is None or self._was_replaced():
                self.close()
                self._file = self._path.open("rb")
                self._begin()
            piece = self._file.read(PIECE)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise RecordError(f"{self._path} cannot be read: {error.strerror}") from None
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > (MOST_LINE if self._reader.number else PIECE):
            raise RecordError(f"{self._path} is no record of april's: one of its lines does not end")
        for raw in lines:
            if (line := self._reader.read(raw + b"\n")) is not None:
                self._take(line)
        self.seen.lines = self._reader.number
        return len(piece) == PIECE

    @property
    def there(self) -> bool:
        """Whether there is a file."""
        return self._file is not None

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _was_replaced(self) -> bool:
        """A new run has put the file aside, or it is shorter than what was read of it."""
        assert self._file is not None
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        here = os.fstat(self._file.fileno())
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino) or there.st_size < self._file.tell()

    def _take(self, line: Line) -> None:
        seen, parts = self.seen, line.parts
        seen.seconds = line.time_s
        try:
            if line.number == 1:
                refuse_other_formats(self._path, parts)
            elif line.what == STANDING:
                seen.standing = standing_from(parts)
                seen.standings.append((line.time_s, seen.standing))
            elif line.what == BATCH:
                metrics = {str(name): float(value) for name, value in parts["metrics"].items()}
                seen.batches.append((int(parts["id"]), metrics, str(parts["bottleneck"])))
                seen.dropped.update({n: int(v) for n, v in metrics.items() if _DROPPED in n and v})
            else:
                seen.end = end_of(line.what, parts)
        except RecordError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise RecordError(
                f"line {line.number} of {self._path} cannot be: {type(error).__name__}: {error}"
            ) from None


_DROPPED = "_dropped_"
"""In the names of metrics that count what was given up."""
