"""Several tensors in one flat buffer of bytes, the same way on both ends of a group."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from april.engines.weight_routes import TensorSpec

ALIGNED = 16
"""Every tensor begins at a multiple of so many bytes, as a view of another dtype asks for."""


def places(specs: Sequence[TensorSpec]) -> tuple[list[tuple[int, int]], int]:
    """Where each tensor lies (first byte, count of bytes), and how long the buffer is."""
    found, at = [], 0
    for spec in specs:
        size = prod(spec.shape) * dtype_of(spec.dtype).itemsize
        found.append((at, size))
        at += -(-size // ALIGNED) * ALIGNED
    return found, at


def dtype_of(name: str) -> Any:
    """The dtype of torch that has this name; raises ValueError if there is none."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def bytes_of(tensor: Any) -> Any:
    """The values of a contiguous tensor, as flat bytes in the same place."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def unpack(flat: Any, specs: Sequence[TensorSpec]) -> list[tuple[str, Any]]:
    """Named tensors, which are views of the buffer."""
    found, _ = places(specs)
    return [
        (spec.name, flat[at : at + size].view(dtype_of(spec.dtype)).view(spec.shape))
        for spec, (at, size) in zip(specs, found, strict=True)
    ]
