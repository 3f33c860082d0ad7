"""Lists of numbers from a server as arrays, or a WireError that says what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from april.core.versions import PolicyVersion
from april.engines.protocol import Chunk, EngineFinish, Float32, Int32
from april.errors import WireError
from april.server_text import said


def chunk_of(
    tokens: Sequence[int], logprobs: Sequence[float], version: PolicyVersion, finish: EngineFinish | None = None
) -> Chunk:
    """One chunk; ranges are checked by the driver, here only that the lists are numbers of one length.

    Raises:
        WireError: lengths differ, a number is missing (null), or does not fit its type.
    """
    if len(tokens) != len(logprobs):
        raise WireError(f"{len(tokens)} tokens came with {len(logprobs)} log-probabilities")
    return Chunk(int32_array(tokens), float32_array(logprobs), version, finish)


def empty_chunk(version: PolicyVersion, finish: EngineFinish | None) -> Chunk:
    """No tokens; an end, or nothing at all."""
    return Chunk(np.empty(0, np.int32), np.empty(0, np.float32), version, finish)


def int32_array(values: Sequence[int]) -> Int32:
    """[k] int32."""
    try:
        return np.array(values, np.int32)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"token ids are not whole numbers of 32 bits: {said(error)}") from None


def float32_array(values: Sequence[float]) -> Float32:
    """[k] float32."""
    try:
        # a number beyond float32 becomes infinite here, and is refused with the other infinite ones
        with np.errstate(over="ignore"):
            return np.array(values, np.float32)
    except (TypeError, ValueError) as error:
        raise WireError(f"log-probabilities are not numbers: {said(error)}") from None
