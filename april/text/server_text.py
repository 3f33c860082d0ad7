"""Sanitises text from servers before it is used in a message, a log, a report or the name of a metric.

Invariant: the text that :func:`clean` returns is short, printable, and without the API keys that were given to
:func:`hide`, even if the server encoded or escaped them.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Iterator

MAX_CHARS = 300
"""Most characters of a server's text in a message."""
MAX_SCANNED_CHARS = 1 << 13
"""Most characters of a text that are searched for keys; nothing beyond them is shown."""
KEY_REPLACEMENT = "<the key>"
_PIECE = 8
"""Number of consecutive letters and digits of a key that are removed like the whole key, because texts may be cut."""
_SHORTEST = 4
"""Fewest letters and digits of a key that is searched for in pieces; shorter keys are searched for literally."""
_LAYERS = 4
"""Most nested layers of escapes that are decoded."""
_CUT_CHARS = 1 << 10
"""Number of characters at the end of a cut text that are not shown, as the beginning of a key may be among them."""
_ESCAPE = re.compile(
    r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\u\{([0-9a-f]{1,6})\}|\\U([0-9a-f]{8})|%u([0-9a-f]{4})|%([0-9a-f]{2})"
    r"|=([0-9a-f]{2})|\\([0-7]{3})|(&#?[0-9a-z]{1,16};?)",
    re.IGNORECASE,
)
_OCTAL, _ENTITY = 8, 9


class _Key:
    """A key split into pieces to search for, in lower case, letters and digits only."""

    def __init__(self, key: str) -> None:
        plain = _plain(key)
        raw = key.encode("utf-8", "surrogatepass")
        self.literal = key if len(plain) < _SHORTEST else ""
        written = [plain, plain[::-1], raw.hex()] if not self.literal else []
        if not self.literal:
            # base64 encodes groups of 3 bytes and base32 of 5, so the letters depend on the key's place in its group
            written += [_inner(base64.b64encode, raw, 3, 4, before) for before in range(3)]
            written += [_inner(base64.b32encode, raw, 5, 8, before) for before in range(5)]
        by_size: dict[int, set[str]] = {}
        for word in written:
            size = min(_PIECE, len(word))
            if size >= _SHORTEST:
                by_size.setdefault(size, set()).update(word[i : i + size] for i in range(len(word) - size + 1))
        self.pieces = {size: frozenset(pieces) for size, pieces in by_size.items()}


_hidden: dict[str, _Key] = {}
"""All keys that this process uses, because a server may repeat the key of another server."""


def hide(key: str) -> None:
    """Remove this API key from all texts that are cleaned from now on."""
    if key and key not in _hidden:
        _hidden[key] = _Key(key)


def clean(value: object, limit: int = MAX_CHARS) -> str:
    """Return a server's text on one line of at most ``limit`` characters, followed by "..." if it was longer.

    Keys, escaped ones too, are removed before the text is cut. Unprintable characters are shown as escapes.
    """
    text = _text_of(value)
    more = len(text) > MAX_SCANNED_CHARS
    text = " ".join(without_keys(text[:MAX_SCANNED_CHARS], cut=more).split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: limit + 1])
    return f"{text[:limit]} ..." if more or len(text) > limit else text


def printable(text: str) -> str:
    """Return text with unprintable characters as escapes, so that it cannot control a terminal; keeps line breaks.

    Used for april's own sentences that quote names and texts from outside; keys are not removed.
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def quoted(value: object, limit: int = 64) -> str:
    """Return a name as :func:`clean` shows it, in quotation marks."""
    return f"'{clean(value, limit)}'"


def without_keys(text: str, *, cut: bool = False) -> str:
    """Return the text without the keys given to :func:`hide`; ``cut`` means that it was cut, perhaps within a key.

    A text that contains an escaped key is not shown at all.
    """
    keys = list(_hidden.values())
    # merge the spans of all keys, because keys may overlap
    spans = _merged([span for key in keys for span in _spans(text, key)])
    parts, at = [], 0
    for start, end in spans:
        parts += [text[at:start], KEY_REPLACEMENT]
        at = end
    layer = shown = "".join(parts) + text[at:]
    for _ in range(_LAYERS):
        following = _ESCAPE.sub(_unescaped, layer)
        if following == layer:
            break
        layer = following
        if any(_contains(_plain(layer), key) for key in keys):
            return KEY_REPLACEMENT
    return shown[:-_CUT_CHARS] if cut else shown


def _text_of(value: object) -> str:
    if isinstance(value, bytes):
        return value[: 4 * MAX_SCANNED_CHARS].decode("utf-8", "replace")
    try:
        return str(value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer with too many digits
        return f"a value of type {type(value).__name__}"


def _plain(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def _inner(encode: Callable[[bytes], bytes], raw: bytes, group: int, letters: int, before: int) -> str:
    """Encode the key after ``before`` other bytes of its group; return the letters that depend on the key alone."""
    whole = encode(b"\0" * before + raw + b"\0" * group).decode()
    bits = 8 * group // letters
    return _plain(whole[-(-8 * before // bits) : 8 * (before + len(raw)) // bits])


def _contains(plain: str, key: _Key) -> bool:
    return any(plain[i : i + n] in pieces for n, pieces in key.pieces.items() for i in range(len(plain) - n + 1))


def _spans(text: str, key: _Key) -> Iterator[tuple[int, int]]:
    """Yield the spans of the text that contain the key, or a piece of it."""
    if key.literal:
        yield from (match.span() for match in re.finditer(re.escape(key.literal), text))
    if not _contains(_plain(text), key):
        return
    letters = [(c, i) for i, one in enumerate(text) for c in one.casefold() if c.isalnum()]
    plain = "".join(c for c, _ in letters)
    for size, pieces in key.pieces.items():
        for i in range(len(plain) - size + 1):
            if plain[i : i + size] in pieces:
                yield letters[i][1], letters[i + size - 1][1] + 1


def _unescaped(match: re.Match[str]) -> str:
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
