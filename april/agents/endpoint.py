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
from april.server_text import clean

log = logging.getLogger("april")
wire_log = logging.getLogger("april.agents.wire")


def _without_content(record: logging.LogRecord) -> bool:
    """What is no HTTP is named by its error alone: its text would have a part of what was sent."""
    kind = record.exc_info[0] if record.exc_info else None
    record.msg, record.args = "a connection to an agent's endpoint failed: %s", ("" if kind is None else kind.__name__,)
    record.exc_info = record.exc_text = None
    return True


wire_log.addFilter(_without_content)

GRACE_S = 60.0
"""Seconds in which an answer goes on that nobody waits for, in case its client asks again."""
SHUTDOWN_S = 1.0
"""Seconds that clients have to read what is left when the server ends."""
BY_NAME = "by-name"
"""In the place of a session's own path: the client says which one it means."""
LARGEST_BODY = 32 << 20
SMALL_BODY = 1 << 20
BYTES_PER_TOKEN = 32
"""A body above SMALL_BODY with more than these for each token of the context is refused before it is tokenised."""
MOST_MESSAGES = 4096
NO_RETRY = {"x-should-retry": "false"}


@dataclass(slots=True, eq=False)
class Opened:
    """A session under its address."""

    session: Session
    endpoint: Endpoint
    path: str
    key: str
    asked: Callable[[], None]
    """Called when a client asks with the key."""
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


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a session: a server, and what is the same there after a restart (drawn where it is empty)."""

    endpoint: Endpoint
    path: str = ""
    key: str = ""
    asked: Callable[[], None] = lambda: None

    def open(self, session: Session) -> Opened:
        """An address and a key for a session, which is used on the server's loop from now on."""
        path, key = self.path or secrets.token_hex(8), self.key or secrets.token_urlsafe(24)
        return self.endpoint.add(Opened(session, self.endpoint, path, key, self.asked))


@dataclass(slots=True, eq=False)
class Endpoint:
    """The server; ``add`` and ``shut`` may be called from any thread.

    Args:
        host: the address that it listens on.
        port: 0 means any that is free.
        commit_s: see COMMIT_S.
        alive_s: see ALIVE_S.
        grace_s: see GRACE_S.
        model: the name that ``/v1/models`` says.
        more: adds routes.
    """

    host: str = "127.0.0.1"
    port: int = 0
    commit_s: float = COMMIT_S
    alive_s: float = ALIVE_S
    grace_s: float = GRACE_S
    model: str = "april"
    more: Callable[[web.UrlDispatcher], None] = lambda router: None
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

    def add(self, door: Opened) -> Opened:
        """Serve a session at its address."""
        self._doors[door.path] = door
        return door

    def shut(self, door: Opened, why: str) -> list[int]:
        """Answer nothing of this session any more; returns the numbers of calls whose answers a client has heard."""
        if self._doors.get(door.path) is door:
            del self._doors[door.path]
        for name in door.names:
            self._named.pop(name, None)
        if self._thread is not None:
            self._loop.call_soon_threadsafe(door.session.close, why)
        return door.session.heard()

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
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[_by_name])
        self.more(app.router)
        for base in ("/{path}", "/{path}/v1", "/{path}/v1/v1"):  # a client of Anthropic's writes /v1 itself
            for route, dialect in ROUTES.items():
                app.router.add_post(base + route, self._handler(dialect))
            app.router.add_post(base + "/messages/count_tokens", self._count)
            app.router.add_get(base + "/models", self._models)
        # a handler ends with its client: whether somebody listens decides what a request is that comes again
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S,
            logger=wire_log,
        )  # fmt: skip
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
        check_key(request, self.key if door is None else door.key, "the API key is not that of this address")
        name = request.headers.get("X-Session-ID")
        if door is None and name is None and request.path.endswith("count_tokens"):
            door = next(iter(self._doors.values()), None)  # a count is the same for all
        door = door or self._named.get(name or "")
        if door is None:
            raise RequestError(f"no sample has the name {name!r:.100} (X-Session-ID)", 404, "not_found_error")
        door.asked()
        return door

    async def _models(self, request: web.Request) -> web.Response:
        context = self._door(request).session.max_context
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "april"}
        return web.json_response({"object": "list", "data": [{**model, "max_model_len": context}]})

    async def _count(self, request: web.Request) -> web.Response:
        """Anthropic's count of the tokens that a request would have."""
        session = self._door(request).session
        wanted = ROUTES["/messages"].read(await body_of(request, _most_bytes(session)))
        return web.json_response({"input_tokens": await session.count(wanted)})

    def _handler(self, dialect: Dialect) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._door(request).session
            asked, wanted = await self._ask(session, dialect, request)
            asked.clients += 1
            try:
                return await self._reply(request, dialect, wanted, asked)
            finally:
                asked.clients -= 1
                if not asked.clients and not asked.task.done():
                    self._loop.call_later(self.grace_s, session.leave, asked)

        return handle

    async def _ask(self, session: Session, dialect: Dialect, request: web.Request) -> tuple[Asked, ChatRequest]:
        body = await body_of(request, _most_bytes(session))
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
        written = b""
        try:
            answer = asked.task.result()
            written = _written(dialect, wanted, answer)
        except asyncio.CancelledError:
            error = RequestError("this sample was given up: nothing of it is answered any more", 410, "session_closed")
        except RequestError as refused:
            error = refused
        except Exception as failure:
            error = RequestError(clean(str(failure) or type(failure).__name__), 400)
        else:
            response = await _begin(request, wanted) if response is None else response
            to = request.transport
            if to is None or to.is_closing():
                return response
            asked.sending.append(to)  # before the last byte: who has read it may be over before this goes on
            try:
                await response.write(written)
                await response.write_eof()
                asked.heard = True
            finally:
                asked.sending.remove(to)
            return response
        if response is None:
            raise error
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


