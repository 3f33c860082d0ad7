"""Reads whole numbers that users give."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def whole_number(value: Any) -> int | None:
    """Return an integer, which may be one of numpy's, as an int; None for all other values, also for booleans."""
    return None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
