"""Server-sent events out of bytes that may be cut anywhere."""

from __future__ import annotations

from april.errors import EngineError, WireError

MAX_EVENT_BYTES = 4 << 20
"""Largest single event, unless whoever reads knows better."""
_BOM = b"\xef\xbb\xbf"


class EventSplitter:
    """Feed bytes, get the payloads (what follows ``data:``) of the events that are complete.

    Lines end in LF or CRLF; comments and other fields are skipped; several data lines of one event are joined.

    Args:
        limit: bytes of one event; None: MAX_EVENT_BYTES.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = MAX_EVENT_BYTES if limit is None else limit
        self._pieces: list[bytes] = []
        self._size = 0
        self._data: list[bytes] = []
        self._lines = 0
        """Bytes of the lines in it."""
        self._first = True

    def feed(self, piece: bytes) -> list[bytes]:
        """The payloads that end in this piece, in order.

        Raises:
            WireError: a line that is no field of an event stream, or an event that is too large.
        """
        cut = piece.rfind(b"\n")
        if cut < 0:
            self._keep(piece)
            return []
        text = b"".join([*self._pieces, piece[: cut + 1]])
        self._pieces, self._size = [], 0
        self._keep(piece[cut + 1 :])
        if self._first:
            text, self._first = text.removeprefix(_BOM), False
        if not self._data and (plain := _plain(text)) is not None:
            return plain
        events = []
        for raw in text.split(b"\n")[:-1]:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._lines += len(line)
                self._require_room(self._lines)
            elif not line:
                if self._data:
                    events.append(b"\n".join(self._data) if len(self._data) > 1 else self._data[0])
                    self._data, self._lines = [], 0
            elif not (line.startswith(b":") or line.split(b":", 1)[0] in (b"event", b"id", b"retry")):
                raise WireError(f"the stream has a line that is no server-sent event ({len(line)} bytes)")
        return events

    def end(self) -> list[bytes]:
        """What the end of the stream completes: an event without its blank line.

        Raises:
            EngineError: the stream ends inside a line: it has broken off.
        """
        if self._size:
            raise EngineError(f"the stream ends inside an event, after {self._size} bytes of it")
        data, self._data = self._data, []
        return [b"\n".join(data)] if data else []

    def _keep(self, piece: bytes) -> None:
        if not piece:
            return
        self._pieces.append(piece)
        self._size += len(piece)
        self._require_room(self._size)

    def _require_room(self, size: int) -> None:
        if size > self._limit:
            raise WireError(f"an event of the stream has more than {self._limit} bytes; april stops reading")


def _plain(text: bytes) -> list[bytes] | None:
    """The payloads of whole events of one data line each, as most servers send them; None: it has something else."""
    blocks = text.split(b"\n\n")
    if blocks.pop() or text.count(b"\n") != 2 * len(blocks) or b"\r" in text:
        return None
    if not all(block.startswith(b"data: ") for block in blocks):
        return None
    return [block[6:] for block in blocks]
