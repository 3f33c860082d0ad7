"""Checks of the installed verl's version and signatures, at the start."""

from __future__ import annotations

from typing import Any

from april import seams
from april.errors import ConfigError

TESTED_VERSION = "0.9.1"
OLDEST, TOO_NEW = (0, 9, 1), (0, 10)
"""verl 0.9.0 has no checkpoint callback."""
_V1 = "verl.trainer.ppo.v1"
SEAMS: dict[str, tuple[str, ...]] = {
    f"{_V1}.agent_loop_tq:AgentLoopManagerTQ.generate_sequences": ("self", "prompts"),
    "verl.experimental.agent_loop.agent_loop:AgentLoopManager.__init__": (
        "self", "config", "llm_client", "teacher_client", "reward_loop_worker_handles",
    ),
    f"{_V1}.agent_loop_tq:AgentLoopWorkerTQ._run_prompt": ("self", "prompt", "sampling_params", "trajectory", "trace"),
    f"{_V1}.agent_loop_tq:AgentLoopWorkerTQ._agent_loop_postprocess": ("self", "output", "validate", "kwargs"),
    f"{_V1}.replay_buffer:ReplayBufferAsync.sample": ("self", "global_steps", "partition_id", "batch_size"),
    f"{_V1}.trainer_base:PPOTrainer._add_prompts_to_generate": ("self", "num_prompts"),
    f"{_V1}.trainer_base:PPOTrainer.prepare_step": ("self",),
    f"{_V1}.trainer_colocate_async:PPOTrainerColocateAsync.on_sample_end": ("self",),
    "verl.utils.tokenizer:get_processor_token_id": ("processor", "token_name"),
    "verl.checkpoint_engine.base:CheckpointEngineManager.abort_replicas": ("self", "reject_request"),
    "verl.trainer.ppo.checkpoint_callback:CheckpointCallback.on_save": (
        "self", "trainer", "global_step", "checkpoint_dir", "async_save", "kwargs",
    ),
}  # fmt: skip
"""The functions that are called, overridden or relied on, with their parameters."""


def require_verl() -> Any:
    """The package verl, of a version that fits; raises ConfigError otherwise."""
    verl = seams.import_trainer("verl", "april.adapters.verl needs verl", TESTED_VERSION)
    version = seams.version_of("verl")
    numbers = tuple(int(part) if part.isdecimal() else -1 for part in version.split(".")[:3])
    if not OLDEST <= numbers < TOO_NEW:
        raise ConfigError(
            f"verl {version} is installed, and april.adapters.verl needs verl {TESTED_VERSION} or a later 0.9.x; pip "
            f"install verl=={TESTED_VERSION}"
        )
    return verl


def require_seams() -> None:
    """Raise ConfigError for the first thing that this verl has not, or has otherwise."""
    seams.require_seams("verl", TESTED_VERSION, SEAMS)
