"""No number from an engine is believed before it was looked at."""

from __future__ import annotations

import numpy as np

from april.core.numbers import wrong_ids, wrong_logprobs
from april.core.versions import PolicyVersion
from april.engines.protocol import Chunk
from april.errors import WireError

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


def check_chunk(
    chunk: Chunk, vocab_size: int, room: int, oldest: PolicyVersion | None, newest: PolicyVersion
) -> None:
    """Raise WireError unless the chunk can be true.

    Checked: int32 and float32 arrays of one length, at most ``room`` tokens, ids in [0, vocab_size), finite
    log-probabilities <= 0, a version between ``oldest`` (that of the tokens before; None: any) and ``newest``.
    """
    tokens, logprobs = chunk.tokens, chunk.logprobs
    for array, what, dtype in ((tokens, "tokens", _INT32), (logprobs, "log-probabilities", _FLOAT32)):
        if getattr(array, "dtype", None) != dtype or array.ndim != 1:
            raise WireError(f"{what} must be a flat array of {dtype}, got {type(array).__name__}")
    count = len(tokens)
    if len(logprobs) != count:
        raise WireError(f"{count} tokens came with {len(logprobs)} log-probabilities")
    if count > room:
        raise WireError(f"{count} tokens came where {room} were left of the budget")
    if count == 0:
        return
    if chunk.version > newest or (oldest is not None and chunk.version < oldest):
        since = "any" if oldest is None else str(oldest)
        raise WireError(f"policy version {chunk.version} came where {since} to {newest} was possible")
    wrong = wrong_ids(tokens, vocab_size) or wrong_logprobs(logprobs)
    if wrong is not None:
        raise WireError(wrong)
