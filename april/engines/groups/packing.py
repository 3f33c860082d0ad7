"""Packs several tensors into one flat byte buffer, with the same layout on both ends of a group."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from april.engines.weight_transfer import TensorSpec

ALIGNED = 16
"""Alignment in bytes at which every tensor begins, as views of another dtype require."""


def places(specs: Sequence[TensorSpec]) -> tuple[list[tuple[int, int]], int]:
    """Return the first byte and the byte count of each tensor, and the length of the buffer."""
    found, at = [], 0
    for spec in specs:
        size = prod(spec.shape) * dtype_of(spec.dtype).itemsize
        found.append((at, size))
        at += -(-size // ALIGNED) * ALIGNED
    return found, at


def dtype_of(name: str) -> Any:
    """Return the torch dtype of this name; raises ValueError if there is none."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def bytes_of(tensor: Any) -> Any:
    """View a contiguous tensor as flat bytes, without a copy."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def unpack(flat: Any, specs: Sequence[TensorSpec]) -> list[tuple[str, Any]]:
    """Return the named tensors as views of the buffer."""
    found, _ = places(specs)
    return [
        (spec.name, flat[at : at + size].view(dtype_of(spec.dtype)).view(spec.shape))
        for spec, (at, size) in zip(specs, found, strict=True)
    ]
