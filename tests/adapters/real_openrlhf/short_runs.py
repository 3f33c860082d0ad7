"""Runs of the unmodified OpenRLHF with april, started as a user starts them, and what was seen of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
GROUPS, SAMPLES, ROWS, LONGEST = 4, 2, 24, 160
TIMEOUT_S = 1500


@dataclass
class Seen:
    """One process of a run: its output and what observe.py has written."""

    status: int
    output: str
    batches: list[dict[str, Any]] = field(default_factory=list)
    trained: list[list[dict[str, Any]]] = field(default_factory=list)
    ledger: dict[str, Any] = field(default_factory=dict)


def flags(files: dict[str, str], where: Path, **changes: Any) -> list[str]:
    """OpenRLHF's, with april's; ``None`` leaves a flag out and ``True`` is one without a value."""
    values: dict[str, Any] = {
        "actor.model_name_or_path": files["model"], "reward.remote_url": str(HERE / "reward.py"),
        "data.prompt_dataset": files["data"], "data.input_key": "input", "data.label_key": "label", "data.max_len": 256,
        "actor.num_nodes": 1, "actor.num_gpus_per_node": 1, "vllm.num_engines": 1, "vllm.sync_backend": "gloo",
        "vllm.enforce_eager": True, "vllm.gpu_memory_utilization": 0.3, "rollout.temperature": 0.8,
        "rollout.batch_size": GROUPS, "rollout.n_samples_per_prompt": SAMPLES, "rollout.micro_batch_size": 2,
        "rollout.max_new_tokens": LONGEST, "train.batch_size": GROUPS * SAMPLES, "train.micro_batch_size": 2,
        "train.num_episodes": 1, "algo.advantage.estimator": "group_norm", "algo.kl.init_coef": 0,
        "algo.advantage.is_correction_level": "token", "ds.zero_stage": 2, "ds.attn_implementation": "eager",
        "ckpt.output_dir": str(where / "out"), "ckpt.path": str(where / "checkpoints"), "actor.adam.lr": 3e-3,
        "actor.lr_warmup_ratio": 0.0, "april.over_sampling_batch_size": 2 * GROUPS,
    }  # fmt: skip
    words = []
    for name, value in {**values, **{k.replace("__", "."): v for k, v in changes.items()}}.items():
        if value is not None:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def run(
    where: Path, words: list[str], *, dtype: str = "float32", killed_after: int | None = None
) -> Seen:  # fmt: skip
    """``python -m command`` with these flags, to its end, or until the trainer dies after a step."""
    seen = where / "seen"
    seen.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE / "on_cpu"), str(ROOT)]), "OBSERVED": str(seen),
        "OPENRLHF_ON_CPU_DTYPE": dtype, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
        "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "TOKENIZERS_PARALLELISM": "false",
        "OBSERVED_UNTIL": str(killed_after or 0),
        # on a machine that others use, too
        "RAY_raylet_start_wait_time_s": "600",
        "RAY_gcs_server_request_timeout_seconds": "300",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "april.adapters.openrlhf", *words], cwd=where, env=environment, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S,
    )  # fmt: skip
    read = {
        kind: [json.loads(path.read_text()) for path in sorted(seen.glob(f"{kind}_*.json"))]
        for kind in ("batch", "trained", "end")
    }
    ledger = read["end"][0] if read["end"] else {}
    return Seen(done.returncode, done.stdout, read["batch"], read["trained"], ledger)


def prepare(where: Path, dtype: str = "float32") -> dict[str, str]:
    """The model and the prompts of a run."""
    return tiny.make(where, ROWS, getattr(torch, dtype))


def trained(where: Path, *more: str, dtype: str = "float32", **changes: Any) -> Seen:
    """A whole run with these flags."""
    return run(where, [*flags(prepare(where, dtype), where, **changes), *more], dtype=dtype)
