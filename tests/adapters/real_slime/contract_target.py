"""For slime's contract test of rollout functions, which gives no arguments and no servers: those are given here."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module
from typing import Any

from april.adapters.slime import make_generate_rollout
from april.testing import FakeEngine


class Tokenizer:
    """Letters are tokens."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [1 + ord(c) % 200 for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))


def evaluate(args: Any, rollout_id: int, data_source: Any, evaluation: bool) -> Any:
    """slime's own evaluation would need its servers."""
    (group,) = data_source.get_samples(1)
    rewards = [s.reward for s in group]
    toy = {"rewards": rewards, "truncated": [False] * len(group), "samples": group}
    return import_module("slime.rollout.base_types").RolloutFnEvalOutput(data={"toy": toy})


FLAGS = {
    "hf_checkpoint": "", "rollout_batch_size": 2, "over_sampling_batch_size": 2, "n_samples_per_prompt": 2,
    "partial_rollout": True, "rollout_max_response_len": 50, "rollout_temperature": 1.0, "rollout_top_p": 1.0,
    "rollout_top_k": -1, "rollout_stop": None, "rollout_stop_token_ids": None, "rollout_skip_special_tokens": False,
    "rollout_seed": 42, "rollout_global_dataset": True, "custom_rm_path": "benchmarks.slime_surroundings.reward",
    "reward_key": None, "group_rm": False, "use_tis": True,
}  # fmt: skip
"""By hand: the contract test replaces modules that slime's parser needs."""
ARGS = Namespace(**FLAGS)
function = make_generate_rollout([FakeEngine(seconds_per_token=1e-4)], tokenizer=Tokenizer(), check=True)


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """april's function with the arguments that the contract test leaves out, and an evaluation without servers."""
    if evaluation:
        return evaluate(args, rollout_id, data_source, evaluation)
    return function(ARGS, rollout_id, data_source)


__all__ = ["ARGS", "generate_rollout"]
