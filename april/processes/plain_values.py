"""Values of users that travel between processes as they are: numbers, text, bytes, lists and mappings."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import msgspec

from april.processes.messages import ENCODER, ProtocolError


def plain_bytes(value: Any, where: str = "it") -> bytes:
    """Encode what a user gave; what would arrive as another thing than it is does not travel.

    Raises TypeError, which says what that is; ``where``: what the value is called there.
    """
    try:
        _refuse_odd(value, where)
        return ENCODER.encode(value)
    except (ValueError, OverflowError, RecursionError) as error:
        raise TypeError(_why_not_written(value, where) or f"{where} cannot be written: {error}") from None


def of_plain_bytes(data: bytes) -> Any:
    """The other way; raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError, TypeError) as error:
        raise ProtocolError(f"a host sent what cannot be read: {error}") from None


def why_not_plain(data: Mapping[str, Any]) -> str | None:
    """Return why the data of a prompt cannot travel between processes, or None."""
    try:
        plain_bytes(dict(data), "data")
    except TypeError as error:
        return str(error)
    return next((f"the key {key!r}, which is no string" for key in data if type(key) is not str), None)


_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
LEVELS = 100
"""The most levels of lists and dicts in one value: what is read at another depth of calls is read all the same."""


def _refuse_odd(value: Any, where: str, levels: int = LEVELS) -> None:
    kind = type(value)
    if not levels and kind in (dict, list):
        raise TypeError(f"{where[:100]} ... has more than {LEVELS} levels")
    if kind is dict:
        for key, item in value.items():
            if type(key) not in _SCALARS:
                raise TypeError(f"{where} has a key of type {type(key).__name__}")
            if type(item) not in _SCALARS:
                _refuse_odd(item, f"{where}[{key!r}]", levels - 1)
    elif kind is list:
        for i, item in enumerate(value):
            if type(item) not in _SCALARS:
                _refuse_odd(item, f"{where}[{i}]", levels - 1)
    elif kind not in _SCALARS:
        raise TypeError(f"{where} is a {kind.__name__}")


def _why_not_written(value: Any, where: str) -> str | None:
    if type(value) is dict:
        keys = (_why_not_written(key, f"the key {key!r} of {where}") for key in value)
        items = (_why_not_written(item, f"{where}[{key!r}]") for key, item in value.items())
        return next(filter(None, chain(keys, items)), None)
    if type(value) is list:
        return next(filter(None, (_why_not_written(item, f"{where}[{i}]") for i, item in enumerate(value))), None)
    try:
        ENCODER.encode(value)
    except UnicodeEncodeError:
        return f"{where} is text with half a character (a surrogate), which UTF-8 does not have"
    except OverflowError:
        return f"{where} is a number of more than 64 bits"
    return None
