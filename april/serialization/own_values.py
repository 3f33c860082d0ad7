"""Serialises april's own values for other processes, as MessagePack; decoding executes no code.

Dataclasses, msgspec structs, named tuples and enums are encoded by their fields, an array as its dtype, shape and
bytes, a scalar of numpy as a number. Decoded values are checked against the annotations of their class. A prompt or an
attachment that several samples or rows share is encoded once per message: the samples of a group share their prompt,
and many rows may share an image.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from april.core.attachments import Attachment, Placed
from april.core.batch import Batch, DeliveredSample
from april.core.types import Prompt
from april.engines.protocol import Request
from april.errors import LinkError

T = TypeVar("T")

_CONTAINERS: dict[type, tuple[str, ...]] = {
    Batch: ("samples",), DeliveredSample: ("prompt", "attached"), Request: ("attached",), Placed: ("attachment",),
}  # fmt: skip
"""For each class, the fields that contain prompts or attachments."""
_OMITTED_FIELDS = {DeliveredSample: {"output"}}
"""For each class, the fields that are left out of the encoding, because they may hold any object."""
_SHARED: dict[type, tuple[str, ...]] = {Prompt: ("attached",), Attachment: ()}
"""Classes whose values are encoded once per message; for each, the fields that contain other such values."""
_PART = 1
"""MessagePack extension type of a reference to a shared value; its content is the value's index in the message."""


def pack(value: Any) -> bytes:
    """Encode a value for :func:`unpack`; raises TypeError for objects that cannot be sent to another process."""
    parts = _SharedParts()
    try:
        return _encode((parts.all, parts.extract(value)))
    except (ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"it cannot be written: {error}") from None


def unpack(content: bytes, kind: type[T]) -> T:
    """Decode a value of the class ``kind``; its arrays are writable copies. Raises LinkError for invalid bytes."""
    try:
        parts, root = _ENVELOPE.decode(content)
        if not parts:
            return _decoder(kind).decode(root)  # type: ignore[arg-type, no-any-return]
        shared: list[Any] = []
        for part in parts:
            fields = msgspec.msgpack.decode(part, ext_hook=partial(_part, shared))
            shared.append(msgspec.convert(fields, Attachment) if "digest" in fields else fields)
        plain = msgspec.msgpack.decode(root, ext_hook=partial(_part, shared))
        return msgspec.convert(plain, kind, dec_hook=_decoded)
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise LinkError(f"another process has sent bytes that are not a valid {_name(kind)}: {error}") from None


class _SharedParts:
    """The shared prompts and attachments of one message, each encoded once; a part refers only to earlier parts."""

    def __init__(self) -> None:
        self.all: list[bytes] = []
        self._numbers: dict[bytes | str, int] = {}

    def extract(self, value: Any) -> Any:
        """Return the value with references in place of its prompts and attachments."""
        kind = type(value)
        if kind in (tuple, list):
            return [self.extract(item) for item in value]
        names = _CONTAINERS.get(kind)
        if names is not None:
            return self._fields(value, names)
        if kind is Attachment:
            return self._reference(value.digest, partial(_encode, value))
        if kind is Prompt:
            content = _encode(self._fields(value, _SHARED[Prompt]))
            return self._reference(content, lambda: content)
        return value

    def _fields(self, value: Any, names: tuple[str, ...]) -> dict[str, Any]:
        omitted = _OMITTED_FIELDS.get(type(value), ())
        fields = {name: getattr(value, name) for name in type(value).__annotations__ if name not in omitted}
        return fields | {name: self.extract(fields[name]) for name in names if fields[name]}

    def _reference(self, key: bytes | str, content: Callable[[], bytes]) -> msgspec.msgpack.Ext:
        if key not in self._numbers:
            self.all.append(content())
            self._numbers[key] = len(self.all) - 1
        return msgspec.msgpack.Ext(_PART, self._numbers[key].to_bytes(4, "big"))


def _part(parts: list[Any], code: int, index: memoryview) -> Any:
    at = int.from_bytes(index, "big")
    if code != _PART or at >= len(parts):
        raise ValueError("a reference to a part that is missing")
    return parts[at]


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iufb" or value.itemsize > 8:
            raise TypeError(f"an array of {value.dtype} cannot be sent to another process")
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        return little.dtype.str, value.shape, little.tobytes()
    if isinstance(value, np.integer | np.floating | np.bool_):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def _decoded(kind: Any, value: Any) -> Any:
    """Decode a value of a type that msgspec does not know (arrays, Counter), by its annotation."""
    base = get_origin(kind) or kind
    if base is Counter:
        return Counter(msgspec.convert(value, dict[get_args(kind)[0], int]))  # type: ignore[misc]
    if base is not np.ndarray:
        raise ValueError(f"a {_name(kind)} cannot be sent to another process")
    name, shape, data = msgspec.convert(value, _Array)
    there, here = _dtypes(kind, name)
    array = np.frombuffer(data, there).reshape(shape)
    if array.shape != shape:
        raise ValueError(f"an array of shape {shape}")
    return array.astype(here)


@lru_cache
def _dtypes(kind: Any, name: str) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return an array's encoded and native dtype; raises ValueError if the annotation requires another one."""
    if len(name) != 3 or name[0] not in "<|" or name[1] not in "iufb" or name[2] not in "1248":
        raise ValueError(f"an array of {name!r}, which is not a dtype of numbers")
    there = np.dtype(name)
    here = there.newbyteorder("=")
    number = get_args(get_args(kind)[1])[0] if get_args(kind) else Any
    wanted = here if number is Any else np.dtype(number)
    if here != wanted:
        raise ValueError(f"an array of {there} instead of {wanted}")
    return there, here


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_decoded, ext_hook=partial(_part, []))


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


_Array = tuple[str, tuple[int, ...], bytes]
_ENVELOPE = msgspec.msgpack.Decoder(tuple[list[bytes], msgspec.Raw])
_encode = msgspec.msgpack.Encoder(enc_hook=_encoded).encode
