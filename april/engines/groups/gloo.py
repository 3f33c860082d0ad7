"""Sender and receiver of tensors over gloo, for machines without GPUs and networks without NCCL.

The members meet at a TCP store that the sender opens on one address only. Each worker registers there, and creates the
group only after the sender has announced that all are present. Until then the sender can cancel; a group that already
waits for a member cannot be interrupted. If a member dies, the others notice it at once; if a member hangs, they notice
it after ``timeout_s``.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from april.engines.groups.packing import bytes_of, places, unpack
from april.engines.groups.polling import poll_until
from april.engines.weight_transfer import TensorSpec

ALL_HERE, OFF = "all here", "off"
"""Keys that the sender sets in the store."""


class GlooSender:
    """The sender's end of a group (rank 0); implements :class:`april.weights.group.Group`.

    Args:
        address: Address of this machine at which the workers reach it.
    """

    def __init__(self, address: str, group: str, world_size: int, timeout_s: float) -> None:
        self._address, self._group, self._world_size, self._timeout_s = address, group, world_size, timeout_s
        self._store = _store(address, listening_store(address), timeout_s)
        self.port: int = self._store.port
        self._process_group: Any = None

    def connect(self, goes_on: Callable[[], None]) -> None:
        """Wait until all workers have registered, then create the group."""
        here = [_here(self._group, rank) for rank in range(1, self._world_size)]
        poll_until(lambda: self._store.check(here), goes_on)
        self._store.set(ALL_HERE, "")
        self._process_group = _group(self._store, self._group, 0, self._world_size, self._address, self._timeout_s)

    def broadcast(self, tensors: Sequence[Any], specs: Sequence[TensorSpec], goes_on: Callable[[], None]) -> None:
        """Broadcast one bucket tensor by tensor, because a flat buffer would need the memory of another bucket."""
        ready = [t.detach().to("cpu").contiguous() for t in tensors]
        works = [_broadcast(self._process_group, bytes_of(t)) for t in ready if t.numel()]
        poll_until(lambda: all(work.is_completed() for work in works), goes_on)
        for work in works:
            work.wait()

    def close(self) -> None:
        """Release the workers, and cancel the join of those still waiting. Transfers in progress keep their memory."""
        group, store = [self._process_group], [self._store]
        if self._store is not None and self._process_group is None:
            self._store.set(OFF, "")
            # keep the store for workers that are about to connect
            later = threading.Timer(self._timeout_s, store.clear)
            later.daemon = True
            later.start()
        self._process_group = self._store = None
        # destroying a group waits for its transfers, so do it in another thread
        threading.Thread(target=group.clear, name="april-group-ends", daemon=True).start()


class GlooReceiver:
    """A worker's end of a group. The constructor blocks until all members are present.

    Raises what torch raises, or RuntimeError, if the sender or another worker is not there in time.
    """

    def __init__(self, address: str, port: int, group: str, rank: int, world_size: int, timeout_s: float) -> None:
        store = _store(address, port, timeout_s)
        store.set(_here(group, rank), "")
        late = time.monotonic() + timeout_s

        def goes_on() -> None:
            if store.check([OFF]):
                raise RuntimeError("the sender has cancelled the transfer")
            if time.monotonic() > late:
                raise RuntimeError(f"some workers did not join the group within {timeout_s:g} s")

        poll_until(lambda: store.check([ALL_HERE]), goes_on)
        self._process_group = _group(store, group, rank, world_size, local_address(address, port), timeout_s)

    def receive(self, specs: Sequence[TensorSpec]) -> list[tuple[str, Any]]:
        """Receive the tensors of the next bucket into a new buffer."""
        found, length = places(specs)
        flat = _bytes(length)
        for work in [_broadcast(self._process_group, flat[at : at + size]) for at, size in found if size]:
            work.wait()
        return unpack(flat, specs)

    def close(self) -> None:
        """Drop the group."""
        self._process_group = None


def listening_store(address: str) -> socket.socket:
    """Open a socket that listens on this address only, on a free port."""
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


def _store(address: str, at: socket.socket | int, timeout_s: float) -> Any:
    """Open the store: as server on the given socket, or as client of that port."""
    store = _distributed().TCPStore
    if isinstance(at, int):
        return store(address, at, None, False, timedelta(seconds=timeout_s))
    port = at.getsockname()[1]
    return store(
        address, port, None, True, timedelta(seconds=timeout_s), wait_for_workers=False, master_listen_fd=at.detach()
    )


def _here(group: str, rank: int) -> str:
    return f"{group}/here/{rank}"


def _group(store: Any, group: str, rank: int, world_size: int, address: str, timeout_s: float) -> Any:
    distributed = _distributed()
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(distributed.PrefixStore(group, store), rank, world_size, options)


def _broadcast(process_group: Any, flat: Any) -> Any:
    options = _distributed().BroadcastOptions()
    options.rootRank = 0
    return process_group.broadcast([flat], options)


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed


def _bytes(length: int) -> Any:
    import torch

    return torch.empty(length, dtype=torch.uint8)
