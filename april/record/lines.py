"""The lines of a record, read and checked."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from april.errors import RecordError

FORMAT = 2
"""Of records; grows when an older april could not replay them."""
HEAD, STATE, OVER, CLOSED, BATCH = "Record", "State", "Over", "Closed", "Batch"
"""Lines that are no events."""


class Line(NamedTuple):
    """One line; the first is number 1."""

    number: int
    time_s: float
    what: str
    parts: dict[str, Any]
    digest: str


_decode = msgspec.json.Decoder(tuple[float, str, dict[str, Any], str]).decode


def lines_of(path: Path, only: Collection[str] = ()) -> Iterator[Line]:
    """Every whole line, or the first one and those of some kinds; all are checked. The last one may have been cut off.

    Raises:
        RecordError: the file is no record, cannot be read, or a line was changed.
    """
    check = number = 0
    wanted = {kind.encode() for kind in (HEAD, *only)} if only else None
    try:
        with path.open("rb") as file:
            for raw in file:
                if number and not raw.endswith(b"\n"):
                    return
                body, _, end = raw.rpartition(b',"')
                check = zlib.crc32(body, check)
                if wanted is not None and number and end == b'%08x"]\n' % check:
                    _, _, rest = body.partition(b',"')
                    if rest.partition(b'"')[0] not in wanted:
                        number += 1
                        continue
                try:
                    time_s, what, parts, digest = _decode(body + b"]")
                    if end != b'%08x"]\n' % check or (what == HEAD) is not (number == 0):
                        raise ValueError
                except (ValueError, RecursionError):
                    if number == 0:
                        break
                    raise RecordError(f"line {number + 1} of {path} is damaged, or was changed") from None
                number += 1
                yield Line(number, time_s, what, parts, digest)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    if number == 0:
        raise RecordError(f"{path} is no record of april's")


def refuse_other_formats(path: Path, head: dict[str, Any]) -> None:
    """Raise RecordError for the record of another april that this one does not understand."""
    if head.get("format") != FORMAT:
        by = f"april {head.get('april')} has written it in format {head.get('format')}"
        raise RecordError(f"{path} cannot be read: {by}, this april reads format {FORMAT}")
