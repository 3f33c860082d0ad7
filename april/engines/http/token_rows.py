"""Rows that come with tokens (extras), as servers send them: text in base64, of numbers or of a file of numpy's.

Everything here is data of a stranger: nothing is unpickled, no shape is believed before it fits the bytes that came.
"""

from __future__ import annotations

import binascii
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib import format as npy

from april.core.attachments import Rows
from april.engines.protocol import ROUTED_EXPERTS
from april.server_text import clean

NO_EXPERTS = "serve a model with experts, as its config.json has no num_experts_per_tok"
_LARGEST = 1 << 16
"""Ids that two bytes can tell apart."""
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class WrongRows(ValueError):
    """Raised for what cannot be rows; the message can follow "has"."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The shape of a row of ``routed_experts``."""

    layers: int
    """Layers of the model, those without experts included."""
    top_k: int
    """Experts per token."""
    experts: int | None = None
    """Experts of a layer; ids are below. None: unknown."""

    @property
    def width(self) -> int:
        """Numbers of one row."""
        return self.layers * self.top_k


def routing_of(files: Sequence[dict[str, Any]]) -> Routing | None:
    """The shape by a model's configuration files; None if they do not say it, or the model has no experts."""
    for file in files:
        text = file.get("text_config")
        for values in (text if isinstance(text, dict) else {}, file):
            layers, top_k = _number(values, "num_hidden_layers"), _number(values, "num_experts_per_tok")
            if layers is not None and top_k is not None:
                names = ("num_experts", "n_routed_experts", "num_local_experts")
                return Routing(layers, top_k, next(filter(None, (_number(values, name) for name in names)), None))
    return None


def _number(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def experts_of_numbers(text: str, routing: Routing) -> Rows:
    """Rows out of int32 numbers (SGLang); raises WrongRows."""
    raw = _bytes_of(text)
    if len(raw) % (4 * routing.width):
        raise WrongRows(
            f"{len(raw)} bytes of {ROUTED_EXPERTS}, which are no rows of {routing.layers} layers with {routing.top_k} "
            "experts per token"
        )
    return narrowed(np.frombuffer(raw, "<i4").reshape(-1, routing.layers, routing.top_k), routing.experts)


def experts_of_npy(text: str, routing: Routing | None = None) -> Rows:
    """Rows out of a file of numpy's (vLLM); ``routing``: the shape, where it is known. Raises WrongRows."""
    return experts_of_array(_array_of(_bytes_of(text)), routing)


def experts_of_array(rows: Rows, routing: Routing | None = None) -> Rows:
    """Rows of an array; as :func:`experts_of_npy`."""
    if rows.ndim != 3 or rows.dtype.kind not in "iu":
        raise WrongRows(f"{ROUTED_EXPERTS} of shape {rows.shape} and type {rows.dtype}, and not rows of ids by layer")
    if routing is not None and rows.shape[1:] != (routing.layers, routing.top_k):
        raise WrongRows(
            f"{ROUTED_EXPERTS} of {rows.shape[1]} layers with {rows.shape[2]} experts per token, and the model has "
            f"{routing.layers} with {routing.top_k}"
        )
    return narrowed(rows, None if routing is None else routing.experts)


def narrowed(rows: Rows, experts: int | None) -> Rows:
    """Ids as the smallest unsigned numbers that hold all experts, or, if their number is unknown, all that came.

    Raises WrongRows for an id outside of them.
    """
    low, high = (int(rows.min()), int(rows.max())) if rows.size else (0, 0)
    most = _LARGEST if experts is None else experts
    if low < 0 or high >= most or most > _LARGEST:
        raise WrongRows(f"the expert {low if low < 0 else high}, and they are numbered from 0 to {most - 1}")
    small = (high + 1 if experts is None else experts) <= 256
    return rows.astype(np.uint8 if small else np.uint16)


def _bytes_of(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise WrongRows(f"{len(text)} characters of {ROUTED_EXPERTS} that are no base64 ({clean(error)})") from None


def _array_of(raw: bytes) -> Rows:
    """The array of a .npy file; its header is believed if the bytes behind it are as many as it says."""
    file = io.BytesIO(raw)
    try:
        shape, by_columns, dtype = _HEADERS[npy.read_magic(file)](file)
    except (ValueError, KeyError, OverflowError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise WrongRows(f"{ROUTED_EXPERTS} that are no array of numpy's ({clean(error)})") from None
    left = len(raw) - file.tell()
    if dtype.hasobject or dtype.itemsize * math.prod(shape) != left or any(size < 0 for size in shape):
        raise WrongRows(f"{ROUTED_EXPERTS} of shape {clean(shape)} and type {clean(dtype)} in {left} bytes")
    rows = np.frombuffer(raw, dtype, offset=file.tell())
    return rows.reshape(shape, order="F" if by_columns else "C")
