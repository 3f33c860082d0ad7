"""Parses the answers of servers and checks them: JSON, errors and lists of numbers."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from april.core.versions import PolicyVersion
from april.engines.protocol import Chunk, EngineFinish, Float32, Int32
from april.errors import EngineBusy, EngineError, RequestRefused, WireError
from april.text.server_text import clean

T = TypeVar("T")


class NotJson(ValueError):
    """Raised for data that is not JSON, is nested too deeply, or does not have the expected shape."""


def read_json(raw: bytes, shape: Any = Any) -> Any:
    """Parse JSON into a value of type ``shape``. Raises NotJson, whose message is a clause for a longer message."""
    return read_with(msgspec.json.Decoder(shape), raw) if shape is not Any else read_with(_ANY, raw)


def read_with(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    """Parse JSON with an existing decoder. Raises NotJson."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotJson(clean(error)) from None
    except RecursionError:
        raise NotJson(f"{len(raw)} bytes, nested too deeply") from None


_ANY = msgspec.json.Decoder()


def positive(values: dict[str, Any], key: str) -> int | None:
    """Return the value under ``key`` if it is a positive integer, else None."""
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


_AT_REST = re.compile(r"\bis (?:paused|asleep|sleeping)\b", re.IGNORECASE)
"""Text by which TensorRT-LLM says that it accepts no requests now; the status looks like a fault of the request."""

_ADAPTER_GONE = re.compile(r"\bLoRA (?:adapters are not loaded|is not enabled|adapter that has never been loaded)\b")
"""Text by which SGLang says that it has lost the adapter that it was started with; the status looks like a fault of the
request."""


def failure_of(status: int, text: str, retry_after_s: float | None = None) -> EngineError:
    """Return the error for a status. RequestRefused (400, 413, 422) means that other requests may still succeed."""
    if status in (429, 503) or (status in (400, 500) and _AT_REST.search(text)):
        return EngineBusy(text, retry_after_s)
    refused = status in (400, 413, 422) and not _ADAPTER_GONE.search(text)
    return RequestRefused(text) if refused else EngineError(text)


def failure_said(payload: bytes, who: str) -> EngineError:
    """Return the error that an event or answer without tokens reports; ``who`` begins the message.

    An error code is treated like a status. Returns a WireError if the payload has no known error shape.
    """
    try:
        answer: Any = read_json(payload)
    except NotJson:
        answer = None
    error = answer.get("error") if isinstance(answer, dict) else None
    if error is None and (not isinstance(answer, dict) or answer.get("message") is None):
        return WireError(f"{who}: the server's answer has neither tokens nor an error ({len(payload)} bytes)")
    code = (error if isinstance(error, dict) else answer).get("code")
    if code == "context_length_exceeded":
        code = 400
    return failure_of(code if isinstance(code, int) else 500, f"{who}: the server says: {error_text(payload)}")


def error_text(body: bytes) -> str:
    """Return the message of an error answer, in any shape that servers use, as cleaned by :func:`clean`."""
    try:
        value: Any = read_json(body)
    except NotJson:
        value = body
    for _ in range(3):
        inner = next((value[key] for key in ("error", "message", "detail") if value.get(key)), None) if isinstance(
            value, dict
        ) else None
        if inner is None:
            break
        value = inner
    return clean(value) or "nothing"


def empty_chunk(version: PolicyVersion, finish: EngineFinish | None) -> Chunk:
    """Make a chunk without tokens, with or without a finish reason."""
    return Chunk(np.empty(0, np.int32), np.empty(0, np.float32), version, finish)


def int32_array(values: Sequence[int]) -> Int32:
    """Return token ids as int32, shape [k]. Raises WireError."""
    try:
        return _array(values, np.int32, "i")
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"token ids are not whole numbers of 32 bits: {clean(error)}") from None


def float32_array(values: Sequence[float]) -> Float32:
    """Return log-probabilities as float32, shape [k]. Raises WireError."""
    try:
        return _array(values, np.float32, "f")
    except (TypeError, ValueError) as error:
        raise WireError(f"log-probabilities are not numbers: {clean(error)}") from None


def _array(values: Sequence[float], dtype: type[np.generic], code: str) -> NDArray[Any]:
    """Return a list of numbers as an array; ``code`` is the format character of ``dtype`` in struct.

    struct takes a third of the time of np.array, which first finds out the type of every value.
    """
    array = np.empty(len(values), dtype)
    try:
        struct.pack_into(f"{len(values)}{code}", array.data, 0, *values)
    except (struct.error, OverflowError):
        # values beyond float32 become infinite here, and are refused like other infinite values
        with np.errstate(over="ignore"):
            return np.array(values, dtype)
    return array
