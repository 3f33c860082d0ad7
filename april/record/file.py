"""Writes and reads the record of a run: a file with its events, from which the run can be replayed.

The event loop adds lines, and a thread writes them; readers check every line.

Invariant: the event loop neither waits for the disk nor sees its errors. If a record cannot be continued, april logs
one warning, and the run goes on without the record.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import threading
import zlib
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from april.core.whole_numbers import whole_number
from april.errors import ConfigError, RecordError
from april.serialization.state_file import make_directory

log = logging.getLogger("april")

FORMAT = 6
"""Format of records; only records of this format can be read."""
HEAD, STATE, CUT_OFF, CLOSED, BATCH, STATUS = "Record", "State", "Over", "Closed", "Batch", "Standing"
REPORT = "Learning"
"""Kinds of lines that do not hold an event of the core."""
NO_LAST_LINE = "in the middle: the process was killed, or still runs"
"""Text that says how a record ends if its closing line (CUT_OFF or CLOSED) is missing."""
WRITE_EVERY_S = 0.2
"""Seconds between two writes; a process that is killed loses at most the lines added since the last write."""
MAX_WAITING_BYTES = 32 << 20
"""Largest number of bytes that may wait for the disk."""
LAST_LINE_BYTES = 256
"""Number of bytes that are kept free for the line that says why a record ends early."""
MAX_HEAD_BYTES = 1 << 20
"""Largest size of a first line in bytes."""
_RESPONSE_ENDED = tuple(f',"{what}",'.encode() for what in ("AttemptEnded", "SampleReturned", BATCH))
"""Texts by which a line shows that a response has ended."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Options of a run's record: its file, its size and its content. Raises ConfigError for wrong values.

    Attributes:
        path: path of the file. An existing file is first renamed: ".1", or the first free number, is appended to its
            name. An existing record of a run that failed before any response had ended is removed.
        limit_mib: size in MiB at which the record ends; the run goes on.
        messages: whether to record the texts of errors, which may quote prompts and responses.
    """

    path: str | os.PathLike[str]
    limit_mib: int = 1024
    messages: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)):
            raise ConfigError(f"record must be the name of a file or an april.RunRecord, got {self.path!r}")
        if os.path.isdir(self.path) or os.fspath(self.path).endswith(os.sep):
            raise ConfigError(f"record: {self.path} is a directory; name a file in it, such as run.jsonl")
        if (whole_number(self.limit_mib) or 0) < 1:
            raise ConfigError(f"record: limit_mib must be a whole number of at least 1, got {self.limit_mib!r}")


class RecordFile:
    """Creates a record's file with mode 0600 and appends lines to it. Raises ConfigError if it cannot be created."""

    def __init__(self, path: Path, limit: int) -> None:
        try:
            make_directory(path.parent)
            self._file = _new_file(path)
        except OSError as error:
            raise ConfigError(f"the record {path} cannot be written: {error.strerror}") from None
        self.path = path
        self.ended = False
        """True once no more lines can be added."""
        self._limit = limit
        self._lines: deque[bytes] = deque()
        self._checksum = self._size = self._written = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="april-record", daemon=True)
        self._thread.start()

    def add(self, line: bytes, *, last: bool = False) -> str:
        """Add a line and return "", or return the reason why it cannot be added.

        ``line`` is a JSON array without its end; the last element, a checksum of all lines so far, is appended here.
        """
        if not last and self._size + len(line) > self._limit - LAST_LINE_BYTES:
            return f"it has reached its limit of {self._limit >> 20} MiB"
        if not last and self._size - self._written > MAX_WAITING_BYTES:
            return "the disk does not keep up"
        self._checksum = zlib.crc32(line, self._checksum)
        self._lines.append(b'%b,"%08x"]\n' % (line, self._checksum))
        self._size += len(line) + 13
        return ""

    def close(self) -> None:
        """Write the waiting lines and stop the thread, within 5 s."""
        self.ended = True
        self._closing.set()
        self._thread.join(5.0)

    def _write(self) -> None:
        try:
            while not self._closing.wait(WRITE_EVERY_S):
                self._write_waiting()
            self._write_waiting()
        except OSError as error:
            self.ended = True
            log.warning("the record %s ends here, but the run continues: %s", self.path, error.strerror)
        finally:
            os.close(self._file)

    def _write_waiting(self) -> None:
        data = b"".join([self._lines.popleft() for _ in range(len(self._lines))])
        while data:
            count = os.write(self._file, data)
            self._written, data = self._written + count, data[count:]


