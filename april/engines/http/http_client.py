"""HTTP client for one server: requests, streams and control calls, with all failures as typed errors.

aiohttp's defaults do not suit long generations; each setting here says why it differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from april.config.engines import checked_key, checked_url
from april.engines.http.wire import NotJson, error_text, failure_of, read_json
from april.errors import EngineError, EngineUnreachable, WireError
from april.text.server_text import clean, without_keys

CONTROL_TIMEOUT_S = 30.0
"""Seconds to wait for the answer to a control call, unless the caller sets another limit."""
MAX_REPLY_BYTES = 4 << 20
"""Maximum bytes of an answer, unless the caller sets another limit."""
MAX_ERROR_BYTES = 1 << 16
MAX_RETRY_AFTER_S = 60.0
_JSON = {"Content-Type": "application/json"}
NO_HEADERS: Mapping[str, str] = {}
_BROKEN = (aiohttp.ClientError, OSError, asyncio.IncompleteReadError)


@dataclass(frozen=True, slots=True)
class Reply:
    """Status and body of an HTTP response with any status."""

    status: int
    body: bytes
    retry_after_s: float | None = None
    """Seconds to wait before a retry, as the server asks (at most 60); None if it does not say."""

    @property
    def ok(self) -> bool:
        return self.status == 200


class HttpClient:
    """HTTP client for one server. Use it on one event loop only; it connects with the first call.

    Args:
        url: http or https URL without path, query, user or password.
        name: Name of the engine, for messages.
        api_key: Bearer token. It appears in no message, even if the server repeats it.
        keepalive_s: Seconds to keep an idle connection. Must be below the server's own limit, or a request may meet a
            connection that is just being closed.
    """

    def __init__(
        self, url: str, *, name: str, api_key: str | None = None, keepalive_s: float = 2.0,
        connect_timeout_s: float = 10.0,
    ) -> None:  # fmt: skip
        self.url = checked_url(url)
        self.name = name
        self._headers = {"Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {checked_key(api_key)}"
        self._keepalive_s = keepalive_s
        self._connect_timeout_s = connect_timeout_s
        self.refusals = 0
        """Number of calls that found the server's port closed."""
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._callers: set[asyncio.Task[Any]] = set()
        """Tasks that wait for the server to answer; tasks that read a streamed response are not included."""
        self._open: set[ResponseBytes] = set()
        self._cut: dict[asyncio.Task[Any], int] = {}
        """Tasks that this client has cancelled, each with the value of ``Task.cancelling()`` before that."""

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port of the server."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    async def call(
        self, method: str, route: str, body: Any = None, *, params: Mapping[str, str] | None = None,
        timeout_s: float | None = CONTROL_TIMEOUT_S, retry: bool = False, limit: int = MAX_REPLY_BYTES,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> Reply:  # fmt: skip
        """Send one request and return the response; ``body`` is bytes, an iterator of bytes, or an object for JSON.

        Responses of every status are returned, except redirects.

        Args:
            timeout_s: Seconds for the whole exchange; None means no limit.
            limit: Maximum bytes of a response with status 200.
            retry: True to send the request again if the connection breaks; only for calls that may safely run twice.

        Raises:
            EngineUnreachable: The server cannot be reached, the connection broke, or no response came in time.
            EngineError: The response is a redirect, or too large.
        """
        raw = body if body is None or isinstance(body, (bytes, AsyncIterator)) else msgspec.json.encode(body)
        while True:
            try:
                if timeout_s is None:
                    return await self._exchange(method, route, raw, params, limit, headers)
                async with asyncio.timeout(timeout_s):
                    return await self._exchange(method, route, raw, params, limit, headers)
            except _BROKEN as error:
                if type(error) is TimeoutError and timeout_s is not None:
                    raise EngineUnreachable(
                        f"{method} {self.url}{route} did not answer within {timeout_s:g} s; is the server overloaded "
                        "or hung?"
                    ) from None
                if not retry:
                    # from None: a traceback would show aiohttp's error, which repeats what the server has sent
                    raise self._unreachable(method, route, error) from None
                retry = False

    async def _exchange(
        self, method: str, route: str, raw: bytes | AsyncIterator[Any] | None, params: Mapping[str, str] | None,
        limit: int, headers: Mapping[str, str],
    ) -> Reply:  # fmt: skip
        with self._breakable():
            response = await self._http.request(
                method, self.url + route, data=raw, params=params,
                headers=headers if raw is None else {**_JSON, **headers}, allow_redirects=False,
            )  # fmt: skip
            try:
                status = response.status
                if status != 200:
                    self._refuse_redirect(response, route)
                content = await self._read(response, limit if status == 200 else MAX_ERROR_BYTES, route)
            except BaseException:
                response.close()
                raise
            response.release()
            return Reply(status, content, None if status == 200 else _retry_after_s(response))

    @contextmanager
    def _breakable(self) -> Iterator[None]:
        """Let :meth:`close` and :meth:`break_off` break off the block, which then raises EngineUnreachable."""
        task = asyncio.current_task()
        assert task is not None
        self._callers.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._was_cut(task):
                raise self._closed_early() from None
            raise
        finally:
            self._callers.discard(task)

    async def json(
        self, method: str, route: str, body: Any = None, *, params: Mapping[str, str] | None = None,
        timeout_s: float | None = CONTROL_TIMEOUT_S, retry: bool = False,
    ) -> Any:  # fmt: skip
        """Make a :meth:`call` and return the JSON of the response, or None if the body is empty.

        Raises EngineError unless the status is 200.
        """
        reply = await self.call(method, route, body, params=params, timeout_s=timeout_s, retry=retry)
        self.require_ok(reply, route)
        if not reply.body:
            return None
        try:
            return read_json(reply.body)
        except NotJson as error:
            raise WireError(f"{self.url}{route} answered with invalid JSON: {error}") from None

    async def post(self, route: str, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> ResponseBytes:
        """POST JSON and return the streamed response, which the caller closes. Raises EngineError unless status 200."""
        try:
            with self._breakable():
                response = await self._http.post(
                    self.url + route, data=body, headers={**_JSON, **headers}, allow_redirects=False
                )
                if response.status != 200:
                    try:
                        self._refuse_redirect(response, route)
                        content = await self._read(response, MAX_ERROR_BYTES, route)
                        self.require_ok(Reply(response.status, content, _retry_after_s(response)), route)
                    finally:
                        response.close()
        except _BROKEN as error:
            raise self._unreachable("POST", route, error) from None
        return ResponseBytes(self, route, response)

    async def web_socket(
        self, route: str, params: Mapping[str, str], *, max_bytes: int, heartbeat_s: float
    ) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket with messages of at most ``max_bytes``; the caller closes it.

        Raises EngineUnreachable if the server does not answer, EngineError if it does not open a WebSocket.
        """
        redirects = aiohttp.TraceConfig()  # the only way in aiohttp to refuse redirects here
        redirects.on_request_redirect.append(_refuse_redirect)
        session = aiohttp.ClientSession(
            connector=self._http.connector, connector_owner=False, headers=self._headers, timeout=self._http.timeout,
            trust_env=False, cookie_jar=aiohttp.DummyCookieJar(), trace_configs=[redirects],
        )  # fmt: skip
        try:
            async with session:
                return await session.ws_connect(
                    self.url + route, params=params, max_msg_size=max_bytes, heartbeat=heartbeat_s, compress=0,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                )  # fmt: skip
        except aiohttp.WSServerHandshakeError as error:
            status = error.status
            raise EngineError(f"{self.url}{route} answered {status}, but a WebSocket was requested") from None
        except _BROKEN as error:
            raise self._unreachable("GET", route, error) from None

    def require_ok(self, reply: Reply, route: str) -> None:
        """Raise the error that corresponds to a status other than 200."""
        if reply.ok:
            return
        what = f"{self.url}{route} answered {reply.status}: {error_text(reply.body)}"
        raise failure_of(reply.status, what, reply.retry_after_s)

    async def close(self) -> None:
        """Close all connections; calls in progress fail. Idempotent."""
        self._closed = True
        # aiohttp lets readers of a closed session wait forever
        for task in self._callers | {b.task for b in self._open if b.reading and b.task}:
            self._cut_off(task)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def break_off(self, task: asyncio.Task[Any]) -> None:
        """Break off the call that ``task`` is making, if any; it raises EngineUnreachable."""
        if task in self._callers:
            self._cut_off(task)

    def _cut_off(self, task: asyncio.Task[Any]) -> None:
        if task not in self._cut:
            self._cut[task] = task.cancelling()
            task.cancel()

    def _was_cut(self, task: asyncio.Task[Any] | None) -> bool:
        """Return whether this client cancelled the task, and nobody else did."""
        before = self._cut.pop(task, None) if task is not None else None
        return task is not None and before is not None and task.uncancel() <= before

    def _closed_early(self) -> EngineUnreachable:
        return EngineUnreachable(f"engine {self.name} was closed during a call")

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineError(f"engine {self.name} is closed; create a new one")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # limit 0: the default of 100 connections would silently throttle over-sampling
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_s),
                # the default total of 300 s would cut off long responses
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
                headers=self._headers,
                # no proxy from the environment, no cookies, no decompression bombs
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                read_bufsize=1 << 18,
            )
        return self._session

    async def _read(self, response: aiohttp.ClientResponse, limit: int, route: str) -> bytes:
        """Return the body; raise if it has more than ``limit`` bytes. Error texts are cut there, without API keys."""
        length = response.content_length
        if response.status == 200 and length is not None and length > limit:
            raise self._too_large(route, limit)
        if length is not None and length <= limit:
            content = await response.read()
            return content if response.status == 200 else _without_keys(content)
        pieces, size = [], 0
        async for piece in response.content.iter_any():
            size += len(piece)
            pieces.append(piece)
            if size > limit:
                response.close()
                if response.status == 200:
                    raise self._too_large(route, limit)
                break
        content = b"".join(pieces)
        return content if response.status == 200 else _without_keys(content, cut=size > limit)

    def _too_large(self, route: str, limit: int) -> EngineError:
        return EngineError(f"{self.url}{route} answers with more than {limit} bytes; april stops reading")

    def _refuse_redirect(self, response: aiohttp.ClientResponse, route: str) -> None:
        if 300 <= response.status < 400:
            target = response.headers.get("Location", "nowhere").partition("?")[0].partition("#")[0]
            raise EngineError(
                f"{self.url}{route} answered with a redirect ({response.status}) to {clean(target)}, which april does "
                "not follow; set the server's own address"
            )

    def _unreachable(self, method: str, route: str, error: BaseException) -> EngineUnreachable:
        if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
            self.refusals += 1
        why, hint = _connection_error(error), f"is the server alive? `april doctor {self.url}` says more"
        if "WRONG_VERSION_NUMBER" in why:
            hint = f"the server does not use TLS; write {self.url.replace('https:', 'http:', 1)}"
        return EngineUnreachable(f"{method} {self.url}{route} failed: {why}; {hint}", why=why)


async def _refuse_redirect(session: object, context: object, asked: aiohttp.TraceRequestRedirectParams) -> None:
    raise EngineError(f"{asked.url.origin()} answered with a redirect, which april does not follow")


async def _no_content() -> bytes:
    return b""


class ResponseBytes:
    """Body of one POST response, read piece by piece by the task that sent it."""

    __slots__ = ("_client", "_more", "_response", "_route", "_stopped", "reading", "task")

    def __init__(self, client: HttpClient, route: str, response: aiohttp.ClientResponse) -> None:
        self._client = client
        self._route = route
        self._response = response
        self._more: Callable[[], Awaitable[bytes]] = response.content.readany
        self.task = asyncio.current_task()
        self.reading = False
        """True while the task waits for more bytes."""
        self._stopped = False
        client._open.add(self)

    @property
    def broken(self) -> bool:
        """Return whether the connection has broken, even if earlier bytes are still unread."""
        return self._response.content.exception() is not None

    async def read(self) -> bytes:
        """Wait for bytes and return those that have arrived; empty at the end. Raises EngineUnreachable."""
        if self._client._closed:
            raise self._client._closed_early()
        self.reading = not self._stopped
        try:
            if self.reading:
                try:
                    return await self._more()
                except asyncio.CancelledError:
                    if not self._client._was_cut(self.task):
                        raise
                    if not self._stopped:
                        raise self._client._closed_early() from None
            self._stopped, self._more = False, _no_content
            await asyncio.sleep(0)  # lets the loop pick up bytes that have already arrived
            return self._response.content.read_nowait()
        except _BROKEN as error:
            raise self._client._unreachable("POST", self._route, error) from None
        finally:
            self.reading = False

    def stop(self) -> None:
        """Stop waiting for more: :meth:`read` returns what has already arrived, then nothing."""
        self._stopped = True
        if self.reading and self.task is not None:
            self._client._cut_off(self.task)

    def close(self) -> None:
        """Close the response; the connection is reused if it was read to its end."""
        self._client._open.discard(self)
        if self._response.content.is_eof():
            self._response.release()
        else:
            self._response.close()


_ERROR_TEXTS: tuple[tuple[type[BaseException], str], ...] = (
    (aiohttp.ServerDisconnectedError, "the server closed the connection without an answer"),
    (aiohttp.ClientPayloadError, "the connection broke in the middle of the answer"),
    (aiohttp.ClientResponseError, "the answer is not HTTP"),
)
"""Replacement texts for aiohttp errors that repeat what the server sent, including token ids."""


def _connection_error(error: BaseException) -> str:
    own = next((words for kind, words in _ERROR_TEXTS if isinstance(error, kind)), "")
    return own or clean(error) or type(error).__name__


def _without_keys(content: bytes, *, cut: bool = False) -> bytes:
    return without_keys(content.decode("utf-8", "surrogateescape"), cut=cut).encode("utf-8", "surrogateescape")


def _retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    """Return Retry-After in seconds, at most 60; None if the header is missing or no number, such as a date."""
    try:
        seconds = float(response.headers.get("Retry-After", ""))
    except ValueError:
        return None
    return min(seconds, MAX_RETRY_AFTER_S) if isfinite(seconds) and seconds >= 0 else None


Confirms = Callable[[Any], bool]
"""Function that returns whether the JSON value of a response confirms that the server has done what was asked."""


def json_value(reply: Reply) -> Any:
    """Return the JSON value of a response: None if it is empty (or ``null``), its raw bytes if it is not JSON."""
    if not reply.body.strip():
        return None
    try:
        return read_json(reply.body)
    except NotJson:
        return reply.body


def has_value(key: str, value: bool | str) -> Confirms:
    """Return a check that accepts an object with ``value`` under ``key``."""
    return lambda said: isinstance(said, dict) and type(said.get(key)) is type(value) and said[key] == value


def is_empty(said: Any) -> bool:
    """Return whether a response was empty."""
    return said is None


def require_confirmation(client: HttpClient, reply: Reply, route: str, *checks: Confirms) -> None:
    """Raise an error unless the status is 200 and one of ``checks`` accepts the JSON value of the body."""
    client.require_ok(reply, route)
    said = json_value(reply)
    if not any(check(said) for check in checks):
        raise EngineError(
            f"{client.url}{route} answered with status 200, but did not confirm success: {error_text(reply.body)}; is "
            "there a proxy or another server in between?"
        )


async def refuses_probe(client: HttpClient, *routes: str) -> str:
    """Probe the first route that exists; returns what is wrong with the answer, or an empty text."""
    for route in routes:
        reply = await client.call("GET", route, retry=True)
        if reply.status != 404:
            break
    is_page = reply.body.lstrip()[:1] == b"<"  # for example from a proxy
    if reply.ok and not is_page:
        return ""
    return f"{client.url} answers {'a page' if reply.ok else reply.status} to a health probe"


async def control(
    client: HttpClient, route: str, *checks: Confirms, body: object = None, params: dict[str, str] | None = None
) -> None:
    """POST a control call that may safely run twice. Raises EngineError unless one of ``checks`` accepts the reply."""
    require_confirmation(client, await client.call("POST", route, body, params=params, retry=True), route, *checks)


async def weight_version(client: HttpClient, route: str) -> str:
    """Return the label of the server's weights, as a GET route shows it. Raises EngineError if it shows none."""
    said = await client.json("GET", route, retry=True)
    label = said.get("weight_version") if isinstance(said, dict) else None
    if isinstance(label, str):
        return label
    raise EngineError(
        f"{client.url}{route} did not return weight_version; is there a proxy or another server in between?"
    )
