"""The server behind :func:`april.serve`: offers one engine to the client that began a session last.

Invariants: no request runs for a client whose session has ended. No request begins while the weights match no policy
version, for example after a failed update. A control call (pause, update, ...) runs to its end even if its client has
disconnected. Control calls run one at a time, except for health and quiet.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np
from aiohttp import WSMsgType, hdrs, web
from msgspec import structs

from april.concurrency.http_listener import HttpListener
from april.config.engines import ANY_ADDRESS, THIS_MACHINE, checked_key
from april.core.attachments import Attachment
from april.core.types import OnWeightUpdate
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.protocol import (
    PIECES_AT_ONCE,
    BufferedStream,
    Chunk,
    Engine,
    KeepsRequests,
    ReadsPaths,
    Request,
    SharesModel,
)
from april.engines.served.wire import (
    HEARTBEAT_S,
    MESSAGE_BYTES,
    ROUTE,
    TENSOR_BYTES,
    Abort,
    Ask,
    CallReply,
    ChunkMessage,
    EngineCall,
    Failure,
    Leave,
    Outbox,
    Start,
    Tensors,
    joined,
    unpacked,
)
from april.engines.weight_transfer import TakesTensors
from april.errors import ConfigError, EngineError, EngineUnreachable, LinkError, RequestRefused, WireError
from april.serialization.own_values import pack, unpack
from april.text.server_text import clean

log = logging.getLogger("april")

ATTACHMENT_BYTES = 1 << 30
"""Largest total size of the attachments that are kept. The least recently used are dropped; clients resend them."""
ABORT_AGAIN_S = 0.02
"""Seconds after which requests that still run are aborted again, because some engines register a request late."""
NO_SESSION = "the engine's server was restarted or serves another client now"


class EngineServer:
    """Serves one engine; created by :func:`serve`. Closing the server does not close the engine."""

    def __init__(self, engine: Engine, key: str = "", *, shares_model: bool = False) -> None:
        if not hasattr(engine, "capabilities"):
            raise ConfigError(f"serve: {type(engine).__name__} is not an engine (april.engines.protocol.Engine)")
        self.engine = engine
        self.url = ""
        self._key = f"Bearer {checked_key(key)}".encode() if key else b""
        self._shares_model = shares_model
        self._session = self._client = ""
        self._connection: _ClientConnection | None = None
        self._untouched = True
        self._version: PolicyVersion | None = FIRST_VERSION
        self._attachments: OrderedDict[str, Attachment] = OrderedDict()
        self._one_call = asyncio.Lock()
        self.running: set[asyncio.Task[None]] = set()
        """Tasks of all requests, also of clients that have disconnected."""
        self._listener: HttpListener | None = None

    def __repr__(self) -> str:
        return f"<EngineServer of {self.engine.name} at {self.url or 'no address'}, {len(self.running)} requests>"

    async def start(self, host: str, port: int) -> None:
        """Start listening."""
        app = web.Application(client_max_size=MESSAGE_BYTES, middlewares=[self._require_key])
        app.router.add_get(f"{ROUTE}line/{{session}}", self._serve_websocket)
        app.router.add_put(f"{ROUTE}attachments/{{kind}}/{{digest}}", self._take_attachment)
        app.router.add_post(f"{ROUTE}tensors", self._take_tensors)
        app.router.add_post(f"{ROUTE}{{call}}", self._control)
        self._listener = HttpListener(app, 1.0)
        try:
            _, free_port = await self._listener.start((host, port), backlog=1024)
        except (OSError, OverflowError) as error:
            why = clean(getattr(error, "strerror", None) or error)
            raise ConfigError(f"serve: cannot listen at {host}:{port}: {why}") from None
        reached = socket.gethostname() if host in ("", *ANY_ADDRESS) else f"[{host}]" if ":" in host else host
        self.url = f"http://{reached}:{free_port}"

    async def close(self) -> None:
        """End all requests and stop listening; idempotent. The engine stays open."""
        self._session = self._client = ""
        if self._connection is not None:
            await self._connection.close()
        if self._listener is not None:
            await self._listener.close()
        for task in self.running:
            task.cancel()
        if self.running:
            await asyncio.wait(self.running)

    @property
    def has_client(self) -> bool:
        """True while a client has a session."""
        return bool(self._session)

    async def wait(self) -> None:
        """Serve until cancelled, then close."""
        try:
            await asyncio.Event().wait()
        finally:
            await self.close()

    # ---------------------------------------------------------------- access

    @web.middleware
    async def _require_key(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if hdrs.ORIGIN in request.headers:  # only browsers send this header, possibly for a malicious page
            return web.Response(status=403, text="browsers may not use this server")
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if self._key and not hmac.compare_digest(given, self._key):
            return web.Response(status=401, text="the key is missing or wrong")
        return await handler(request)

    def _require(self, session: str) -> None:
        if not session or session != self._session:
            raise EngineUnreachable(NO_SESSION)

    # ---------------------------------------------------------------- requests

    async def _serve_websocket(self, http: web.Request) -> web.StreamResponse:
        if http.match_info["session"] != self._session:
            return web.Response(status=409, text=NO_SESSION)
        try:
            interval_s = float(http.query["interval_s"])
        except (KeyError, ValueError):
            return web.Response(status=400, text="interval_s is missing, or is not a number")
        ws = web.WebSocketResponse(max_msg_size=MESSAGE_BYTES, compress=False, heartbeat=HEARTBEAT_S)
        await ws.prepare(http)
        connection, before = _ClientConnection(self, ws, interval_s), self._connection
        self._connection = connection
        if before is not None:  # the client reconnected before this side noticed the disconnect
            await before.close()
        await connection.run()
        return ws

    def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Begin a request, after adding the uploaded bytes of its attachments."""
        if self._version is None:
            raise EngineError("the engine's weights match no policy version; update them")
        if request.attached:
            own = (
                replace(placed, attachment=self._attachments[placed.attachment.digest]) for placed in request.attached
            )
            request = structs.replace(request, attached=tuple(own))
        return self.engine.generate(request)

    def missing(self, request: Request) -> list[str]:
        """Return the digests of the request's attachments that were not uploaded."""
        digests = [placed.attachment.digest for placed in request.attached]
        for digest in digests:
            if digest in self._attachments:
                self._attachments.move_to_end(digest)
        return [digest for digest in digests if digest not in self._attachments]

    async def _take_attachment(self, http: web.Request) -> web.Response:
        attachment = Attachment.of(http.match_info["kind"], await http.read())
        if attachment.digest != http.match_info["digest"]:
            return web.Response(status=400, text="the bytes do not match the digest")
        self._attachments[attachment.digest] = attachment
        held = sum(a.size for a in self._attachments.values())
        while held > ATTACHMENT_BYTES and len(self._attachments) > 1:
            held -= self._attachments.popitem(last=False)[1].size
        return web.Response()

    # ---------------------------------------------------------------- control calls

    async def _control(self, http: web.Request) -> web.Response:
        calls: dict[str, Callable[[EngineCall, CallReply], Awaitable[None]]] = {
            "begin": self._begin, "end": self._end, "pause": self._pause, "resume": self._resume,
            "update": self._update, "content": self._content, "quiet": self._quiet, "health": self._health,
        }  # fmt: skip
        method = calls.get(http.match_info["call"])
        if method is None:
            return web.Response(status=404, text="there is no such call")
        try:
            call = unpack(await http.read(), EngineCall)
        except LinkError as error:
            return web.Response(status=400, text=str(error))

        async def fill(answer: CallReply) -> None:
            if method not in (self._begin, self._health):
                self._require(call.session)
            await method(call, answer)

        # health and quiet do not wait for other calls, which may take long
        return await self._respond(fill, alone=method not in (self._health, self._quiet))

    async def _respond(self, fill: Callable[[CallReply], Awaitable[None]], *, alone: bool = True) -> web.Response:
        answer = CallReply()
        try:
            if alone:
                async with self._one_call:
                    await fill(answer)
            else:
                await fill(answer)
            return self._reply(answer)
        except Exception as error:
            return self._reply(CallReply(Failure.of(error)))

    def _reply(self, answer: CallReply) -> web.Response:
        answer.session, answer.client, answer.version = self._session, self._client, self._version
        answer.untouched = self._untouched
        return web.Response(body=pack(answer), content_type="application/octet-stream")

    async def _begin(self, call: EngineCall, answer: CallReply) -> None:
        """Begin a session for this client; the previous client receives nothing more, not even unfinished answers."""
        self._session, self._client = secrets.token_hex(16), call.client
        if self._connection is not None:
            await self._connection.close()
        await self.engine.pause()
        await self._until_idle()
        if call.present and self._version != FIRST_VERSION:
            await self.engine.update_weights(FIRST_VERSION)
            self._version = FIRST_VERSION
        await self.engine.resume()
        can = self.engine.capabilities
        answer.capabilities = replace(
            can, remote=True, own_weights=False, shares_weights=self._shares_model, gathers_weights=False,
            collective=(), takes_tensors=can.takes_tensors and not self._shares_model,
        )  # fmt: skip
        answer.reads_paths = isinstance(self.engine, ReadsPaths)

    async def _end(self, call: EngineCall, answer: CallReply) -> None:
        """End the session, because its client no longer needs the engine."""
        self._session = self._client = ""
        if self._connection is not None:
            await self._connection.close()

    async def _until_idle(self) -> None:
        while self.running:
            await self.engine.abort()
            await asyncio.wait(self.running, timeout=ABORT_AGAIN_S)

    async def _pause(self, call: EngineCall, answer: CallReply) -> None:
        if call.in_flight is OnWeightUpdate.RESUBMIT:
            await self.engine.pause()
            await self._until_idle()
        elif isinstance(self.engine, KeepsRequests):
            await self.engine.pause_in_flight(call.in_flight)
        else:
            raise EngineError(f"engine {self.engine.name} cannot keep requests over a weight update")

    async def _resume(self, call: EngineCall, answer: CallReply) -> None:
        await self.engine.resume()

    async def _update(self, call: EngineCall, answer: CallReply) -> None:
        if call.version is None:
            raise EngineError("the call for a weight update contains no version")
        before, self._version = self._version, None
        untouched, self._untouched = self._untouched, False
        try:
            await self.engine.update_weights(call.version, call.path)
        except Exception:
            with suppress(Exception):  # if health() fails too, the weights match no version
                if before is not None and (await self.engine.health()).current:
                    self._version, self._untouched = before, untouched
            raise
        self._version = call.version
        self._untouched = untouched and call.version == FIRST_VERSION and call.path is None

    async def _take_tensors(self, http: web.Request) -> web.Response:
        import torch

        try:
            size = int.from_bytes(await http.content.readexactly(4), "big")
            if size > MESSAGE_BYTES:
                raise WireError(f"the header of the tensors has {size} bytes, but at most {MESSAGE_BYTES} are accepted")
            head = unpack(await http.content.readexactly(size), Tensors)
            self._require(head.session)  # checked before memory is allocated
            if min(head.sizes, default=0) < 0 or sum(head.sizes) > TENSOR_BYTES:
                raise WireError(
                    f"the tensors have {sum(head.sizes)} bytes, but at most {TENSOR_BYTES} are accepted in one call"
                )
            body, filled = bytearray(sum(head.sizes)), 0
            while piece := await http.content.readany():
                if filled + len(piece) > len(body):
                    raise WireError("the call contains more bytes than its tensors have")
                body[filled : filled + len(piece)] = piece
                filled += len(piece)
            if filled < len(body):
                raise WireError("the call contains fewer bytes than its tensors have")
            tensors, at = [], 0
            for spec, size in zip(head.specs, head.sizes, strict=True):
                raw = torch.frombuffer(body, dtype=torch.uint8, count=size, offset=at) if size else torch.empty(0)
                tensors.append(raw.view(getattr(torch, spec.dtype)).reshape(spec.shape))
                at += size
        except (LinkError, EngineError, asyncio.IncompleteReadError, ValueError, RuntimeError, AttributeError) as error:
            return web.Response(status=400, text=str(error))

        async def fill(answer: CallReply) -> None:
            self._require(head.session)
            if not isinstance(self.engine, TakesTensors):
                raise EngineError(f"engine {self.engine.name} accepts no tensors")
            self._version, self._untouched = None, False
            await self.engine.take(head.specs, tensors, head.last)

        return await self._respond(fill)

    async def _content(self, call: EngineCall, answer: CallReply) -> None:
        if not isinstance(self.engine, ReadsPaths) or call.path is None:
            raise EngineError(f"engine {self.engine.name} does not read paths itself")
        answer.content = await self.engine.content_of(call.path)

    async def _quiet(self, call: EngineCall, answer: CallReply) -> None:
        if isinstance(self.engine, SharesModel):
            await self.engine.quiet()

    async def _health(self, call: EngineCall, answer: CallReply) -> None:
        answer.health = await self.engine.health()


