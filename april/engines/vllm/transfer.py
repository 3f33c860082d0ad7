"""Weights sent to vLLM from the trainer's process: the calls that take its workers through a transfer.

vLLM's layers remember what they have got of a transfer that broke off, and count it to the next one, from wherever that
comes. So before weights go into a server in which one may have broken off, in this run or an earlier one, an empty
transfer is begun and ended, which makes the layers forget.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Any

from april.engines.groups.gloo import towards
from april.engines.http.http_client import require_words, says
from april.engines.http.server_engine import ServerEngine
from april.engines.openai.engine import CompletionsEngine
from april.engines.vllm.probe import VllmFacts
from april.engines.weight_routes import GLOO, Handshake, Meeting, TensorSpec
from april.errors import EngineError, EngineUnreachable

INIT, START, UPDATE = "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"
FINISH = "/finish_weight_update"
"""The calls, as a server has them; the methods of the workers have the same names."""
_WORDS = {
    INIT: says("message", "Weight transfer initialized"), START: says("message", "Weight update started"),
    UPDATE: says("message", "Weights updated"), FINISH: says("message", "Weight update finished"),
}  # fmt: skip


class Transfers(ServerEngine):
    """The part of a vLLM engine that is a :class:`~april.engines.weight_routes.ReceivesWeights`, but for the way."""

    _stands_still: AsyncExitStack | None = None
    """Requests of others are held up in it while weights come in."""
    _forgotten = False
    """The server's layers remember no transfer that has broken off."""
    _got_part = False
    """It may have a part of the weights that are being sent."""
    _before = ""
    """``_not_whole`` as the transfer began."""

    def _frozen(self) -> AbstractAsyncContextManager[None]:
        """Requests of other clients stand still meanwhile."""
        raise NotImplementedError

    async def _transfer(self, call: str, arguments: dict[str, Any] | None = None) -> None:
        """Make one of the calls; raises EngineError unless all workers have done it."""
        raise NotImplementedError

    @property
    def handshake(self) -> Handshake:
        """vLLM's own back-end joins by a unique id."""
        return Handshake.APRIL if GLOO in self._capabilities.collective else Handshake.UNIQUE_ID

    async def join(self, meeting: Meeting) -> None:
        """Have all workers join the group."""
        info: dict[str, Any] = {"rank_offset": meeting.rank_offset, "world_size": meeting.world_size}
        if meeting.backend == GLOO:
            info |= {
                "master_address": meeting.address, "master_port": meeting.port, "group": meeting.group,
                "timeout_s": meeting.timeout_s,
            }  # fmt: skip
        else:
            # a bucket is one packed buffer: as long as the longest
            info |= {
                "nccl_unique_id_b64": meeting.unique_id, "packed": True, "packed_num_buffers": 1,
                "packed_buffer_size_bytes": meeting.bucket_bytes,
            }  # fmt: skip
        await self._transfer(INIT, {"init_info": info})

    async def begin(self) -> None:
        """Have the layers wait for weights; requests of other clients stand still from here on."""
        self.require_idle()
        with suppress(EngineError):
            await self.let_others_go_on()  # where the last transfer ended without an answer
        self._got_part, self._before = False, self._not_whole
        self._stands_still = AsyncExitStack()
        await self._stands_still.enter_async_context(self._frozen())
        await self.forget_transfers()
        self._forgotten = False
        self._not_whole = f"engine {self.name} is in the middle of a weight update"
        await self._transfer(START)

    async def receive(self, bucket: Sequence[TensorSpec], last: bool) -> None:
        """Have the workers take a bucket."""
        info = {
            "names": [spec.name for spec in bucket], "dtype_names": [spec.dtype for spec in bucket],
            "shapes": [spec.shape for spec in bucket],
        }  # fmt: skip
        self._got_part = True
        self._not_whole = f"engine {self.name} has a part of new weights; update its weights again"
        await self._transfer(UPDATE, {"update_info": info})

    async def finish(self) -> None:
        """Put the weights into use; ``update_weights`` does the rest."""
        await self._transfer(FINISH)
        self._forgotten = True

    async def leave(self) -> bool:
        """End a transfer that has broken off; True: the server has the weights that it had before."""
        begun = self._stands_still is not None
        try:
            await self.forget_transfers()
        except EngineError:
            return False
        finally:
            with suppress(EngineError):
                await self.let_others_go_on()
        if not begun:
            return True
        if not self._got_part:
            self._not_whole = self._before
        return not self._got_part

    async def forget_transfers(self) -> None:
        """Have the layers forget a transfer that has broken off; where none can have, this is not asked."""
        if self._forgotten or not self._capabilities.collective:
            return
        try:
            await self._transfer(START)
        except EngineUnreachable:
            raise
        except EngineError:
            pass  # one is under way, and is ended then
        await self._transfer(FINISH)
        self._forgotten = True

    async def let_others_go_on(self) -> None:
        """Let requests of other clients go on."""
        held, self._stands_still = self._stands_still, None
        if held is not None:
            await held.aclose()


class TransferEngine(Transfers, CompletionsEngine):
    """The way to a server: HTTP."""

    facts: VllmFacts

    @property
    def sender_address(self) -> str:
        """The address from which this machine reaches the server."""
        return towards(*self._client.address)

    async def ranks(self) -> int:
        """Count of the server's workers, over all its data-parallel copies."""
        said = await self._client.json("GET", "/get_world_size", params={"include_dp": "true"}, retry=True)
        size = said.get("world_size") if isinstance(said, dict) else None
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise EngineError(f"{self._client.url}/get_world_size does not say how many workers there are")
        return size

    async def _transfer(self, call: str, arguments: dict[str, Any] | None = None) -> None:
        body = {} if call == FINISH else arguments
        reply = await self._client.call("POST", call, body, timeout_s=None)
        require_words(self._client, reply, call, _WORDS[call])
