"""An SGLang server as the receiver of weights that the trainer's process sends: its own group, and its own calls.

The server is paused from the first call to the last (``retract``): a request of somebody else would run on the weights
of two versions, and SGLang would wait for its end before each bucket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from april.engines.http.http_client import CONTROL_TIMEOUT_S, HttpClient, Reply, control, says, words_of
from april.engines.http.wire import error_text
from april.engines.sglang.worker import SglangWorker
from april.engines.weight_routes import Meeting, TensorSpec
from april.errors import EngineError

log = logging.getLogger("april")

_DONE = says("success", True)
_OPEN_ALREADY = "already open"
"""Words of a server that an earlier transfer has left in the middle."""


@dataclass(slots=True)
class WeightTransfer:
    """The part of one server in a transfer, from :meth:`join` to :meth:`resume`."""

    worker: SglangWorker
    meeting: Meeting | None = None
    """The group that it was asked to join."""
    begun: bool = False
    """It was told to begin, and not to end."""
    touched: bool = False
    """It was asked to take a bucket, and its weights have no version since."""
    mark: str | None = None
    """The label of weights that are partly written; None: none were, or it has no labels."""
    paused: bool = False
    """It was paused for the transfer, and not continued."""

    @property
    def client(self) -> HttpClient:
        """To its server."""
        return self.worker.client

    async def join(self, meeting: Meeting, rank_offset: int) -> None:
        """Have its workers meet the sender, from this rank up."""
        self.meeting = meeting
        await self._post("/init_weights_update_group", "join the group", {
            "master_address": meeting.address, "master_port": meeting.port, "rank_offset": rank_offset,
            "world_size": meeting.world_size, "group_name": meeting.group, "backend": meeting.backend,
        })  # fmt: skip

    async def begin(self) -> None:
        """Pause it and make its weights writable; what an earlier transfer has left open is ended first."""
        self.paused, self.mark = True, None  # also if the answer is lost
        await control(self.client, "/pause_generation", says("status", "ok"), body={"mode": "retract"})
        self.begun = True
        reply = await self._ask("/begin_weight_update", {})
        if not _done(reply) and _OPEN_ALREADY in error_text(reply.body):
            await self._post("/end_weight_update", "end an earlier transfer")
            reply = await self._ask("/begin_weight_update", {})
        self._require(reply, "begin a transfer of weights")

    async def receive(self, bucket: Sequence[TensorSpec], last: bool, mark: str) -> None:
        """Have it take these tensors; before the first ones, its weights get the name ``mark``."""
        assert self.meeting is not None
        self.touched = True
        if self.mark is None and self.worker.facts.label is not None:
            await self.worker.set_label(mark)
            self.mark = mark
        names = [spec.name for spec in bucket]
        which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        await self._post("/update_weights_from_distributed", f"take {which}", {
            "names": names, "dtypes": [spec.dtype for spec in bucket], "shapes": [list(spec.shape) for spec in bucket],
            "group_name": self.meeting.group, "abort_all_requests": False, "flush_cache": last,
        })  # fmt: skip

    async def finish(self) -> None:
        """Put the weights into use, and give the group up."""
        await self._post("/end_weight_update", "put the new weights into use")
        self.begun = False
        await self._part()

    async def leave(self) -> bool:
        """End whatever was begun, give the group up, and let others go on; never raises.

        Returns whether it still has the weights from before.
        """
        if self.begun:
            self.begun = False
            with suppress(EngineError):
                await self.client.call("POST", "/end_weight_update", {}, timeout_s=CONTROL_TIMEOUT_S)
        await self._part()
        try:
            await self.resume()
        except EngineError as error:
            log.warning("a server that was paused for a transfer may stand still now: %s", error)
        return not self.touched

    async def _part(self) -> None:
        """Give the group up; a worker that never was in it, or is gone, has nothing to give up."""
        meeting, self.meeting = self.meeting, None
        if meeting is not None:
            body = {"group_name": meeting.group}
            with suppress(EngineError):
                await self.client.call("POST", "/destroy_weights_update_group", body, timeout_s=CONTROL_TIMEOUT_S)

    async def resume(self) -> None:
        """Let requests of others go on; raises EngineError where it does not."""
        if self.paused:
            await control(self.client, "/continue_generation", says("status", "ok"), body={})
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
    return reply.ok and _DONE(words_of(reply))


async def all_or_first_error(calls: Sequence[Any]) -> None:
    """Await all of them; the first error ends the wait for the others, whose servers may wait for the failed one."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
