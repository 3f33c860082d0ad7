"""The HTTP server to which agents send their requests; each sample has its own address and key.

When april interrupts a rollout, a client notices only that the answer takes long: keep-alive bytes hold its connection
open. The server has its own thread, because a rollout function may block april's event loop while its client waits for
an answer. A server on that loop would deadlock; this one still answers, so that april can report the blocking function.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

import msgspec
from aiohttp import web

from april.agents.chat import COMMIT_S, KEEPALIVE_S, Answer, ChatRequest, RequestError
from april.agents.dialects import Anthropic, Dialect, OpenAIChat, OpenAIText, SseEvent
from april.agents.responses import OpenAIResponses
from april.agents.session import AnswerTask, Session
from april.concurrency.http_listener import HttpListener
from april.text.server_text import clean

log = logging.getLogger("april")
wire_log = logging.getLogger("april.agents.wire")


def _without_content(record: logging.LogRecord) -> bool:
    """Reduce a log record about malformed HTTP to the error's type, because its text contains a part of the request."""
    kind = record.exc_info[0] if record.exc_info else None
    record.msg, record.args = "a connection to an agent's endpoint failed: %s", ("" if kind is None else kind.__name__,)
    record.exc_info = record.exc_text = None
    return True


wire_log.addFilter(_without_content)

GRACE_S = 60.0
"""Seconds for which an answer is still generated after its latest client has disconnected, in case it asks again."""
SHUTDOWN_S = 1.0
"""Seconds that clients have to read the rest of their answers when the server stops."""
SHARED_PATH = "by-name"
"""Path that replaces a session's own path for clients that name the session in a header."""
MAX_BODY_BYTES = 32 << 20
SMALL_BODY_BYTES = 1 << 20
BYTES_PER_TOKEN = 32
"""Bytes of a request body allowed per token of the context. Longer bodies are refused before they are tokenised, but
bodies of up to SMALL_BODY_BYTES are always accepted."""
MAX_MESSAGES = 4096
NO_RETRY = {"x-should-retry": "false"}


@dataclass(slots=True, eq=False)
class ServedSession:
    """A session with the path and key under which clients reach it."""

    session: Session
    endpoint: Endpoint
    path: str
    key: str = field(repr=False)
    on_request: Callable[[], None]
    """Function that is called for each request with the key."""
    names: list[str] = field(default_factory=list)
    last_refusal: str = ""
    """Reason why the latest refused request was refused; empty if there is none."""

    @property
    def has_received_answers(self) -> bool:
        """True if a client has received the answer to at least one request."""
        return bool(self.session.received_calls())

    @property
    def url(self) -> str:
        """Base URL for a client."""
        return f"{self.endpoint.url}/{self.path}/v1"

    def shared_address(self) -> tuple[str, str]:
        """Return base URL and key for a client that names one of several sessions in each request (X-Session-ID)."""
        return f"{self.endpoint.url}/{SHARED_PATH}/v1", self.endpoint.key

    def register_name(self, name: str, refusal: str = "") -> None:
        """Register this session under a name, for clients of :meth:`shared_address`. May be called from any thread.

        If ``refusal`` is not empty, requests with the name are refused with this text.
        """
        self.names.append(name)
        self.endpoint._sessions_by_name[name] = refusal or self


