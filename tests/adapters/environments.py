"""Environments for the trainers, each made once below ``.venv``, as those of the engines are."""

from __future__ import annotations

from tests.real_engines.environments import ROOT, TORCH, Recipe

TRL_VERSION, VERL_VERSION = "1.16.0", "0.9.1"

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
