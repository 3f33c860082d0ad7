"""Converts a batch's arrays to torch tensors; torch is imported only when :func:`to_torch` is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from april.errors import ConfigError

if TYPE_CHECKING:
    import torch


def to_torch(arrays: Mapping[str, Any], device: torch.device | str | int | None = None) -> dict[str, torch.Tensor]:
    """Copy the arrays to tensors of the same names and shapes, on ``device`` (None means torch's default).

    Integers become int64, which gather and embeddings need as indices; floats become float32. Masks (uint8 arrays whose
    names end in ``_mask``) become bool, for indexing, multiplication and torch.where (sums are int64; for ``1 - mask``
    write ``~mask``).

    Raises:
        ConfigError: torch is not installed.
        TypeError: ``arrays`` is not a mapping to arrays of numbers; the message names the wrong value.
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
    dtypes = {"i": torch.int64, "u": torch.int64, "b": torch.bool, "f": torch.float32}
    tensors: dict[str, torch.Tensor] = {}
    for name, value in arrays.items():
        kind = value.dtype.kind if isinstance(value, np.ndarray) else ""
        if kind == "u" and name.endswith("_mask"):
            kind = "b"  # other uint8 arrays, such as ids of experts, are integers
        if kind not in dtypes:
            what = f"an array of {value.dtype}" if kind else type(value).__name__
            raise TypeError(f"april.to_torch: {name} is {what}; give the arrays of Batch.padded() or Batch.ragged()")
        tensors[name] = torch.tensor(value, dtype=dtypes[kind], device=device)
    return tensors
