"""Makes the calls to vLLM by which its workers receive weights from the trainer's process.

vLLM's layers remember the tensors of a broken transfer and count them as part of the next transfer, even if that comes
from another sender. So if a transfer may have broken off, in this run or an earlier one, an empty transfer is begun and
ended first, which makes the layers forget those tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Any

from april.core.versions import PolicyVersion
from april.engines.http.http_client import has_value
from april.engines.http.server_engine import ServerEngine
from april.engines.weight_transfer import GLOO, GroupInvitation, Handshake, TensorSpec
from april.errors import EngineError, EngineUnreachable

INIT, START, UPDATE = "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"
FINISH = "/finish_weight_update"
"""Routes of the transfer calls; the workers' methods have the same names."""
CONFIRMATIONS = {
    INIT: has_value("message", "Weight transfer initialized"), START: has_value("message", "Weight update started"),
    UPDATE: has_value("message", "Weights updated"), FINISH: has_value("message", "Weight update finished"),
}  # fmt: skip
"""Tests of the answers with which a server confirms the calls, indexed by route."""


class Transfers(ServerEngine):
    """Base class of vLLM engines that receive weights from the trainer's process.

    It implements :class:`~april.engines.weight_transfer.ReceivesWeights`. Subclasses implement how calls reach vLLM.
    """

    _pause_of_others: AsyncExitStack | None = None
    """Context that pauses other clients' requests during a transfer; None outside a transfer."""
    _nothing_to_forget = False
    """True if the server's layers are known to remember no broken transfer."""
    _weights_received = False
    """True if the server may have received some of the weights in this transfer."""
    _before = ""
    """Value of ``_why_incomplete`` when the transfer began."""

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Update like the base class, then resume the other clients' requests that a transfer had paused."""
        try:
            await super().update_weights(version, path)
        finally:
            await self.resume_other_clients()

    def _other_clients_paused(self) -> AbstractAsyncContextManager[None]:
        """Return a context that pauses the requests of other clients."""
        raise NotImplementedError

    async def _transfer(self, call: str, arguments: dict[str, Any] | None = None) -> None:
        """Make one transfer call. Raises EngineError unless all workers succeed."""
        raise NotImplementedError

    @property
    def handshake(self) -> Handshake:
        """How the workers join the group. Only vLLM's own NCCL back-end uses NCCL's unique id."""
        return Handshake.TORCH if GLOO in self._capabilities.collective else Handshake.UNIQUE_ID

    async def join(self, meeting: GroupInvitation) -> None:
        info: dict[str, Any] = {"rank_offset": meeting.rank_offset, "world_size": meeting.world_size}
        if meeting.backend == GLOO:
            info |= {
                "master_address": meeting.address, "master_port": meeting.port, "group": meeting.group,
                "timeout_s": meeting.timeout_s,
            }  # fmt: skip
        else:
            # vLLM receives a bucket in one packed buffer, which must be as large as the largest bucket
            info |= {
                "nccl_unique_id_b64": meeting.unique_id, "packed": True, "packed_num_buffers": 1,
                "packed_buffer_size_bytes": meeting.bucket_bytes,
            }  # fmt: skip
        await self._transfer(INIT, {"init_info": info})

    async def begin(self) -> None:
        """Prepare the layers to receive weights, and pause the requests of other clients."""
        self.require_idle()
        with suppress(EngineError):
            await self.resume_other_clients()  # in case the last transfer ended without an answer
        self._weights_received, self._before = False, self._why_incomplete
        self._pause_of_others = AsyncExitStack()
        await self._pause_of_others.enter_async_context(self._other_clients_paused())
        await self.forget_transfers()
        self._nothing_to_forget = False
        self._why_incomplete = f"engine {self.name} is in the middle of a weight update"
        await self._transfer(START)

    async def receive(self, bucket: Sequence[TensorSpec], last: bool) -> None:
        info = {
            "names": [spec.name for spec in bucket], "dtype_names": [spec.dtype for spec in bucket],
            "shapes": [spec.shape for spec in bucket],
        }  # fmt: skip
        self._weights_received = True
        self._why_incomplete = f"engine {self.name} has only part of the new weights; update its weights again"
        await self._transfer(UPDATE, {"update_info": info})

    async def finish(self) -> None:
        """Put the received weights into use. ``update_weights`` then empties the caches and labels the weights."""
        await self._transfer(FINISH)
        self._nothing_to_forget = True

    async def leave(self) -> bool:
        """Abandon a broken transfer; returns True if the server still has the weights from before the transfer."""
        begun = self._pause_of_others is not None
        try:
            await self.forget_transfers()
        except EngineError:
            return False
        finally:
            with suppress(EngineError):
                await self.resume_other_clients()
        if not begun:
            return True
        if not self._weights_received:
            self._why_incomplete = self._before
        return not self._weights_received

    async def forget_transfers(self) -> None:
        """Make the layers forget a broken transfer; does nothing if they are known to remember none."""
        if self._nothing_to_forget or not self._capabilities.collective:
            return
        try:
            await self._transfer(START)
        except EngineUnreachable:
            raise
        except EngineError:
            pass  # a transfer is still open, and the next call ends it
        await self._transfer(FINISH)
        self._nothing_to_forget = True

    async def resume_other_clients(self) -> None:
        held, self._pause_of_others = self._pause_of_others, None
        if held is not None:
            await held.aclose()
