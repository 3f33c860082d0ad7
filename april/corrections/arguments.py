"""Converts the arguments of losses and advantages to numbers and arrays, or raises ValueError.

For the error message, ``who`` is the public function that was called, and ``what`` is the name of its argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

ArrayOrTensor = TypeVar("ArrayOrTensor", NDArray[Any], "torch.Tensor")
"""Array or tensor; a function with such an argument returns the same kind."""


def number(who: str, what: str, value: Any) -> float:
    """Convert a Python, numpy or torch number to a float. Raises ValueError for text, bools and several numbers."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        if not isinstance(plain, (bool, str, bytes)):
            return float(plain)
    except (TypeError, ValueError, RuntimeError):  # numpy and torch raise different types for several numbers
        pass
    raise ValueError(f"{who}: {what} must be a number, got {value!r:.100}")


def pair(who: str, what: str, values: Any) -> tuple[float, float]:
    """Return two numbers as floats."""
    try:
        low, high = values
    except (TypeError, ValueError):
        raise ValueError(f"{who}: {what} must be (low, high), got {values!r:.100}") from None
    return number(who, f"low of {what}", low), number(who, f"high of {what}", high)


def array_of(who: str, what: str, values: Any) -> NDArray[Any]:
    """Convert an array, a list, or a tensor on any device to an array. Tensors and object arrays become float64."""
    try:
        array = np.asarray(values.detach().double().cpu() if hasattr(values, "detach") else values)
        array = array.astype(np.float64) if array.dtype == object else array
    except (TypeError, ValueError, RuntimeError):  # rows of different lengths, None, tensors without values
        array = np.empty(0, object)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{who}: {what} must be an array or tensor of numbers, got {values!r:.100}")
    return array
