"""Converts arrays and tensors to plain values (numbers, text, bytes, lists, mappings), which any process can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from april.errors import CheckpointError

ARRAY = "__array__"
"""Key of an encoded array, [library, dtype, shape, bytes]; the library of one of NumPy's numbers is "scalar". Empty
bytes are None, as ``torch.load`` cannot read them."""
_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes, "int": partial(int, base=16), "text": partial(bytes.decode, errors="surrogatepass"),
}  # fmt: skip
"""Decoders of other values that ``torch.load`` or MessagePack cannot hold, by the name in place of the library's."""
_EXACT: dict[type, Callable[[Any], Any]] = {
    str: str.__str__, bytes: bytes.__bytes__, int: int.__int__, float: float.__float__
}  # fmt: skip
"""Functions that convert values of subclasses, such as enum members or NumPy's float64, to the plain type itself."""


def plain(value: Any, where: str = "it") -> Any:
    """Return ``value`` with arrays and tensors encoded under the key ARRAY; ``where`` names it in errors.

    Raises:
        CheckpointError: the value contains an object that is neither a plain value nor an array.
    """
    own = type(value)
    if own is float or (own is int and -(2**63) <= value < 2**63) or (own is str and value.isascii()):
        return value  # most values, first and fast, because the event loop waits for this
    if value is None or own is bool:
        return value
    for kind, exact in _EXACT.items():
        if isinstance(value, kind):
            return _scalar(exact(value))
    if isinstance(value, dict) and ARRAY not in value:
        return {_key(key, where): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if hasattr(value, "detach"):  # a tensor, without importing torch
        import torch

        flat = value.detach().cpu().contiguous().reshape(-1)
        name = str(value.dtype).removeprefix("torch.")
        return {ARRAY: ["torch", name, list(value.shape), flat.view(torch.uint8).numpy().tobytes() or None]}
    array = np.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else np.empty(0, object)
    if array.dtype.kind not in "iufb":
        raise CheckpointError(
            f"{where} is a {type(value).__name__}; give only numbers, text, bytes, lists, mappings and arrays"
        )
    array = array.astype(array.dtype.newbyteorder("<"))
    library = "scalar" if isinstance(value, np.generic) else "numpy"
    return {ARRAY: [library, array.dtype.str, list(array.shape), array.tobytes() or None]}


def _scalar(value: Any) -> Any:
    if value != b"" and why_not_plain(value, "") is None:
        return value
    if isinstance(value, int):
        return {ARRAY: ["int", "", [], b"%x" % value]}
    return {ARRAY: ["text", "", [], value.encode(errors="surrogatepass")] if value else ["bytes", "", [], None]}


def _key(key: Any, where: str) -> Any:
    """Return a mapping's key as a plain value that can be a key. Raises CheckpointError if there is none."""
    if isinstance(key, tuple):
        return tuple(_key(part, where) for part in key)
    found = plain(key.item() if isinstance(key, np.generic) else key, where)
    if isinstance(found, (dict, list)):
        raise CheckpointError(f"{where} has a key that cannot be saved, of type {type(key).__name__}")
    return found


def restored(value: Any) -> Any:
    """Decode a value from :func:`plain`, where tuples became lists. Raises CheckpointError for an invalid array."""
    if isinstance(value, list):
        return [restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if ARRAY not in value:
        return {key: restored(item) for key, item in value.items()}
    try:
        library, name, shape, content = value[ARRAY]
        if library in _DECODERS:
            return _DECODERS[library](content or b"")
        if library in ("numpy", "scalar"):
            array = np.frombuffer(bytearray(content or b""), np.dtype(name)).reshape(shape)
            return array[()] if library == "scalar" else array
        import torch

        of_bytes = partial(torch.tensor, []) if content is None else partial(torch.frombuffer, bytearray(content))
        return of_bytes(dtype=torch.uint8).view(getattr(torch, name)).reshape(shape)
    except (TypeError, ValueError, AttributeError, RuntimeError, SyntaxError) as error:
        raise CheckpointError(f"the state is damaged: an array in it cannot be decoded: {error}") from error


SCALARS = frozenset({type(None), bool, int, float, str, bytes})
LEVELS = 100
"""Largest number of nested lists and mappings in a value; decoding a deeper value could exceed the recursion limit."""


def why_not_plain(value: Any, where: str, levels: int = LEVELS) -> str | None:
    """Return why a value cannot be sent unchanged to another process, or None if it can; ``where`` names it."""
    kind = type(value)
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"{where} is text with half a character (a surrogate), which UTF-8 does not have"
    elif kind is int:
        if not -(2**63) <= value < 2**64:
            return f"{where} is a number of more than 64 bits"
    elif kind in (dict, list):
        if not levels:
            return f"{where[:100]} ... has more than {LEVELS} levels"
        return next(filter(None, _why_items_not_plain(value, where, levels - 1)), None)
    elif kind not in SCALARS:
        return f"{where} is a {kind.__name__}"
    return None


def _why_items_not_plain(value: Any, where: str, levels: int) -> Iterator[str | None]:
    if type(value) is list:
        for i, item in enumerate(value):
            yield why_not_plain(item, f"{where}[{i}]", levels)
        return
    for key, item in value.items():
        if type(key) not in SCALARS:
            yield f"{where} has a key of type {type(key).__name__}"
        yield why_not_plain(key, f"the key {key!r} of {where}", levels)
        yield why_not_plain(item, f"{where}[{key!r}]", levels)
