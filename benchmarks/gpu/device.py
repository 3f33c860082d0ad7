"""The device: what it is, how much memory is free, and how fast it copies, which is the limit to hold things to."""

from __future__ import annotations

import os
import platform
import time
from statistics import median
from typing import Any

import torch

from april.errors import ConfigError

COPIES = 10


def chosen(name: str | None, *, miniature: bool) -> torch.device:
    """The device of this name; without one the GPU, or the CPU for a miniature. ROCm's GPUs are called cuda too.

    Raises:
        ConfigError: there is no such device.
    """
    if name is None and miniature:
        return torch.device("cpu")
    device = torch.device(name or "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "torch sees no GPU: install a build of torch for it, or see how the benchmark works with --miniature"
        )
    return device


def facts(device: torch.device) -> dict[str, Any]:
    """What a reader must know of where this ran."""
    import transformers

    from april import __version__

    said: dict[str, Any] = {
        "device": "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "memory_bytes": total_bytes(device),
        "april": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "attention": "sdpa",
    }
    return said | ({"threads": torch.get_num_threads()} if device.type == "cpu" else {"cuda": torch.version.cuda})


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def total_bytes(device: torch.device) -> int:
    """Memory of the device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: torch.device) -> int:
    """Memory that is not in use; what torch has cached and does not use is given back first."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def bandwidth(device: torch.device, size: int) -> dict[str, float]:
    """Bytes per second of copies of ``size`` bytes from the device's memory to itself; a copy reads and writes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = []
    for _ in range(COPIES):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        rates.append(2 * size / (time.perf_counter() - start))
    return {"bytes_per_s": max(rates), "median_bytes_per_s": median(rates), "copied_bytes": float(size)}
