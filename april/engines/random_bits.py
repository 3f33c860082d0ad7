"""Pseudo-random numbers that are the same on every platform, by the mixer of splitmix64 (Steele, Lea, Flood 2014)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STEP = np.uint64(0x9E3779B97F4A7C15)
MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the mixer of splitmix64 to counters; unsigned array arithmetic wraps around."""
    x = (x ^ (x >> np.uint64(30))) * MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))
