"""Rows and trajectories as plain values for april's state file, and back: nothing in it is executed."""

from __future__ import annotations

from typing import Any

import torch

from april.errors import CheckpointError

TENSOR = "__tensor__"


def plain(value: Any, where: str) -> Any:
    """``value`` with its tensors and arrays as (dtype, shape, bytes); ``where`` it stands is for the message.

    Raises:
        CheckpointError: it holds something else than numbers, text, bytes, lists, mappings, tensors and arrays.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, dict):
        return {key: plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    try:
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
    except (TypeError, ValueError, RuntimeError):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which april cannot keep over a restart: let the data set give "
            "numbers, text, lists, mappings, tensors or arrays, or set recover.mode to disabled"
        ) from None
    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {TENSOR: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), content]}


def restored(value: Any) -> Any:
    """The way back; what was an array is a tensor now."""
    if isinstance(value, list):
        return [restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR not in value:
        return {key: restored(item) for key, item in value.items()}
    name, shape, content = value[TENSOR]
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"april's state is damaged: there is no tensor of {name!r}")
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)
