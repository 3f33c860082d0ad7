"""Protocols of engines that receive weights from the trainer's process, without a directory; needs no torch.

A *meeting* is the process group of one sender (rank 0) and the workers of all engines that it sends to. The methods
of :class:`ReceivesWeights` are called on april's event loop while the engine is paused. ``join`` and ``receive``
return when the workers have joined or received; the trainer's thread does its part at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

GLOO, NCCL = "gloo", "nccl"
"""Back-ends over which april sends weights."""


class Handshake(StrEnum):
    """How the sender and an engine's workers form their process group; one group uses one way."""

    TORCH = "torch"
    """A named process group of torch.distributed, with the store at the meeting's address and port."""
    UNIQUE_ID = "unique id"
    """NCCL by the meeting's unique id, without a store."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describes one tensor of a transfer: Hugging Face name, dtype as torch spells it ("bfloat16"), shape."""

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
    """Name of the group, unique for each meeting."""
    backend: str
    timeout_s: float
    """Seconds after which a worker stops waiting for the others."""
    bucket_bytes: int
    """Largest number of bytes in a bucket; only a single tensor may be larger."""
    unique_id: str = ""
    """NCCL's unique id in base64; only with :attr:`Handshake.UNIQUE_ID`."""


@runtime_checkable
class ReceivesWeights(Protocol):
    """Additional methods of an engine whose ``capabilities.collective`` is not empty.

    Each raises EngineError, or EngineUnreachable where there was no answer.
    """

    @property
    def handshake(self) -> Handshake:
        """How the engine's workers meet the sender."""
        ...

    @property
    def sender_address(self) -> str:
        """Address of this machine at which the engine's workers can reach it."""
        ...

    async def ranks(self) -> int:
        """Return the number of the engine's workers, over all its data-parallel replicas."""
        ...

    async def join(self, meeting: GroupInvitation) -> None:
        """Make all workers join the sender's group; returns when they have."""
        ...

    async def begin(self) -> None:
        """Prepare for the first bucket."""
        ...

    async def receive(self, bucket: Sequence[TensorSpec], last: bool) -> None:
        """Make all workers receive the tensors that the sender broadcasts, in this order; returns when they have."""
        ...

    async def finish(self) -> None:
        """Activate the weights after the last bucket. ``update_weights`` clears the caches and sets the version."""
        ...

    async def leave(self) -> bool:
        """Leave the group in any phase of a transfer, so that the engine can join a new group; never raises.

        Returns True if the engine still has all the weights that it had before the meeting.
        """
        ...


@runtime_checkable
class TakesTensors(Protocol):
    """Additional methods of an engine in this process with ``capabilities.takes_tensors``; it needs no group."""

    def reads(self, model: Any) -> bool:
        """Return True if the engine generates from this very module, so that nothing needs to be copied."""
        ...

    async def take(self, specs: Sequence[TensorSpec], tensors: Sequence[Any], last: bool) -> None:
        """Copy these tensors into the engine's weights; the sender owns them and changes them afterwards."""
        ...
