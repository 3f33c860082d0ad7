"""What an unmodified verl 0.9.1 needs to train without a GPU; loaded in each of its processes as a plugin of verl's.

Of the trainer, three things are replaced or added, none of them in april:

1. a platform "cpu" (verl's own registry; ``VERL_PLATFORM=cpu``): torch.cpu with the calls that only CUDA has;
2. a rollout "tiny" (verl's registries of replicas and of their other half in the trainer): ``tiny_replica``;
3. ``init_process_group`` is given "gloo" where verl asks for "cpu:gloo,cpu:gloo", which torch refuses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformBase):  # type: ignore[misc]
    """A CPU that Ray counts as one logical GPU."""

    device_name = property(lambda _: "cpu")
    vendor_name = property(lambda _: "cpu")
    device_module = property(lambda _: CpuModule())

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # verl moves tensors to it

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, count: float) -> dict[str, float]:
        return {"num_gpus": count}

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def get_device_capability(self, device_index: int | None = None) -> tuple[None, None]:
        return None, None

    def cudart(self) -> None:
        return None

    @contextlib.contextmanager
    def nvtx_range(self, message: str) -> Iterator[None]:
        yield

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_device(self, device_index: int) -> None: ...
    def synchronize(self, device_index: int | None = None) -> None: ...
    def set_allocator_settings(self, settings: str) -> None: ...
    def empty_cache(self) -> None: ...
    def profiler_start(self) -> None: ...
    def profiler_stop(self) -> None: ...


def _replica() -> Any:
    from verl_on_cpu.tiny_replica import TinyReplica

    return TinyReplica


RolloutReplicaRegistry.register(NAME, _replica)
base._ROLLOUT_REGISTRY[NAME, "async"] = "verl_on_cpu.tiny_replica.TinyWeights"

_init_process_group = torch.distributed.init_process_group


def _with_gloo(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
    return _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = _with_gloo