class _ClientConnection:
    """The WebSocket that carries one client's requests and their answers."""

    def __init__(self, server: EngineServer, ws: web.WebSocketResponse, interval_s: float) -> None:
        self._server, self._ws, self._interval_s = server, ws, interval_s
        self._outbox = Outbox(ws)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._kept: dict[str, list[Chunk]] = {}
        """Chunks that were not sent yet, indexed by attempt id."""
        self._streams: dict[str, BufferedStream] = {}
        """Streams that buffer the engine's pieces until they are parsed together, indexed by attempt id."""
        self._helpers: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Answer requests until the connection ends, then cancel the requests that still run."""
        self._spawn(self._outbox.run())
        if self._interval_s > 0:
            self._spawn(self._hand_over())
        try:
            async for message in self._ws:
                if message.type is not WSMsgType.BINARY:
                    break
                for ask in unpacked(message.data, Ask):
                    self._take(ask)
        except WireError as error:
            log.warning("a client of engine %s was disconnected: %s", self._server.engine.name, error)
        finally:
            await self.close()

    async def close(self) -> None:
        """Cancel the requests of this connection and close the socket."""
        for task in [*self._helpers, *self._tasks.values()]:
            task.cancel()
        with suppress(Exception):
            async with asyncio.timeout(1.0):
                await self._ws.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._helpers.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._helpers.discard(task)
        # the client notices an error in sending, after which the Outbox closes the socket
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("engine %s: %s", self._server.engine.name, error)

    def _take(self, ask: Start | Abort | Leave) -> None:
        if isinstance(ask, Abort):
            self._spawn(self._server.engine.abort(ask.attempt_ids))
        elif isinstance(ask, Leave):
            if (task := self._tasks.get(ask.attempt_id)) is not None:
                task.cancel()
        else:
            attempt_id = ask.request.attempt_id
            if attempt_id in self._tasks:
                failure = Failure.of(RequestRefused(f"attempt {attempt_id} is already in flight"))
                self._outbox.put(ChunkMessage(attempt_id, [], True, failure))
                return
            self._tasks[attempt_id] = task = asyncio.ensure_future(self._serve(ask.request))
            self._server.running.add(task)
            task.add_done_callback(lambda task: self._served(attempt_id, task))

    def _served(self, attempt_id: str, task: asyncio.Task[None]) -> None:
        del self._tasks[attempt_id]
        self._server.running.discard(task)
        if not task.cancelled():
            task.exception()

    async def _serve(self, request: Request) -> None:
        kept = self._kept[request.attempt_id] = []
        at_once = request.stream or self._interval_s <= 0
        failure, missing = None, self._server.missing(request)
        try:
            if not missing:
                chunks = cast(Any, self._server.generate(request))
                if isinstance(chunks, BufferedStream):
                    self._streams[request.attempt_id] = chunks
                async with aclosing(chunks), aclosing(_in_portions(chunks, 1 if at_once else PIECES_AT_ONCE)) as some:
                    async for portion in some:
                        kept += portion
                        if at_once and kept and kept[-1].finish is None:
                            self._send(request.attempt_id, kept)
        except Exception as error:
            failure = Failure.of(error)
        except asyncio.CancelledError:
            failure = Failure("EngineError", "the request was cancelled at the server")
            raise
        finally:
            del self._kept[request.attempt_id]
            self._streams.pop(request.attempt_id, None)
            self._put(ChunkMessage(request.attempt_id, joined(kept), True, failure, missing))

    def _send(self, attempt_id: str, kept: list[Chunk]) -> None:
        self._put(ChunkMessage(attempt_id, joined(kept)))
        kept.clear()

    def _put(self, message: ChunkMessage) -> None:
        """Queue a message; if the engine's chunks cannot be encoded, the request ends with that error instead."""
        try:
            self._outbox.put(message)
        except TypeError as error:
            self._outbox.put(ChunkMessage(message.attempt_id, [], True, Failure.of(error)))
            if not message.last:
                self._tasks[message.attempt_id].cancel()

    async def _hand_over(self) -> None:
        """Send new tokens every interval, so that a dying server loses at most one interval of tokens."""
        while True:
            await asyncio.sleep(self._interval_s)
            for attempt_id, kept in self._kept.items():
                if (pile := self._streams.get(attempt_id)) is not None:
                    kept += pile.take()
                if kept:
                    self._send(attempt_id, kept)


