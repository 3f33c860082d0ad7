"""A batch's arrays as torch tensors; torch is imported when it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from april.errors import ConfigError

if TYPE_CHECKING:
    import torch


def to_torch(arrays: Mapping[str, Any], device: torch.device | str | int | None = None) -> dict[str, torch.Tensor]:
    """Copy the arrays to tensors of the same names and shapes, on ``device`` (None means torch's default).

    Integers become int64, as gather and embeddings want their indices; the uint8 masks become bool, which selects,
    multiplies and goes into torch.where (sums are int64; for ``1 - mask`` write ``~mask``); floats become float32.

    Raises:
        ConfigError: torch is not installed.
        TypeError: not the arrays of a batch; a value that is not an array of numbers is named.
    """
    if not isinstance(arrays, Mapping):
        raise TypeError(
            f"april.to_torch takes the arrays of batch.padded() or batch.ragged(), got {type(arrays).__name__}"
        )
    try:
        import torch
    except ImportError:
        raise ConfigError(
            "april.to_torch needs torch, in the build for your machine: pip install torch; without it, use the arrays"
        ) from None
    dtypes = {"i": torch.int64, "b": torch.bool, "f": torch.float32}
    tensors: dict[str, torch.Tensor] = {}
    for name, value in arrays.items():
        kind = value.dtype.kind if isinstance(value, np.ndarray) else ""
        if isinstance(value, np.ndarray) and value.dtype == np.uint8:
            kind = "b"
        if kind not in dtypes:
            what = f"an array of {value.dtype}" if kind else type(value).__name__
            raise TypeError(f"april.to_torch: {name} is {what}; give the arrays of Batch.padded() or Batch.ragged()")
        tensors[name] = torch.tensor(value, dtype=dtypes[kind], device=device)
    return tensors
