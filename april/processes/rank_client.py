"""The client with which a training rank calls the scheduler, through the rank server in the scheduler's process.

The client's WebSocket stays open until the rank leaves.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import Any

import aiohttp

from april.driver.loop_thread import LoopThread
from april.driver.user_code import describe
from april.errors import ConfigError, RankError, SchedulerClosed
from april.processes import rank_messages as messages
from april.processes.heartbeats import Heartbeats
from april.processes.rank_server import DRAIN_S, RankServer
from april.processes.ranks import Ranks, Rendezvous
from april.serialization.own_values import pack, unpack

RECONNECT_S = 0.2
"""Seconds between two attempts to reach a server that does not listen yet."""
RESEND_S = 0.05
"""Seconds before a request whose answer was lost is sent again."""
CONNECTION_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)


class RankClient:
    """Sends the calls of one rank to the rank server, which executes each call once for all ranks.

    Args:
        name: name of the process that has the scheduler, for messages.
        server: the rank server if it is in this process, as on rank 0; None if it is in another process.
    """

    def __init__(self, ranks: Ranks, name: str = "rank 0", server: RankServer | None = None) -> None:
        self._ranks, self._name, self._server = ranks, name, server
        self.next_call = 0
        """Number of the next call that this rank makes; the server sends the first number when the rank joins."""
        self.token = ""
        """Secret that all ranks share, sent with every request."""
        self._session_id = 0
        self._requests = itertools.count()
        self._group_error: RankError | None = None
        self._lost_reason: str | None = None
        """Reason why the server cannot be reached any more; None while it can."""
        self._http: aiohttp.ClientSession | None = None
        self._websocket: aiohttp.ClientWebSocketResponse | None = None
        self._heartbeats = Heartbeats(ranks.rank_deadline_s)
        self._reader: asyncio.Task[None] | None = None
        self._sender: asyncio.Task[None] | None = None
        self._pending_requests: set[asyncio.Task[Any]] = set()
        self.thread = LoopThread("april-ranks") if server is None else server.thread

    @property
    def group_error(self) -> RankError | None:
        """The error because of which the ranks cannot continue; None while there is none."""
        return self._group_error if self._server is None else self._server.group_error

    def raise_group_error(self) -> None:
        """Raise RankError if the ranks cannot continue together."""
        if (broken := self.group_error) is not None:
            raise RankError(str(broken), broken.ranks)

    @property
    def host(self) -> str:
        """This machine's address on the connection to rank 0."""
        assert self._websocket is not None
        return str(self._websocket.get_extra_info("sockname")[0])

    def join(self, rendezvous: Rendezvous) -> None:
        """Join the other ranks at the server; raises RankError if it does not listen in time."""
        rank, share, deadline_s = self._ranks.rank, self._ranks.share, self._ranks.rank_deadline_s
        server = self._server
        if server is not None:
            self._session_id = self.thread.call(lambda: server.join(rank, share)).session
            return
        address, self.token = rendezvous.find()

        async def connect() -> None:
            self._http = session = aiohttp.ClientSession(
                f"http://{address}", headers={"Authorization": f"Bearer {self.token}"}, trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=deadline_s),
            )  # fmt: skip
            loop = asyncio.get_running_loop()
            end = loop.time() + self._ranks.rank_timeout_s
            closing = aiohttp.ClientWSTimeout(ws_close=DRAIN_S)
            place = f"/connect?rank={rank}&share={share}"
            while True:
                try:
                    async with asyncio.timeout(deadline_s):
                        line = await session.ws_connect(place, max_msg_size=0, timeout=closing)
                        joined = unpack(await line.receive_bytes(), messages.Joined)
                    break
                except (*CONNECTION_ERRORS, TypeError) as error:  # TypeError: the server has closed the connection
                    if rendezvous.server_listens or loop.time() > end:
                        silent = isinstance(error, TimeoutError)
                        why = messages.silence_message(deadline_s) if silent else describe(error)
                        raise RankError(f"{self._name} cannot be reached: {why}", (0,)) from None
                await asyncio.sleep(RECONNECT_S)
            self._session_id, self.next_call, self._websocket = joined.session, joined.call, line
            self._reader = loop.create_task(self._read_websocket(line))
            self._heartbeats.note_beat(0, loop.time())
            self._check_heartbeats(line)

        self.thread.wait_for(connect)

    async def _read_websocket(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in websocket:
            self._heartbeats.note_beat(0, asyncio.get_running_loop().time())
            heartbeat = message.type is not aiohttp.WSMsgType.BINARY or message.data == messages.HEARTBEAT
            if not heartbeat and self._group_error is None:
                broken = unpack(message.data, messages.GroupFailed)
                self._group_error = RankError(broken.sentence, broken.ranks)
        if self._lost_reason is None:
            self._mark_lost("the connection was closed")
            if self._pending_requests:  # earlier answers may still arrive on other connections
                await asyncio.wait(self._pending_requests, timeout=DRAIN_S)
        await self._disconnect()  # ends the requests that still wait

    def _check_heartbeats(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        """Disconnect if the server's heartbeats are missing; otherwise send a heartbeat."""
        loop = asyncio.get_running_loop()
        if self._lost_reason is not None:
            return
        if list(self._heartbeats.silent_peers(loop.time())):
            self._mark_lost(messages.silence_message(self._ranks.rank_deadline_s))
            self._sender = loop.create_task(self._disconnect())
            return
        self._sender = loop.create_task(self._send(websocket, messages.HEARTBEAT))
        loop.call_later(self._heartbeats.interval_s, self._check_heartbeats, websocket)

    def _mark_lost(self, why: str) -> None:
        self._lost_reason = f"the connection to {self._name} is lost: {why}"
        self._group_error = self._group_error or RankError(self._lost_reason, (0,))

    async def _send(self, websocket: aiohttp.ClientWebSocketResponse, message: bytes) -> None:
        with suppress(ConnectionError, RuntimeError):  # the connection is closed
            await websocket.send_bytes(message)

    async def _disconnect(self) -> None:
        if self._http is not None:
            await self._http.close()

    def close(self, error: BaseException | None) -> None:
        """Leave the other ranks; a rank in the server's process leaves together with the server."""
        if self._server is not None:
            return

        async def end() -> None:
            if self._lost_reason is None:
                self._lost_reason = "this rank has closed its scheduler"
            if self._websocket is not None:
                await self._send(self._websocket, pack(messages.RankClosed("" if error is None else describe(error))))
                await self._websocket.close()
            await self._disconnect()

        try:
            self.thread.end_with(end)
        finally:  # an interrupt ends only the wait above; the connection is closed in any case
            self.thread.stop(last=end)

    def exchange(self, request: messages.CallRequest) -> messages.Step | messages.CallResult:
        """Take part in a call of all ranks; return the next step that this rank must carry out, or the call's result.

        If the wait is interrupted, the rank is withdrawn from the call.
        """
        return self.thread.wait_for(lambda: self._exchange(request))

    def report_failure(self, request: messages.CallRequest) -> None:
        """Tell all ranks that a step has failed on this rank; an interrupt ends the wait, but not the message."""
        with suppress(SchedulerClosed):
            self.thread.submit(lambda: self._exchange(request)).wait()

    def query(self, method: str, *arguments: Any) -> bytes:
        """Return the server's answer to a query; raises the server's error, or RankError if the server is gone."""
        query = messages.Query(method, list(arguments))
        try:
            pack(query)
        except TypeError as error:
            raise ConfigError(f"{method}: an argument cannot be sent to {self._name}: {error}") from None
        ended = self.thread.wait_for(lambda: self._post("/query", query))
        assert isinstance(ended, messages.CallResult)
        if ended.error is not None:
            raise messages.error_from_message(ended.error)
        return ended.content

    async def _exchange(self, request: messages.CallRequest) -> messages.Step | messages.CallResult:
        request.rank, request.session = self._ranks.rank, self._session_id
        if self._server is None:
            return await self._post("/call", request)
        request.request = next(self._requests)
        return await self._server.exchange(request)

    async def _post(
        self, route: str, request: messages.CallRequest | messages.Query
    ) -> messages.Step | messages.CallResult:
        """Send a request, and repeat it if its answer is lost; the server answers a repeated request as before."""
        task = asyncio.current_task()
        assert task is not None
        self._pending_requests.add(task)
        try:
            while True:
                if isinstance(request, messages.CallRequest):
                    request.request = next(self._requests)
                try:
                    if self._http is None or self._http.closed:
                        raise self._lost_error(route)
                    async with self._http.post(route, data=pack(request)) as response:
                        response.raise_for_status()
                        return unpack(await response.read(), messages.Step | messages.CallResult)  # type: ignore[arg-type]
                except aiohttp.ClientResponseError as error:
                    raise RankError(f"{self._name} does not answer: {describe(error)}", (0,)) from None
                except CONNECTION_ERRORS:
                    if self._reader is not None:
                        await asyncio.wait([self._reader], timeout=RESEND_S)
                    if self._lost_reason is not None:
                        raise self._lost_error(route) from None
        finally:
            self._pending_requests.discard(task)

    def _lost_error(self, route: str) -> RankError:
        if route == "/call" and self._group_error is not None:
            return RankError(str(self._group_error), self._group_error.ranks)
        return RankError(self._lost_reason or "this rank has closed its scheduler", (0,))

