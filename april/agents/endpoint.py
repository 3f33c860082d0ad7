"""The HTTP server of a process, with an address and a key for each sample; it runs in its own thread.

A client sees only that an answer takes long, never an abort: filler bytes keep its connection alive. The thread is
separate so that a function which blocks the driver's loop with its own client can be told so; a server on that loop
would wait for itself.
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
from april.text.server_text import clean

log = logging.getLogger("april")
wire_log = logging.getLogger("april.agents.wire")


def _without_content(record: logging.LogRecord) -> bool:
    """Reduce a log record about malformed HTTP to the error's type, as its text contains part of what was sent."""
    kind = record.exc_info[0] if record.exc_info else None
    record.msg, record.args = "a connection to an agent's endpoint failed: %s", ("" if kind is None else kind.__name__,)
    record.exc_info = record.exc_text = None
    return True


wire_log.addFilter(_without_content)

GRACE_S = 60.0
"""Seconds for which an answer is still generated after its client has left, in case the client asks again."""
SHUTDOWN_S = 1.0
"""Seconds that clients have to read what is left when the server stops."""
BY_NAME = "by-name"
"""Path that clients use instead of a session's own when they name the session in a header."""
LARGEST_BODY = 32 << 20
SMALL_BODY = 1 << 20
BYTES_PER_TOKEN = 32
"""Bytes allowed for each token of the context: a body above this and SMALL_BODY is refused before it is tokenised."""
MOST_MESSAGES = 4096
NO_RETRY = {"x-should-retry": "false"}


@dataclass(slots=True, eq=False)
class Opened:
    """A session with the path and key under which clients reach it."""

    session: Session
    endpoint: Endpoint
    path: str
    key: str
    asked: Callable[[], None]
    """Called when a client makes a request with the key."""
    names: list[str] = field(default_factory=list)
    refused: str = ""
    """Reason why the latest refused request was refused; empty if there is none."""

    @property
    def accepted(self) -> bool:
        """True if at least one request was not refused."""
        return any(self.session.asked.values())

    @property
    def url(self) -> str:
        """Base URL for a client."""
        return f"{self.endpoint.url}/{self.path}/v1"

    def by_name(self) -> tuple[str, str]:
        """Return base URL and key for a client of several sessions, which names one per request (``X-Session-ID``)."""
        return f"{self.endpoint.url}/{BY_NAME}/v1", self.endpoint.key

    def name(self, name: str) -> None:
        """Register this session under a name, for clients of :meth:`by_name`. May be called from any thread."""
        self.names.append(name)
        self.endpoint._named[name] = self


@dataclass(frozen=True, slots=True)
class Place:
    """Where a session is served: the server, and a path and key to keep across restarts (random if empty)."""

    endpoint: Endpoint
    path: str = ""
    key: str = ""
    asked: Callable[[], None] = lambda: None

    def open(self, session: Session) -> Opened:
        """Serve a session, which may be used only on the server's loop from now on; returns its address and key."""
        path, key = self.path or secrets.token_hex(8), self.key or secrets.token_urlsafe(24)
        return self.endpoint.add(Opened(session, self.endpoint, path, key, self.asked))


