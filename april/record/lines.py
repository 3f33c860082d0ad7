"""The lines of a record, read and checked."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from april.errors import RecordError

FORMAT = 3
"""Of records; grows when an older april could not replay them."""
HEAD, STATE, OVER, CLOSED, BATCH, STANDING = "Record", "State", "Over", "Closed", "Batch", "Standing"
"""Lines that are no events."""
IN_THE_MIDDLE = "in the middle: the process was killed, or still runs"
"""How a record ends without a last line."""


class Line(NamedTuple):
    """One line; the first is number 1."""

    number: int
    time_s: float
    what: str
    parts: dict[str, Any]
    digest: str


_decode = msgspec.json.Decoder(tuple[float, str, dict[str, Any], str]).decode


class LineReader:
    """Takes the whole lines of one record, one after the other, and checks them all.

    Args:
        path: of the record, for messages.
        only: kinds of lines that are wanted besides the first; none: all.
    """

    def __init__(self, path: Path, only: Collection[str] = ()) -> None:
        self._path = path
        self._wanted = {kind.encode() for kind in (HEAD, *only)} if only else None
        self._check = 0
        self.number = 0
        """Lines so far."""

    def read(self, raw: bytes) -> Line | None:
        """The next line, with its end; None if it is of no wanted kind.

        Raises:
            RecordError: it is none, was changed, or does not follow the one before.
        """
        body, _, end = raw.rpartition(b',"')
        self._check = zlib.crc32(body, self._check)
        holds = end == b'%08x"]\n' % self._check
        if self._wanted is not None and self.number and holds:
            _, _, rest = body.partition(b',"')
            if rest.partition(b'"')[0] not in self._wanted:
                self.number += 1
                return None
        try:
            time_s, what, parts, digest = _decode(body + b"]")
            if not holds or (what == HEAD) is not (self.number == 0):
                raise ValueError
        except (ValueError, RecursionError):
            if self.number == 0:
                raise RecordError(f"{self._path} is no record of april's") from None
            raise RecordError(f"line {self.number + 1} of {self._path} is damaged, or was changed") from None
        self.number += 1
        return Line(self.number, time_s, what, parts, digest)


def is_head(start: bytes) -> bool:
    """Whether a file that begins so is a record."""
    return start.partition(b",")[2].startswith(b'"%b"' % HEAD.encode())


def is_record(path: Path) -> bool:
    """Whether the file begins as records do; raises RecordError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return is_head(file.read(64))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None


def lines_of(path: Path, only: Collection[str] = ()) -> Iterator[Line]:
    """Every whole line, or the first one and those of some kinds; all are checked. The last one may have been cut off.

    Raises:
        RecordError: the file is no record, cannot be read, or a line was changed.
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
        raise RecordError(f"{path} is no record of april's")


def refuse_other_formats(path: Path, head: dict[str, Any]) -> None:
    """Raise RecordError for the record of another april that this one does not understand."""
    if head.get("format") != FORMAT:
        by = f"april {head.get('april')} has written it in format {head.get('format')}"
        raise RecordError(f"{path} cannot be read: {by}, this april reads format {FORMAT}")


def end_of(what: str, parts: dict[str, Any]) -> str | None:
    """How the record ends, if a line is the last one."""
    if what == OVER:
        return f"the run went on, its record did not: {parts.get('why')}"
    return "the run was closed" if what == CLOSED else None
