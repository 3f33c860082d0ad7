"""Registers ``april_grpo`` in verl: an advantage estimator that compares a sample with the first finished of its group.

verl gives estimators only the rows of one batch, with the column ``uid``. april's sampler therefore computes advantages
itself, stores them here by rollout name, and writes that name into ``uid``. All of this runs in verl's driver process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est

from april.adapters.verl.rollouts import DeliveredRows
from april.adapters.verl.settings import ESTIMATOR
from april.errors import RolloutError

PADDING = "pad"
"""Prefix of the uid of padding rows that verl adds; their tokens have no loss."""
_given: dict[str, float] = {}
"""Advantages of the last delivered batch, by rollout name."""


def name_of(uid: str, rollout: int) -> str:
    """Return the name of a rollout, with which its keys in verl's queue begin."""
    return f"{uid}_{rollout}"


def store_advantages(delivery: DeliveredRows, *, scaled: bool) -> None:
    """Store advantages for :func:`april_grpo`, divided by the group's standard deviation if ``scaled`` is True."""
    values = delivery.batch.advantages("grpo" if scaled else "dr_grpo", ddof=1)
    _given.clear()
    _given.update(zip((name_of(*rollout) for rollout in delivery.rollouts), values.tolist(), strict=True))


@register_adv_est(ESTIMATOR)  # type: ignore[untyped-decorator]
def april_grpo(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[str], **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns, float [B, T] each: a row's stored advantage at each token with loss, else 0.

    Raises RolloutError for a row that does not belong to the last delivered batch.
    """
    unknown = [name for name in index if name not in _given and not name.startswith(PADDING)]
    if unknown:
        raise RolloutError(
            f"row {unknown[0]} is not in april's last batch; algorithm.adv_estimator={ESTIMATOR} only works with its "
            "rows"
        )
    of_rows = torch.tensor(
        [_given.get(name, 0.0) for name in index], dtype=token_level_rewards.dtype, device=token_level_rewards.device
    )
    advantages = of_rows.unsqueeze(-1) * response_mask
    return advantages, advantages
