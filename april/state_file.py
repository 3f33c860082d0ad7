"""What april saves beside a trainer's checkpoint: sealed bytes, in msgpack, of which nothing is ever executed."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from april.core.sealed import FORMAT
from april.errors import CheckpointError


def pack(kind: str, content: Any) -> bytes:
    """``content`` as sealed bytes; arrays, tensors and numbers of numpy become lists and numbers.

    Raises:
        CheckpointError: it holds something that is no plain value.
    """
    try:
        data = msgspec.msgpack.encode(content, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"april's state cannot be saved: {error}") from error
    head = {"april": kind, "format": FORMAT, "checksum": checksum_of(data)}
    return msgspec.msgpack.encode({**head, "content": data})


def unpack(kind: str, data: bytes, where: str) -> Any:
    """What was packed; ``where`` it was found is for the message.

    Raises:
        CheckpointError: it was changed, is of another kind, or another version of april wrote it.
    """
    try:
        outer = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"april's state in {where} cannot be read: {error}") from error
    if not isinstance(outer, dict) or outer.get("format") != FORMAT or outer.get("april") != kind:
        raise CheckpointError(f"april's state in {where} was written by another version of april, or is none")
    content = outer.get("content")
    if not isinstance(content, bytes) or checksum_of(content) != outer.get("checksum"):
        raise CheckpointError(f"april's state in {where} is damaged: its checksum does not fit its content")
    return msgspec.msgpack.decode(content)


def checksum_of(data: bytes) -> str:
    """32 hex digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no plain value")
