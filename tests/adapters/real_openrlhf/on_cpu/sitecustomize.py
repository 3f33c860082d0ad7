"""What OpenRLHF and vLLM need on a machine without a GPU, put there as soon as their modules are imported.

Python imports this module by itself in every process whose PYTHONPATH has this directory, Ray's workers and vLLM's too.
Nothing of april is touched, but for what a test wants to see (``OBSERVED``, see observe.py).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

_AFTER: dict[str, Callable[[Any], None]] = {}
FULL_PRECISION = os.environ.get("OPENRLHF_ON_CPU_DTYPE") == "float32"
"""OpenRLHF offers bf16 and fp16 only, and asks vLLM for bfloat16."""


def after(name: str) -> Callable[[Callable[[Any], None]], None]:
    """Decorates what is to be done with a module when it has been imported."""

    def keep(change: Callable[[Any], None]) -> None:
        _AFTER[name] = change

    return keep


class _Changing(importlib.abc.MetaPathFinder):
    """Finds the modules of ``_AFTER`` as everybody does, and has them changed when they have run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        change = _AFTER.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name) if path is None else importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_change(module: Any) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Changing())


class _Device(str):
    """``cpu``; as a number in f"cuda:{...}", where OpenRLHF names a device that it does not use here, 0."""

    def __format__(self, spec: str) -> str:
        return "0"


@after("torch")
def _no_cuda(torch: Any) -> None:
    torch.cuda.current_device = lambda: _Device("cpu")
    for name in ("set_device", "synchronize", "empty_cache", "current_stream"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)


@after("torch.distributed.device_mesh")
def _mesh_of_cpus(module: Any) -> None:
    made = module.init_device_mesh
    module.init_device_mesh = lambda kind, *args, **kwargs: made("cpu", *args, **kwargs)


@after("deepspeed")
def _plain_adam(deepspeed: Any) -> None:
    """torch's own Adam: compiling DeepSpeed's takes minutes."""
    begin = deepspeed.initialize

    def initialize(*args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config") or kwargs.get("config_params")
        if isinstance(config, dict) and "optimizer" in config:
            config["optimizer"]["params"]["torch_adam"] = True
        return begin(*args, **kwargs)

    deepspeed.initialize = initialize


@after("openrlhf.utils.distributed_util")
def _weights_without_nccl(module: Any) -> None:
    import weights_over_tcp

    module.stateless_init_process_group = weights_over_tcp.join


@after("openrlhf.trainer.ray.vllm_engine")
def _vllm_that_receives(module: Any) -> None:
    vllm = module.vllm
    arguments = vllm.AsyncEngineArgs

    def changed(*args: Any, **kwargs: Any) -> Any:
        kwargs["worker_extension_cls"] = "weights_over_tcp.Receiver"
        if FULL_PRECISION:
            kwargs["dtype"] = "float32"
        return arguments(*args, **kwargs)

    vllm.AsyncEngineArgs = changed


if FULL_PRECISION:

    @after("openrlhf.utils.utils")
    def _float32(module: Any) -> None:
        import torch

        module.convert_to_torch_dtype = lambda name: torch.float32

    @after("openrlhf.utils.deepspeed.deepspeed_utils")
    def _no_mixed_precision(module: Any) -> None:
        for name in ("get_train_ds_config", "get_eval_ds_config"):
            make = getattr(module, name)

            def float32(*args: Any, _make: Any = make, **kwargs: Any) -> Any:
                config = _make(*args, **kwargs)
                config["bf16"]["enabled"] = config["fp16"]["enabled"] = False
                return config

            setattr(module, name, float32)


@after("ray")
def _pretended_gpus(ray: Any) -> None:
    """OpenRLHF's placement groups want GPUs; Ray believes what it is told of them."""
    begin = ray.init

    def init(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("runtime_env", None)
        return begin(*args, **kwargs, num_cpus=8, num_gpus=4, include_dashboard=False, object_store_memory=2**28)

    if os.environ.get("OPENRLHF_ON_CPU_DRIVER") == str(os.getpid()) or "OPENRLHF_ON_CPU_DRIVER" not in os.environ:
        ray.init = init


if os.environ.get("OBSERVED"):
    import observe

    observe.watch(after)
