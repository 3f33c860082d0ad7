"""JSON of servers, which may be anything."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from april.server_text import said

T = TypeVar("T")


class NotJson(ValueError):
    """What was read is no JSON, is nested too deeply, or does not have the shape that was asked for."""


def read_json(raw: bytes, shape: Any = Any) -> Any:
    """The value; ``shape`` is the type that it must have.

    Raises:
        NotJson: the message says what is wrong, in words that a sentence can end with.
    """
    return read_with(msgspec.json.Decoder(shape), raw) if shape is not Any else read_with(_ANY, raw)


def read_with(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    """The same by a decoder that is kept."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotJson(said(error)) from None
    except RecursionError:
        raise NotJson(f"{len(raw)} bytes, nested too deeply") from None


_ANY = msgspec.json.Decoder()
