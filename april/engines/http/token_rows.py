"""Decodes ``routed_experts``, the rows of expert ids that servers send per token, from base64 text.

The data is not trusted: nothing is unpickled.
"""

from __future__ import annotations

import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib import format as npy

from april.core.attachments import Rows
from april.engines.http.wire import positive
from april.engines.protocol import ROUTED_EXPERTS
from april.text.server_text import clean

NO_EXPERTS = "serve a model with experts; the config.json of this one has no num_experts_per_tok"
_MAX_EXPERTS = 1 << 16
"""Largest number of experts per layer, because ids are kept in one or two bytes."""


class InvalidRows(ValueError):
    """Raised for data that is not valid rows; the message completes the sentence "The answer has ..."."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Shape of one row of ``routed_experts``: the ids of the experts that computed one token, for each layer."""

    layers: int
    """Number of layers of the model, including those without experts."""
    top_k: int
    """Number of experts per token and layer."""
    experts: int | None = None
    """Number of experts per layer, whose ids begin with 0; None if unknown."""

    @property
    def width(self) -> int:
        return self.layers * self.top_k


def routing_of(files: Sequence[dict[str, Any]]) -> Routing | None:
    """Return the shape from a model's configuration files; None if it is missing or the model has no experts."""
    for file in files:
        text = file.get("text_config")
        for values in (text if isinstance(text, dict) else {}, file):
            layers, top_k = positive(values, "num_hidden_layers"), positive(values, "num_experts_per_tok")
            if layers is not None and top_k is not None:
                names = ("num_experts", "n_routed_experts", "num_local_experts")
                return Routing(layers, top_k, next(filter(None, (positive(values, name) for name in names)), None))
    return None


def experts_of_numbers(text: str, routing: Routing) -> Rows:
    """Decode rows from base64 text of int32 numbers (SGLang). Raises InvalidRows."""
    raw = _bytes_of(text)
    if len(raw) % (4 * routing.width):
        raise InvalidRows(
            f"{len(raw)} bytes of {ROUTED_EXPERTS}, which do not match {routing.layers} layers with {routing.top_k} "
            "experts per token"
        )
    return narrow_ids(np.frombuffer(raw, "<i4").reshape(-1, routing.layers, routing.top_k), routing.experts)


def experts_of_npy(text: str, routing: Routing | None = None) -> Rows:
    """Decode rows from base64 text of a .npy file (vLLM). Raises InvalidRows, also if they do not fit ``routing``."""
    return experts_of_array(_array_of(_bytes_of(text)), routing)


def experts_of_array(rows: Rows, routing: Routing | None = None) -> Rows:
    """Check rows that are already an array, and shrink their dtype. Raises InvalidRows like :func:`experts_of_npy`."""
    if rows.ndim != 3 or rows.dtype.kind not in "iu":
        raise InvalidRows(
            f"{ROUTED_EXPERTS} of shape {rows.shape} and type {rows.dtype}, but rows of ids per layer are needed"
        )
    if routing is not None and rows.shape[1:] != (routing.layers, routing.top_k):
        raise InvalidRows(
            f"{ROUTED_EXPERTS} of {rows.shape[1]} layers with {rows.shape[2]} experts per token, but the model has "
            f"{routing.layers} with {routing.top_k}"
        )
    return narrow_ids(rows, None if routing is None else routing.experts)


def narrow_ids(rows: Rows, experts: int | None) -> Rows:
    """Convert ids to uint8 if that holds all ids below ``experts`` (None means all ids in ``rows``), else to uint16.

    Raises InvalidRows for a negative or too large id.
    """
    low, high = (int(rows.min()), int(rows.max())) if rows.size else (0, 0)
    most = _MAX_EXPERTS if experts is None else experts
    if low < 0 or high >= most or most > _MAX_EXPERTS:
        raise InvalidRows(f"the expert {low if low < 0 else high}, but experts are numbered from 0 to {most - 1}")
    small = (high + 1 if experts is None else experts) <= 256
    return rows.astype(np.uint8 if small else np.uint16)


def _bytes_of(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRows(f"{len(text)} characters of {ROUTED_EXPERTS} that are not base64 ({clean(error)})") from None


def _array_of(raw: bytes) -> Rows:
    """Decode a .npy file. Raises InvalidRows."""
    try:
        return np.asarray(npy.read_array(io.BytesIO(raw), allow_pickle=False))
    except (ValueError, OverflowError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise InvalidRows(f"{ROUTED_EXPERTS} that are not a numpy array ({clean(error)})") from None
