"""Draws one token per row of logits, with separate temperature, nucleus, minimum length and seed for each row.

Invariant: the token of a row depends only on its logits, its parameters and its (seed, position), never on the other
rows of the batch or on the row's place in it. The randomness is one uniform number per (seed, position), made by an
integer hash and turned into a token by inverting the row's cumulative distribution.

Log-probabilities are log_softmax(logits / T) in float32, before the nucleus and forbidden tokens are applied
(``LogprobKind.TEMPERATURE``); a greedy row reports log_softmax(logits).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from april.engines.random_bits import STEP, splitmix64

# (52 random bits + 0.5) x _SCALE is strictly between 0 and 1, so that u x total in sample() is below the total.
_SCALE = 2.0**-52


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Return uniform numbers in (0, 1), float64 [B, count]: column j belongs to ``positions + j`` of each row.

    Args:
        seeds: uint64 [B], one stream per seed.
        positions: int64 [B], index of the first token within its attempt.
        count: Number of consecutive positions.
    """
    steps = (positions[:, None] + np.arange(1, count + 1)).astype(np.uint64)
    # The seed is mixed first, so that seeds 0, 1, 2 ... do not give shifted copies of one stream.
    bits = splitmix64(splitmix64(seeds + STEP)[:, None] + steps * STEP)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * _SCALE


@dataclass(slots=True)
class SamplingRows:
    """Sampling parameters of the rows of one batch, on the logits' device; a parameter is None if no row needs it."""

    temperature: Tensor | None
    """Temperatures, float32 [B, 1]; 1 for greedy rows."""
    greedy: Tensor | None
    """True for greedy rows, bool [B]."""
    all_greedy: bool
    nucleus_rows: Tensor | None
    """Indices of the rows with top_p < 1, int64 [k]."""
    nucleus_mass: Tensor | None
    """The top_p of ``nucleus_rows``, float64 [k, 1]."""

    @classmethod
    def of(cls, temperature: NDArray[np.float64], top_p: NDArray[np.float64], device: torch.device) -> SamplingRows:
        """Create the parameters of a batch from those of each row [B]; temperature 0 means greedy."""
        greedy = temperature == 0.0
        scale = np.where(greedy, 1.0, temperature)
        nucleus = np.flatnonzero((top_p < 1.0) & ~greedy)
        rows = cls(None, None, bool(greedy.all()), None, None)
        # This is called whenever the slots change, and in most cases there is nothing to upload.
        if (scale != 1.0).any():
            rows.temperature = torch.from_numpy(scale).to(device, torch.float32).unsqueeze(1)
        if greedy.any():
            rows.greedy = torch.from_numpy(greedy).to(device)
        if nucleus.size:
            rows.nucleus_rows = torch.from_numpy(nucleus).to(device)
            rows.nucleus_mass = torch.from_numpy(top_p[nucleus]).to(device).unsqueeze(1)
        return rows


def nucleus(probabilities: Tensor, mass: Tensor) -> Tensor:
    """Keep the smallest set of most likely tokens with total probability ``mass``; set all others to zero.

    Args:
        probabilities: float [k, V], rows sum to 1.
        mass: float64 [k, 1] in (0, 1). Of equally likely tokens the lower id is kept first.
    """
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    dropped = torch.zeros_like(ordered, dtype=torch.bool).scatter_(1, order, before >= mass)
    return probabilities.masked_fill(dropped, 0.0)


def sample(
    logits: Tensor, rows: SamplingRows, uniform: Tensor | None, forbidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: [B, V], any float dtype.
        rows: Parameters of the B rows.
        uniform: float64 [B, 1] in (0, 1), see :func:`uniforms`; may be None if every row is greedy.
        forbidden: bool [B, V], tokens that must not be drawn (end of sequence before ``min_tokens``), or None.

    Returns:
        Tokens int64 [B] and their log-probabilities float32 [B]. Rows with NaN in their logits give a token inside
        the vocabulary and a NaN log-probability.
    """
    scaled = logits.float()
    if rows.temperature is not None:
        scaled = scaled / rows.temperature
    logprobs = scaled.log_softmax(-1)
    allowed = logprobs if forbidden is None else logprobs.masked_fill(forbidden, -torch.inf)
    if rows.all_greedy:
        tokens = allowed.argmax(-1)
    else:
        assert uniform is not None
        # Without the forbidden tokens the total may be close to zero, so the rest is normalised again.
        probabilities = allowed.exp() if forbidden is None else allowed.softmax(-1)
        if rows.nucleus_rows is not None and rows.nucleus_mass is not None:
            kept = nucleus(probabilities.index_select(0, rows.nucleus_rows), rows.nucleus_mass)
            probabilities = probabilities.index_copy(0, rows.nucleus_rows, kept)
        cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        # The first entry above u x total never has probability zero. The clamp only matters for rows with NaN.
        tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        tokens = tokens.clamp_(max=logits.shape[-1] - 1).squeeze(1)
        if rows.greedy is not None:
            tokens = torch.where(rows.greedy, allowed.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
