"""How much memory do the tokens of an attempt in flight take, by the number of tokens per chunk?

Run: ``python -m benchmarks.tape_memory``.
"""

from __future__ import annotations

import json
import tracemalloc

import numpy as np

from april.core.tape import AttemptTape
from april.core.versions import FIRST_VERSION

PACKED_BYTES = 8
"""Bytes of one token and its log-probability."""


def most_bytes_per_token(tokens: int, per_chunk: int, start: int = 0) -> float:
    """Return the largest number of bytes per token that a tape holds while it grows from ``start`` to ``tokens``."""
    tracemalloc.start()
    tape, most = AttemptTape(), 0.0
    for _ in range(tokens // per_chunk):
        tape.append(np.zeros(per_chunk, np.int32), np.zeros(per_chunk, np.float32), FIRST_VERSION)
        if tape.count >= start:
            most = max(most, tracemalloc.get_traced_memory()[0] / tape.count)
    tracemalloc.stop()
    return most


if __name__ == "__main__":
    print(json.dumps({
        f"of_packed_in_chunks_of_{k}": round(most_bytes_per_token(8192, k, 6000) / PACKED_BYTES, 2)
        for k in (1, 2, 16, 32, 8192)
    }, indent=2))  # fmt: skip
