"""How engines take weights that the trainer's process sends to them: without a directory, and without torch here.

A *meeting* is the process group of one sender, rank 0, and of the workers of all engines that it sends to. Every call
of :class:`ReceivesWeights` is made on april's event loop while the engine is paused; ``join`` and ``receive`` return
when the workers have met the sender, or have received, so the trainer's thread does its part meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

GLOO, NCCL = "gloo", "nccl"
BACKENDS = (NCCL, GLOO)
"""Those that april sends over, the faster one first."""


class Handshake(StrEnum):
    """The ways in which a sender and an engine's workers find each other; one group is of one way."""

    APRIL = "april"
    """The workers run april's own receiver: they meet at the store of the meeting's address and port."""
    TORCH = "torch"
    """A process group of torch.distributed with a name, at the store of the meeting's address and port."""
    UNIQUE_ID = "unique id"
    """NCCL by the unique id of the meeting, without a store."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that comes next: its Hugging Face name, its dtype as torch spells it ("bfloat16"), its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What an engine must know to join: its workers are ranks ``rank_offset`` and up of ``world_size``."""

    address: str
    port: int
    world_size: int
    rank_offset: int
    group: str
    """Unique for each meeting."""
    backend: str
    timeout_s: float
    """After so long without the others a worker gives up."""
    bucket_bytes: int
    """Most bytes of a bucket, unless it is of one tensor."""
    unique_id: str = ""
    """Base64, with :attr:`Handshake.UNIQUE_ID`."""


@runtime_checkable
class ReceivesWeights(Protocol):
    """The methods that engines whose ``capabilities.collective`` is not empty have besides those of an engine.

    Each raises EngineError, or EngineUnreachable where there was no answer.
    """

    @property
    def handshake(self) -> Handshake:
        """The way in which its workers meet the sender."""
        ...

    @property
    def sender_address(self) -> str:
        """Address of this machine as the engine's workers can reach it."""
        ...

    async def ranks(self) -> int:
        """Count of its workers, over all of its data-parallel copies."""
        ...

    async def join(self, meeting: Meeting) -> None:
        """Have all workers meet the sender; returns when they have."""
        ...

    async def begin(self) -> None:
        """Make ready for the first bucket."""
        ...

    async def receive(self, bucket: Sequence[TensorSpec], last: bool) -> None:
        """Have all workers take the tensors that the sender broadcasts, in this order; returns when they have."""
        ...

    async def finish(self) -> None:
        """Put the weights into use, after the last bucket. ``update_weights`` empties the caches and names them."""
        ...

    async def leave(self) -> bool:
        """Give the group up, in whatever phase it is, so that a new meeting can be joined; never raises.

        True: the engine has the weights that it had before the meeting, all of them.
        """
        ...


@runtime_checkable
class TakesTensors(Protocol):
    """The methods of engines in this process whose ``capabilities.takes_tensors`` is true: no group is needed."""

    def reads(self, model: Any) -> bool:
        """Return whether this very module is what it generates from, so that nothing is to be copied."""
        ...

    async def take(self, specs: Sequence[TensorSpec], tensors: Sequence[Any], last: bool) -> None:
        """Copy these tensors into the engine's weights; they belong to the sender and change afterwards."""
        ...
