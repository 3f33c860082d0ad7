"""Opens process groups in which a trainer sends weights to engines' workers; torch's default group is not used."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from april.engines.weight_transfer import GroupInvitation, Handshake, TensorSpec


class Group(Protocol):
    """The sender's end of a group, which is rank 0 of the group. Must be used by one thread."""

    def connect(self, check: Callable[[], None]) -> None:
        """Wait until the workers have joined; ``check`` is called regularly and may raise an error to end the wait."""
        ...

    def broadcast(self, tensors: Sequence[Any], specs: Sequence[TensorSpec], check: Callable[[], None]) -> None:
        """Send one bucket, and wait until it is sent; ``check`` is as for :meth:`connect`."""
        ...

    def close(self) -> None:
        """End the group without waiting; if the backend supports it, workers that wait for the sender fail at once."""
        ...


def open_group(
    backend: str, handshake: Handshake, address: str, world_size: int, timeout_s: float, bucket_bytes: int
) -> tuple[Group, GroupInvitation]:
    """Open a group; return it with a :class:`GroupInvitation`, in which the caller sets each engine's ``rank_offset``.

    Args:
        address: address at which the workers reach this machine.
    """
    name = f"april-{os.urandom(8).hex()}"
    invitation = GroupInvitation(
        address=address, port=0, world_size=world_size, rank_offset=1, group=name, backend=backend,
        timeout_s=timeout_s, bucket_bytes=bucket_bytes,
    )  # fmt: skip
    if handshake is Handshake.TORCH:
        from april.weights.torch_group import TorchSender

        torch_group = TorchSender(backend, address, name, world_size, timeout_s)
        return torch_group, replace(invitation, port=torch_group.port)
    from april.weights.nccl import NcclSender

    nccl = NcclSender(world_size)
    return nccl, replace(invitation, unique_id=nccl.unique_id)
