"""Adds a checksum to saved states, and refuses states that were changed since, for example by a damaged disk.

Invariant: the checksum depends on the values only, not on the file format: it is the same after dicts change their
order, tuples become lists, arrays become lists of numbers, and numeric keys become text.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from april.errors import CheckpointError

FORMAT = 4
"""Format number of everything that april saves; only states of this format can be read."""
PIECES = (b"tokens", b"logprobs")
"""Keys whose value may be one ``bytes`` object or a list of its parts; both forms have the same checksum."""
LARGEST_ARRAY = 1 << 20
"""Size in bytes above which an array in a prompt's data gets no checksum."""
State = dict[str, Any]
_IMMUTABLE = frozenset({type(None), bool, int, float, str, bytes})


def seal(kind: str, content: Mapping[str, Any]) -> State:
    """Return ``content`` as a state of this kind, with format number and checksum.

    A mapping in ``content`` may hold values of the user in its entry ``data``, and list the keys of those that are not
    plain in its entry ``unchecked``; the checksum leaves these values out.
    """
    return {"april": kind, "format": FORMAT, "checksum": checksum(kind, content), **content}


def verify_checksum(kind: str, state: Any) -> None:
    """Raise CheckpointError unless ``state`` is an unchanged state of this kind that :func:`seal` returned."""
    if not isinstance(state, Mapping) or "april" not in state:
        raise CheckpointError("this is not a state that april's state_dict() returned")
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"the state has format {state.get('format')!r}; this version of april reads format {FORMAT}"
        )
    if state["april"] != kind:
        raise CheckpointError(f"this is a state of april's {state['april']!r}, but a state of {kind!r} is needed")
    content = {key: value for key, value in state.items() if key not in ("april", "format", "checksum")}
    try:
        found = checksum(kind, content)
    except (NoChecksum, RecursionError) as error:
        raise CheckpointError(f"the state is damaged: {error}") from None
    if found != state.get("checksum"):
        raise CheckpointError(
            f"the state is damaged: its checksum is {state.get('checksum')!r}, but its content has {found!r}; it was "
            "changed after state_dict() returned it, or while it was written or read"
        )


class NoChecksum(TypeError):
    """Raised for a value of a type for which no checksum can be computed."""


def checksum(kind: str, content: Any) -> str:
    """Return the checksum of ``content`` as 32 hex digits; raises NoChecksum if a value is not plain."""
    digest = hashlib.blake2b(kind.encode(), digest_size=16)
    _add(content, digest.update)
    return digest.hexdigest()


def is_plain(value: Any) -> bool:
    """Return True if a value has a checksum: a number, string, bytes, None, or a list, dict or small array of these."""
    try:
        _add(value, lambda piece: None)
    except (NoChecksum, RecursionError):
        return False
    return True


def _add(value: Any, put: Callable[[Any], None]) -> None:
    if isinstance(value, (bytes, bytearray)):
        put(b"B%d:" % len(value))
        put(value)
    elif isinstance(value, (list, tuple)):
        put(b"L%d:" % len(value))
        for item in value:
            _add(item, put)
    elif isinstance(value, Mapping):
        _add_mapping(value, put)
    elif (piece := _scalar(value)) is not None:
        put(piece)
    elif hasattr(value, "tolist") and getattr(value, "nbytes", 0) <= LARGEST_ARRAY:
        _add(value.tolist(), put)
    else:
        raise NoChecksum(f"a {type(value).__name__} is not a plain value")


def _scalar(value: Any) -> bytes | None:
    """Return the bytes to hash for a number, string or None; return None for other values.

    A float without a fractional part is hashed like the int.
    """
    if value is None:
        return b"N"
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return b"S%d:%b" % (len(text), text)
    if isinstance(value, bool):
        return b"T" if value else b"F"
    if isinstance(value, float):
        if value.is_integer():
            return b"I%x;" % int(value)
        return b"Dnan" if value != value else b"D" + struct.pack("<d", value)
    if isinstance(value, int):
        return b"I%x;" % value
    return None


def _add_mapping(value: Mapping[Any, Any], put: Callable[[Any], None]) -> None:
    entries = sorted(((_key(key), item) for key, item in value.items()), key=lambda entry: entry[0])
    put(b"M%d:" % len(entries))
    unchecked = value.get("unchecked")
    for key, item in entries:
        put(b"S%d:%b" % (len(key), key))
        if key == b"data" and isinstance(unchecked, (list, tuple)) and isinstance(item, Mapping):
            item = {name: of for name, of in item.items() if _text(name) not in unchecked}
        if key in PIECES and isinstance(item, (list, tuple)) and item and all(isinstance(p, bytes) for p in item):
            put(b"B%d:" % sum(map(len, item)))
            for piece in item:
                put(piece)
        else:
            _add(item, put)


def data_out(data: Mapping[Any, Any]) -> tuple[State, list[str]]:
    """Return a prompt's data for a state, and the names of its entries that have no checksum.

    Entries with a checksum are copies, as the user's functions may change the originals before the state is written.
    """
    out, unchecked = {}, []
    for name, value in data.items():
        if type(name) is str and type(value) in _IMMUTABLE:
            out[name] = value
            continue
        plain = is_plain(name) and is_plain(value)
        try:
            out[name] = deepcopy(value) if plain else value
        except Exception:  # a tensor that is part of an autograd graph cannot be copied
            out[name], plain = value, False
        if not plain:
            unchecked.append(_text(name))
    return out, sorted(unchecked)


def _key(key: Any) -> bytes:
    return _text(key).encode("utf-8", "surrogatepass")


def _text(key: Any) -> str:
    """Return a mapping's key as JSON writes it."""
    if isinstance(key, bool) or key is None:
        return {True: "true", False: "false", None: "null"}[key]
    return key if isinstance(key, str) else str(key)
