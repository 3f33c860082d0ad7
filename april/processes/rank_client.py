"""The client with which a rank makes its calls at the rank server; its WebSocket stays open while the rank is there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from april.driver.loop_thread import LoopThread
from april.driver.user_code import describe
from april.errors import ConfigError, RankError, SchedulerClosed
from april.processes.heartbeats import Heartbeats
from april.processes.rank_messages import ALIVE, Asked, Broken, Ended, Joined, Leaving, Look, Step, error_of, silence
from april.processes.rank_server import LINGER_S, RankServer
from april.processes.ranks import MeetingPoint, Ranks
from april.serialization.own_values import pack, unpack

TRY_AGAIN_S = 0.2
"""Seconds between two attempts to reach a server that does not listen yet."""
ASK_AGAIN_S = 0.05
"""Seconds before a request whose answer was lost is sent again."""
LOST = (aiohttp.ClientError, OSError, TimeoutError)
"""Errors of a lost connection."""


class RankClient:
    """Makes the calls of one rank at the rank server.

    Args:
        name: name of the process that has the scheduler, for messages.
        server: the rank server, if it is in this process, as for rank 0.
    """

    def __init__(self, ranks: Ranks, name: str = "rank 0", server: RankServer | None = None) -> None:
        self._ranks, self._name, self._server = ranks, name, server
        self.first = 0
        """Number of the next call."""
        self.token = ""
        """The token that all ranks share."""
        self._number = 0
        """Number of this rank's session at the server."""
        self._requests = itertools.count()
        self._broken: RankError | None = None
        self._gone: str | None = None
        """Reason why the server cannot be reached any more; None while it can."""
        self._session: aiohttp.ClientSession | None = None
        self._line: aiohttp.ClientWebSocketResponse | None = None
        self._beats = Heartbeats[int](ranks.rank_deadline_s)
        self._hears: asyncio.Task[None] | None = None
        self._alive: asyncio.Task[None] | None = None
        self._asking: set[asyncio.Task[Any]] = set()
        self.thread = LoopThread("april-ranks") if server is None else server.thread

    @property
    def broken(self) -> RankError | None:
        """The error that keeps the ranks from continuing together; None while there is none."""
        return self._broken if self._server is None else self._server.broken

    def raise_if_broken(self) -> None:
        """Raise RankError if the ranks cannot continue together."""
        if (broken := self.broken) is not None:
            raise RankError(str(broken), broken.ranks)

    @property
    def host(self) -> str:
        """This machine's address on the connection to rank 0."""
        assert self._line is not None
        return str(self._line.get_extra_info("sockname")[0])

    # ---------------------------------------------------------------- the beginning and the end

    def open(self, point: MeetingPoint) -> None:
        """Join the other ranks at the server; raises RankError if it does not listen in time."""
        rank, share, deadline_s = self._ranks.rank, self._ranks.share, self._ranks.rank_deadline_s
        server = self._server
        if server is not None:
            self._number = self.thread.call(lambda: server.join(rank, share)).session
            return
        address, self.token = point.find()

        async def come_in() -> None:
            self._session = session = aiohttp.ClientSession(
                f"http://{address}", headers={"Authorization": f"Bearer {self.token}"}, trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=deadline_s),
            )  # fmt: skip
            loop = asyncio.get_running_loop()
            end = loop.time() + self._ranks.rank_timeout_s
            closing = aiohttp.ClientWSTimeout(ws_close=LINGER_S)
            place = f"/line?rank={rank}&share={share}"
            while True:
                try:
                    async with asyncio.timeout(deadline_s):
                        line = await session.ws_connect(place, max_msg_size=0, timeout=closing)
                        joined = unpack(await line.receive_bytes(), Joined)
                    break
                except (*LOST, TypeError) as error:  # TypeError: the server has closed the connection
                    if point.listens or loop.time() > end:
                        why = silence(deadline_s) if isinstance(error, TimeoutError) else describe(error)
                        raise RankError(f"{self._name} cannot be reached: {why}", (0,)) from None
                await asyncio.sleep(TRY_AGAIN_S)
            self._number, self.first, self._line = joined.session, joined.call, line
            self._hears = loop.create_task(self._hear(line))
            self._beats.hear(0, loop.time())
            self._tick(line)

        self._wait_for(come_in)

    async def _hear(self, line: aiohttp.ClientWebSocketResponse) -> None:
        async for message in line:
            self._beats.hear(0, asyncio.get_running_loop().time())
            if message.type is aiohttp.WSMsgType.BINARY and message.data != ALIVE and self._broken is None:
                broken = unpack(message.data, Broken)
                self._broken = RankError(broken.sentence, broken.ranks)
        if self._gone is None:
            self._lost("the connection was closed")
            if self._asking:  # earlier answers may still arrive on other connections
                await asyncio.wait(self._asking, timeout=LINGER_S)
        await self._hang_up()  # ends the requests that still wait

    def _tick(self, line: aiohttp.ClientWebSocketResponse) -> None:
        """Check whether heartbeats of the server are missing, and send one."""
        loop = asyncio.get_running_loop()
        if self._gone is not None:
            return
        if list(self._beats.silent(loop.time())):
            self._lost(silence(self._ranks.rank_deadline_s))
            self._alive = loop.create_task(self._hang_up())
            return
        self._alive = loop.create_task(self._say(line, ALIVE))
        loop.call_later(self._beats.interval_s, self._tick, line)

    def _lost(self, why: str) -> None:
        self._gone = f"the connection to {self._name} is lost: {why}"
        self._broken = self._broken or RankError(self._gone, (0,))

    async def _say(self, line: aiohttp.ClientWebSocketResponse, said: bytes) -> None:
        with suppress(ConnectionError, RuntimeError):  # the line is closed
            await line.send_bytes(said)

    async def _hang_up(self) -> None:
        if self._session is not None:
            await self._session.close()

    def close(self, error: BaseException | None) -> None:
        """Leave the other ranks; a rank in the server's process leaves together with the server."""
        if self._server is not None:
            return

        async def end() -> None:
            if self._gone is None:
                self._gone = "this rank has closed its scheduler"
            if self._line is not None:
                await self._say(self._line, pack(Leaving("" if error is None else describe(error))))
                await self._line.close()
            await self._hang_up()

        ended = False
        try:
            if self.thread.alive and self.thread.in_own_process:
                self._wait_for(end)
                ended = True
        finally:  # an interrupt ends only the wait; the connection is still closed
            self.thread.request_stop(None if ended else end)
            self.thread.stop()

    # ---------------------------------------------------------------- calls and looks

    def exchange(self, number: int, what: str, carried: int, arguments: bytes = b"", said: bytes = b"") -> Step | Ended:
        """Call :meth:`april.processes.rank_server.RankServer.exchange`; an interrupt takes the rank out of the call."""
        come: Step | Ended = self._wait_for(lambda: self._exchange(number, what, carried, None, arguments, said))
        return come

    def failed(self, number: int, what: str, carried: int, error: BaseException) -> None:
        """Tell all ranks that a step has failed on this one; an interrupt ends only the wait."""
        said = describe(error)
        with suppress(SchedulerClosed):
            self.thread.submit(lambda: self._exchange(number, what, carried, said)).wait()

    def look(self, method: str, *arguments: Any) -> bytes:
        """Return the server's answer to a question; raises the server's error, or RankError if the server is gone."""
        look = Look(method, list(arguments))
        try:
            pack(look)
        except TypeError as error:
            raise ConfigError(f"{method}: an argument cannot be sent to {self._name}: {error}") from None
        ended = self._wait_for(lambda: self._post("/look", look))
        assert isinstance(ended, Ended)
        if ended.error is not None:
            raise error_of(ended.error)
        return ended.content

    async def _exchange(
        self, number: int, what: str, carried: int, error: str | None, arguments: bytes = b"", said: bytes = b""
    ) -> Step | Ended:
        asked = Asked(
            rank=self._ranks.rank, session=self._number, request=0, number=number, what=what, carried=carried,
            error=error, arguments=arguments, said=said,
        )  # fmt: skip
        if self._server is None:
            return await self._post("/call", asked)
        return await self._server.exchange(msgspec.structs.replace(asked, request=next(self._requests)))

    async def _post(self, route: str, asked: Asked | Look) -> Step | Ended:
        """Send a request; repeat it if its answer is lost while the server lives, which then answers as before."""
        task = asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        try:
            while True:
                if isinstance(asked, Asked):
                    asked.request = next(self._requests)
                try:
                    if self._session is None or self._session.closed:
                        raise self._why_gone(route)
                    async with self._session.post(route, data=pack(asked)) as response:
                        response.raise_for_status()
                        return unpack(await response.read(), Step | Ended)  # type: ignore[arg-type]
                except aiohttp.ClientResponseError as error:
                    raise RankError(f"{self._name} does not answer: {describe(error)}", (0,)) from None
                except LOST:
                    if self._hears is not None:
                        await asyncio.wait([self._hears], timeout=ASK_AGAIN_S)
                    if self._gone is not None:
                        raise self._why_gone(route) from None
        finally:
            self._asking.discard(task)

    def _why_gone(self, route: str) -> RankError:
        if route == "/call" and self._broken is not None:
            return RankError(str(self._broken), self._broken.ranks)
        return RankError(self._gone or "this rank has closed its scheduler", (0,))

    def _wait_for(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return self.thread.wait_for(lambda reply: reply.follow(asyncio.get_running_loop().create_task(work())))
