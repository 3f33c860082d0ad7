"""Advantages by april's formula where slime asks for them: ``--custom-reward-post-process-path``.

slime's own takes means over ``--n-samples-per-prompt`` neighbours, which a group quorum delivers in parts. What is
returned here is the advantage of every token in slime's GRPO, GSPO, CISPO and REINFORCE++ with a baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from april.corrections.advantages import Method
from april.errors import RolloutError

HOOK = "april.adapters.slime.post_process_rewards"
SCALED, CENTRED = ("grpo", "gspo", "cispo"), ("reinforce_plus_plus_baseline",)
"""``--advantage-estimator`` whose rewards slime divides by the deviation in their group, and those it only centres."""


def method_of(args: Any) -> Method | None:
    """April's name of what slime makes of a group's rewards by its flags; None: it leaves them as they are."""
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in SCALED + CENTRED or not getattr(args, "rewards_normalization", True):
        return None
    return "grpo" if estimator in SCALED and getattr(args, "grpo_std_normalization", True) else "dr_grpo"


def post_process_rewards(args: Any, samples: Sequence[Any], **kwargs: Any) -> tuple[list[float], list[float]]:
    """(raw rewards, advantages) of delivered samples, in their order; of whole groups what slime itself makes of them.

    Raises:
        RolloutError: samples that april has not delivered.
    """
    raw = [sample.get_reward_value(args) for sample in samples]
    if method_of(args) is None:
        return raw, raw
    try:
        return raw, [sample.metadata["april"]["advantage"] for sample in samples]
    except (KeyError, TypeError):
        raise RolloutError(
            f"--custom-reward-post-process-path {HOOK} got a sample that april has not delivered; it goes with "
            "--rollout-function-path april.adapters.slime.generate_rollout"
        ) from None
