"""What an unmodified verl 0.9.1 needs to train without a GPU; loaded in each of its processes as a plugin of verl's.

Of the trainer, three things are replaced or added, none of them in april:

1. a platform "cpu" (verl's own registry; ``VERL_PLATFORM=cpu``): torch.cpu with the calls that only CUDA has;
2. a rollout "tiny" (verl's registries of replicas and of their other half in the trainer): ``tiny_replica``;
3. ``init_process_group`` is given "gloo" where verl asks for "cpu:gloo,cpu:gloo", which torch refuses.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry

NAME = "tiny"
_ANSWERS = {
    "is_available": False, "device_count": 1, "current_device": "cpu", "mem_get_info": (1 << 30, 2 << 30),
    "get_device_name": "cpu",
}  # fmt: skip
_BYTES = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")


class CpuModule:
    """torch.cpu, and an answer to whatever verl asks of torch.cuda."""

    def __getattr__(self, name: str) -> Any:
        if name in _ANSWERS:
            return lambda *_: _ANSWERS[name]
        if name in _BYTES:
            return lambda *_: 0
        return getattr(torch.cpu, name, None) or (lambda *_, **__: None)

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


_PLATFORM = {
    "is_available": True, "is_platform_available": True, "current_device": "cpu",  # verl moves tensors to it
    "device_count": 1, "communication_backend_name": "gloo", "visible_devices_envvar": "CUDA_VISIBLE_DEVICES",
    "ray_resource_name": "GPU", "ray_noset_envvars": ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"],
    "is_ipc_supported": False, "get_device_capability": (None, None), "cudart": None, "set_device": None,
    "synchronize": None, "set_allocator_settings": None, "empty_cache": None, "profiler_start": None,
    "profiler_stop": None,
}  # fmt: skip


def _says(value: Any) -> Any:
    """A method that answers this, whatever it is asked."""
    return lambda *_, **__: value


class _Cpu(PlatformBase):  # type: ignore[misc]
    """A CPU that Ray counts as one logical GPU."""

    device_name = property(_says("cpu"))
    vendor_name = property(_says("cpu"))
    device_module = property(lambda _: CpuModule())

    def ray_resource_options(self, count: float) -> dict[str, float]:
        return {"num_gpus": count}

    def nvtx_range(self, message: str) -> Any:
        return contextlib.nullcontext()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


PlatformRegistry.register(platform="cpu")(type("Cpu", (_Cpu,), {name: _says(v) for name, v in _PLATFORM.items()}))


def _replica() -> Any:
    from verl_on_cpu.tiny_replica import TinyReplica

    return TinyReplica


RolloutReplicaRegistry.register(NAME, _replica)
base._ROLLOUT_REGISTRY[NAME, "async"] = "verl_on_cpu.tiny_replica.TinyWeights"

_init_process_group = torch.distributed.init_process_group


def _with_gloo(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
    return _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = _with_gloo
