"""What april uses of OpenRLHF: looked at before anything starts, as OpenRLHF promises none of its internals."""

from __future__ import annotations

import importlib
import inspect
from importlib import metadata
from typing import Any

from april.errors import ConfigError

TRIED = "0.11.2"
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "openrlhf.trainer.ppo_utils.samples_generator.SamplesGenerator": {
        "__init__": ("self", "strategy", "prompts_dataloader", "eval_dataloader", "tokenizer", "vllm_engines"),
        "generate_samples": ("self", "generate_kwargs"),
        "generate_eval_samples": ("self", "generate_kwargs"),
        "_generate_vllm": ("self", "dataloader_iter", "num_prompts", "dynamic_filtering", "generate_kwargs"),
        "_process_response_into_experience": ("self", "response", "generate_kwargs"),
    },
    "openrlhf.trainer.ppo_trainer.BasePPOTrainer": {"broadcast_to_vllm": ("self",)},
    "openrlhf.utils.agent.SingleTurnAgentExecutor": {
        "_fetch_rewards_via_func": ("self", "queries_list", "prompts_list", "labels_list"),
        "_fetch_rewards_via_http": ("self", "queries_list", "prompts_list", "labels_list"),
    },
}
"""Classes, and the methods that are called or overridden, with their parameters."""
NEEDED_ACTORS: dict[str, dict[str, tuple[str, ...]]] = {
    "openrlhf.trainer.ppo_trainer.PPOTrainer": {"fit": ("self", "global_step"), "broadcast_to_vllm": ("self",)},
    "openrlhf.trainer.ppo_trainer_async.GenerateSamplesActor": {
        "fit": ("self", "episode", "total_consumed_prompts"),
        "load_state_dict": ("self", "state_dict"),
    },
    "openrlhf.trainer.ppo_trainer_async.TrainingActor": {"broadcast_to_vllm": ("self",)},
    "openrlhf.trainer.ppo_trainer_async.PPOTrainerAsync": {"fit": ("self",)},
    "openrlhf.trainer.ray.vllm_engine.RolloutRayActor": {
        "update_weight": ("self", "name", "dtype", "shape", "empty_cache"),
        "update_weight_cuda_ipc": ("self", "name", "dtype", "shape", "ipc_handles", "empty_cache"),
    },
}
"""The same for classes that OpenRLHF has decorated as Ray actors."""


_RAYS_OWN = "_ray_trace_ctx"


def require_openrlhf() -> None:
    """Raise ConfigError unless everything is there and takes what april gives it."""
    try:
        importlib.import_module("openrlhf")
    except ImportError as error:
        raise ConfigError(
            f"april.adapters.openrlhf runs OpenRLHF, which is not installed here: pip install openrlhf=={TRIED} (its "
            f"import failed: {error}); in a loop of your own use april.RolloutScheduler"
        ) from error
    for path, methods in NEEDED.items():
        _check(path, find(path), methods)
    for path, methods in NEEDED_ACTORS.items():
        _check(path, undecorated(path), methods)


def find(path: str) -> Any:
    """The object at ``package.module.name``; raises ConfigError where it has moved or its packages are missing."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{_version()} has no {path} that can be imported ({type(error).__name__}: {error}); {_HELD}"
        ) from error


def undecorated(path: str) -> Any:
    """The class below a Ray actor class, as it stands in OpenRLHF's source; raises ConfigError."""
    actor = find(path)
    try:
        return actor.__ray_metadata__.modified_class.__ray_actor_class__
    except AttributeError:
        raise ConfigError(f"{path} of {_version()} is not the Ray actor that april knows; {_HELD}") from None


def _check(path: str, owner: Any, methods: dict[str, tuple[str, ...]]) -> None:
    for name, parameters in methods.items():
        method = getattr(owner, name, None)
        # Ray gives the methods of its actors one more parameter
        found = None if method is None else tuple(p for p in inspect.signature(method).parameters if p != _RAYS_OWN)
        if found != parameters:
            there = "is not there" if found is None else f"takes ({', '.join(found[1:])})"
            raise ConfigError(f"{path}.{name}({', '.join(parameters[1:])}) {there} in {_version()}; {_HELD}")


_HELD = f"april's adapter was held against openrlhf {TRIED}: install that, or another version that has it"


def _version() -> str:
    try:
        return f"openrlhf {metadata.version('openrlhf')}"
    except metadata.PackageNotFoundError:
        return "this openrlhf"
