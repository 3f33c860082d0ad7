"""The HTTP server in the scheduler's process, to which the ranks of a trainer send their calls.

The rule: every rank makes each call that changes something, in the same order and with the same arguments. A call
begins when all ranks have made it. If one rank breaks the rule, this call and all later ones fail on all ranks.

A request to ``/call`` is answered when the rank has a step to carry out, or when the call has ended. After a step, an
interrupt or a lost answer the rank sends the request again. ``/query`` answers a query of one rank at once.
``/connect`` opens a WebSocket that stays open while the rank lives: its heartbeats reveal the death of a rank that is
training and makes no calls.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from aiohttp import WSMsgType, web

from april.concurrency.http_listener import HttpListener
from april.core.batch import Batch
from april.driver.loop_thread import LoopThread
from april.driver.user_code import describe
from april.errors import RankError, SchedulerClosed
from april.processes import rank_messages as messages
from april.processes.addresses import format_address, listening_socket
from april.processes.heartbeats import Heartbeats
from april.processes.ranks import Ranks
from april.serialization.own_values import pack, unpack

log = logging.getLogger("april")

DRAIN_S = 1.0
"""Seconds that ranks have to read their last answers when the server ends."""
PIECE_BYTES = 1 << 20
"""Largest number of bytes written at once: asyncio copies what is left of a large write again and again."""
RunOnAllRanks = Callable[..., Mapping[int, bytes]]
"""``run(step, content=b"")`` makes every rank carry out a step of the current call, and returns each rank's result.

