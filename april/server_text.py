"""Text of servers on its one way into a message, a log, a report or the name of a metric.

Invariant: the text that :func:`clean` returns is short, printable, and without the keys that were given to
:func:`hide`, however they are written there.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Iterator

MAX_CHARS = 300
"""Most characters of one text in a message."""
LOOKED_AT = 1 << 13
"""Most characters of a text that are examined; nothing beyond them is shown."""
BLOT = "<the key>"
_PIECE = 8
"""Number of letters and digits of a key in a row that count as the key: a text may have been cut in it."""
_SHORTEST = 4
"""Fewest letters and digits of a key that is searched for in pieces; a shorter one is searched for as it stands."""
_LAYERS = 4
"""Number of layers of escapes that are undone."""
_ESCAPE = re.compile(
    r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\u\{([0-9a-f]{1,6})\}|\\U([0-9a-f]{8})|%u([0-9a-f]{4})|%([0-9a-f]{2})"
    r"|=([0-9a-f]{2})|\\([0-7]{3})|(&#?[0-9a-z]{1,16};?)",
    re.IGNORECASE,
)
_OCTAL, _ENTITY = 8, 9


class _Key:
    """A key as the pieces to search for, in lower case and letters and digits alone."""

    def __init__(self, key: str) -> None:
        plain = _plain(key)
        raw = key.encode("utf-8", "surrogatepass")
        self.literal = key if len(plain) < _SHORTEST else ""
        written = [plain, plain[::-1], raw.hex()] if not self.literal else []
        if not self.literal:
            # what stands before the key shifts its letters, but only by a part of a group
            written += [_inner(base64.b64encode, raw, 3, 4, before) for before in range(3)]
            written += [_inner(base64.b32encode, raw, 5, 8, before) for before in range(5)]
        self.starts = tuple(w for w in written[:3])
        by_size: dict[int, set[str]] = {}
        for word in written:
            size = min(_PIECE, len(word))
            if size >= _SHORTEST:
                by_size.setdefault(size, set()).update(word[i : i + size] for i in range(len(word) - size + 1))
        self.pieces = {size: frozenset(pieces) for size, pieces in by_size.items()}


_hidden: dict[str, _Key] = {}
"""All keys that this process has been given: one server may repeat another's."""


def hide(key: str) -> None:
    """Remove this key from all texts from now on."""
    if key and key not in _hidden:
        _hidden[key] = _Key(key)


def clean(value: object, limit: int = MAX_CHARS) -> str:
    """Return the text of a server on one line of at most ``limit`` characters (and "..." where there was more).

    Keys are removed, however they are escaped, before anything is cut; unprintable characters are shown by number.
    """
    text = _text_of(value)
    more = len(text) > LOOKED_AT
    text = " ".join(without_keys(text[:LOOKED_AT], cut=more).split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: limit + 1])
    return f"{text[:limit]} ..." if more or len(text) > limit else text


def printable(text: str) -> str:
    """Return text with its spaces and lines, and unprintable characters by number, so that no terminal obeys it.

    It is for sentences of april's that repeat names and texts of others; keys are not removed.
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def quoted(value: object, limit: int = 64) -> str:
    """Return :func:`clean` between quotation marks, for names."""
    return f"'{clean(value, limit)}'"


def without_keys(text: str, *, cut: bool = False) -> str:
    """Return the text without hidden keys; with ``cut`` it may end in the beginning of one."""
    # of all keys together, for they may have parts in common
    spans = _merged([span for key in list(_hidden.values()) for span in _spans(text, key, cut)])
    parts, at = [], 0
    for start, end in spans:
        parts += [text[at:start], BLOT]
        at = end
    return "".join(parts) + text[at:]


def _text_of(value: object) -> str:
    if isinstance(value, bytes):
        return value[: 4 * LOOKED_AT].decode("utf-8", "replace")
    try:
        return str(value)
    except (RecursionError, ValueError):  # too deep, or an integer of too many digits
        return f"a value of type {type(value).__name__}"


def _plain(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def _inner(encode: Callable[[bytes], bytes], raw: bytes, group: int, letters: int, before: int) -> str:
    """Return the letters of an encoding that the key alone decides, with so many bytes before it in its group."""
    whole = encode(b"\0" * before + raw + b"\0" * group).decode()
    bits = 8 * group // letters
    return _plain(whole[-(-8 * before // bits) : 8 * (before + len(raw)) // bits])


def _spans(text: str, key: _Key, cut: bool) -> list[tuple[int, int]]:
    """Return the spans of the key; each layer of escapes is undone in turn."""
    if key.literal:
        return [match.span() for match in re.finditer(re.escape(key.literal), text)]
    found: list[tuple[int, int]] = []
    layer, origin = text, None
    for _ in range(_LAYERS):
        plain = _plain(layer)
        if cut or _has_piece(plain, key):
            found += _found(layer, origin, key, cut)
        if _ESCAPE.search(layer) is None:
            break
        undone = list(_undone(layer, origin))
        following = "".join(c for c, _, _ in undone)
        if following == layer:
            break
        layer, origin = following, [(start, end) for _, start, end in undone]
    return found


def _has_piece(plain: str, key: _Key) -> bool:
    return any(
        plain[i : i + size] in pieces for size, pieces in key.pieces.items() for i in range(len(plain) - size + 1)
    )


def _found(
    layer: str, origin: list[tuple[int, int]] | None, key: _Key, cut: bool
) -> Iterator[tuple[int, int]]:
    """Yield the spans of the original text that hold a piece of the key."""
    letters = [(c, i) for i, one in enumerate(layer) for c in one.casefold() if c.isalnum()]
    plain = "".join(c for c, _ in letters)

    def original(first: int, last: int) -> tuple[int, int]:
        start, end = letters[first][1], letters[last][1]
        return (start, end + 1) if origin is None else (origin[start][0], origin[end][1])

    for size, pieces in key.pieces.items():
        for i in range(len(plain) - size + 1):
            if plain[i : i + size] in pieces:
                yield original(i, i + size - 1)
    if cut:
        for word in key.starts:
            n = next((n for n in range(min(_PIECE, len(word)), 0, -1) if plain.endswith(word[:n])), 0)
            if n:
                yield original(len(plain) - n, len(plain) - 1)


def _undone(layer: str, origin: list[tuple[int, int]] | None) -> Iterator[tuple[str, int, int]]:
    """Yield the characters behind one layer of escapes, each with its place in the original text."""

    def original(start: int, end: int) -> tuple[int, int]:
        return (start, end) if origin is None else (origin[start][0], origin[end - 1][1])

    at = 0
    for match in _ESCAPE.finditer(layer):
        for i in range(at, match.start()):
            yield layer[i], *original(i, i + 1)
        at = match.end()
        for c in _meant(match):
            yield c, *original(match.start(), at)
    for i in range(at, len(layer)):
        yield layer[i], *original(i, i + 1)


def _meant(match: re.Match[str]) -> str:
    kind = match.lastindex or 0
    digits = match[kind]
    if kind == _ENTITY:
        return html.unescape(digits)
    code = int(digits, 8 if kind == _OCTAL else 16)
    return chr(code) if code <= 0x10FFFF else match[0]


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
