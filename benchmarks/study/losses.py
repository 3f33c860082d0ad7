"""The losses of the study, made of april's own weights and advantages.

p is a token's probability before the first optimizer step of the batch, q the one it was sampled with. All but four
losses multiply PPO's clipped ratio to p by a weight that stands for p / q, which has no gradient; they differ in it:

===============  ====================================================  =================================================
loss             weight                                                ratio that is clipped
===============  ====================================================  =================================================
``none``         1                                                     to p
``behaviour``    (in the ratio)                                        to q
``tis``          :func:`april.truncated_weights`, per token, 2         to p
``icepop``       :func:`april.masked_weights`, per token, 0.5 to 5     to p
``decoupled``    p / q per token, not truncated (AReaL, 2505.24298)    to p
``gspo``         (in the ratio)                                        of the response to q, its geometric mean; the
                                                                       paper's bounds
``bounded``      (in the ratio)                                        to q, with a bound of 3 where the advantage is
                                                                       negative
``geo-mask``     :func:`april.truncated_weights`, per token, 2; 0 for  to p
                 responses whose geometric mean is outside 0.98 to
                 1.02
``m2po``         (in the ratio) 0 for those tokens that move away from  to q, not clipped
                 q whose squared log ratios are largest, so that the
                 mean of the others is 0.04 (2510.01161)
``dead-zone``    as ``sequence``; log ratios within 0.4 count as 0     to p
``sequence``     :func:`april.truncated_weights`, per response, 2      to p: the demo's
===============  ====================================================  =================================================
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.corrections.importance import LARGEST, masked_weights, truncated_weights
from benchmarks.study.grpo import DEAD_ZONE, SEQUENCE, Float32, Loss, truncated

GSPO_CLIP = (3e-4, 4e-4)
"""Bounds of the response's ratio, less and more than 1 (GSPO, arXiv 2507.18071)."""

GEOMETRIC_BOUNDS = (0.98, 1.02)


M2PO_BOUND = 0.04
"""Largest mean of the squared log ratios of the tokens that M2PO does not mask (arXiv 2510.01161)."""


def _geo_mask(p: Float32, q: Float32, mask: NDArray[Any], _: Float32) -> Float32:
    """Return truncated weights per token, 0 for responses whose geometric mean ratio is outside the bounds."""
    kept = masked_weights(p, q, mask, *GEOMETRIC_BOUNDS, level="geometric") > 0
    return np.where(kept, truncated_weights(p, q, mask, 2.0, level="token"), np.float32(0))


def _m2po(p: Float32, q: Float32, mask: NDArray[Any], advantages: Float32) -> Float32:
    """Return 0 for the tokens that M2PO masks, and 1 for the others (Algorithm 1 of arXiv 2510.01161)."""
    log_ratios = np.where(mask, p.astype(np.float64) - q, 0.0)
    squares = np.where(log_ratios * advantages[:, None] > 0, log_ratios**2, 0.0)
    ordered = np.sort(squares[squares > 0])
    inside = ordered[np.cumsum(ordered) <= M2PO_BOUND * np.arange(1, len(ordered) + 1)]
    return np.where(squares <= inside.max(initial=0.0), np.float32(1), np.float32(0))


LOSSES: dict[str, Loss] = {
    "none": Loss(),
    "behaviour": Loss(to_behaviour=True),
    "tis": Loss(truncated(2.0, "token")),
    "icepop": Loss(lambda p, q, mask, _: masked_weights(p, q, mask)),
    "decoupled": Loss(truncated(LARGEST, "token")),
    "gspo": Loss(to_behaviour=True, per_response=True, clip=GSPO_CLIP),
    "bounded": Loss(to_behaviour=True, negative_bound=3.0),
    "geo-mask": Loss(_geo_mask),
    "m2po": Loss(_m2po, to_behaviour=True, clip=(1.0, math.inf)),
    "dead-zone": Loss(truncated(2.0, "sequence", DEAD_ZONE), product=True),
    "sequence": SEQUENCE,
}
