"""Frames as arguments and answers of actor calls: long ones are arrays, which go through Ray's object store.

Ray copies an array into the store once, and whoever reads it there copies nothing; text and bytes inside of a list
would be pickled and copied on both sides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

LONG = 1 << 16
"""Bytes from which on a frame is an array; Ray puts answers above 100 KiB into its store."""

Packed = bytes | NDArray[np.uint8]


def pack_frames(frames: Iterable[bytes]) -> list[Packed]:
    """For a call or an answer; nothing is copied."""
    return [np.frombuffer(frame, np.uint8) if len(frame) >= LONG else frame for frame in frames]


def unpack_frames(frames: Iterable[Any]) -> list[bytes]:
    """As they were sent."""
    return [frame if isinstance(frame, bytes) else frame.tobytes() for frame in frames]
