"""What fake inference servers have in common: a port that opens and breaks, requests in a queue and in places."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from april.testing.servers.control_faults import ControlFault, PlannedControlFault, wrong_answer
from april.testing.servers.fake_request import FakeRequest
from april.testing.servers.request_faults import KEEPS_ALIVE, PlannedFault, RequestFault

KEEP_ALIVE_S = 0.01
"""Between two signs of life of a stream without tokens."""


R = TypeVar("R", bound=FakeRequest)


class FakeServer(Generic[R]):
    """A server on a real loopback socket. Subclasses say what it answers.

    Args:
        weights: name of the weights.
        max_running: requests decoded at the same time.
        vocab_size, eos, context: of the model.
        mean_length: mean of the (geometric) response lengths.
        stepped: nothing is generated but by :meth:`step`; may be changed at any time (call :meth:`go_on` to go on).
        turns: of the event loop per token.
    """

    def __init__(
        self, *, weights: str, vocab_size: int, eos: int, context: int, mean_length: int, max_running: int,
        stepped: bool, turns: int,
    ) -> None:  # fmt: skip
        self.weights, self.label = weights, "default"
        self.vocab_size, self.eos, self.context, self.mean_length = vocab_size, eos, context, mean_length
        self.max_running, self.stepped, self.turns = max_running, stepped, turns
        self.turn: Callable[[], Awaitable[None]] = partial(asyncio.sleep, 0)
        """One turn of the event loop; whoever has clients on other loops may wait for theirs too."""
        self.first_weights = weights
        """Those of every new process."""
        self.faults: list[PlannedFault] = []
        self.control_faults: list[PlannedControlFault] = []
        self.runs: list[R] = []
        """Every request that was let in, in the order of arrival."""
        self.violations: list[str] = []
        """What was asked and must not be asked."""
        self.pause_mode: str | None = None
        self.stale_cache = False
        """Keys and values of older weights are in the cache."""
        self.unanswered: dict[str, int] = {}
        """Route -> so many calls are obeyed, and their connections break in place of an answer."""
        self.alive = False
        self.starts = 0
        self._live: list[R] = []
        self._queue: deque[R] = deque()
        self._changed = asyncio.Event()
        self._transports: set[asyncio.Transport] = set()
        self._listener: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._port = 0

    # ---------------------------------------------------------------- what subclasses say

    def _routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    def _said(self, run: R) -> str:
        """The next answer as JSON, wrong if the script says so."""
        raise NotImplementedError

    def _fails_by(self, run: R, kind: RequestFault) -> bool:
        """Faults of this server alone that wait for a number of tokens."""
        return False

    def _failure(self, run: R) -> web.Response | None:
        """What a plain request gets in place of an answer."""
        return None

    def _usage(self, run: R) -> list[str]:
        """Events of a stream that have the usage alone."""
        return []

    async def _early(self, request: web.Request) -> web.StreamResponse | None:
        """An answer before the route is looked at."""
        return None

    # ---------------------------------------------------------------- life

    async def start(self) -> str:
        """Open the port (the same one again after a death); returns the URL."""
        app = web.Application(client_max_size=1 << 26, middlewares=[self._see])
        app.add_routes(self._routes())
        # idle connections are closed as early as the real servers do it
        options = {"keepalive_timeout": 5.0, "access_log": None, "shutdown_timeout": 0.1} | self._runner_options()
        self._runner = web.AppRunner(app, **options)
        await self._runner.setup()
        assert self._runner.server is not None
        self._listener = await asyncio.get_running_loop().create_server(
            self._runner.server, "127.0.0.1", self._port, reuse_address=True
        )
        self._port = self._listener.sockets[0].getsockname()[1]
        self.alive = True
        self.starts += 1
        self._ticker = asyncio.create_task(self._tick())
        return self.url

    def _runner_options(self) -> dict[str, Any]:
        return {}

    @property
    def url(self) -> str:
        """Address on loopback."""
        return f"http://127.0.0.1:{self._port}"

    async def close(self) -> None:
        """As :meth:`die`, and wait for the end."""
        self.die()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()

    def die(self) -> None:
        """Break all connections and close the port, as a killed process does."""
        self.alive = False
        if self._listener is not None:
            self._listener.close()
        for run in self._live:
            run.dead = True
            run.news.set()
        for transport in self._transports:
            transport.abort()
        self._transports.clear()
        self._live.clear()
        self._queue.clear()
        self._changed.set()

    async def restart(self, weights: str = "w0") -> None:
        """A new process with weights as given, the default label, and no requests."""
        await self.close()
        self._forget(weights)
        await self.start()

    def _forget(self, weights: str) -> None:
        """What a new process does not have."""
        self.weights, self.label, self.pause_mode, self.stale_cache = weights, "default", None, False

    def _restart_at_once(self) -> None:
        """Another process behind the same port: requests break, and nobody sees the port closed."""
        for run in list(self._live):
            run.dead = True
            self._leave(run)
        self._forget(self.first_weights)
        self.starts += 1

    # ---------------------------------------------------------------- generation

    def step(self, count: int = 1) -> None:
        """``count`` tokens for every running request; those that wait are given places first."""
        for _ in range(count):
            if self.pause_mode is not None:
                return
            while self._queue and len(self.running) < self.max_running:
                run = self._queue.popleft()
                run.running = run.started = True
            for run in self.running:
                if run.frozen or run.finish is not None or self._fault_at(run):
                    continue
                self._make_token(run)
                if run.finish is not None:
                    self._end(run, run.finish)
                elif run.due:
                    run.flush()

    def _make_token(self, run: R) -> None:
        run.make_token(self.weights, self.label, self.vocab_size, self.eos, self.mean_length)

    def _fault_at(self, run: R) -> bool:
        """Faults that wait for a number of tokens."""
        if run.fault is None or len(run.ids) < run.fault.after_tokens:
            return False
        match run.fault.kind:
            case RequestFault.SERVER_DIES:
                self.die()
            case RequestFault.BREAK_OFF:
                run.dead = True
                self._leave(run)
            case RequestFault.UNASKED_ABORT:
                self._end(run, run.aborted())
            case RequestFault.EARLY_LENGTH if run.ids:
                self._end(run, run.used_up())
            case RequestFault.EARLY_STOP if run.ids:
                self._end(run, run.stopped())
            case kind if kind in KEEPS_ALIVE:
                run.frozen = True
                run.flush()
            case kind:
                return self._fails_by(run, kind)
        return True

    def _end(self, run: R, finish: Any) -> None:
        run.finish = finish
        run.flush()
        self._leave(run)

    # ---------------------------------------------------------------- requests

    @property
    def running(self) -> list[R]:
        """Requests that have a place."""
        return [run for run in self._live if run.running]

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def open_requests(self) -> int:
        """Requests that the server has not done with."""
        return len(self._live)

    async def _tick(self) -> None:
        while True:
            busy = any(not r.frozen for r in self.running) or (self._queue and len(self.running) < self.max_running)
            if self.alive and not self.stepped and self.pause_mode is None and busy:
                self.step()
                for _ in range(self.turns):
                    await self.turn()
            else:
                await self._wait()

    def go_on(self) -> None:
        """Generate with the turns of the loop again."""
        self.stepped = False
        self._changed.set()

    def _plan(self) -> PlannedFault | None:
        """The fault of the request that has just come."""
        for fault in self.faults:
            if fault.times and fault.request in (None, len(self.runs)):
                fault.times -= 1
                return fault
        return None

    def _leave(self, run: R) -> None:
        run.running = False
        if run in self._live:
            self._live.remove(run)
        if run in self._queue:
            self._queue.remove(run)
        run.news.set()
        self._changed.set()

    async def _news(self, run: R) -> None:
        run.news.clear()
        await run.news.wait()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # ---------------------------------------------------------------- answers

    async def _plain(self, request: web.Request, run: R) -> web.StreamResponse:
        alive = None
        while not run.over:
            if run.frozen and run.hit(*KEEPS_ALIVE):
                alive = await spaces(request, alive)
            else:
                await self._news(run)
        if run.dead:
            return cut(request)
        failure = self._failure(run)
        if failure is not None:
            return failure
        text = self._said(run)
        run.sent = run.flushed
        if alive is not None:
            await alive.write(text.encode())
            return alive
        return web.Response(text=text, content_type="application/json")

    async def _stream(self, request: web.Request, run: R) -> web.StreamResponse:
        response = await event_stream(request)
        while True:
            while run.flushed == run.sent and not run.over:
                if run.frozen and run.hit(*KEEPS_ALIVE):
                    await response.write(self._alive(run))
                    await asyncio.sleep(KEEP_ALIVE_S)
                else:
                    await self._news(run)
            if run.dead:
                return cut(request)
            ended, event, fresh = run.over, self._said(run), run.sent < run.flushed
            run.sent = run.flushed
            await self._write(response, run, event)
            doubled = run.hit(RequestFault.DOUBLED_EVENT) and fresh and run.fault and run.sent > run.fault.after_tokens
            if doubled or (run.hit(RequestFault.ENDS_TWICE) and ended):
                await self._write(response, run, event if doubled else self._said(run))
                run.fault = None
            if not event.endswith("}"):
                return cut(request)
            if ended:
                break
        for event in [] if run.failed else self._usage(run):
            await self._write(response, run, event)
        if not run.hit(RequestFault.NO_DONE):
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _alive(self, run: R) -> bytes:
        """A sign of life without tokens."""
        if run.hit(RequestFault.COMMENTS):
            return b": ping\n\n"
        if run.hit(RequestFault.PINGS):
            return b"event: ping\n\n"
        return "".join(f"data: {event}\n\n" for event in (self._said(run), *self._usage(run))).encode()

    async def _write(self, response: web.StreamResponse, run: R, event: str) -> None:
        raw = f"data: {event}\n\n".encode()
        if not run.hit(RequestFault.TRICKLE):
            await response.write(raw)
            return
        for i in range(len(raw)):
            await response.write(raw[i : i + 1])
            await asyncio.sleep(0)

    # ---------------------------------------------------------------- control

    @web.middleware
    async def _see(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.transport is not None:
            self._transports.add(request.transport)
        early = await self._early(request)
        response = early if early is not None else await self._controlled(request, handler)
        if self.unanswered.get(request.path):
            self.unanswered[request.path] -= 1
            return cut(request)
        return response

    async def _controlled(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's answer, or what goes wrong with it by the script."""
        for fault in self.control_faults:
            if fault.route != request.path or not fault.times:
                continue
            if fault.later:
                fault.later -= 1
                continue
            fault.times -= 1
            if fault.kind is ControlFault.RESTARTS_BEFORE:
                self._restart_at_once()
                return await handler(request)
            if fault.kind is ControlFault.RESTARTS_AFTER:
                response = await handler(request)
                self._restart_at_once()
                return response
            if fault.kind is ControlFault.SILENT:
                await handler(request)
                while self.alive:
                    await self._wait()
                return cut(request)
            if fault.obeyed:
                await handler(request)
            return await wrong_answer(fault.kind, request)
        return await handler(request)


async def event_stream(request: web.Request) -> web.StreamResponse:
    """The beginning of an answer in events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def spaces(request: web.Request, response: web.StreamResponse | None) -> web.StreamResponse:
    """A sign of life of a plain answer, whose JSON comes later."""
    if response is None:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
    await response.write(b" ")
    await asyncio.sleep(KEEP_ALIVE_S)
    return response


def cut(request: web.Request) -> web.Response:
    """Break the connection of a request."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
