"""What comes with a conversation and is no token: attachments, such as images, and extras, such as routed experts.

An *attachment* is bytes under the hash of their content, or the path of a file that has them. A conversation's tokens
say where each one is, by as many tokens as the model reads it as; everything that counts tokens counts those.

*Extras* are named arrays that an engine gives with the tokens that it generates: one row for each token of the
conversation but its first, made by the step in which the model read the token before. A row is kept as it was made, by
the attempt that generated its token; a prompt's rows are those of its first attempt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[Any]
"""[R, ...]: a row per token, of any number type."""
Extras = Mapping[str, Rows]
"""Rows by name; all of them have the same number of rows."""


class _None(dict[str, Rows]):
    """No rows; hashable, so that it can be the default of a field: a factory costs at every object."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # never changed, as its type says


NO_EXTRAS: Extras = _None()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Attachment:
    """Bytes that come with a prompt, in memory (``data``) or in a file (``path``); equal if their content is."""

    kind: str
    """The name of what it is, as engines know it: ``image``."""
    digest: str
    """SHA-256 of the bytes, in hexadecimal: the name under which servers and caches know it."""
    size: int = field(compare=False)
    """The number of bytes."""
    data: bytes | None = field(default=None, repr=False, compare=False)
    """The bytes; None means that they are in the file ``path``, and read whenever they are needed."""
    path: str = field(default="", compare=False)
    """The file that they come from; empty if there is none."""

    @classmethod
    def of(cls, kind: str, data: bytes, path: str = "") -> Attachment:
        """The attachment with these bytes."""
        return cls(kind, hashlib.sha256(data).hexdigest(), len(data), data, path)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that its content takes."""
        return 0 if self.data is None else self.size


@dataclass(frozen=True, slots=True)
class Placed:
    """An attachment at its place: tokens [at, at + count) of a conversation are what the model reads it as."""

    attachment: Attachment
    at: int
    count: int
    stands: tuple[int, ...]
    """The tokens that stand there for it in a request to an engine that expands prompts itself."""

    @property
    def end(self) -> int:
        """The place of the token that follows it."""
        return self.at + self.count


def collapsed(token_ids: NDArray[np.int32], attached: Sequence[Placed]) -> NDArray[np.int32]:
    """A conversation as an engine takes it that expands prompts itself: int32 [K], each attachment's tokens replaced by
    those that stand for it.
    """
    if not attached:
        return token_ids
    parts, at = [], 0
    for placed in attached:
        parts += [token_ids[at : placed.at], np.array(placed.stands, np.int32)]
        at = placed.end
    return np.concatenate([*parts, token_ids[at:]])


def before(attached: Sequence[Placed], end: int) -> tuple[Placed, ...]:
    """Those attachments of a conversation that begin within its first ``end`` tokens."""
    return tuple(placed for placed in attached if placed.at < end)


def rows_of(extras: Extras) -> int:
    """The number of rows; 0 without any."""
    return next((len(rows) for rows in extras.values()), 0)


def joined(extras: Extras, more: Extras) -> Extras:
    """Rows, and rows that follow them; those of one name have the same shape."""
    return {name: np.concatenate((extras[name], rows)) for name, rows in more.items()} if extras else more


def first_rows(extras: Extras, count: int) -> Extras:
    """The first ``count`` rows."""
    return {name: rows[:count] for name, rows in extras.items()} if rows_of(extras) > count else extras


def whole_rows(extras: Extras, count: int) -> Extras:
    """``count`` rows, read-only; the last one stands for tokens behind it that have none, on which nothing rests."""
    whole = {}
    for name, rows in extras.items():
        missing = np.repeat(rows[-1:], count - len(rows), axis=0)
        whole[name] = np.concatenate((rows, missing)) if len(missing) else rows[:]
        whole[name].flags.writeable = False
    return whole


def wrong_rows(extras: Extras, names: Sequence[str], count: int, held: Extras = NO_EXTRAS) -> str | None:
    """Describe why these cannot be the ``count`` rows that were asked for, after ``held``; None means that they can."""
    for name in names:
        rows = extras.get(name)
        if not isinstance(rows, np.ndarray) or rows.ndim < 1:
            return f"no rows of {name}"
        if len(rows) != count:
            return f"{len(rows)} rows of {name}, and {count} were asked for"
        if rows.dtype.kind not in "iuf":
            return f"rows of {name} that are no numbers ({rows.dtype})"
        if name in held and rows.shape[1:] != held[name].shape[1:]:
            return f"rows of {name} of shape {rows.shape[1:]}, after rows of shape {held[name].shape[1:]}"
    return None


def wrong_places(attached: Sequence[Placed], length: int, kinds: Sequence[str], vocab_size: int) -> str | None:
    """Describe why these cannot be attached to ``length`` tokens; None means that they can."""
    end = 0
    for placed in attached:
        if placed.at < end or placed.count < 1 or placed.end > length:
            return f"something attached to tokens {placed.at} to {placed.end} of {length}, from {end} on"
        if placed.attachment.kind not in kinds:
            return f"an attachment of another kind than {', '.join(kinds) or 'none'}"
        if not placed.stands or not all(0 <= token < vocab_size for token in placed.stands):
            return f"an attachment that ids stand for outside of the vocabulary of {vocab_size}"
        end = placed.end
    return None
