"""A tiny random Llama, a tokenizer of letters and prompts, all made on the spot; and a run of verl on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SWITCH = ("hydra.searchpath=[pkg://april.adapters.verl.conf]", "+april=verl")
LETTERS = [chr(i) for i in range(32, 127)] + ["\n"]
EOS, VOCAB = 1, 3 + len(LETTERS)


def make(directory: Path, rows: int = 64) -> None:
    """Model, tokenizer and data below ``directory``."""
    import pandas as pd
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": EOS, "<unk>": 2} | {c: i for i, c in enumerate(LETTERS, 3)}
    letters = Tokenizer(models.WordLevel(words, "<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    letters.decoder = decoders.Fuse()
    special = dict(zip(("pad_token", "eos_token", "unk_token"), words, strict=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, **special)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}a~{% endif %}"
    )
    tokenizer.save_pretrained(directory / "model")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=2048, eos_token_id=EOS, pad_token_id=0, bos_token_id=None,
            tie_word_embeddings=False,
        )
    ).save_pretrained(directory / "model")  # fmt: skip
    table = [
        {
            "data_source": "tiny/add", "prompt": [{"role": "user", "content": f"{i}+{i * i % 7}="}], "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)}, "extra_info": {"index": i, "split": "train"},
        }
        for i in range(rows)
    ]  # fmt: skip
    pd.DataFrame(table).to_parquet(directory / "train.parquet")
    pd.DataFrame(table[:4]).to_parquet(directory / "val.parquet")


def overrides(directory: Path) -> list[str]:
    """Of verl, for 4 groups of 2 and all that a CPU needs."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={directory}/train.parquet", f"data.val_files={directory}/val.parquet",
        "data.train_batch_size=4", "data.max_prompt_length=32", "data.max_response_length=160",
        "data.dataloader_num_workers=0", "data.shuffle=False",
        f"actor_rollout_ref.model.path={directory}/model", "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"{actor}.strategy=fsdp2", "actor_rollout_ref.ref.strategy=fsdp2", f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_micro_batch_size_per_gpu=4", f"{actor}.use_torch_compile=False", f"{actor}.optim.lr=1e-3",
        f"+{actor}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
        f"{rollout}.name=tiny", f"{rollout}.n=2", f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=4", f"{rollout}.agent.num_workers=1",
        f"{rollout}.load_format=auto",
        "reward.num_workers=1", f"reward.custom_reward_function.path={HERE}/reward_of_a_user.py",
        "reward.reward_model.rollout.name=tiny",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "transfer_queue.backend.SimpleStorage.total_storage_size=1000",
        "trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.logger=[console,file]",
        "trainer.total_epochs=100", "trainer.val_before_train=False", "trainer.test_freq=-1",
        f"trainer.default_local_dir={directory}/checkpoints",
        "+ray_kwargs.ray_init.num_gpus=1", "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.include_dashboard=False", "+ray_kwargs.ray_init.object_store_memory=300000000",
    ]  # fmt: skip


def surroundings(directory: Path) -> dict[str, str]:
    """Environment variables of a run."""
    return os.environ | {
        "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}",
        "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu", "VERL_ENGINE_DEVICE": "cuda",
        "VERL_ON_CPU_TRACE": f"{directory}/trace.jsonl", "VERL_ON_CPU_WITNESS": f"{directory}/witness.jsonl",
        "VERL_FILE_LOGGER_PATH": f"{directory}/metrics.jsonl",
        "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_raylet_start_wait_time_s": "240",
        # what other programs take is no reason to end a worker
        "RAY_memory_monitor_refresh_ms": "0", "HF_HUB_OFFLINE": "1", "HYDRA_FULL_ERROR": "1", "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


@dataclass
class Outcome:
    status: int
    log: str
    metrics: list[dict[str, Any]]
    """By step."""
    trained: list[dict[str, Any]]
    """What the witness saw, by step."""
    requests: list[dict[str, Any]]
    """What the replica was sent and sent back."""


def train(directory: Path, *more: str) -> Outcome:
    """Run verl as a user does, in a process of its own; the notes of an earlier run in ``directory`` are removed."""
    if not (directory / "model").is_dir():
        make(directory)
    for name in ("trace", "witness", "metrics"):
        (directory / f"{name}.jsonl").unlink(missing_ok=True)
    # april's group last: what is given by hand wins
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(directory), *SWITCH, *more]
    with (directory / "log.txt").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            command, cwd=directory, env=surroundings(directory), stdout=log, stderr=subprocess.STDOUT,
            timeout=1500, check=False,
        )  # fmt: skip
    text = (directory / "log.txt").read_text("utf-8", errors="replace")
    metrics = [line["data"] | {"step": line["step"]} for line in lines(directory / "metrics.jsonl")]
    trace = lines(directory / "trace.jsonl")
    return Outcome(done.returncode, text, metrics, lines(directory / "witness.jsonl"), trace)


def lines(path: Path) -> list[dict[str, Any]]:
    """Of a JSONL file; none if there is no file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
