"""The file of a record: lines go in on the loop, a thread of its own writes them.

Invariant: whatever the disk does, the loop neither waits for it nor hears of it; a record that cannot go on is over,
and the log says so once.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from april.atomic_file import make_directory
from april.errors import ConfigError

log = logging.getLogger("april")

WRITE_EVERY_S = 0.2
"""What a process that is killed has not written."""
MOST_WAITING = 32 << 20
"""Bytes that may wait for the disk."""
LAST_LINE = 256
"""Bytes kept free for the line that says why a record is over."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Where a run is recorded, and how much of it; raises ConfigError for what cannot be.

    Attributes:
        path: of the file; what is there already is kept as ``path`` + ".1".
        limit_mib: size at which the record ends; the run goes on without it.
        messages: with the texts of errors, which may quote prompts and responses.
    """

    path: str | os.PathLike[str]
    limit_mib: int = 1024
    messages: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)):
            raise ConfigError(f"record must be the name of a file or an april.RunRecord, got {self.path!r}")
        if isinstance(self.limit_mib, bool) or not isinstance(self.limit_mib, int) or self.limit_mib < 1:
            raise ConfigError(f"record: limit_mib must be a whole number of at least 1, got {self.limit_mib!r}")


class RecordFile:
    """A new file of mode 0600; raises ConfigError if it cannot be made."""

    def __init__(self, path: Path, limit: int) -> None:
        try:
            make_directory(path.parent)
            if path.is_file():
                path.replace(f"{path}.1")
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(f"the record {path} cannot be written: {error.strerror}") from None
        self.path = path
        self.over = False
        """Nothing is taken any more."""
        self._limit = limit
        self._lines: deque[bytes] = deque()
        self._check = self._size = self._written = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="april-record", daemon=True)
        self._thread.start()

    def add(self, line: bytes, *, last: bool = False) -> str:
        """Take a line, a JSON array without its end, which will be a check of it and all before. Why not, if not."""
        if not last and self._size + len(line) > self._limit - LAST_LINE:
            return f"it has reached its limit of {self._limit >> 20} MiB"
        if not last and self._size - self._written > MOST_WAITING:
            return "the disk does not keep up"
        self._check = zlib.crc32(line, self._check)
        self._lines.append(b'%b,"%08x"]\n' % (line, self._check))
        self._size += len(line) + 13
        return ""

    def close(self) -> None:
        """Write what waits, for a few seconds at most."""
        self.over = True
        self._closing.set()
        self._thread.join(5.0)

    def _write(self) -> None:
        try:
            while not self._closing.wait(WRITE_EVERY_S):
                self._write_waiting()
            self._write_waiting()
        except OSError as error:
            self.over = True
            log.warning("the record %s ends here, the run goes on: %s", self.path, error.strerror)
        finally:
            os.close(self._file)

    def _write_waiting(self) -> None:
        data = b"".join([self._lines.popleft() for _ in range(len(self._lines))])
        while data:
            count = os.write(self._file, data)
            self._written, data = self._written + count, data[count:]
