"""Converts events to plain JSON values and back: ids, states, counts and versions, but no user text and no tokens.

Of an attachment, only kind, hash and size are kept. The conversion follows the fields of the classes, so a new event
needs no code here. Text is left out unless its field is known to hold april's own names, as users may share records.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from april.core.attachments import Attachment
from april.core.batch import DeliveredSample
from april.core.saved_state import Packed
from april.core.types import GenerateCall, Group, Sample

NAME_FIELDS = frozenset(
    {
        "attachments", "attempt_id", "attempt_ids", "content", "contents", "engine", "engines", "extras", "id",
        "kind", "logprob_kind", "name", "names", "parts", "per_token", "per_turn", "silent",
    }
)  # fmt: skip
"""Fields whose text is kept: names of attempts, engines, kinds and parts of rewards, and hashes made by april.
A replay needs them all."""
OMITTED_FIELDS = frozenset(
    {"data", "end_ids", "eos_token_ids", "metrics", "note", "stop_token_ids", "tape", "unchecked"}
)
"""Fields that are left out: they hold user data or token ids, or can be derived from other fields."""
OMITTED_OF_ROWS = OMITTED_FIELDS | {"cohort_values", "extras", "row_reward", "turns"}
"""Fields of delivered rows that are left out, because a replay finds their contents in other events and in calls."""
OMITTED_TEXT = "(left out)"
_EXCEPTION_NAME = re.compile(r"(?:^|: )([A-Za-z_]\w{0,60}(?:Error|Exception|Timeout|Interrupt|Exit))(?=: |$)")

_PLAIN_TYPES = (int, float, bool, type(None))

T = TypeVar("T")
ConvertText = Callable[[str], str]
Converter = Callable[[Any, ConvertText, bool], Any]


def omit_text(text: str) -> str:
    """Return :data:`OMITTED_TEXT` for any text but the empty one."""
    return OMITTED_TEXT if text else ""


def exception_name(text: str) -> str:
    """Return the name of the exception in an error message; :data:`OMITTED_TEXT` if there is none."""
    found = _EXCEPTION_NAME.search(text)
    return found[1] if found else OMITTED_TEXT if text else ""


def to_plain(value: Any, convert_text: ConvertText = omit_text, *, is_name: bool = False) -> Any:
    """Convert a value to plain JSON values.

    An array becomes its length, a mask its length and sum, a sample or group its id.

    ``convert_text`` is applied to text unless ``is_name`` is true. Raises TypeError for an unknown type.
    """
    return _CONVERTERS[type(value)](value, convert_text, is_name)


def _converter(kind: type) -> Converter:
    """Return the function that converts values of this type."""
    if kind in _PLAIN_TYPES:
        return lambda value, of, named: value
    if issubclass(kind, Enum):
        return lambda value, of, named: value.value
    if issubclass(kind, str):
        return lambda value, of, named: value if named else of(value)
    if issubclass(kind, (Sample, Group)):
        return lambda value, of, named: value.id
    if issubclass(kind, GenerateCall):
        return lambda value, of, named: value.owner
    if issubclass(kind, np.ndarray):
        return lambda value, of, named: (
            {"length": len(value), "sum": int(value.sum())} if value.dtype == np.uint8 else {"length": len(value)}
        )
    if issubclass(kind, Packed):
        return lambda value, of, named: {"length": len(value)}
    if issubclass(kind, np.generic):
        return lambda value, of, named: value.item()
    if issubclass(kind, Mapping):
        return lambda value, of, named: {str(key): to_plain(item, of, is_name=named) for key, item in value.items()}
    if issubclass(kind, Attachment):
        return lambda value, of, named: {
            "kind": value.kind if value.kind.isidentifier() else of(value.kind),
            "digest": of(value.digest) if value.digest.strip("0123456789abcdef") else value.digest,
            "size": value.size,
        }
    if names := names_in_list(kind):
        are_names = [name in NAME_FIELDS for name in names]
        return lambda value, of, named: [
            _CONVERTERS[type(part)](part, of, is_name)
            for part, is_name in zip(map(partial(getattr, value), names), are_names, strict=True)
        ]
    if is_dataclass(kind) or issubclass(kind, msgspec.Struct):
        all_of_them = fields(kind) if is_dataclass(kind) else msgspec.structs.fields(kind)
        left_out = OMITTED_OF_ROWS if issubclass(kind, DeliveredSample) else OMITTED_FIELDS
        parts = [(f.name, f.default, f.name in NAME_FIELDS) for f in all_of_them if f.name not in left_out]
        return lambda value, of, named: _plain_fields(value, of, parts)
    if issubclass(kind, (list, tuple)):
        return lambda value, of, named: [_CONVERTERS[type(item)](item, of, named) for item in value]
    raise TypeError(f"a {kind.__name__} cannot be recorded")


def names_in_list(kind: type) -> tuple[str, ...]:
    """Return the field names of a named tuple, or of a struct that is encoded as a list; else an empty tuple."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__ if kind.__struct_config__.array_like else ()
    return getattr(kind, "_fields", ())


class _Converters(dict[type, Converter]):
    """Holds conversion functions by type, each of which is created when it is first needed."""

    def __missing__(self, kind: type) -> Converter:
        self[kind] = converter = _converter(kind)
        return converter


_CONVERTERS = _Converters()


def _plain_fields(value: Any, convert_text: ConvertText, fields: list[tuple[str, Any, bool]]) -> dict[str, Any]:
    """Convert the fields of a value that differ from their defaults."""
    out = {}
    for name, default, is_name in fields:
        part = getattr(value, name)
        kind = type(part)
        if kind in _PLAIN_TYPES:
            if part != default:
                out[name] = part
        elif part is not default:
            out[name] = _CONVERTERS[kind](part, convert_text, is_name)
    return out


def from_plain(parts: Any, kind: type[T]) -> T:
    """Undo :func:`to_plain`. Arrays get the right length; their values are 0, or 1 from index ``differs_at`` on.

    Raises:
        ValueError: the parts do not describe a value of this type.
    """
    return msgspec.convert(parts, kind, dec_hook=_array, str_keys=True)


def blank_extras(names: Iterable[str], rows: int) -> dict[str, Any]:
    """Return an array of shape [rows, 0] for each name of extras: a replay knows the number of rows, but no values."""
    return {name: np.zeros((rows, 0), np.float32) for name in names}


def _array(kind: Any, parts: Any) -> Any:
    base = get_origin(kind) or kind
    if base is Counter:
        return Counter(msgspec.convert(parts, dict[get_args(kind)[0], int], str_keys=True))  # type: ignore[misc]
    length = parts["length"]
    if base is not np.ndarray:  # tokens or log-probabilities of a saved core
        return base(np.zeros(length, base.dtype[1:]))
    if get_args(get_args(kind)[1]) == (Any,):
        return np.zeros((length, 0), np.float32)
    array = np.zeros(length, np.int32)
    array[parts.get("differs_at", length) :] = 1
    return array
