"""The losses of the study, made of april's own weights and advantages.

p is a token's probability before the first optimizer step of the batch, q the one it was sampled with. All but two
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
``sequence``     :func:`april.truncated_weights`, per response, 2      to p: the demo's
===============  ====================================================  =================================================
"""

from __future__ import annotations

from april.corrections.importance import LARGEST, masked_weights
from benchmarks.study.grpo import SEQUENCE, Loss, truncated

GSPO_CLIP = (3e-4, 4e-4)
"""Bounds of the response's ratio, less and more than 1 (GSPO, arXiv 2507.18071)."""

LOSSES: dict[str, Loss] = {
    "none": Loss(),
    "behaviour": Loss(to_behaviour=True),
    "tis": Loss(truncated(2.0, "token")),
    "icepop": Loss(lambda p, q, mask: masked_weights(p, q, mask)),
    "decoupled": Loss(truncated(LARGEST, "token")),
    "gspo": Loss(to_behaviour=True, per_response=True, clip=GSPO_CLIP),
    "sequence": SEQUENCE,
}
