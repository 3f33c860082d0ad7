"""The HTTP server of a process: an address and a key for each sample, on a thread of its own.

A client sees an answer that takes long, never an abort: bytes that mean nothing keep its connection alive. The thread
lets a function that blocks the driver's loop with a client of its own be told so, instead of waiting for itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from april.agents.chat import ALIVE_S, COMMIT_S, Answer, ChatRequest, RequestError
from april.agents.dialects import Anthropic, Dialect, OpenAIChat, OpenAIText, SseEvent
from april.agents.responses import OpenAIResponses
from april.agents.session import Asked, Session
from april.driver.llm import Door

log = logging.getLogger("april")

SHUTDOWN_S = 1.0
"""Seconds that clients have to read what is left when the server ends."""
BY_NAME = "by-name"
"""In the place of a session's own path: the client says which one it means."""
LARGEST_BODY = 32 << 20
MOST_MESSAGES = 4096
NO_RETRY = {"x-should-retry": "false"}


@dataclass(slots=True, eq=False)
class Opened:
    """A session under its address."""

    session: Session
    path: str
    key: str
    endpoint: Endpoint
    names: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The address for a client."""
        return f"{self.endpoint.url}/{self.path}/v1"

    def by_name(self) -> tuple[str, str]:
        """Address and key of one client for several sessions, each of which it names: ``X-Session-ID``."""
        return f"{self.endpoint.url}/{BY_NAME}/v1", self.endpoint.key

    def name(self, name: str) -> None:
        """This session's name for such a client. May be called from any thread."""
        self.names.append(name)
        self.endpoint._named[name] = self


