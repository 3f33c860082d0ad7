"""Chunks that cannot be true, made from ones that are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from april.core.versions import PolicyVersion
from april.engines.protocol import Chunk
from april.testing.fault_script import FaultKind


def made_wrong(chunk: Chunk, kind: FaultKind, vocab_size: int, room: int) -> Chunk:
    """``chunk``, which has tokens, with the fault ``kind``; ``room``: tokens that the request may still get."""
    tokens, logprobs, version = chunk.tokens, chunk.logprobs.copy(), chunk.version
    match kind:
        case FaultKind.NAN_LOGPROB:
            logprobs[-1] = np.nan
        case FaultKind.POSITIVE_LOGPROB:
            logprobs[-1] = 0.5
        case FaultKind.CLAMPED_LOGPROB:
            logprobs[-1] = -9999.0
        case FaultKind.UNKNOWN_TOKEN:
            tokens = np.append(tokens[:-1], np.int32(vocab_size))
        case FaultKind.LENGTHS_DIFFER:
            logprobs = np.append(logprobs, np.float32(-1.0))
        case FaultKind.TOO_MANY_TOKENS:
            tokens, logprobs = np.resize(tokens, room + 1), np.resize(logprobs, room + 1)
        case FaultKind.FUTURE_VERSION:
            version = PolicyVersion(version.incarnation, version.n + 1)
        case FaultKind.OLDER_VERSION:
            version = PolicyVersion(version.incarnation, version.n - 1)
        case _:
            raise ValueError(f"{kind} is not a fault of a chunk")
    return replace(chunk, tokens=tokens, logprobs=logprobs, version=version)
