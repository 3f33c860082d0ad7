"""Defines what accompanies a conversation's tokens: attachments, such as images, and extras, such as routed experts.

An *attachment* is a block of bytes, or a file, identified by the hash of its content. In the conversation's token ids
it occupies one position for each token that the model reads for it; all token counts include these positions.

*Extras* are named arrays that an engine returns with the tokens that it generates. Row i of an array was computed when
the model read token i of the conversation and predicted token i + 1, so there is one row fewer than there are tokens.
april keeps row i from the attempt (engine request) that generated token i + 1, or from the first attempt for a prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[Any]
"""Array [R, ...] of any number type, with one row per token."""
Extras = Mapping[str, Rows]
"""Row arrays by name; all have the same number of rows."""


class NoRows(dict[str, Any]):
    """An empty mapping that is hashable, so that a dataclass accepts it as a default; a default factory is slower."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # safe, as nobody changes it: Extras is a read-only type


NO_EXTRAS: Extras = NoRows()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Attachment:
    """Bytes attached to a prompt, such as an image, in memory (``data``) or in a file (``path``); equal by content."""

    kind: str
    """Kind of attachment, named as engines name it, such as ``image``."""
    digest: str
    """SHA-256 of the bytes in hexadecimal, by which servers and caches identify the attachment."""
    size: int = field(compare=False)
    """Number of bytes."""
    data: bytes | None = field(default=None, repr=False, compare=False)
    """The bytes; None if they are read from the file ``path`` whenever they are needed."""
    path: str = field(default="", compare=False)
    """Path of the file with the bytes; empty if there is none."""

    @classmethod
    def of(cls, kind: str, data: bytes, path: str = "") -> Attachment:
        """Return the attachment with these bytes."""
        return cls(kind, hashlib.sha256(data).hexdigest(), len(data), data, path)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the content takes; 0 if the content is only on disk."""
        return 0 if self.data is None else self.size


@dataclass(frozen=True, slots=True)
class Placed:
    """An attachment with its position: it occupies the tokens [at, at + count) of a conversation."""

    attachment: Attachment
    at: int
    count: int
    stands: tuple[int, ...]
    """Placeholder tokens that are sent instead of these tokens to engines that expand placeholders themselves."""

    @property
    def end(self) -> int:
        return self.at + self.count


def collapsed(token_ids: NDArray[np.int32], attached: Sequence[Placed]) -> NDArray[np.int32]:
    """Replace each attachment's tokens by its placeholder tokens, for an engine that expands these itself."""
    if not attached:
        return token_ids
    parts, at = [], 0
    for placed in attached:
        parts += [token_ids[at : placed.at], np.array(placed.stands, np.int32)]
        at = placed.end
    return np.concatenate([*parts, token_ids[at:]])


def before(attached: Sequence[Placed], end: int) -> tuple[Placed, ...]:
    """Return the attachments that begin within the first ``end`` tokens of a conversation."""
    return tuple(placed for placed in attached if placed.at < end)


def rows_of(extras: Extras) -> int:
    """Return the number of rows of each array; 0 without arrays."""
    return next((len(rows) for rows in extras.values()), 0)


def joined(extras: Extras, more: Extras) -> Extras:
    """Return the arrays with the rows of ``more`` appended; row shapes and kinds of number must match."""
    return {name: np.concatenate((extras[name], rows)) for name, rows in more.items()} if extras else more


def first_rows(extras: Extras, count: int) -> Extras:
    return {name: rows[:count] for name, rows in extras.items()} if rows_of(extras) > count else extras


def whole_rows(extras: Extras, count: int) -> Extras:
    """Return arrays of ``count`` read-only rows. Missing rows repeat the last row; no loss depends on them."""
    whole = {}
    for name, rows in extras.items():
        missing = np.repeat(rows[-1:], count - len(rows), axis=0)
        whole[name] = np.concatenate((rows, missing)) if len(missing) else rows[:]
        whole[name].flags.writeable = False
    return whole


def note_layout(layout: dict[str, Rows], extras: Extras, names: Sequence[str]) -> None:
    """Record in ``layout`` the row shape and type of names that arrive for the first time; later rows must match."""
    for name in names:
        if name not in layout and name in extras:
            layout[name] = np.empty((0, *extras[name].shape[1:]), extras[name].dtype)


def wrong_rows(extras: Extras, names: Sequence[str], count: int, layout: Extras = NO_EXTRAS) -> str | None:
    """Return what is wrong with ``extras``, which must have ``count`` valid rows for each name; None if nothing is.

    ``layout`` has the layout of the run's earlier rows. New rows must have the same shape and kind of number, so that
    all fit into one array; the bytes per value may differ, as an engine may send small ids as single bytes.
    """
    for name in names:
        rows = extras.get(name)
        if not isinstance(rows, np.ndarray) or rows.ndim < 1:
            return f"no rows of {name}"
        if len(rows) != count:
            return f"{len(rows)} rows of {name}, but {count} were asked for"
        if rows.dtype.kind not in "iuf" or rows.itemsize > 8:
            return f"rows of {name} that are not numbers of up to 8 bytes ({rows.dtype})"
        earlier = layout.get(name)
        if earlier is not None and rows.shape[1:] != earlier.shape[1:]:
            return f"rows of {name} of shape {rows.shape[1:]}, after rows of shape {earlier.shape[1:]}"
        if earlier is not None and rows.dtype.kind != earlier.dtype.kind:
            return f"rows of {name} of type {rows.dtype}, after rows of type {earlier.dtype}"
    return None
