"""Makes extras (arrays with a row per token) for simulated and fake engines, such that a test can recompute them.

Each row depends on the conversation up to its token, on the weight version and on the name of the array. So a test
notices if a row was taken from another attempt, shifted, or made under other weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from april.core.attachments import Extras, Rows
from april.core.tape import Int32
from april.core.versions import PolicyVersion
from april.engines.random_bits import MIX1, STEP, splitmix64

LAYERS, TOP_K = 2, 2
"""Number of layers, and of experts per token; a row is uint8 [2, 2]."""


def synthetic_rows(name: str, token_ids: Int32, versions: Sequence[tuple[PolicyVersion, int]], start: int = 0) -> Rows:
    """Return rows [start, start + R) of a conversation, uint8 [R, 2, 2]; ``versions``: (version, number of rows)."""
    count = sum(k for _, k in versions)
    read = token_ids[: start + count].astype(np.int64).astype(np.uint64) + np.uint64(1)
    weights = np.cumprod(np.full(len(read), MIX1, np.uint64))  # wraps around, as all array arithmetic here
    prefix = np.cumsum(splitmix64(read * STEP) * weights, dtype=np.uint64)[start:]
    made = [np.full(k, (v.incarnation << 32) ^ (v.n & 0xFFFFFFFF), np.uint64) for v, k in versions]
    label = np.uint64(int.from_bytes(name.encode()[:8].ljust(8, b"\0"), "little"))
    mixed = splitmix64(prefix + splitmix64(np.concatenate([*made, np.empty(0, np.uint64)]) * STEP + label))
    return mixed.view(np.uint8).reshape(-1, 8)[:, :4].reshape(-1, LAYERS, TOP_K).copy()


def rows_of_attempt(
    names: Sequence[str], token_ids: Int32, generated: Int32, versions: Sequence[tuple[PolicyVersion, int]], start: int
) -> Extras:
    """Return one attempt's rows from ``start`` on; rows of tokens before the attempt have the first of ``versions``."""
    if not len(generated):
        return {}
    before = len(token_ids) - 1 - start
    spans = [(versions[0][0], before), *versions] if before else versions
    whole = np.concatenate((token_ids, generated))
    return {name: synthetic_rows(name, whole, spans, start) for name in names}