@dataclass(slots=True, eq=False)
class Endpoint:
    """The HTTP server; ``serve`` and ``close_session`` may be called from any thread.

    Args:
        port: port to listen on; 0 means any free one.
        commit_s: seconds after which a slow answer begins with status 200 and keep-alive bytes.
        alive_s: seconds between two keep-alive bytes of a slow answer.
        reached_at: host or host:port at which clients reach the server, for ``url``; empty means ``host``.
        clients: networks whose clients may connect, besides this machine; empty means all networks.
        grace_s: seconds for which an answer is still generated after its latest client has disconnected.
        model: name of the model in ``/v1/models``.
    """

    host: str = "127.0.0.1"
    port: int = 0
    commit_s: float = COMMIT_S
    alive_s: float = KEEPALIVE_S
    reached_at: str = ""
    clients: Sequence[str] = ()
    grace_s: float = GRACE_S
    model: str = "april"
    add_routes: Callable[[web.UrlDispatcher], None] = lambda router: None
    _sessions_by_path: dict[str, ServedSession] = field(default_factory=dict)
    _sessions_by_name: dict[str, ServedSession | str] = field(default_factory=dict)
    """Sessions by the names that clients send; a string is the text with which requests with that name are refused."""
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _thread: threading.Thread | None = None
    _listener: HttpListener | None = None
    url: str = ""

    # ---------------------------------------------------------------- called from other threads

    def start(self) -> None:
        """Start the server in its thread; raises OSError if the address is taken."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="april agents", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def serve(
        self, session: Session, path: str = "", key: str = "", on_request: Callable[[], None] = lambda: None
    ) -> ServedSession:
        """Serve a session, which may be used only on the server's loop from now on; returns its address and key.

        An empty ``path`` or ``key`` is replaced by a random one; with fixed ones, clients can return after a restart.
        """
        path, key = path or secrets.token_hex(8), key or secrets.token_urlsafe(24)
        served = self._sessions_by_path[path] = ServedSession(session, self, path, key, on_request)
        return served

    def close_session(self, served: ServedSession, why: str) -> list[int]:
        """Stop answering this session's requests; returns the numbers of calls whose answers a client has received."""
        if self._sessions_by_path.get(served.path) is served:
            del self._sessions_by_path[served.path]
        for name in served.names:
            self._sessions_by_name.pop(name, None)
        if self._thread is not None:
            self._loop.call_soon_threadsafe(served.session.close, why)
        return served.session.received_calls()

    def stop(self) -> None:
        """Stop the server and wait for its thread to end."""
        if self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._thread = None

    # ---------------------------------------------------------------- called on the server's loop

    async def _start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_responses, self._refuse_others])
        self.add_routes(app.router)
        for base in ("/{path}", "/{path}/v1", "/{path}/v1/v1"):  # Anthropic's clients append /v1 themselves
            for route, dialect in ROUTES.items():
                app.router.add_post(base + route, self._handler(dialect))
            app.router.add_post(base + "/messages/count_tokens", self._count_tokens)
            app.router.add_get(base + "/models", self._models)
        # A handler must end when its client leaves: an equal later request shares the answer only if no client waits.
        self._listener = HttpListener(app, SHUTDOWN_S, cancel_handlers=True, logger=wire_log)
        _, port = await self._listener.start((self.host, self.port))
        host = self.reached_at or (f"[{self.host}]" if ":" in self.host else self.host)
        self.url = f"http://{host}" if re.search(r":\d+$", self.reached_at) else f"http://{host}:{port}"

    @web.middleware
    async def _refuse_others(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        """Refuse clients from other networks than ``clients``."""
        if self.clients:
            peer = ip_address((request.remote or "").partition("%")[0])
            peer = getattr(peer, "ipv4_mapped", None) or peer
            if not (peer.is_loopback or any(peer in ip_network(network) for network in self.clients)):
                raise RequestError(f"clients at {peer} may not connect; see agents.clients", 403, "permission_error")
        response: web.StreamResponse = await handler(request)
        return response

    async def _stop(self) -> None:
        for served in list(self._sessions_by_path.values()):
            served.session.close("april has ended")
        self._sessions_by_path.clear()
        if self._listener is not None:
            await self._listener.close()

    def _session_of(self, request: web.Request) -> ServedSession:
        """Return the session that a request is for; raises RequestError if there is none or the key is wrong."""
        shared_path = request.match_info["path"] == SHARED_PATH
        served = self._sessions_by_path.get(request.match_info["path"])
        if served is None and not shared_path:
            raise RequestError("this address belongs to no sample, or its sample has ended", 404, "not_found_error")
        check_key(request, self.key if served is None else served.key, "the API key does not belong to this address")
        name = request.headers.get("X-Session-ID")
        if served is None and name is None and request.path.endswith("count_tokens"):
            served = next(iter(self._sessions_by_path.values()), None)  # all sessions count tokens alike
        found = served or self._sessions_by_name.get(name or "", f"no sample has the name {name!r:.100} (X-Session-ID)")
        if isinstance(found, str):
            raise RequestError(found, 404, "not_found_error")
        found.on_request()
        return found

    async def _models(self, request: web.Request) -> web.Response:
        context = self._session_of(request).session.max_context
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "april"}
        return web.json_response({"object": "list", "data": [{**model, "max_model_len": context}]})

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = self._session_of(request).session
        chat_request = ROUTES["/messages"].read(await read_json_body(request, _max_body_bytes(session)))
        return web.json_response({"input_tokens": await session.count_tokens(chat_request)})

    def _handler(self, dialect: Dialect) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            served = self._session_of(request)
            session = served.session
            try:
                answer_task, chat_request = await self._submit(session, dialect, request)
                answer_task.clients += 1
                if answer_task.grace_timer:
                    answer_task.grace_timer.cancel()
                try:
                    return await self._send_answer(request, dialect, chat_request, answer_task)
                finally:
                    answer_task.clients -= 1
                    if not answer_task.clients and not answer_task.task.done():
                        after = self._loop.call_later(self.grace_s, session.cancel_if_abandoned, answer_task)
                        answer_task.grace_timer = after
            except RequestError as error:
                served.last_refusal = str(error)
                raise

        return handle

    async def _submit(self, session: Session, dialect: Dialect, request: web.Request) -> tuple[AnswerTask, ChatRequest]:
        fields = decode_json(await read_body(request, _max_body_bytes(session)), dict[str, msgspec.Raw])
        history, digest = fields.get(dialect.history, b"null"), b""
        sent = decode_json(history, list[msgspec.Raw]) if bytes(memoryview(history)[:1]) == b"[" else []
        body = {name: decode_json(value) for name, value in fields.items() if not (sent and name == dialect.history)}
        if sent:
            read_one = lambda i, message: dialect.read_one(i, decode_json(message))  # noqa: E731
            body[dialect.history], digest = session.reader.read(dialect, sent, read_one)
        chat_request = dialect.read(body)
        if len(chat_request.messages) > MAX_MESSAGES:
            raise RequestError(f"more than {MAX_MESSAGES} messages in one conversation")
        for name in (dialect.history, "stream", "stream_options"):
            body.pop(name, None)
        identity = [request.path, request.headers.get("X-Session-ID", ""), body, digest.hex()]
        identity_digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        retry = request.headers.get("x-stainless-retry-count") or "0"
        number = int(retry) if retry.isdecimal() and len(retry) < 10 else 1
        return session.submit(chat_request, identity_digest, retry=number), chat_request

    async def _send_answer(
        self, request: web.Request, dialect: Dialect, chat_request: ChatRequest, answer_task: AnswerTask
    ) -> web.StreamResponse:
        """Wait for the answer while keeping the connection alive, and send it."""
        done, _ = await asyncio.wait([answer_task.task], timeout=self.commit_s)
        response: web.StreamResponse | None = None
        if not done:
            response = await _send_headers(request, chat_request)
            while not done:
                await response.write(dialect.ping if chat_request.stream else b"\n")
                done, _ = await asyncio.wait([answer_task.task], timeout=self.alive_s)
        encoded = b""
        try:
            answer = answer_task.task.result()
            encoded = _encode_answer(dialect, chat_request, answer)
        except asyncio.CancelledError:
            error = RequestError((
                "this sample was given up, so its requests are no longer answered"
            ), 410, "session_closed")
        except RequestError as refused:
            error = refused
        except Exception as failure:
            error = RequestError(clean(str(failure) or type(failure).__name__), 400)
        else:
            response = await _send_headers(request, chat_request) if response is None else response
            transport = request.transport
            if transport is None or transport.is_closing():
                return response
            # noted before the last byte is sent, because a client may leave as soon as it has read that byte
            answer_task.sending_connections.append(transport)
            try:
                await response.write(encoded)
                await response.write_eof()
                answer_task.answer_sent = True
            finally:
                answer_task.sending_connections.remove(transport)
            return response
        if response is None:
            raise error
        if chat_request.stream:
            await response.write(_encode_event(("error", dialect.error(error))))
            await response.write_eof()
            return response
        # status 200 is sent already, so only a cut connection can report the error
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
async def _errors_as_responses(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    """Turn every failure into an error of the request's dialect, without logging the request's content."""
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


def check_key(request: web.Request, key: str, error_text: str) -> None:
    """Raise RequestError for a request that does not carry the key."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    # a client may send both headers, one of them with a placeholder
    given = request.headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""
    if not any(hmac.compare_digest(one.encode(errors="surrogateescape"), key.encode()) for one in given):
        raise RequestError(error_text, 401, "authentication_error")


def _max_body_bytes(session: Session) -> int:
    """Return the number of bytes above which no body can fit into the context."""
    if session.message_images is not None:
        return MAX_BODY_BYTES  # images may make up most of the body
    return min(MAX_BODY_BYTES, max(SMALL_BODY_BYTES, BYTES_PER_TOKEN * session.max_context))


async def read_json_body(request: web.Request, max_bytes: int) -> Any:
    """Return the JSON of a request whose body has at most ``max_bytes`` bytes; raises RequestError."""
    return decode_json(await read_body(request, max_bytes))


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """Return the body of a request, ``{}`` if it is empty; raises RequestError for more than ``max_bytes`` bytes."""
    too_large = RequestError(f"the body is larger than {max_bytes:,} bytes, the limit at the moment", 413)
    if (request.content_length or 0) > max_bytes:
        raise too_large
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:  # whatever the decoder of the body raises
        raise RequestError(f"the body cannot be decoded: {type(error).__name__}") from None
    if len(raw) > max_bytes:
        raise too_large
    return raw or b"{}"


def decode_json(raw: bytes | msgspec.Raw, kind: Any = Any) -> Any:
    """Return the value of JSON text; raises RequestError unless it is JSON of the type ``kind``."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (ValueError, RecursionError) as error:
        half = "; it has half of a surrogate pair" if b"\\ud" in bytes(raw).lower() else ""
        raise RequestError(f"the body is not JSON, or not a JSON object: {str(error)[:200]}{half}") from None


async def _send_headers(request: web.Request, chat_request: ChatRequest) -> web.StreamResponse:
    kind = "text/event-stream" if chat_request.stream else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-store"})
    await response.prepare(request)
    return response


def _encode_answer(dialect: Dialect, chat_request: ChatRequest, answer: Answer) -> bytes:
    """Return the answer's bytes as one piece, so that a client receives all of it or nothing."""
    if chat_request.stream:
        return b"".join(map(_encode_event, dialect.stream(answer, chat_request)))
    return json.dumps(dialect.response_body(answer, chat_request), allow_nan=False).encode()


def _encode_event(event: SseEvent) -> bytes:
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data, allow_nan=False)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()
