"""The file of a record: lines go in on the loop, a thread of its own writes them.

Invariant: whatever the disk does, the loop neither waits for it nor hears of it; a record that cannot go on is over,
and the log says so once.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import threading
import zlib
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from april.errors import ConfigError
from april.record.lines import BATCH, is_head
from april.state_file import make_directory

log = logging.getLogger("april")

WRITE_EVERY_S = 0.2
"""What a process that is killed has not written."""
MOST_WAITING = 32 << 20
"""Bytes that may wait for the disk."""
LAST_LINE = 256
"""Bytes kept free for the line that says why a record is over."""
MOST_HEAD = 1 << 20
"""Bytes of a first line."""
_ENDED = tuple(f',"{what}",'.encode() for what in ("AttemptEnded", "SampleReturned", BATCH))
"""What the lines begin with that say that a response has ended."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Where a run is recorded, and how much of it; raises ConfigError for what cannot be.

    Attributes:
        path: of the file; what is there already is kept as ``path`` + ".1", ".2" and so on, the oldest first, unless
            it is the record of a start that failed before a response had ended.
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
            self._file = _new_file(path)
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


def _new_file(path: Path) -> int:
    """A file that was not there, locked as long as it is open: somebody writes it. Raises OSError."""
    while True:
        if path.is_file():
            _put_aside(path)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if path.is_file():  # another process was quicker
                continue
            raise
        with suppress(OSError):  # a file system without locks; nothing is removed there
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file
        os.close(file)  # taken for that of a failed start, in the moment before it was locked


def _put_aside(path: Path) -> None:
    """Rename a file to ``path`` + ".1", or the first number that is free; what began nothing is removed."""
    for number in itertools.count(1):
        aside = Path(f"{path}.{number}")
        try:
            os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            continue
        try:
            path.replace(aside)
        except FileNotFoundError:  # another process was quicker
            aside.unlink()
        except BaseException:
            aside.unlink()
            raise
        else:
            if not _removed(aside):
                log.info("what was in %s is kept as %s", path, aside)
        return


def _removed(path: Path) -> bool:
    """Remove a record in which no response has ended and that nobody writes any more; whether it was one."""
    with suppress(OSError), path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        first = file.readline(MOST_HEAD)
        if (is_head(first) or not first) and not any(mark in line for line in file for mark in _ENDED):
            path.unlink()
            return True
    return False
