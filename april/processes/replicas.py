"""Ranks that generate from models of their own must have the same weights: whether they do, by some of the values."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from april.engines.protocol import Engine, ShowsWeights

log = logging.getLogger("april")


def sampled(engines: Iterable[Engine]) -> bytes:
    """Values of the model that is on this rank, float32; empty: none is, or the ranks gather its weights anyway."""
    showing = (e for e in engines if isinstance(e, ShowsWeights) and not e.capabilities.gathers_weights)
    engine = next(showing, None)
    return b"" if engine is None else np.ascontiguousarray(engine.weight_sample(), np.float32).tobytes()


def differ(rank: int, own: bytes, first: bytes) -> bool:
    """Warn if the values of this rank are not those of rank 0; whether they are not."""
    if not (own and first) or own == first:
        return False
    here, there = np.frombuffer(own, np.float32), np.frombuffer(first, np.float32)
    how = "another model"
    if len(here) == len(there):
        how = f"largest difference of {len(here):,} values: {np.nanmax(np.abs(here - there)):.2g}"
    log.warning(
        "rank %d does not generate from the weights of rank 0 (%s), so log-probabilities are not those of the model "
        "that is trained on them; train one model on all ranks (DistributedDataParallel, or average the gradients), or "
        "give model= on rank 0 only", rank, how,
    )  # fmt: skip
    return True
