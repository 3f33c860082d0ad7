"""april inside slime and miles: ``--rollout-function-path april.adapters.slime.generate_rollout``."""

from __future__ import annotations

from april.adapters.slime.rollout_function import (
    GenerateRollout,
    RolloutFunction,
    generate_rollout,
    make_generate_rollout,
)
from april.adapters.slime.samples import post_process_rewards

__all__ = ["GenerateRollout", "RolloutFunction", "generate_rollout", "make_generate_rollout", "post_process_rewards"]
