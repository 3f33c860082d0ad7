"""Sends weights from the trainer's process to one SGLang server, over a process group.

The server is paused during the whole transfer (mode ``retract``, in which requests go back to the queue). Otherwise
requests of other clients would run on a mix of two versions, and SGLang would wait for their end before each bucket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from april.engines.http.http_client import CONTROL_TIMEOUT_S, HttpClient, Reply, control, has_value, json_value
from april.engines.http.wire import error_text
from april.engines.sglang.worker import SglangWorker
from april.engines.weight_transfer import GroupInvitation, TensorSpec
from april.errors import EngineError

log = logging.getLogger("april")

_DONE = has_value("success", True)
_OPEN_ALREADY = "already open"
"""Text in a server's refusal to begin a transfer because an earlier one was left open."""


@dataclass(slots=True)
class WeightTransfer:
    """One server's part in a transfer of weights, from :meth:`join` to :meth:`resume`."""

    worker: SglangWorker
    meeting: GroupInvitation | None = None
    """Process group that the server was asked to join; None outside a transfer."""
    begun: bool = False
    """True if the server was asked to begin the transfer, and not yet to end it."""
    touched: bool = False
    """True if the server was asked to receive a bucket, so that its weights match no version."""
    mark: str | None = None
    """Label of the partly written weights; None before the first bucket."""
    paused: bool = False
    """True if the server was paused for the transfer and has not been resumed."""

    @property
    def client(self) -> HttpClient:
        return self.worker.client

    async def join(self, meeting: GroupInvitation, rank_offset: int) -> None:
        """Have the server's workers join the sender's group, with ranks from ``rank_offset`` on."""
        self.meeting = meeting
        await self._post("/init_weights_update_group", "join the group", {
            "master_address": meeting.address, "master_port": meeting.port, "rank_offset": rank_offset,
            "world_size": meeting.world_size, "group_name": meeting.group, "backend": meeting.backend,
        })  # fmt: skip

    async def begin(self) -> None:
        """Pause the server and make its weights writable, after ending a transfer that was left open."""
        self.paused, self.mark = True, None  # set first, because the answer may be lost
        await control(self.client, "/pause_generation", has_value("status", "ok"), body={"mode": "retract"})
        self.begun = True
        reply = await self._ask("/begin_weight_update", {})
        if not _done(reply) and _OPEN_ALREADY in error_text(reply.body):
            await self._post("/end_weight_update", "end an earlier transfer")
            reply = await self._ask("/begin_weight_update", {})
        self._require(reply, "begin a transfer of weights")

    async def receive(self, bucket: Sequence[TensorSpec], last: bool, mark: str) -> None:
        """Have the server receive the tensors of one bucket.

        Before the first bucket, the server's weights get the label ``mark``, because they are incomplete from then on.
        """
        assert self.meeting is not None
        self.touched = True
        if self.mark is None:
            await self.worker.set_label(mark)
            self.mark = mark
        names = [spec.name for spec in bucket]
        which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        await self._post("/update_weights_from_distributed", f"take {which}", {
            "names": names, "dtypes": [spec.dtype for spec in bucket], "shapes": [list(spec.shape) for spec in bucket],
            "group_name": self.meeting.group, "abort_all_requests": False, "flush_cache": last,
        })  # fmt: skip

    async def finish(self) -> None:
        """Put the received weights into use, and leave the group."""
        await self._post("/end_weight_update", "put the new weights into use")
        self.begun = False
        await self._leave_group()

    async def leave(self) -> bool:
        """Abandon the transfer: end it if it was begun, leave the group and resume the server. Never raises.

        Returns whether the server still has the weights from before the transfer.
        """
        if self.begun:
            self.begun = False
            with suppress(EngineError):
                await self.client.call("POST", "/end_weight_update", {}, timeout_s=CONTROL_TIMEOUT_S)
        await self._leave_group()
        try:
            await self.resume()
        except EngineError as error:
            log.warning("a server that was paused for a transfer may still be paused now: %s", error)
        return not self.touched

    async def _leave_group(self) -> None:
        """Leave the process group; errors are ignored, since the server may be gone or may never have joined."""
        meeting, self.meeting = self.meeting, None
        if meeting is not None:
            body = {"group_name": meeting.group}
            with suppress(EngineError):
                await self.client.call("POST", "/destroy_weights_update_group", body, timeout_s=CONTROL_TIMEOUT_S)

    async def resume(self) -> None:
        """Resume the server for other clients' requests. Raises EngineError if that fails."""
        if self.paused:
            await self.worker.go_on()
            self.paused = False

    async def _post(self, route: str, what: str, body: dict[str, Any] | None = None) -> None:
        self._require(await self._ask(route, body or {}), what)

    async def _ask(self, route: str, body: dict[str, Any]) -> Reply:
        limit_s = CONTROL_TIMEOUT_S if self.meeting is None else self.meeting.timeout_s
        return await self.client.call("POST", route, body, timeout_s=limit_s)

    def _require(self, reply: Reply, what: str) -> None:
        if not _done(reply):
            said = f"status {reply.status}: " if not reply.ok else ""
            raise EngineError(f"{self.client.url} could not {what}: {said}{error_text(reply.body)}")


def _done(reply: Reply) -> bool:
    return reply.ok and _DONE(json_value(reply))


async def all_or_first_error(calls: Sequence[Any]) -> None:
    """Await all calls; on the first error cancel the others, whose servers may be waiting for the failed one."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
