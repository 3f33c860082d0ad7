"""Joins gloo process groups that are compatible with torch.distributed, and receives weights over them in a worker.

The members find each other through a TCP store that the sender opens on one address only. If a member dies, or the
sender closes the store before all have joined, the others fail at once. If a member hangs, they fail after
``timeout_s`` seconds.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from april.engines.weight_transfer import TensorSpec


def gloo_group(keys: Any, rank: int, world_size: int, address: str, timeout_s: float) -> Any:
    """Join a gloo group as ``rank``, blocking until all members have joined. ``keys`` come from :func:`group_keys`."""
    gloo: Any = _distributed().ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(keys, rank, world_size, options)


def group_keys(store: Any, group: str, device: str) -> Any:
    """Return the part of the store where torch.distributed keeps the keys of a named group for this device type."""
    keys: Any = _distributed().PrefixStore(group, store)
    for prefix in (group, device):
        keys = _distributed().PrefixStore(f"{prefix}/", keys)
    return keys


def bytes_of(tensor: Any) -> Any:
    """View a contiguous tensor as flat bytes, without a copy, because gloo does not support all dtypes."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


class GlooReceiver:
    """Member of a gloo group that receives tensors from rank 0, the sender.

    The constructor blocks until all members have joined, and raises torch's own error after ``timeout_s`` seconds.
    """

    def __init__(self, address: str, port: int, group: str, rank: int, world_size: int, timeout_s: float) -> None:
        store = _distributed().TCPStore(address, port, None, False, timedelta(seconds=timeout_s))
        here = local_address(address, port)
        self._process_group = gloo_group(group_keys(store, group, "cpu"), rank, world_size, here, timeout_s)

    def receive(self, specs: Sequence[TensorSpec]) -> list[tuple[str, Any]]:
        import torch

        found = [(spec.name, torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))) for spec in specs]
        options = _distributed().BroadcastOptions()
        options.rootRank = 0
        for work in [self._process_group.broadcast([bytes_of(tensor)], options) for _, tensor in found]:
            work.wait()
        return found

    def close(self) -> None:
        self._process_group = None


def listening_store(address: str) -> socket.socket:
    """Open a socket for a TCP store that listens on a free port of this address only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listens = socket.socket(family)
    try:
        listens.bind((address, 0))
        listens.listen()
    except OSError:
        listens.close()
        raise
    return listens


def local_address(host: str, port: int) -> str:
    """Return this machine's address on the route to ``host``; no packet is sent."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, there = found[0]
    with socket.socket(family, kind, protocol) as one:
        one.connect(there)
        return str(one.getsockname()[0])


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed
