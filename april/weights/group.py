"""Opens process groups of one sender and the workers of engines, separate from torch.distributed's default group."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from april.engines.weight_transfer import GroupInvitation, Handshake, TensorSpec


class Group(Protocol):
    """The sender's end of a group, which is rank 0. Used by one thread."""

    def connect(self, goes_on: Callable[[], None]) -> None:
        """Wait until the workers have joined; ``goes_on`` is called regularly and may raise to end the wait."""
        ...

    def broadcast(self, tensors: Sequence[Any], specs: Sequence[TensorSpec], goes_on: Callable[[], None]) -> None:
        """Send one bucket, and wait until it is sent; ``goes_on`` is as for :meth:`connect`."""
        ...

    def close(self) -> None:
        """Release the workers, without waiting; if the back-end can, workers that wait for the sender fail at once."""
        ...


def open_group(
    backend: str, handshake: Handshake, address: str, world_size: int, timeout_s: float, bucket_bytes: int
) -> tuple[Group, GroupInvitation]:
    """Open a group; return it with the :class:`GroupInvitation` for engines, whose ``rank_offset`` is set per engine.

    Args:
        address: address of this machine, as the workers reach it.
    """
    name = f"april-{os.urandom(8).hex()}"
    meeting = GroupInvitation(
        address=address, port=0, world_size=world_size, rank_offset=1, group=name, backend=backend,
        timeout_s=timeout_s, bucket_bytes=bucket_bytes,
    )  # fmt: skip
    if handshake is Handshake.TORCH:
        from april.weights.torch_group import TorchSender

        torch_group = TorchSender(backend, address, name, world_size, timeout_s)
        return torch_group, replace(meeting, port=torch_group.port)
    from april.weights.nccl import NcclSender

    nccl = NcclSender(world_size)
    return nccl, replace(meeting, unique_id=nccl.unique_id)
