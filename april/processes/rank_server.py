"""The HTTP server beside the scheduler, at which the ranks of a trainer make their calls.

The rule: every rank makes each call that changes something, in the same order and with the same arguments. A call
begins when all ranks have made it. If one rank breaks the rule, all ranks get the same error, for good.

``/call`` waits until the rank has a step to carry out, after which the rank asks again, or until the call has ended; a
rank that was interrupted, or has lost an answer, asks again. ``/look`` is answered at once. ``/line`` is a WebSocket
that is open as long as the rank is there: its heartbeats reveal the death of a rank that is training and makes no
calls.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from aiohttp import WSMsgType, web

from april.core.batch import Batch
from april.driver.loop_thread import LoopThread, Reply
from april.driver.user_code import describe
from april.errors import RankError, SchedulerClosed
from april.processes.addresses import bound, told_address
from april.processes.heartbeats import Heartbeats
from april.processes.rank_messages import ALIVE, Asked, Broken, Ended, Joined, Leaving, Look, Step, silence, told
from april.processes.ranks import Ranks
from april.serialization.own_values import pack, unpack

log = logging.getLogger("april")

LINGER_S = 1.0
"""Seconds that ranks have to read their last answers when the server ends."""
PIECE_BYTES = 1 << 20
"""Largest number of bytes written at once, as asyncio copies the rest of a write again and again."""


class OnAll(Protocol):
    """Makes every rank carry out a step of the current call; returns each rank's result.

    Raises RankError if a rank could not.
    """

    def __call__(self, step: str, content: bytes = b"") -> Mapping[int, bytes]: ...


class Conducted(Protocol):
    """The scheduler behind the server; its methods are called in threads."""

    def carry_out(self, asked: Any, on_all: OnAll, shares: Sequence[int]) -> tuple[Any, Sequence[bytes]]:
        """Make a call; ``asked`` is what rank 0 has sent, ``shares`` is the share of a batch that each rank gets.

        Returns the result, and the content that is sent to each rank.
        """

    def look(self, method: str, arguments: list[Any]) -> bytes:
        """Answer a question of one rank."""

    @property
    def batches_out(self) -> list[int]:
        """Numbers of the batches that are delivered and not committed."""


class Call:
    """A call that all ranks make together."""

    def __init__(self) -> None:
        self.what: dict[int, str] = {}
        """Name and arguments of the call, by rank that has joined it."""
        self.began = False
        """True once all ranks have joined, so that the call is carried out."""
        self.sessions: dict[int, int] = {}
        """Session that each rank had when it joined."""
        self.steps: list[tuple[str, bytes]] = []
        self.done: dict[int, bytes] = {}
        """Results of the last step, by rank that has carried it out."""
        self.before: dict[int, int] = {}
        """Number of steps that were over when a restarted rank joined, by rank."""
        self.failed: RankError | None = None
        """Error of a step that failed."""
        self.answers: Sequence[Ended] | None = None
        """Answer to each rank, once the call has ended."""
        self.batch: int | None = None
        """Number of the batch that the call has delivered."""


class RankServer:
    """Serves the calls of a group of ranks.

    Args:
        ranks: number of ranks, and how long they wait.
        name: name of the process that has the scheduler, for messages.
        returns: True if lost ranks may come back and are sent the answers that they missed. False if rank 0 is in this
            process, and the server ends with it.
    """

    def __init__(self, ranks: Ranks, *, name: str = "rank 0", returns: bool = False) -> None:
        self._ranks, self._name, self._returns = ranks, name, returns
        self._all = frozenset(range(ranks.world_size))
        self.asked: Any = None
        """The call as rank 0 sent it, in bytes; a rank 0 in this process sets an object here before it joins."""
        self.outcome: tuple[Any, Exception | None] = None, None
        """(result, error) of the last call, for a rank in this process."""
        self.broken: RankError | None = None
        """Error that keeps the ranks from continuing together."""
        self.shares = [-1] * ranks.world_size
        """Share of a batch that each rank gets, as the rank has reported it."""
        self._calls: dict[int, Call] = {}
        """Calls by number: those that have not ended, and ended ones whose answers a rank may still ask for."""
        self._first = 0
        """Number of the call with which a new rank begins."""
        self._reached: dict[int, int] = {}
        """Number of the call that each connected rank was at last."""
        self._latest: dict[int, tuple[int, int]] = {}
        """Session and request number of each rank's last request."""
        self._sessions: dict[int, int] = {}
        """Session of each connected rank."""
        self._lines: dict[int, web.WebSocketResponse] = {}
        self._beats = Heartbeats[int](ranks.rank_deadline_s)
        self._numbers = itertools.count()
        self._closed: set[int] = set()
        """The ranks that have closed their scheduler."""
        self._lost: dict[int, asyncio.TimerHandle] = {}
        """Lost ranks that may still come back, with the timers of their timeouts."""
        self._waits: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._answering: set[asyncio.Task[Any]] = set()
        """Tasks that answer calls and looks."""
        self._says: set[asyncio.Task[Any]] = set()
        """Tasks that send messages over the ranks' lines."""
        self._carries_out: asyncio.Task[None] | None = None
        self._scheduler: Conducted | Exception | None = None
        self._begun = asyncio.Event()
        """Set once there is a scheduler, or the error that prevented it."""
        self._closing = False
        self._runner: web.AppRunner | None = None
        self.thread = LoopThread("april-ranks")
        self.thread.call(self._tick)

    # ---------------------------------------------------------------- its owner

    def listen(self, token: str) -> str:
        """Listen for ranks that know the token, and return the address; raises LinkError."""
        expected = f"Bearer {token}".encode()

        @web.middleware
        async def known(request: web.Request, handler: Any) -> web.StreamResponse:
            if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), expected):
                raise web.HTTPUnauthorized
            return await handler(request)  # type: ignore[no-any-return]

        async def listen() -> str:
            listening = bound(self._ranks.address)
            app = web.Application(middlewares=[known], client_max_size=0)
            app.add_routes([web.get("/line", self._line), web.post("/call", self._call), web.post("/look", self._ask)])
            self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=LINGER_S, access_log=None)
            await self._runner.setup()
            await web.SockSite(self._runner, listening, backlog=128 + self._ranks.world_size).start()
            return told_address(listening.getsockname())

        return self.thread.run(listen)

    def begin(self, scheduler: Conducted | Exception) -> None:
        """Set the scheduler, or the error that prevented it; calls are carried out from now on."""
        self._scheduler = scheduler
        self.thread.call(self._begun.set)

    def close(self, error: BaseException | None = None, *, wait: bool = False) -> None:
        """Stop answering. ``error`` is that of rank 0; ``wait`` first waits until all ranks have closed or are late."""

        async def end() -> None:
            if not self._returns:
                self._leave(0, "" if error is None else describe(error))
            if wait and self.broken is None:
                with suppress(RankError, TimeoutError):
                    async with asyncio.timeout(self._ranks.rank_timeout_s):
                        await self._until(lambda: self._closed >= self._all)
            await self._end()

        ended = False
        try:
            if self.thread.alive and self.thread.in_own_process:
                self._wait_for(end)
                ended = True
        finally:  # an interrupt ends only the wait, not the closing
            self.thread.request_stop(None if ended else self._end)

    def stop(self) -> None:
        """Wait for the server's threads to end; called once the scheduler is closed, as a thread may wait for that."""
        self.thread.request_stop(self._end)  # an interrupt may have kept close() from it
        self.thread.stop()

    async def _end(self) -> None:
        self._closing = True
        self._break(f"{self._name} has closed its scheduler", (0,))
        if self._answering:
            await asyncio.wait(self._answering, timeout=LINGER_S)
        await asyncio.gather(*self._says, *(line.close() for line in self._lines.values()), return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()

    # ---------------------------------------------------------------- ranks come and go

    def join(self, rank: int, share: int) -> Joined:
        """Add a rank, which gets this share of each batch."""
        session = self._sessions[rank] = next(self._numbers)
        self.shares[rank], self._reached[rank] = share, self._first
        self._closed.discard(rank)
        if (timer := self._lost.pop(rank, None)) is not None:
            timer.cancel()
        return Joined(session, self._first)

    async def _line(self, request: web.Request) -> web.StreamResponse:
        rank, share = int(request.query["rank"]), int(request.query["share"])
        if self._returns and rank in self._sessions:
            self._replace(rank)
        closed = rank in self._closed and not self._returns
        if self._closing or closed or rank in self._sessions or rank not in self._all:
            raise web.HTTPConflict  # the rank is too early for the next scheduler, or two processes claim this rank
        line = web.WebSocketResponse(timeout=LINGER_S, max_msg_size=0)
        joined = self.join(rank, share)
        bye = False
        try:
            await line.prepare(request)
            await self._say(line, pack(joined))
            if self._sessions.get(rank) == joined.session:
                self._lines[rank] = line
                self._beats.hear(rank, asyncio.get_running_loop().time())
            if self.broken is not None:
                await self._say(line, pack(Broken(str(self.broken), self.broken.ranks)))
            async for message in line:
                if self._sessions.get(rank) != joined.session:
                    break  # another process has taken its place
                self._beats.hear(rank, asyncio.get_running_loop().time())
                if message.type is WSMsgType.BINARY and message.data != ALIVE:
                    bye = True
                    self._leave(rank, unpack(message.data, Leaving).error)
        finally:  # also runs when the connection is lost, which cancels this handler
            if self._sessions.get(rank) == joined.session:
                self._gone(rank, "" if bye else "the connection was closed")
        return line

    def _replace(self, rank: int) -> None:
        """Disconnect a rank that was restarted while it seems to be connected still."""
        if (line := self._lines.get(rank)) is not None:
            last = Broken(f"rank {rank} has connected again, and this connection is no longer valid", (rank,))
            self._beside(self._hang_up(line, pack(last)))
        self._gone(rank, "it was restarted")

    async def _hang_up(self, line: web.WebSocketResponse, last: bytes = ALIVE) -> None:
        await self._say(line, last)
        await line.close()

    def _tick(self) -> None:
        """Find ranks whose heartbeats are missing, and send a heartbeat to all."""
        loop = asyncio.get_running_loop()
        for rank in list(self._beats.silent(loop.time())):
            self._beside(self._hang_up(self._lines[rank]))
            self._gone(rank, silence(self._ranks.rank_deadline_s))
        for line in self._lines.values():
            self._beside(self._say(line, ALIVE))
        loop.call_later(self._beats.interval_s, self._tick)

    def _gone(self, rank: int, why: str) -> None:
        """Remove a rank that is no longer connected; ``why`` is empty if the rank has said that it leaves."""
        del self._sessions[rank], self._reached[rank]
        self._lines.pop(rank, None)
        self._beats.forget(rank)
        if not why or self._closing or self.broken is not None:
            return
        if not self._returns:
            self._break(f"the connection to rank {rank} is lost: {why}", (rank,))
            return
        late_s = self._ranks.rank_timeout_s
        sentence = (
            f"the connection to rank {rank} is lost: {why}; it did not come back within {late_s:g} s (rank_timeout_s)"
        )
        self._lost[rank] = asyncio.get_running_loop().call_later(late_s, self._break, sentence, (rank,))
        for call in self._calls.values():
            if not call.began:
                call.what.pop(rank, None)
            elif call.answers is None and call.steps and rank not in call.done:
                lost = RankError(f"rank {rank} was lost in its {call.steps[-1][0]}: {why}", (rank,))
                call.failed = call.failed or lost
        self._look_up()

    def _leave(self, rank: int, error: str) -> None:
        """Note that a rank closes its scheduler, after an error if there is one; an open call of another rank fails."""
        self._closed.add(rank)
        waiting = ((r, what) for c in self._calls.values() if c.answers is None for r, what in c.what.items())
        if error:
            self._break(f"rank {rank} has ended with an error: {error}", (rank,))
        elif (found := next(((r, what) for r, what in waiting if r != rank), None)) is not None:
            self._break(f"rank {rank} closed its scheduler during {found[1]} of rank {found[0]}", (rank,))
        self._look_up()

    # ---------------------------------------------------------------- a call

    async def _call(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self.exchange(unpack(await request.read(), Asked)))

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        asked = unpack(await request.read(), Look)

        async def look() -> Ended:
            return Ended(await asyncio.to_thread(self._there().look, asked.method, asked.arguments))

        return await self._answer(request, look())

    async def _answer(self, request: web.Request, work: Awaitable[Step | Ended]) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            try:
                said = await work
            except Exception as error:
                said = Ended(error=told(error, self._name))
            content = pack(said)
            response = web.StreamResponse()
            response.content_length = len(content)
            await response.prepare(request)
            for at in range(0, len(content), PIECE_BYTES):
                await response.write(content[at : at + PIECE_BYTES])
            await response.write_eof()
            return response
        finally:
            self._answering.discard(task)

    async def exchange(self, asked: Asked) -> Step | Ended:
        """Return what a rank that has joined a call must do next; raises RankError."""
        rank, call = asked.rank, self._arrive(asked)
        carried = asked.carried + call.before.get(rank, 0)
        if asked.error is not None:
            self._fail(rank, call, carried, asked.error)
            return Ended()
        if 0 < carried == len(call.steps):
            call.done[rank] = asked.said
            self._look_up()
        if not call.began and call.what.keys() == self._all:
            call.began = True
            self._carries_out = asyncio.get_running_loop().create_task(self._carry_out(asked.number, call))
            self._look_up()
        try:
            await self._until(lambda: call.began, lambda: self._late(call, asked.what))
        except asyncio.CancelledError:  # an interrupted rank leaves the call; the others wait for it again
            if not call.began and self._latest[rank] == (asked.session, asked.request):
                call.what.pop(rank, None)
            raise
        await self._until(
            lambda: call.answers is not None or len(call.steps) > carried, lambda: self._late_in_step(call, rank)
        )
        return call.answers[rank] if call.answers is not None else Step(*call.steps[carried])

    def _arrive(self, asked: Asked) -> Call:
        """Note a request of a rank, and return its call; raises RankError."""
        rank, latest = asked.rank, (asked.session, asked.request)
        if self._sessions.get(rank) != asked.session:
            why = "has attached anew, and is not here any more" if rank in self._sessions else "has lost its connection"
            raise self._broken_again() or RankError(f"rank {rank} {why}", (rank,))
        if latest < self._latest.get(rank, latest):
            raise RankError(f"rank {rank} has made a newer call", (rank,))
        self._latest[rank], self._reached[rank] = latest, asked.number
        call = self._calls.setdefault(asked.number, Call())
        self._check(rank, call, asked.what)
        if call.began and call.sessions[rank] != asked.session:
            call.before[rank] = len(call.steps) - bool(call.steps and rank not in call.done)
        call.sessions[rank] = asked.session
        if not call.began:
            call.what[rank] = asked.what
            if rank == 0 and self._returns:
                self.asked = asked.arguments
        return call

    def _check(self, rank: int, call: Call, what: str) -> None:
        """Stop all ranks if a rank makes another call than the others; raises RankError."""
        said = {r: text for r, text in call.what.items() if r != rank or call.began}
        other = next((r for r, text in said.items() if text != what), None)
        if other is not None and call.answers is not None and self._returns:
            raise RankError(
                f"rank {rank} was restarted and makes another call than all ranks have made there: {what} instead of "
                f"{said[other]}"
            )
        if other is not None and call.began:
            self._break(
                f"rank {rank} was interrupted in {said[other]} and called {what} instead, unlike the other ranks; an "
                "interrupted call must be made again",
                (rank,),
            )
        elif other is not None:
            self._break(
                f"the ranks make different calls at the same place: rank {other} {said[other]}, rank {rank} {what}. "
                "Every rank must make the same calls, in the same order and with the same arguments",
                (other, rank),
            )
        elif self._closed and not call.began:
            self._break(f"{_names(self._closed)} closed before {what}, which {_names({rank})} waits for", self._closed)
        if (broken := self._broken_again()) is not None and (other is not None or not call.began):
            raise broken

    def _fail(self, rank: int, call: Call, carried: int, error: str) -> None:
        if call.answers is None and carried < len(call.steps):
            failed = RankError(f"the {call.steps[carried][0]} of rank {rank} raised {error}", (rank,))
            call.failed = call.failed or failed
            self._look_up()

    async def _carry_out(self, number: int, call: Call) -> None:
        """Carry out a call that all ranks have joined."""
        asked = self.asked
        await self._begun.wait()

        def on_all(step: str, content: bytes = b"") -> Mapping[int, bytes]:
            said: dict[int, bytes] = self._wait_for(lambda: self._step(call, step, content))
            return said

        def make() -> tuple[list[Ended], int | None, Collection[int]]:
            try:
                result, contents = self._there().carry_out(asked, on_all, self.shares)
                self.outcome = result, None
                answers = [Ended(content) for content in contents]
            except Exception as error:
                result, self.outcome = None, (None, error)
                answers = [Ended(error=told(error, self._name))] * len(self._all)
            out = self._there().batches_out if self._returns else ()
            return answers, result.id if isinstance(result, Batch) else None, out

        call.answers, call.batch, out = await asyncio.to_thread(make)
        ended = sorted(n for n, c in self._calls.items() if c.answers is not None)
        self._first = next((n for n in ended if self._calls[n].batch in out), number + 1)
        needed = min(self._first, number, *self._reached.values())
        self._calls = {n: c for n, c in self._calls.items() if n >= needed}
        self._look_up()

    def _there(self) -> Conducted:
        if isinstance(self._scheduler, Exception):
            raise self._scheduler
        if self._scheduler is None:
            raise SchedulerClosed(f"{self._name} has no scheduler (yet)")
        return self._scheduler

    async def _step(self, call: Call, step: str, content: bytes) -> dict[int, bytes]:
        """Make all ranks carry out a step and return their results; raises RankError."""
        call.done.clear()
        call.steps.append((step, content))
        self._look_up()
        await self._until(lambda: call.failed is not None or call.done.keys() == self._all)
        if call.failed is not None:
            raise RankError(str(call.failed), call.failed.ranks)
        return dict(call.done)

    # ---------------------------------------------------------------- what is waited for

    async def _until(self, there: Callable[[], bool], late: Callable[[], None] | None = None) -> None:
        """Wait until ``there()`` is true; raises RankError if ranks are stopped. Runs ``late`` after rank_timeout_s."""
        loop = asyncio.get_running_loop()
        wait = there, loop.create_future()
        timer = None if late is None else loop.call_later(self._ranks.rank_timeout_s, late)
        self._waits.append(wait)
        self._look(wait)
        try:
            await wait[1]
        finally:
            self._waits.remove(wait)
            if timer is not None:
                timer.cancel()

    def _look_up(self) -> None:
        """Check all waits again, because something has changed."""
        for wait in self._waits:
            self._look(wait)

    def _look(self, wait: tuple[Callable[[], bool], asyncio.Future[None]]) -> None:
        there, future = wait
        if future.done():
            return
        failing = any(c.failed is not None and c.answers is None for c in self._calls.values())
        if there():
            future.set_result(None)
        elif not failing and (broken := self._broken_again()) is not None:
            future.set_exception(broken)  # a call with a failed step ends first, as that error says more

    def _late(self, call: Call, what: str) -> None:
        self._break_late(self._all - call.what.keys(), what)

    def _late_in_step(self, call: Call, rank: int) -> None:
        waits = rank in call.done and call.done.keys() != self._all
        if waits and call.answers is None and call.failed is None:
            self._break_late(self._all - call.done.keys(), f"the end of its {call.steps[-1][0]}")

    def _break_late(self, missing: Collection[int], where: str) -> None:
        late_s = self._ranks.rank_timeout_s
        self._break(f"{_names(missing)} did not reach {where} within {late_s:g} s (rank_timeout_s)", missing)

    def _break(self, sentence: str, ranks: Iterable[int]) -> None:
        """Stop all ranks for good with one error; ``ranks`` are those that caused it."""
        if self.broken is not None:
            return
        self.broken = RankError(sentence, tuple(sorted(set(ranks))))
        if self._returns and not self._closing:
            log.warning("the ranks cannot continue together: %s", sentence)
        for line in self._lines.values():
            self._beside(self._say(line, pack(Broken(sentence, self.broken.ranks))))
        self._look_up()

    def _broken_again(self) -> RankError | None:
        return None if self.broken is None else RankError(str(self.broken), self.broken.ranks)

    async def _say(self, line: web.WebSocketResponse, said: bytes) -> None:
        with suppress(ConnectionError, RuntimeError):  # the line is closed, or not open yet
            await line.send_bytes(said)

    def _beside(self, work: Coroutine[Any, Any, Any]) -> None:
        self._says.add(task := asyncio.get_running_loop().create_task(work))
        task.add_done_callback(self._says.discard)

    def _wait_for(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        def begin(reply: Reply[Any]) -> None:
            reply.follow(asyncio.get_running_loop().create_task(work()))

        return self.thread.wait_for(begin)


def _names(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(numbers)}"