def _new_file(path: Path) -> int:
    """Create a file and lock it until it is closed; the lock shows that it is being written. Raises OSError."""
    while True:
        if path.is_file():
            _rename_existing(path)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if path.is_file():  # another process was quicker
                continue
            raise
        with suppress(OSError):  # on file systems without locks, _remove_if_empty removes nothing
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file
        os.close(file)  # another process removed it before it was locked


def _rename_existing(path: Path) -> None:
    """Append the first free number to the file's name; remove the file if it is a record without any response."""
    for number in itertools.count(1):
        renamed = Path(f"{path}.{number}")
        try:
            os.close(os.open(renamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            continue
        try:
            path.replace(renamed)
        except FileNotFoundError:  # another process was quicker
            renamed.unlink()
        except BaseException:
            renamed.unlink()
            raise
        else:
            if not _remove_if_empty(renamed):
                log.info("the old content of %s is kept as %s", path, renamed)
        return


def _remove_if_empty(path: Path) -> bool:
    """Remove the record if no response has ended in it and no process writes it; return True if it was removed."""
    with suppress(OSError), path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        first = file.readline(MAX_HEAD_BYTES)
        if (is_head(first) or not first) and not any(mark in line for line in file for mark in _RESPONSE_ENDED):
            path.unlink()
            return True
    return False


# ---------------------------------------------------------------- reading


class Line(NamedTuple):
    """A line of a record. ``number`` begins with 1; ``digest`` is the digest of all the core's decisions so far."""

    number: int
    time_s: float
    kind: str
    fields: dict[str, Any]
    digest: str


_decode = msgspec.json.Decoder(tuple[float, str, dict[str, Any], str]).decode


class LineReader:
    """Decodes the complete lines of a record one by one, and verifies the checksum of each.

    Args:
        path: path of the record, for error messages.
        only: kinds of lines to return besides the first line; empty means all lines.
    """

    def __init__(self, path: Path, only: Collection[str] = ()) -> None:
        self._path = path
        self._wanted = {kind.encode() for kind in (HEAD, *only)} if only else None
        self._checksum = 0
        self.number = 0
        """Number of lines read so far."""

    def read(self, raw: bytes) -> Line | None:
        """Decode the next line, given with its newline; return None if its kind is not wanted.

        Raises:
            RecordError: the bytes are not a line of a record, were changed, or do not follow the previous line.
        """
        body, _, end = raw.rpartition(b',"')
        self._checksum = zlib.crc32(body, self._checksum)
        checksum_ok = end == b'%08x"]\n' % self._checksum
        if self._wanted is not None and self.number and checksum_ok:
            _, _, rest = body.partition(b',"')
            if rest.partition(b'"')[0] not in self._wanted:
                self.number += 1
                return None
        try:
            time_s, what, parts, digest = _decode(body + b"]")
            if not checksum_ok or (what == HEAD) is not (self.number == 0):
                raise ValueError
        except (ValueError, RecursionError):
            if self.number == 0:
                raise RecordError(f"{self._path} is not a record of april") from None
            raise RecordError(f"line {self.number + 1} of {self._path} is damaged, or was changed") from None
        self.number += 1
        return Line(self.number, time_s, what, parts, digest)


def is_head(start: bytes) -> bool:
    """Return True if ``start``, the first bytes of a file, shows that it is a record."""
    return start.partition(b",")[2].startswith(b'"%b"' % HEAD.encode())


def is_record(path: Path) -> bool:
    """Return True if the file begins like a record. Raises RecordError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return is_head(file.read(64))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None


def lines_of(path: Path, only: Collection[str] = ()) -> Iterator[Line]:
    """Yield the lines of a record, or only the first line and the kinds in ``only``; all lines are checked.

    An incomplete last line is skipped, as the process may have been killed while it wrote the line.

    Raises:
        RecordError: the file is not a record or cannot be read, or a line was changed.
    """
    reader = LineReader(path, only)
    try:
        with path.open("rb") as file:
            for raw in file:
                if reader.number and not raw.endswith(b"\n"):
                    return
                if (line := reader.read(raw)) is not None:
                    yield line
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    if reader.number == 0:
        raise RecordError(f"{path} is not a record of april")


def refuse_other_formats(path: Path, head: dict[str, Any]) -> None:
    """Raise RecordError if a record has a format that this version of april cannot read."""
    if head.get("format") != FORMAT:
        by = f"april {head.get('april')} has written it in format {head.get('format')}"
        raise RecordError(f"{path} cannot be read: {by}, this april reads format {FORMAT}")


def end_text(kind: str, fields: dict[str, Any]) -> str | None:
    """Return a text that says how the record ends, if a line of this kind closes it; else None."""
    if kind == CUT_OFF:
        return f"the run continued, but its record stopped: {fields.get('why')}"
    return "the run was closed" if kind == CLOSED else None