Raises RankError if a rank fails to carry it out.
"""


class CollectiveCall:
    """A call that all ranks make together."""

    def __init__(self) -> None:
        self.call_texts: dict[int, str] = {}
        """Name and arguments of the call, by rank that has joined it."""
        self.started = False
        """True once all ranks have joined, so that the call is being carried out."""
        self.sessions: dict[int, int] = {}
        """Session that each rank had when it joined."""
        self.steps: list[tuple[str, bytes]] = []
        self.step_results: dict[int, bytes] = {}
        """Results of the last step, by rank that has carried it out."""
        self.steps_before_join: dict[int, int] = {}
        """By restarted rank: number of steps that were over when the rank joined the call again."""
        self.step_error: RankError | None = None
        """Error of the first step that failed; None if none has failed."""
        self.results: Sequence[messages.CallResult] | None = None
        """Answer to each rank; None until the call has ended."""
        self.batch_id: int | None = None
        """Number of the batch that the call has delivered; None if it has delivered none."""


class RankServer:
    """Serves the calls of a group of ranks.

    Args:
        ranks: number of ranks, and how long they wait.
        name: name of the process that has the scheduler, for messages.
        allow_rejoin: True if lost ranks may come back and are sent the answers that they missed. False if rank 0 is in
            this process, so that the server ends together with rank 0.
    """

    def __init__(self, ranks: Ranks, *, name: str = "rank 0", allow_rejoin: bool = False) -> None:
        self._ranks, self._name, self._allow_rejoin = ranks, name, allow_rejoin
        self._all_ranks = frozenset(range(ranks.world_size))
        self.rank0_request: Any = None
        """The call as rank 0 sent it, in bytes; a rank 0 in this process sets an object here before it joins."""
        self.last_outcome: tuple[Any, Exception | None] = None, None
        """(result, error) of the last call, for a rank in this process."""
        self.group_error: RankError | None = None
        """Error because of which the ranks cannot continue; None while there is none."""
        self.shares = [-1] * ranks.world_size
        """Number of each rank's batch share, indexed by rank; -1 until the rank has joined."""
        self._calls: dict[int, CollectiveCall] = {}
        """Calls by number: open calls, and ended calls whose answers a rank may still ask for."""
        self._next_call = 0
        """Number of the first call that a rank takes part in if it joins now."""
        self._latest_calls: dict[int, int] = {}
        """Number of the latest call of each connected rank."""
        self._latest_requests: dict[int, tuple[int, int]] = {}
        """Session and request number of each rank's last request."""
        self._sessions: dict[int, int] = {}
        self._websockets: dict[int, web.WebSocketResponse] = {}
        self._heartbeats = Heartbeats(ranks.rank_deadline_s)
        self._session_ids = itertools.count()
        self._closed_ranks: set[int] = set()
        self._rejoin_timers: dict[int, asyncio.TimerHandle] = {}
        """Timers of lost ranks that may still come back, by rank; if a timer expires, all ranks fail."""
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._request_tasks: set[asyncio.Task[Any]] = set()
        self._send_tasks: set[asyncio.Task[Any]] = set()
        self._call_task: asyncio.Task[None] | None = None
        self._scheduler: Any = None
        self._scheduler_set = asyncio.Event()
        """Set once the scheduler was created, or its creation has failed."""
        self._closing = False
        self._listener: HttpListener | None = None
        self.thread = LoopThread("april-ranks")
        self.thread.call(self._check_heartbeats)

    # ---------------------------------------------------------------- for the process of the scheduler

    def listen(self, token: str) -> str:
        """Listen for ranks that know the token, and return the address; raises LinkError."""
        expected = f"Bearer {token}".encode()

        @web.middleware
        async def require_token(request: web.Request, handler: Any) -> web.StreamResponse:
            if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), expected):
                raise web.HTTPUnauthorized
            return await handler(request)  # type: ignore[no-any-return]

        async def listen() -> str:
            app = web.Application(middlewares=[require_token], client_max_size=0)
            app.router.add_get("/connect", self._serve_websocket)
            app.router.add_post("/call", self._handle_call)
            app.router.add_post("/query", self._handle_query)
            self._listener = HttpListener(app, DRAIN_S, cancel_handlers=True)
            listening = listening_socket(self._ranks.address)
            return format_address(await self._listener.start(listening, backlog=128 + self._ranks.world_size))

        return self.thread.run(listen)

    def set_scheduler(self, scheduler: Any) -> None:
        """Set the SharedScheduler, or the error with which its creation failed; from now on calls are carried out."""
        self._scheduler = scheduler
        self.thread.call(self._scheduler_set.set)

    def close(self, error: BaseException | None = None, *, wait: bool = False) -> None:
        """Stop answering, after rank 0's ``error`` if any; with ``wait``, first wait until all ranks have closed."""

        async def end() -> None:
            if not self._allow_rejoin:
                self._note_closed(0, "" if error is None else describe(error))
            if wait and self.group_error is None:
                with suppress(RankError, TimeoutError):
                    async with asyncio.timeout(self._ranks.rank_timeout_s):
                        await self._wait_until(lambda: self._closed_ranks >= self._all_ranks)
            await self._end()

        try:
            self.thread.end_with(end)
        finally:  # an interrupt ends only the wait above; the server then stops at once
            self.thread.request_stop(self._end)

    def stop(self) -> None:
        """Wait for the server's threads to end. Close the scheduler before, because a thread may wait for it."""
        self.thread.request_stop(self._end)  # in case an interrupt ended close() before it requested this
        self.thread.stop()

    async def _end(self) -> None:
        self._closing = True
        self._fail_group(f"{self._name} has closed its scheduler", (0,))
        if self._request_tasks:
            await asyncio.wait(self._request_tasks, timeout=DRAIN_S)
        closing = [websocket.close() for websocket in self._websockets.values()]
        await asyncio.gather(*self._send_tasks, *closing, return_exceptions=True)
        if self._listener is not None:
            await self._listener.close()

    # ---------------------------------------------------------------- connections of ranks

    def join(self, rank: int, share: int) -> messages.Joined:
        """Add a rank, which gets this share of each batch."""
        session = self._sessions[rank] = next(self._session_ids)
        self.shares[rank], self._latest_calls[rank] = share, self._next_call
        self._closed_ranks.discard(rank)
        if (timer := self._rejoin_timers.pop(rank, None)) is not None:
            timer.cancel()
        return messages.Joined(session, self._next_call)

    async def _serve_websocket(self, request: web.Request) -> web.StreamResponse:
        rank, share = int(request.query["rank"]), int(request.query["share"])
        if self._allow_rejoin and rank in self._sessions:
            self._disconnect_replaced(rank)
        closed = rank in self._closed_ranks and not self._allow_rejoin
        if self._closing or closed or rank in self._sessions or rank not in self._all_ranks:
            raise web.HTTPConflict  # the rank is too early for the next scheduler, or two processes claim this rank
        websocket = web.WebSocketResponse(timeout=DRAIN_S, max_msg_size=0)
        joined = self.join(rank, share)
        has_left = False
        try:
            await websocket.prepare(request)
            await self._send(websocket, pack(joined))
            if self._sessions.get(rank) == joined.session:
                self._websockets[rank] = websocket
                self._heartbeats.note_beat(rank, asyncio.get_running_loop().time())
            if self.group_error is not None:
                await self._send(websocket, pack(messages.GroupFailed(str(self.group_error), self.group_error.ranks)))
            async for message in websocket:
                if self._sessions.get(rank) != joined.session:
                    break  # another process has joined as this rank
                self._heartbeats.note_beat(rank, asyncio.get_running_loop().time())
                if message.type is WSMsgType.BINARY and message.data != messages.HEARTBEAT:
                    has_left = True
                    self._note_closed(rank, unpack(message.data, messages.RankClosed).error)
        finally:  # also runs when the connection is lost, which cancels this handler
            if self._sessions.get(rank) == joined.session:
                self._remove_rank(rank, "" if has_left else "the connection was closed")
        return websocket

    def _disconnect_replaced(self, rank: int) -> None:
        """Disconnect the earlier process of a rank that was restarted, if it still seems to be connected."""
        if (websocket := self._websockets.get(rank)) is not None:
            sentence = f"rank {rank} has connected again, and this connection is no longer valid"
            message = messages.GroupFailed(sentence, (rank,))
            self._in_background(self._disconnect(websocket, pack(message)))
        self._remove_rank(rank, "it was restarted")

    async def _disconnect(self, websocket: web.WebSocketResponse, message: bytes = messages.HEARTBEAT) -> None:
        await self._send(websocket, message)
        await websocket.close()

    def _check_heartbeats(self) -> None:
        loop = asyncio.get_running_loop()
        for rank in list(self._heartbeats.silent_peers(loop.time())):
            self._in_background(self._disconnect(self._websockets[rank]))
            self._remove_rank(rank, messages.silence_message(self._ranks.rank_deadline_s))
        for websocket in self._websockets.values():
            self._in_background(self._send(websocket, messages.HEARTBEAT))
        loop.call_later(self._heartbeats.interval_s, self._check_heartbeats)

    def _remove_rank(self, rank: int, why: str) -> None:
        """Remove a rank that is no longer connected; ``why`` is empty if the rank announced that it leaves."""
        del self._sessions[rank], self._latest_calls[rank]
        self._websockets.pop(rank, None)
        self._heartbeats.forget(rank)
        if not why or self._closing or self.group_error is not None:
            return
        if not self._allow_rejoin:
            self._fail_group(f"the connection to rank {rank} is lost: {why}", (rank,))
            return
        late_s = self._ranks.rank_timeout_s
        sentence = (
            f"the connection to rank {rank} is lost: {why}; it did not come back within {late_s:g} s (rank_timeout_s)"
        )
        self._rejoin_timers[rank] = asyncio.get_running_loop().call_later(late_s, self._fail_group, sentence, (rank,))
        for call in self._calls.values():
            if not call.started:
                call.call_texts.pop(rank, None)
            elif call.results is None and call.steps and rank not in call.step_results:
                lost = RankError(f"rank {rank} was lost in its {call.steps[-1][0]}: {why}", (rank,))
                call.step_error = call.step_error or lost
        self._check_waiters()

    def _note_closed(self, rank: int, error: str) -> None:
        """Note that a rank has closed its scheduler; all ranks fail if it had an error, or if a call waits for it."""
        self._closed_ranks.add(rank)
        waiting = ((r, what) for c in self._calls.values() if c.results is None for r, what in c.call_texts.items())
        if error:
            self._fail_group(f"rank {rank} has ended with an error: {error}", (rank,))
        elif (found := next(((r, what) for r, what in waiting if r != rank), None)) is not None:
            other, call_text = found
            self._fail_group(f"rank {rank} closed its scheduler during {call_text} of rank {other}", (rank,))
        self._check_waiters()

    # ---------------------------------------------------------------- a call

    async def _handle_call(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, self.exchange(unpack(await request.read(), messages.CallRequest)))

    async def _handle_query(self, request: web.Request) -> web.StreamResponse:
        query = unpack(await request.read(), messages.Query)

        async def answer() -> messages.CallResult:
            scheduler = self._require_scheduler()
            return messages.CallResult(await asyncio.to_thread(scheduler.query, query.method, query.arguments))

        return await self._respond(request, answer())

    async def _respond(
        self, request: web.Request, work: Awaitable[messages.Step | messages.CallResult]
    ) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._request_tasks.add(task)
        try:
            try:
                result = await work
            except Exception as error:
                result = messages.CallResult(error=messages.error_message(error, self._name))
            content = pack(result)
            response = web.StreamResponse()
            response.content_length = len(content)
            await response.prepare(request)
            for at in range(0, len(content), PIECE_BYTES):
                await response.write(content[at : at + PIECE_BYTES])
            await response.write_eof()
            return response
        finally:
            self._request_tasks.discard(task)

    async def exchange(self, request: messages.CallRequest) -> messages.Step | messages.CallResult:
        """Let a rank take part in a call; return its next step, or the call's result. Raises RankError."""
        rank, call = request.rank, self._register(request)
        steps_done = request.steps_done + call.steps_before_join.get(rank, 0)
        if request.error is not None:
            self._fail_step(rank, call, steps_done, request.error)
            return messages.CallResult()
        if 0 < steps_done == len(call.steps):
            call.step_results[rank] = request.step_result
            self._check_waiters()
        if not call.started and call.call_texts.keys() == self._all_ranks:
            call.started = True
            self._call_task = asyncio.get_running_loop().create_task(self._execute(request.call_number, call))
            self._check_waiters()
        try:
            await self._wait_until(
                lambda: call.started,
                lambda: self._fail_missing(self._all_ranks - call.call_texts.keys(), request.call_text),
            )
        except asyncio.CancelledError:  # an interrupted rank leaves the call; the others wait for it again
            if not call.started and self._latest_requests[rank] == (request.session, request.request):
                call.call_texts.pop(rank, None)
            raise
        await self._wait_until(
            lambda: call.results is not None or len(call.steps) > steps_done,
            lambda: self._fail_late_in_step(call, rank),
        )
        return call.results[rank] if call.results is not None else messages.Step(*call.steps[steps_done])

    def _register(self, request: messages.CallRequest) -> CollectiveCall:
        """Note a request of a rank, and return its call; raises RankError."""
        rank, latest = request.rank, (request.session, request.request)
        if self._sessions.get(rank) != request.session:
            why = "was replaced by a newer process" if rank in self._sessions else "has lost its connection"
            raise self._group_error_copy() or RankError(f"rank {rank} {why}", (rank,))
        if latest < self._latest_requests.get(rank, latest):
            raise RankError(f"rank {rank} has made a newer call", (rank,))
        self._latest_requests[rank], self._latest_calls[rank] = latest, request.call_number
        call = self._calls.setdefault(request.call_number, CollectiveCall())
        self._require_same_call(rank, call, request.call_text)
        if call.started and call.sessions[rank] != request.session:
            call.steps_before_join[rank] = len(call.steps) - bool(call.steps and rank not in call.step_results)
        call.sessions[rank] = request.session
        if not call.started:
            call.call_texts[rank] = request.call_text
            if rank == 0 and self._allow_rejoin:
                self.rank0_request = request.arguments
        return call

    def _require_same_call(self, rank: int, call: CollectiveCall, call_text: str) -> None:
        """Stop all ranks with a RankError if a rank makes another call than the others."""
        others = {r: text for r, text in call.call_texts.items() if r != rank or call.started}
        other = next((r for r, text in others.items() if text != call_text), None)
        if other is not None and call.results is not None and self._allow_rejoin:
            raise RankError(
                f"rank {rank} was restarted and makes another call than the ranks made before: {call_text} instead of "
                f"{others[other]}"
            )
        if other is not None and call.started:
            self._fail_group(
                f"rank {rank} was interrupted in {others[other]} and called {call_text} instead, unlike the other "
                "ranks; an interrupted call must be made again",
                (rank,),
            )
        elif other is not None:
            self._fail_group(
                f"the ranks make different calls at the same place: rank {other} {others[other]}, rank {rank} "
                f"{call_text}. Every rank must make the same calls, in the same order and with the same arguments",
                (other, rank),
            )
        elif self._closed_ranks and not call.started:
            closed = self._closed_ranks
            self._fail_group(f"{_rank_names(closed)} closed before {call_text}, which rank {rank} waits for", closed)
        if (broken := self._group_error_copy()) is not None and (other is not None or not call.started):
            raise broken

    def _fail_step(self, rank: int, call: CollectiveCall, steps_done: int, error: str) -> None:
        if call.results is None and steps_done < len(call.steps):
            failed = RankError(f"the {call.steps[steps_done][0]} of rank {rank} raised {error}", (rank,))
            call.step_error = call.step_error or failed
            self._check_waiters()

    async def _execute(self, call_number: int, call: CollectiveCall) -> None:
        request = self.rank0_request
        await self._scheduler_set.wait()

        def run_on_all(step: str, content: bytes = b"") -> Mapping[int, bytes]:
            return self.thread.wait_for(lambda: self._run_step(call, step, content))

        def execute() -> tuple[list[messages.CallResult], int | None, Collection[int]]:
            try:
                result, contents = self._require_scheduler().execute(request, run_on_all, self.shares)
                self.last_outcome = result, None
                answers = [messages.CallResult(content) for content in contents]
            except Exception as error:
                result, self.last_outcome = None, (None, error)
                answers = [messages.CallResult(error=messages.error_message(error, self._name))] * len(self._all_ranks)
            out = self._require_scheduler().uncommitted_batches if self._allow_rejoin else ()
            return answers, result.id if isinstance(result, Batch) else None, out

        call.results, call.batch_id, uncommitted = await asyncio.to_thread(execute)
        ended = sorted(n for n, c in self._calls.items() if c.results is not None)
        self._next_call = next((n for n in ended if self._calls[n].batch_id in uncommitted), call_number + 1)
        needed = min(self._next_call, call_number, *self._latest_calls.values())
        self._calls = {n: c for n, c in self._calls.items() if n >= needed}
        self._check_waiters()

    def _require_scheduler(self) -> Any:
        if isinstance(self._scheduler, Exception):
            raise self._scheduler
        if self._scheduler is None:
            raise SchedulerClosed(f"{self._name} has no scheduler (yet)")
        return self._scheduler

    async def _run_step(self, call: CollectiveCall, step: str, content: bytes) -> dict[int, bytes]:
        """Make all ranks carry out a step and return their results; raises RankError."""
        call.step_results.clear()
        call.steps.append((step, content))
        self._check_waiters()
        await self._wait_until(lambda: call.step_error is not None or call.step_results.keys() == self._all_ranks)
        if call.step_error is not None:
            raise RankError(str(call.step_error), call.step_error.ranks)
        return dict(call.step_results)

    # ---------------------------------------------------------------- waiting and failing

    async def _wait_until(self, condition: Callable[[], bool], on_timeout: Callable[[], None] | None = None) -> None:
        """Wait until ``condition()`` is true; after the ranks' timeout call ``on_timeout``.

        Raises RankError if the ranks cannot continue.
        """
        loop = asyncio.get_running_loop()
        waiter = condition, loop.create_future()
        timer = None if on_timeout is None else loop.call_later(self._ranks.rank_timeout_s, on_timeout)
        self._waiters.append(waiter)
        self._check_waiter(waiter)
        try:
            await waiter[1]
        finally:
            self._waiters.remove(waiter)
            if timer is not None:
                timer.cancel()

    def _check_waiters(self) -> None:
        """Check all conditions that are waited for; must be called after every change that may fulfil one."""
        for waiter in self._waiters:
            self._check_waiter(waiter)

    def _check_waiter(self, waiter: tuple[Callable[[], bool], asyncio.Future[None]]) -> None:
        condition, future = waiter
        if future.done():
            return
        failing = any(c.step_error is not None and c.results is None for c in self._calls.values())
        if condition():
            future.set_result(None)
        elif not failing and (broken := self._group_error_copy()) is not None:
            # if a step has failed, this waits until its call has ended, because the step's own error says more
            future.set_exception(broken)

    def _fail_late_in_step(self, call: CollectiveCall, rank: int) -> None:
        waits = rank in call.step_results and call.step_results.keys() != self._all_ranks
        if waits and call.results is None and call.step_error is None:
            self._fail_missing(self._all_ranks - call.step_results.keys(), f"the end of its {call.steps[-1][0]}")

    def _fail_missing(self, missing: Collection[int], where: str) -> None:
        late_s = self._ranks.rank_timeout_s
        self._fail_group(
            f"{_rank_names(missing)} did not reach {where} within {late_s:g} s (rank_timeout_s)", missing
        )

    def _fail_group(self, sentence: str, ranks: Iterable[int]) -> None:
        """Stop all ranks for good with one error; ``ranks`` are those that caused it."""
        if self.group_error is not None:
            return
        self.group_error = RankError(sentence, tuple(sorted(set(ranks))))
        if self._allow_rejoin and not self._closing:
            log.warning("the ranks cannot continue together: %s", sentence)
        for websocket in self._websockets.values():
            self._in_background(self._send(websocket, pack(messages.GroupFailed(sentence, self.group_error.ranks))))
        self._check_waiters()

    def _group_error_copy(self) -> RankError | None:
        return None if self.group_error is None else RankError(str(self.group_error), self.group_error.ranks)

    async def _send(self, websocket: web.WebSocketResponse, message: bytes) -> None:
        with suppress(ConnectionError, RuntimeError):  # the WebSocket is closed, or not open yet
            await websocket.send_bytes(message)

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        self._send_tasks.add(task := asyncio.get_running_loop().create_task(work))
        task.add_done_callback(self._send_tasks.discard)


def _rank_names(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(numbers)}"
