"""The advantage estimator ``april_grpo`` in verl: each sample against the first finishers of its group.

verl's estimators are given the rows of one batch, and their column ``uid`` to group them by. So the sampler writes the
name of its rollout there for each row, and leaves the advantages here by that name. Both run in verl's driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est

from april.adapters.verl.settings import ESTIMATOR
from april.corrections.advantages import Method, group_advantages
from april.errors import RolloutError
from april.processes.coordinator.messages import Delivery

PADDING = "pad"
"""With this begins the uid of rows that verl adds; their tokens have no loss."""
_given: dict[str, float] = {}
"""Advantages of the batch that verl was handed last."""


def name_of(uid: str, rollout: int) -> str:
    """Return how a rollout of a prompt begins its keys in verl's queue."""
    return f"{uid}_{rollout}"


def leave(delivery: Delivery, *, scaled: bool) -> None:
    """Leave advantages for verl's next call of :func:`april_grpo`; ``scaled``: by the deviation, as in GRPO."""
    method: Method = "grpo" if scaled else "dr_grpo"
    values = group_advantages(delivery.rewards, delivery.baseline_rewards, method, ddof=1)
    _given.clear()
    _given.update(zip((name_of(*rollout) for rollout in delivery.rollouts), values.tolist(), strict=True))


@register_adv_est(ESTIMATOR)  # type: ignore[untyped-decorator]
def april_grpo(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[str], **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, float [B, T] each: april's advantage of the row, on its tokens with loss.

    Raises RolloutError for a row that is not of the batch that april has handed over.
    """
    unknown = [name for name in index if name not in _given and not name.startswith(PADDING)]
    if unknown:
        raise RolloutError(
            f"row {unknown[0]} is not of april's last batch; algorithm.adv_estimator={ESTIMATOR} is for those"
        )
    of_rows = torch.tensor(
        [_given.get(name, 0.0) for name in index], dtype=token_level_rewards.dtype, device=token_level_rewards.device
    )
    advantages = of_rows.unsqueeze(-1) * response_mask
    return advantages, advantages