@dataclass(slots=True, eq=False)
class Endpoint:
    """The HTTP server; ``add`` and ``shut`` may be called from any thread.

    Args:
        host: address to listen on.
        port: port to listen on; 0 means any free one.
        commit_s: see COMMIT_S.
        alive_s: see ALIVE_S.
        grace_s: see GRACE_S.
        model: name of the model in ``/v1/models``.
        more: function that adds further routes.
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
        """Start the server in its thread; raises OSError if the address is taken."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="april agents", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def add(self, door: Opened) -> Opened:
        """Serve a session at its address."""
        self._doors[door.path] = door
        return door

    def shut(self, door: Opened, why: str) -> list[int]:
        """Stop answering this session's requests; returns the numbers of calls whose answers a client has received."""
        if self._doors.get(door.path) is door:
            del self._doors[door.path]
        for name in door.names:
            self._named.pop(name, None)
        if self._thread is not None:
            self._loop.call_soon_threadsafe(door.session.close, why)
        return door.session.heard()

    def stop(self) -> None:
        """Stop the server and wait for its thread to end."""
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
        for base in ("/{path}", "/{path}/v1", "/{path}/v1/v1"):  # Anthropic's clients append /v1 themselves
            for route, dialect in ROUTES.items():
                app.router.add_post(base + route, self._handler(dialect))
            app.router.add_post(base + "/messages/count_tokens", self._count)
            app.router.add_get(base + "/models", self._models)
        # cancel a handler when its client leaves: whether a client still waits decides if an equal request is a retry
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
        """Return the session that a request is for; raises RequestError if there is none or the key is wrong."""
        by_name = request.match_info["path"] == BY_NAME
        door = self._doors.get(request.match_info["path"])
        if door is None and not by_name:
            raise RequestError("no sample has this address any more, or none ever had it", 404, "not_found_error")
        check_key(request, self.key if door is None else door.key, "the API key does not belong to this address")
        name = request.headers.get("X-Session-ID")
        if door is None and name is None and request.path.endswith("count_tokens"):
            door = next(iter(self._doors.values()), None)  # all sessions count tokens alike
        door = door or self._named.get(name or "")
        if door is None:
            raise RequestError(
                f"no sample has the name {name!r:.100} (X-Session-ID): the model {self.model!r} is the policy, which "
                "only answers agents that are trained; other models, such as a user simulator or a judge, need an "
                "entry of their own in the environment's configuration", 404, "not_found_error",
            )  # fmt: skip
        door.asked()
        return door

    async def _models(self, request: web.Request) -> web.Response:
        context = self._door(request).session.max_context
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "april"}
        return web.json_response({"object": "list", "data": [{**model, "max_model_len": context}]})

    async def _count(self, request: web.Request) -> web.Response:
        """Answer Anthropic's request for the number of tokens in a conversation."""
        session = self._door(request).session
        wanted = ROUTES["/messages"].read(await body_of(request, _most_bytes(session)))
        return web.json_response({"input_tokens": await session.count(wanted)})

    def _handler(self, dialect: Dialect) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            door = self._door(request)
            session = door.session
            try:
                asked, wanted = await self._ask(session, dialect, request)
            except RequestError as error:
                door.refused = str(error)
                raise
            asked.clients += 1
            try:
                return await self._reply(request, dialect, wanted, asked)
            except RequestError as error:
                door.refused = str(error)
                raise
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
        try:
            what = json.dumps([request.path, client, body], sort_keys=True, allow_nan=False)
        except ValueError:
            raise RequestError("the body is not JSON: it has a number that is not finite") from None
        retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        return session.ask(wanted, hashlib.sha256(what.encode()).hexdigest(), retry=retry), wanted

    async def _reply(
        self, request: web.Request, dialect: Dialect, wanted: ChatRequest, asked: Asked
    ) -> web.StreamResponse:
        """Wait for the answer while keeping the connection alive, and send it."""
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
            error = RequestError((
                "this sample was given up, so its requests are no longer answered"
            ), 410, "session_closed")
        except RequestError as refused:
            error = refused
        except Exception as failure:
            error = RequestError(clean(str(failure) or type(failure).__name__), 400)
        else:
            response = await _begin(request, wanted) if response is None else response
            to = request.transport
            if to is None or to.is_closing():
                return response
            asked.sending.append(to)  # before the last byte: a client that has read it may leave before this continues
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
        # the 200 is sent already, so the error can only be reported by cutting the connection
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
    """Turn every failure into an error of the request's dialect, without logging what was asked."""
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
    """Raise RequestError for a request that does not carry the key."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    # a client may send both headers, one of them with a placeholder
    given = request.headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""
    if not any(hmac.compare_digest(one.encode(errors="surrogateescape"), key.encode()) for one in given):
        raise RequestError(why_not, 401, "authentication_error")


def _most_bytes(session: Session) -> int:
    """Return the bytes above which a body cannot fit into the context, whatever it contains."""
    if session.sight is not None:
        return LARGEST_BODY  # images may make up most of the body
    return min(LARGEST_BODY, max(SMALL_BODY, BYTES_PER_TOKEN * session.max_context))


async def body_of(request: web.Request, most: int) -> Any:
    """Return the JSON of a request whose body has at most ``most`` bytes; raises RequestError."""
    large = RequestError(f"the body is larger than {most:,} bytes, the limit at the moment", 413)
    if (request.content_length or 0) > most:
        raise large
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise large from None
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:  # whatever the decoder of the body raises
        raise RequestError(f"the body cannot be decoded: {type(error).__name__}") from None
    if len(raw) > most:
        raise large
    try:
        text = raw.decode()
        body = json.loads(text or "{}")
        if "\\ud" in text or "\\uD" in text:
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the body has half of a surrogate pair, which is not valid text") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {str(error)[:200]}") from None
    return body


async def _begin(request: web.Request, wanted: ChatRequest) -> web.StreamResponse:
    """Send the headers of a 200 response."""
    kind = "text/event-stream" if wanted.stream else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-store"})
    await response.prepare(request)
    return response


def _written(dialect: Dialect, wanted: ChatRequest, answer: Answer) -> bytes:
    """Return the answer's bytes as one piece, so that a client receives all of it or nothing."""
    if wanted.stream:
        return b"".join(map(_event, dialect.stream(answer, wanted)))
    return json.dumps(dialect.whole(answer, wanted), allow_nan=False).encode()


def _event(event: SseEvent) -> bytes:
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data, allow_nan=False)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()