@dataclass(slots=True, eq=False)
class Endpoint:
    """The server; ``open`` and ``shut`` may be called from any thread.

    Args:
        host: the address that it listens on.
        port: 0 means any that is free.
        commit_s: see COMMIT_S.
        alive_s: see ALIVE_S.
        model: the name that ``/v1/models`` says.
        max_model_len: the model's context.
    """

    host: str = "127.0.0.1"
    port: int = 0
    commit_s: float = COMMIT_S
    alive_s: float = ALIVE_S
    model: str = "april"
    max_model_len: int | None = None
    _doors: dict[str, Opened] = field(default_factory=dict)
    _named: dict[str, Opened] = field(default_factory=dict)
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _thread: threading.Thread | None = None
    _runner: web.AppRunner | None = None
    url: str = ""

    # ---------------------------------------------------------------- from other threads

    def start(self) -> None:
        """Begin to listen; raises OSError if the address is taken."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="april agents", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def open(self, session: Session) -> Opened:
        """An address and a key for a session, which is used on this server's loop from now on."""
        door = Opened(session, secrets.token_hex(8), secrets.token_urlsafe(24), self)
        self._doors[door.path] = door
        return door

    def shut(self, door: Door, why: str) -> list[int]:
        """Answer nothing of this session any more; returns the numbers of calls whose answers nobody has heard."""
        opened = next((o for o in list(self._doors.values()) if o is door), None)
        if opened is None:
            return []
        del self._doors[opened.path]
        for name in opened.names:
            del self._named[name]
        self._loop.call_soon_threadsafe(opened.session.close, why)
        return opened.session.unheard()

    def stop(self) -> None:
        """End the server; its thread has ended when this returns."""
        if self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._thread = None

    # ---------------------------------------------------------------- on its loop

    async def _start(self) -> None:
        app = web.Application(client_max_size=LARGEST_BODY)
        for base in ("/{path}", "/{path}/v1", "/{path}/v1/v1"):  # a client of Anthropic's writes /v1 itself
            for route, dialect in ROUTES.items():
                app.router.add_post(base + route, self._handler(dialect))
            app.router.add_post(base + "/messages/count_tokens", self._count)
            app.router.add_get(base + "/models", self._models)
        # a handler ends with its client: whether somebody listens decides what a request is that comes again
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        for door in list(self._doors.values()):
            door.session.close("april has ended")
        self._doors.clear()
        if self._runner is not None:
            await self._runner.cleanup()

    def _door(self, request: web.Request) -> Opened:
        """The session that the request is for; raises RequestError without its key."""
        by_name = request.match_info["path"] == BY_NAME
        door = self._doors.get(request.match_info["path"])
        if door is None and not by_name:
            raise RequestError("no sample has this address, or not any more", 404, "not_found_error")
        key = self.key if door is None else door.key
        # a client may bring both, one of which is a placeholder
        given = request.headers.get("x-api-key", ""), request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not any(hmac.compare_digest(one.encode(), key.encode()) for one in given):
            raise RequestError("the API key is not that of this address", 401, "authentication_error")
        name = request.headers.get("X-Session-ID")
        if door is None and name is None and request.path.endswith("count_tokens"):
            door = next(iter(self._doors.values()), None)  # a count is the same for all
        door = door or self._named.get(name or "")
        if door is None:
            raise RequestError(f"no sample has the name {name!r:.100} (X-Session-ID)", 404, "not_found_error")
        return door

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._door(request)
        except RequestError as error:
            return web.json_response(ROUTES["/chat/completions"].error(error), status=error.status, headers=NO_RETRY)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "april"}
        return web.json_response({"object": "list", "data": [{**model, "max_model_len": self.max_model_len}]})

    async def _count(self, request: web.Request) -> web.Response:
        """Anthropic's count of the tokens that a request would have."""
        dialect = ROUTES["/messages"]
        try:
            count = self._door(request).session.count(dialect.read(await _body(request)))
        except RequestError as error:
            return _refused(dialect, error)
        return web.json_response({"input_tokens": count})

    def _handler(self, dialect: Dialect) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                door = self._door(request)
                asked, wanted = await self._ask(door.session, dialect, request)
            except RequestError as error:
                return _refused(dialect, error)
            asked.clients += 1
            try:
                return await self._reply(request, dialect, wanted, asked)
            finally:
                asked.clients -= 1

        return handle

    async def _ask(self, session: Session, dialect: Dialect, request: web.Request) -> tuple[Asked, ChatRequest]:
        body = await _body(request)
        wanted = dialect.read(body)
        if len(wanted.messages) > MOST_MESSAGES:
            raise RequestError(f"more than {MOST_MESSAGES} messages in one conversation")
        for stream in ("stream", "stream_options"):
            body.pop(stream, None)
        client = request.headers.get("X-Session-ID", "")
        what = json.dumps([request.path, client, body], sort_keys=True)
        retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        return session.ask(wanted, hashlib.sha256(what.encode()).hexdigest(), retry=retry), wanted

    async def _reply(
        self, request: web.Request, dialect: Dialect, wanted: ChatRequest, asked: Asked
    ) -> web.StreamResponse:
        """Wait for the answer, keeping the connection alive, and write it."""
        done, _ = await asyncio.wait([asked.task], timeout=self.commit_s)
        response: web.StreamResponse | None = None
        if not done:
            response = await _begin(request, wanted)
            while not done:
                await response.write(dialect.ping if wanted.stream else b"\n")
                done, _ = await asyncio.wait([asked.task], timeout=self.alive_s)
        try:
            answer = asked.task.result()
        except asyncio.CancelledError:
            error = RequestError("this sample was given up: nothing of it is answered any more", 410, "session_closed")
        except RequestError as refused:
            error = refused
        except Exception as failure:
            error = RequestError(str(failure) or type(failure).__name__, 400)
        else:
            response = await _begin(request, wanted) if response is None else response
            to = request.transport
            if to is None or to.is_closing():
                return response
            asked.sending.append(to)  # before the last byte: who has read it may be over before this goes on
            try:
                await response.write(_written(dialect, wanted, answer))
                await response.write_eof()
                asked.heard = True
            finally:
                asked.sending.remove(to)
            return response
        if response is None:
            return _refused(dialect, error)
        if wanted.stream:
            await response.write(_event(("error", dialect.error(error))))
            await response.write_eof()
            return response
        # a body that began as an answer cannot become an error: the client takes a cut connection for one
        if request.transport is not None:
            request.transport.abort()
        return response


ROUTES: dict[str, Dialect] = {
    "/chat/completions": OpenAIChat(),
    "/completions": OpenAIText(),
    "/responses": OpenAIResponses(),
    "/messages": Anthropic(),
}


async def _body(request: web.Request) -> Any:
    """The JSON of a request; raises RequestError."""
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise RequestError(f"the body is larger than {LARGEST_BODY >> 20} MiB", 413) from None
    try:
        return json.loads(raw)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None


async def _begin(request: web.Request, wanted: ChatRequest) -> web.StreamResponse:
    """Send the 200."""
    kind = "text/event-stream" if wanted.stream else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-store"})
    await response.prepare(request)
    return response


def _written(dialect: Dialect, wanted: ChatRequest, answer: Answer) -> bytes:
    """The answer in one piece: it is heard as a whole, or not."""
    if wanted.stream:
        return b"".join(map(_event, dialect.stream(answer, wanted)))
    return json.dumps(dialect.whole(answer, wanted)).encode()


def _event(event: SseEvent) -> bytes:
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def _refused(dialect: Dialect, error: RequestError) -> web.Response:
    headers = {} if error.retry else NO_RETRY
    return web.json_response(dialect.error(error), status=error.status, headers=headers)
