"""Protocols of engines that receive weights from the trainer's process, without a directory; needs no torch.

One process group, called *meeting*, connects the sender (rank 0) with the workers of all engines that it sends to. The
methods of :class:`ReceivesWeights` are called on april's event loop while the engine is paused. While ``join`` and
``receive`` wait for the workers, the sender joins or sends in the trainer's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

GLOO, NCCL = "gloo", "nccl"
"""Back-ends over which april sends weights."""


class Handshake(StrEnum):
    """How the sender and an engine's workers form their process group; all members of a group use the same way."""

    TORCH = "torch"
    """A named process group of torch.distributed; the sender opens its store and invites the workers to its address."""
    UNIQUE_ID = "unique id"
    """An NCCL communicator that is formed by NCCL's unique id, without a store."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Hugging Face name, dtype as torch spells it ("bfloat16"), and shape of one tensor in a transfer."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInvitation:
    """What an engine needs to join a process group; its workers are ranks ``rank_offset`` and up of ``world_size``."""

    address: str
    port: int
    world_size: int
    rank_offset: int
    group: str
    """Name of the process group; no two groups have the same name."""
    backend: str
    timeout_s: float
    """Seconds after which a worker stops waiting for other members."""
    bucket_bytes: int
    """Maximum bytes of a bucket (tensors that are sent together); a larger tensor is a bucket by itself."""
    unique_id: str = ""
    """NCCL's unique id in base64; only with :attr:`Handshake.UNIQUE_ID`."""


@runtime_checkable
class ReceivesWeights(Protocol):
    """Additional methods of an engine whose ``capabilities.collective`` is not empty.

    Each method raises EngineError, or EngineUnreachable if the engine did not answer.
    """

    @property
    def handshake(self) -> Handshake:
        """How the engine's workers form a group with the sender."""
        ...

    @property
    def sender_address(self) -> str:
        """Address of this machine at which the engine's workers can reach it."""
        ...

    async def ranks(self) -> int:
        """Return the number of the engine's workers, over all its data-parallel replicas."""
        ...

    async def join(self, meeting: GroupInvitation) -> None:
        """Make all workers join the sender's group; returns when all have joined."""
        ...

    async def begin(self) -> None:
        """Prepare the engine for the first bucket."""
        ...

    async def receive(self, bucket: Sequence[TensorSpec], last: bool) -> None:
        """Make all workers receive the tensors of one bucket, in this order; ``last`` is True for the last bucket."""
        ...

    async def finish(self) -> None:
        """Put the received weights into use. ``update_weights`` then clears the caches and sets the version."""
        ...

    async def leave(self) -> bool:
        """Leave the group, in any phase of a transfer, so that the engine can join a new group; never raises.

        Returns True if the engine still has all the weights that it had before it joined.
        """
        ...


@runtime_checkable
class TakesTensors(Protocol):
    """Additional methods of an engine in this process with ``capabilities.takes_tensors``; needs no process group."""

    def reads(self, model: Any) -> bool:
        """Return True if the engine generates with this very torch module, so that nothing needs to be copied."""
        ...

    async def take(self, specs: Sequence[TensorSpec], tensors: Sequence[Any], last: bool) -> None:
        """Copy one bucket into the engine's weights before returning, because the sender overwrites its tensors."""
        ...
