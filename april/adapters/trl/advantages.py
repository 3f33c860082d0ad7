"""With a quorum, april's advantages in place of TRL's, whose formula wants whole groups, one after another.

Same numbers otherwise: TRL's ``scale_rewards``, and its standard deviations (k - 1 below, 1e-4 added).
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from april.core.batch import Batch
from april.core.tape import Float32

log = logging.getLogger("april")
EPSILON = 1e-4


def put_advantages(trainer: Any, batch: Batch, output: dict[str, Any]) -> None:
    """Into what the loss gets, TRL's table of completions, and its share of responses that teach nothing.

    ``batch``: this rank's part; the table and the share are of all ranks, as TRL's are.
    """
    everywhere, like = trainer.accelerator.gather, output["advantages"]
    found = like.new_tensor(advantages_of(batch, trainer.scale_rewards, everywhere(like.new_tensor(batch.rewards))))
    output["advantages"] = found
    trainer._logs["advantages"].extend(everywhere(found).tolist())  # holds one batch: those of TRL are gone
    if trainer.scale_rewards != "batch":
        alike = [bool((sample.baseline_rewards == np.float32(sample.reward)).all()) for sample in batch.samples]
        trainer._metrics["train"]["frac_reward_zero_std"][-1] = float(everywhere(like.new_tensor(alike)).mean())


def advantages_of(batch: Batch, scale_rewards: str, rewards: Any) -> Float32:
    """float32 [B], as GRPOConfig says: ``group``, ``batch`` or ``none``; ``rewards``: those of all ranks."""
    if scale_rewards == "group":
        return batch.advantages("grpo", epsilon=EPSILON, ddof=1)
    centred = batch.advantages("dr_grpo")
    return centred / np.float32(float(rewards.std()) + EPSILON) if scale_rewards == "batch" else centred


def warn_of_other_rewards(trainer: Any, batch: Batch) -> bool:
    """Whether TRL, which asks about the batch, got other rewards than april, which asked about each response alone."""
    theirs, ours = trainer._metrics["train"]["reward"][-1], batch.metrics["reward_mean"]
    if np.isclose(theirs, ours, rtol=1e-4, atol=1e-4):
        return False
    log.warning(
        "batch %d has a mean reward of %g where TRL logs %g: a reward function gives other values when it is asked "
        "once more, about a whole batch. Advantages are made of the former, for which each response was alone; with "
        "group_quorum below 1 reward functions must not compare responses with each other",
        batch.id, ours, theirs,
    )  # fmt: skip
    return True
