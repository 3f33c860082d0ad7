"""AReaL's own PPOTrainer on this CPU: a tiny model, its configuration, and what stands in for a GPU.

What is replaced: the mask of packed sequences (AReaL leaves their borders to flash attention), and the question for the
version of an installed sglang, whose servers here are :class:`ModelServer`. Nothing else of AReaL is.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch
from areal.api.cli_args import (
    ClusterSpecConfig,
    EvaluatorConfig,
    GenerationHyperparameters,
    InferenceEngineConfig,
    MicroBatchSpec,
    NameResolveConfig,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    PPOConfig,
    RecoverConfig,
    RejectionSamplingConfig,
    SaverConfig,
    SGLangConfig,
    StatsLoggerConfig,
    TrainDatasetConfig,
    ValidDatasetConfig,
    WandBConfig,
)
from areal.engine.fsdp_engine import FSDPPPOActor
from areal.utils import name_resolve
from datasets import Dataset

from tests.adapters.real_trl import tiny

GROUPS, SAMPLES, PROMPTS, LONGEST = 4, 4, 64, 160
FIRST, DIGITS = 4, 32
"""Prompt i is FIRST + i // DIGITS, FIRST + i % DIGITS, 3."""


def one_rank() -> None:
    """What AReaL's launcher sets for a rank; before the trainer is made."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}  # fmt: skip
    torch.set_num_threads(1)
    SGLangConfig.build_args = staticmethod(lambda *a, **k: {})


def model(directory: Path) -> str:
    path = directory / "model"
    if not path.is_dir():
        tiny.model().save_pretrained(path)
        tiny.tokenizer().save_pretrained(path)
    return str(path)


def rows(count: int = PROMPTS) -> Dataset:
    """Prompts of token ids."""
    return Dataset.from_list([{"messages": [FIRST + i // DIGITS, FIRST + i % DIGITS, 3]} for i in range(count)])


def number(ids: Any) -> int:
    """Which prompt these ids begin with."""
    return (int(ids[0]) - FIRST) * DIGITS + int(ids[1]) - FIRST


def config(directory: Path, *, steps: int, offpolicyness: int, evaluate: bool = False, colocated: bool = False) -> Any:
    """GRPO with AReaL's decoupled loss, disk updates, a recover checkpoint after each step."""
    own: dict[str, Any] = {"experiment_name": "e", "trial_name": "t"}
    root = str(directory / "root")
    names = NameResolveConfig(type="nfs", nfs_record_root=str(directory / f"names-{os.getpid()}"))
    made = PPOConfig(
        **own, total_train_epochs=1, total_train_steps=steps, tokenizer_path=model(directory),
        train_dataset=TrainDatasetConfig(path="-", type="rl", batch_size=GROUPS, shuffle=False),
        valid_dataset=ValidDatasetConfig(path="-", type="rl", batch_size=GROUPS) if evaluate else None,
        cluster=ClusterSpecConfig(fileroot=root, name_resolve=names),
        gconfig=GenerationHyperparameters(max_new_tokens=LONGEST, max_tokens=400, n_samples=SAMPLES),
        actor=PPOActorConfig(
            **own, path=model(directory), backend="fsdp:d1", dtype="float32", attn_impl="sdpa", disable_dropout=True,
            gradient_checkpointing=False, weight_update_mode="disk", ppo_n_minibatches=1, kl_ctl=0.0, adv_norm=None,
            optimizer=OptimizerConfig(
                type="adam", lr=5e-3, warmup_steps_proportion=0.0, lr_scheduler_type="constant"
            ),
            mb_spec=MicroBatchSpec(max_tokens_per_mb=4096), use_decoupled_loss=True, recompute_logprob=True,
            prox_logp_method="recompute",
            rejection_sampling=RejectionSamplingConfig(level="token", action="clamp", metric="ratio", upper=2.0),
            reward_norm=NormConfig(mean_level="group", std_level="group", group_size=SAMPLES),
        ),
        rollout=InferenceEngineConfig(
            **own, backend="sglang:d1", consumer_batch_size=GROUPS, max_concurrent_rollouts=2 * GROUPS,
            max_head_offpolicyness=offpolicyness, pause_grace_period=0.0, setup_timeout=20,
            check_trajectory_format=True,
        ),
        saver=SaverConfig(**own, fileroot=root),
        evaluator=EvaluatorConfig(**own, fileroot=root, freq_steps=2 if evaluate else None),
        recover=RecoverConfig(**own, fileroot=root, mode="auto", freq_steps=1),
        stats_logger=StatsLoggerConfig(**own, fileroot=root, wandb=WandBConfig(mode="disabled")),
    )  # fmt: skip
    name_resolve.reconfigure(names)
    return made


class CpuActor(FSDPPPOActor):
    """AReaL's actor; sequences that are packed into one row do not see each other without flash attention either."""

    def _prepare_mb_list(self, input_: dict[str, Any]) -> Any:
        made = super()._prepare_mb_list(input_)
        for part in (*made.mbs, *(made.padded_mbs or ())):
            borders = part["cu_seq_lens_q"]
            lengths = borders[1:] - borders[:-1]
            sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            mask = (sequence[:, None] == sequence[None, :]).tril()[None, None]
            part["attention_mask"] = {"full_attention": mask, "sliding_attention": mask}
        return made
