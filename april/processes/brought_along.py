"""What tokens bring along over a link: attachments by their digests, and rows in pieces.

Neither side believes the other: bytes have the digest under which they travel, a digest is one that was sent for its
group, and rows are the numbers that they say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from april.attachments import attachment_bytes
from april.core.attachments import NO_EXTRAS, Attachment, Extras, Placed
from april.errors import AttachmentError, WireError
from april.processes import messages as wire
from april.processes.messages import ProtocolError

PIECE_BYTES = 8 << 20
"""Most bytes of a piece of rows, one row at least."""
MOST_IN_A_ROW = 1 << 20
"""Most numbers of one row."""


class Attached:
    """The attachments of the groups that one side of a link knows: those that have come, and those that it has sent.

    Args:
        peer: of the other side, for messages.
        paths: whether it may name a file of this side's in place of bytes.
    """

    def __init__(self, peer: str, *, paths: bool) -> None:
        self._peer, self._paths = peer, paths
        self._here: dict[int, dict[str, Attachment]] = {}
        """By group and digest, that have come."""
        self._there: dict[int, set[str]] = {}
        """Digests, by group, that the other side has."""

    def __len__(self) -> int:
        """The number of groups of which something is remembered."""
        return len(self._here.keys() | self._there.keys())

    def news(self, group: int, attached: Sequence[Placed], *, read: bool = False) -> list[wire.Message]:
        """Those that the other side has not got, to be sent before they are named.

        Raises AttachmentError for a file that cannot be read here, if it is to be ``read``; else its path goes, and
        whoever needs it there says what is wrong.
        """
        if not attached:
            return []
        there = self._there.get(group, set())
        news: dict[str, wire.Message] = {}
        data: bytes | None
        for a in [placed.attachment for placed in attached]:
            if a.digest not in there and a.digest not in news:
                try:
                    data = attachment_bytes(a)
                except AttachmentError:
                    if read:
                        raise
                    data = None
                news[a.digest] = wire.Attach(group, a.kind, a.digest, a.size, data, a.path if data is None else "")
        self._there.setdefault(group, set()).update(news)
        return list(news.values())

    def came(self, m: wire.Attach, *, has: bool = True) -> None:
        """Take one; raises ProtocolError if it is not what it says. ``has``: the other side keeps it for the group."""
        if m.data is None and not (self._paths and m.path):
            raise ProtocolError(f"{self._peer}: an attachment of group {m.group} has come without its bytes")
        attachment = Attachment(m.kind, m.digest, m.size, None, m.path)
        if m.data is not None:
            attachment = Attachment.of(m.kind, m.data)
            if (attachment.digest, attachment.size) != (m.digest, m.size):
                raise ProtocolError(f"{self._peer}: an attachment of group {m.group} has another digest than it says")
        self._here.setdefault(m.group, {}).setdefault(attachment.digest, attachment)
        if has:
            self.known(m.group, attachment.digest)

    def known(self, group: int, digest: str) -> None:
        """The other side has it: it need not be sent."""
        self._there.setdefault(group, set()).add(digest)

    def keep(self, group: int, attached: Sequence[Placed]) -> None:
        """Be able to place these, which the other side may name by their digests."""
        for placed in attached:
            self._here.setdefault(group, {}).setdefault(placed.attachment.digest, placed.attachment)

    def placed(self, group: int, places: Sequence[wire.Place]) -> tuple[Placed, ...]:
        """Attachments at their places; raises ProtocolError for one that was never sent."""
        if not places:
            return ()
        here = self._here.get(group, {})
        try:
            return tuple(Placed(here[p.digest], p.at, p.count, p.stands) for p in places)
        except KeyError:
            raise ProtocolError(f"{self._peer}: group {group} has no such attachment; it was never sent") from None

    def forget(self, group: int) -> None:
        """Forget those of a group; so does the other side."""
        self._here.pop(group, None)
        self._there.pop(group, None)


def places(attached: Sequence[Placed]) -> tuple[wire.Place, ...]:
    """Attachments by their digests."""
    return tuple(wire.Place(p.attachment.digest, p.at, p.count, tuple(p.stands)) for p in attached)


# -------------------------------------------------------------------- rows


def pieces(attempt_id: str, extras: Extras) -> Iterator[wire.Rows]:
    """Rows in pieces, name by name."""
    for name, rows in extras.items():
        flat = np.ascontiguousarray(rows, rows.dtype.newbyteorder("<"))
        count = max(1, PIECE_BYTES // max(1, flat[:1].nbytes))
        for at in range(0, len(flat), count):
            yield wire.Rows(
                attempt_id, name, flat.dtype.str, flat.shape[1:], at, bytearray(flat[at : at + count].tobytes())
            )


class RowsCome:
    """The rows of one attempt, piece by piece.

    Args:
        names: that were asked for.
        most: rows of each, at most.
    """

    __slots__ = ("_most", "_names", "_rows")

    def __init__(self, names: Sequence[str], most: int) -> None:
        self._names, self._most = names, most
        self._rows: dict[str, tuple[np.dtype, tuple[int, ...], bytearray]] = {}

    def add(self, m: wire.Rows) -> None:
        """Take a piece; raises WireError for what are no rows, or not those that were asked for."""
        if m.name not in self._names:
            raise WireError("rows came that nobody has asked for")
        if m.name not in self._rows:
            self._rows[m.name] = _dtype(m.dtype), m.shape, bytearray()
            if not 0 < prod(m.shape) <= MOST_IN_A_ROW or any(length < 1 for length in m.shape):
                raise WireError(f"rows of {m.name} have the shape {m.shape}")
        dtype, shape, data = self._rows[m.name]
        size = dtype.itemsize * prod(shape)
        if 0 <= m.at * size < len(data):
            return  # told before
        if (m.dtype, m.shape) != (dtype.str, shape) or len(m.data) % size or m.at * size != len(data):
            raise WireError(f"{len(m.data)} bytes came for rows of {m.name} from row {m.at} on, after {len(data)}")
        if len(data) + len(m.data) > self._most * size:
            raise WireError(f"more than {self._most} rows of {m.name} came")
        if data:
            data += m.data
        else:
            self._rows[m.name] = dtype, shape, m.data

    def extras(self) -> Extras:
        """All of them, of the machine's byte order."""
        if not self._rows:
            return NO_EXTRAS
        return {
            name: np.frombuffer(data, dtype).reshape(-1, *shape).astype(dtype.newbyteorder("="), copy=False)
            for name, (dtype, shape, data) in self._rows.items()
        }


def _dtype(name: str) -> np.dtype:
    """A type of plain numbers; raises WireError for any other."""
    if len(name) != 3 or name[0] not in "<|" or name[1] not in "iuf" or name[2] not in "1248":
        raise WireError("rows came that are no numbers")
    try:
        return np.dtype(name)
    except TypeError:
        raise WireError("rows came that are no numbers") from None