async def _in_portions(chunks: Any, enough: int) -> AsyncGenerator[list[Chunk], None]:
    """Yield copies of the chunks; a buffered stream yields when ``enough`` pieces have arrived, or all of them."""
    if isinstance(chunks, BufferedStream):
        while await chunks.arrived():
            if chunks.waiting >= enough or chunks.over:
                yield chunks.take()
        return
    async for chunk in chunks:
        yield [_own(chunk)]


def _own(chunk: Chunk) -> Chunk:
    """Copy a chunk, because an engine may reuse its arrays."""
    extras = {name: np.array(rows) for name, rows in chunk.extras.items()}
    return replace(chunk, tokens=np.array(chunk.tokens), logprobs=np.array(chunk.logprobs), extras=extras)


async def serve(
    engine: Engine, host: str = "127.0.0.1", port: int = 0, key: str = "", *, shares_model: bool = False
) -> EngineServer:
    """Offer an engine to a scheduler in another process; runs on the current event loop, which must be the engine's.

    The scheduler connects with ``engine={"kind": "april", "urls": [server.url], "api_key": key}`` or with
    ``add_engine(server.url)``.

    Args:
        engine: Any engine object.
        host: Address to listen at. Other machines can connect only if it is not a loopback address; then a key is
            required.
        port: Port to listen at; 0 means any free one.
        key: Secret that lets a client use the engine and change its weights; ``april.new_token()`` makes one.
        shares_model: Whether this process trains the model that the engine generates from; clients then send no
            weights.

    Returns:
        The server, with its ``url``; ``await server.close()`` stops it, ``await server.wait()`` serves until cancelled.

    Raises:
        ConfigError: the object is no engine, the address is not available, or other machines can reach the address
            and there is no key.
    """
    if host not in THIS_MACHINE and not key:
        raise ConfigError(f"serve: other machines can reach {host}, so give a key=, such as april.new_token()")
    server = EngineServer(engine, key, shares_model=shares_model)
    await server.start(host, port)
    return server