@web.middleware
async def _by_name(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    """Whatever goes wrong has a name, in the words of the dialect; the log says nothing of what was asked."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except RequestError as refused:
        error = refused
    except web.HTTPException as refused:
        error = RequestError(f"{request.method} {request.path[:200]}: {refused.reason}", refused.status)
    except (ConnectionError, asyncio.CancelledError):
        raise  # the client has gone
    except Exception as failure:
        log.warning("a request to %s failed: %s", request.match_info.route.resource, type(failure).__name__)
        error = RequestError(f"the request cannot be read: {type(failure).__name__}", 400)
    route = next((route for route in ROUTES if request.path.endswith(route)), "/chat/completions")
    dialect = ROUTES["/messages" if request.path.endswith("/count_tokens") else route]
    headers = {"Retry-After": str(error.retry_s)} if error.retry_s else {} if error.retry else NO_RETRY
    return web.json_response(dialect.error(error), status=error.status, headers=headers)


def check_key(request: web.Request, key: str, why_not: str) -> None:
    """Raise RequestError for a request without the key."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    # a client may bring both, one of which is a placeholder
    given = request.headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""
    if not any(hmac.compare_digest(one.encode(errors="surrogateescape"), key.encode()) for one in given):
        raise RequestError(why_not, 401, "authentication_error")


def _most_bytes(session: Session) -> int:
    """A body of more bytes has no room in the context, whatever it says."""
    if session.sight is not None:
        return LARGEST_BODY  # most of it is images
    return min(LARGEST_BODY, max(SMALL_BODY, BYTES_PER_TOKEN * session.max_context))


async def body_of(request: web.Request, most: int) -> Any:
    """The JSON of a request, of so many bytes at most; raises RequestError."""
    large = RequestError(f"the body is larger than {most:,} bytes, for which there is no room", 413)
    if (request.content_length or 0) > most:
        raise large
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise large from None
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:  # what a decoder raises
        raise RequestError(f"the body cannot be decoded: {type(error).__name__}") from None
    if len(raw) > most:
        raise large
    try:
        text = raw.decode()
        body = json.loads(text or "{}")
        if "\\ud" in text or "\\uD" in text:
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the body has half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {str(error)[:200]}") from None
    return body


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
