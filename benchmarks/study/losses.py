"""The losses of the study, made of april's own weights and advantages.

p is a token's probability before the first optimizer step of the batch, q the one it was sampled with. All but two
losses multiply PPO's clipped ratio to p by a weight that stands for p / q, which has no gradient; they differ in it:

===============  ====================================================  =================================================
loss             weight                                                ratio that is clipped
===============  ====================================================  =================================================
``none``         1                                                     to p
``behaviour``    (in the ratio)                                        to q: the demo's and own_loop's
``tis``          :func:`april.truncated_weights`, per token, 2         to p
``icepop``       :func:`april.masked_weights`, per token, 0.5 to 5     to p
``decoupled``    p / q per token, not truncated (AReaL, 2505.24298)    to p
``gspo``         (in the ratio)                                        of the response to q, its geometric mean; the
                                                                       paper's bounds
``gspo_wide``    (in the ratio)                                        the same with the bounds of the others
``sequence``     :func:`april.truncated_weights`, per response, 2      to p
``sequence1``    the same with a limit of 1                            to p
===============  ====================================================  =================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from april.corrections.importance import LARGEST, masked_weights, truncated_weights

Float32 = NDArray[np.float32]

CLIP = (0.2, 0.28)
"""The ratio is clipped to [1 - low, 1 + high] (DAPO, arXiv 2503.14476)."""
GSPO_CLIP = (3e-4, 4e-4)
"""The same of the response's ratio (GSPO, arXiv 2507.18071)."""

Weights = Callable[[Float32, Float32, NDArray[Any]], Float32]
"""(log p, log q, loss mask), each [B, T], to the weights."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss.

    Attributes:
        weights: constant weight of each token; None means 1.
        to_behaviour: whether the ratio is to q, not to p.
        per_response: whether it is the geometric mean over the response.
        clip: bounds of the ratio.
    """

    weights: Weights | None = None
    to_behaviour: bool = False
    per_response: bool = False
    clip: tuple[float, float] = CLIP

    def objective(self, now: Tensor, reference: Tensor, weights: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        """What is maximised, of each token, [rows, T]; ``reference`` is log q or log p, as ``to_behaviour`` says."""
        drift = torch.where(mask, now - reference, 0.0)
        if self.per_response:
            mean = drift.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
            # the response's ratio, with the gradient of each token in its own place (the paper's GSPO-token)
            drift = mean.detach() + torch.where(mask, now - now.detach(), 0.0)
        ratio = drift.exp()
        low, high = self.clip
        bounded = ratio.clamp(1.0 - low, 1.0 + high)
        return weights * torch.minimum(ratio * advantages, bounded * advantages)


def _truncated(limit: float, level: Any) -> Weights:
    return lambda p, q, mask: truncated_weights(p, q, mask, limit, level=level)


LOSSES: dict[str, Loss] = {
    "none": Loss(),
    "behaviour": Loss(to_behaviour=True),
    "tis": Loss(_truncated(2.0, "token")),
    "icepop": Loss(lambda p, q, mask: masked_weights(p, q, mask)),
    "decoupled": Loss(_truncated(LARGEST, "token")),
    "gspo": Loss(to_behaviour=True, per_response=True, clip=GSPO_CLIP),
    "gspo_wide": Loss(to_behaviour=True, per_response=True),
    "sequence": Loss(_truncated(2.0, "sequence")),
    "sequence1": Loss(_truncated(1.0, "sequence")),
}
