"""Checks of the installed AReaL's version and signatures, at the start."""

from __future__ import annotations

from april.seams import import_trainer, require_seams

TRIED = "1.0.4"
SEAMS: dict[str, tuple[str, ...]] = {
    "areal.trainer.rl_trainer:PPOTrainer.__init__": ("self", "config", "train_dataset", "valid_dataset"),
    "areal.trainer.rl_trainer:PPOTrainer._create_dataloader": (
        "self", "dataset", "dataset_config", "rank", "world_size",
    ),
    "areal.trainer.rl_trainer:PPOTrainer._init_rollout": ("self", "rollout_config", "is_eval", "lora_path"),
    "areal.infra.workflow_executor:WorkflowExecutor.__init__": (
        "self", "config", "inference_engine", "staleness_manager",
    ),
    "areal.infra.workflow_executor:WorkflowExecutor.initialize": ("self", "logger", "train_data_parallel_size"),
    "areal.infra.workflow_executor:WorkflowExecutor.prepare_batch": (
        "self", "dataloader", "workflow", "should_accept_fn", "dynamic_bs",
    ),
    "areal.infra.workflow_executor:WorkflowExecutor.pause": ("self",),
    "areal.infra.workflow_executor:WorkflowExecutor.resume": ("self",),
    "areal.infra.workflow_executor:WorkflowExecutor.destroy": ("self",),
    "areal.infra.remote_inf_engine:GroupedRolloutWorkflow.__init__": ("self", "workflow", "group_size", "logger"),
    "areal.infra.remote_inf_engine:RemoteInfEngine.agenerate": ("self", "req"),
    "areal.infra.remote_inf_engine:RemoteInfEngine.choose_server": ("self",),
    "areal.infra.remote_inf_engine:RemoteInfEngine.pause_generation": ("self",),
    "areal.infra.remote_inf_engine:RemoteInfEngine.continue_generation": ("self",),
    "areal.infra.utils.http:arequest_with_retry": (
        "addr", "endpoint", "payload", "session", "method", "max_retries", "timeout", "retry_delay", "verbose",
    ),
    "areal.utils.data:concat_padded_tensors": ("tensor_dicts", "pad_value"),
    "areal.utils.recover:RecoverHandler.recover_info_path": ("experiment_name", "trial_name", "fileroot"),
}  # fmt: skip
"""The signatures of what is called, overridden or relied on."""


def require_areal() -> None:
    """Raise ConfigError for the first thing that this AReaL has not, or has otherwise."""
    needs = "april.adapters.areal runs AReaL, which is not installed here"
    import_trainer("areal", needs, TRIED, "; in a loop of your own use april.RolloutScheduler")
    require_seams("areal", TRIED, SEAMS)
