"""Checks the parts of OpenRLHF that april uses before it starts, since OpenRLHF's internals may change."""

from __future__ import annotations

from april.adapters.common.installed_trainer import import_trainer, require_functions

TESTED_VERSION = "0.11.2"
_GENERATOR = "openrlhf.trainer.ppo_utils.samples_generator:SamplesGenerator"
_EXECUTOR = "openrlhf.utils.agent:SingleTurnAgentExecutor"
_ASYNC = "openrlhf.trainer.ppo_trainer_async"
_ENGINE = "openrlhf.trainer.ray.vllm_engine:RolloutRayActor"
REQUIRED_FUNCTIONS: dict[str, tuple[str, ...]] = {
    f"{_GENERATOR}.__init__": (
        "self", "strategy", "prompts_dataloader", "eval_dataloader", "tokenizer", "vllm_engines",
    ),
    f"{_GENERATOR}.generate_samples": ("self", "generate_kwargs"),
    f"{_GENERATOR}.generate_eval_samples": ("self", "generate_kwargs"),
    f"{_GENERATOR}._generate_vllm": ("self", "dataloader_iter", "num_prompts", "dynamic_filtering", "generate_kwargs"),
    f"{_GENERATOR}._process_response_into_experience": ("self", "response", "generate_kwargs"),
    "openrlhf.trainer.ppo_trainer:BasePPOTrainer.broadcast_to_vllm": ("self",),
    f"{_EXECUTOR}._fetch_rewards_via_func": ("self", "queries_list", "prompts_list", "labels_list"),
    f"{_EXECUTOR}._fetch_rewards_via_http": ("self", "queries_list", "prompts_list", "labels_list"),
    "openrlhf.trainer.ppo_trainer:PPOTrainer.fit": ("self", "global_step"),
    "openrlhf.trainer.ppo_trainer:PPOTrainer.broadcast_to_vllm": ("self",),
    f"{_ASYNC}:GenerateSamplesActor.fit": ("self", "episode", "total_consumed_prompts"),
    f"{_ASYNC}:GenerateSamplesActor.load_state_dict": ("self", "state_dict"),
    f"{_ASYNC}:TrainingActor.broadcast_to_vllm": ("self",),
    f"{_ASYNC}:PPOTrainerAsync.fit": ("self",),
    f"{_ENGINE}.update_weight": ("self", "name", "dtype", "shape", "empty_cache"),
    f"{_ENGINE}.update_weight_cuda_ipc": ("self", "name", "dtype", "shape", "ipc_handles", "empty_cache"),
}  # fmt: skip
"""Parameters of OpenRLHF's functions that april calls or overrides."""


def require_openrlhf() -> None:
    """Raise ConfigError if OpenRLHF, or a function that april needs, is missing or has other parameters."""
    needs = "april.adapters.openrlhf runs OpenRLHF, which is not installed here"
    import_trainer("openrlhf", needs, TESTED_VERSION, "; in a loop of your own use april.RolloutScheduler")
    require_functions("openrlhf", TESTED_VERSION, REQUIRED_FUNCTIONS)
