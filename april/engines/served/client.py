"""The client engine: uses an engine that another process offers with :func:`april.serve` like a local engine.

A session begins when a client connects. It ends when the client closes, another client begins a session, or the
server's process ends. Invariant: the client yields only tokens that the server made in this client's session, and
relies only on versions that the server confirmed in this session.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import aiohttp
from msgspec import structs

from april.concurrency.worker_threads import run_in_thread
from april.config.engines import AprilEngineConfig
from april.core.attachments import Attachment
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.abilities import OF_THE_MODEL
from april.engines.attachments import attachment_bytes
from april.engines.http.http_client import HttpClient
from april.engines.http.loaded_adapters import LoadedAdapter
from april.engines.http.server_engine import ServerEngine
from april.engines.http.server_probe import connect_all, least
from april.engines.http.weight_directories import is_adapter
from april.engines.http.wire import empty_chunk
from april.engines.protocol import Capabilities, Chunk, EngineFinish, FirstWeights, Health, OnWeightUpdate, Request
from april.engines.served.wire import (
    HEARTBEAT_S,
    MESSAGE_BYTES,
    PIECE_BYTES,
    ROUTE,
    Abort,
    CallReply,
    ChunkMessage,
    EngineCall,
    Leave,
    Outbox,
    Start,
    Tensors,
    unpacked,
)
from april.engines.weight_transfer import TensorSpec
from april.errors import (
    EngineBusy,
    EngineError,
    EngineUnreachable,
    LinkError,
    RequestRefused,
    WeightsGone,
    WireError,
)
from april.serialization.own_values import pack, unpack
from april.text.server_text import clean

log = logging.getLogger("april")

TRIES = 4
"""Attempts to send one request while the server lacks its attachments."""
ATTACHMENT_S = 600.0
"""Timeout in seconds for uploading one attachment."""


class ServedEngine(ServerEngine):
    """An engine that another process serves; created by :func:`connect_april`."""

    def __init__(self, client: HttpClient, config: AprilEngineConfig, began: CallReply, client_id: str) -> None:
        can = began.capabilities
        if can is None:
            raise WireError(f"{client.url} does not report what its engine can do")
        present = config.first_weights == "present"
        self._of_start = began.untouched or present or can.shares_weights
        """True if the weights that the server had when the session began count as the run's first version."""
        super().__init__(
            client.name,
            replace(
                can, max_in_flight=least(config.max_in_flight, can.max_in_flight),
                first_weights=can.first_weights if self._of_start else FirstWeights.OTHERS,
            ),
        )  # fmt: skip
        self._client = client
        self._interval_s = config.interval_s
        self._client_id = client_id
        self._session = began.session
        self._connection: _Connection | None = None
        self._opening = asyncio.Lock()
        self._keeps = False
        """True while the engine is paused but keeps its requests."""
        self._sent: dict[str, asyncio.Task[None]] = {}
        """Uploads of attachments, finished or running, indexed by digest."""
        self.attachments_sent = 0
        if not self._of_start:
            self._why_incomplete = (
                f"engine {self.name} has weights that another run of april gave it, and has none of this run before a "
                "weight update"
            )
            log.warning("%s", self._why_incomplete)

    # ---------------------------------------------------------------- requests

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Run one request; raises the errors of the remote engine, or EngineUnreachable."""
        async with self._admission.request(request.attempt_id) as admitted:
            if not admitted:
                yield empty_chunk(self._version, EngineFinish.ABORT)
                return
            self._check(request)
            self._adapters.note_request(request.attempt_id)
            digests = tuple(replace(p, attachment=replace(p.attachment, data=None, path="")) for p in request.attached)
            without_bytes = structs.replace(request, attached=digests) if digests else request
            for _ in range(TRIES):
                for placed in request.attached:
                    await self._send(placed.attachment)
                missing: list[str] = []
                async with aclosing(self._answer(without_bytes)) as pieces:
                    async for piece in pieces:
                        for chunk in piece.chunks:
                            yield chunk
                        if piece.failure is not None:
                            raise piece.failure.error()
                        missing = piece.missing
                if not missing:
                    return
                for digest in missing:
                    self._sent.pop(digest, None)
            raise EngineError(f"{self._client.url} loses attachments right after it gets them")

    async def _answer(self, request: Request) -> AsyncGenerator[ChunkMessage, None]:
        connection = await self._connect()
        try:
            connection.outbox.put(Start(request))
        except TypeError as error:
            url = self._client.url
            raise RequestRefused(f"attempt {request.attempt_id} cannot be sent to {url}: {clean(error)}") from None
        inbox = connection.inboxes[request.attempt_id] = asyncio.Queue()
        over = False
        try:
            while not over:
                piece = await inbox.get()
                if isinstance(piece, EngineError):
                    over = True
                    raise piece
                over = piece.last
                yield piece
        finally:
            del connection.inboxes[request.attempt_id]
            if not over:
                connection.outbox.put(Leave(request.attempt_id))

    async def _connect(self) -> _Connection:
        async with self._opening:
            if self._connection is None or self._connection.broken:
                route = f"{ROUTE}line/{self._session}"
                socket = await self._client.web_socket(
                    route, {"interval_s": str(self._interval_s)}, max_bytes=MESSAGE_BYTES, heartbeat_s=HEARTBEAT_S
                )
                self._connection = _Connection(self._client.url, socket)
            return self._connection

    async def _send(self, attachment: Attachment) -> None:
        """Upload the attachment's bytes once; concurrent requests with the same attachment wait for that upload."""
        sent = self._sent.get(attachment.digest)
        if sent is None:
            sent = self._sent[attachment.digest] = asyncio.ensure_future(self._put(attachment))
        try:
            await asyncio.shield(sent)
        except BaseException:
            if sent.done() and self._sent.get(attachment.digest) is sent:
                del self._sent[attachment.digest]
            raise

    async def _put(self, attachment: Attachment) -> None:
        content = attachment.data if attachment.data is not None else await run_in_thread(attachment_bytes, attachment)
        route = f"{ROUTE}attachments/{attachment.kind}/{attachment.digest}"
        self._client.require_ok(await self._client.call("PUT", route, content, timeout_s=ATTACHMENT_S), route)
        self.attachments_sent += 1

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Ask the engine to end these attempts (None means all)."""
        ids = self._to_abort(attempt_ids)
        if ids and self._connection is not None:  # without a connection the requests have ended, or are about to
            self._connection.outbox.put(Abort(ids))

    # ---------------------------------------------------------------- control calls

    async def _call(self, name: str, call: EngineCall) -> CallReply:
        return await _answer_of(self._client, name, pack(call))

    async def _ensure_session(self) -> None:
        """Begin a new session if this client's session has ended and no other client has one.

        Raises EngineError if another client uses the engine, or if the server was restarted with another model.
        """
        now = await self._call("health", EngineCall(self._session))
        if now.session == self._session:
            return
        if now.client:
            raise EngineError(f"{self._client.url} has another client, and two clients cannot share its weights")
        await self._disconnect()
        self._sent.clear()
        began = await self._call("begin", EngineCall(client=self._client_id))
        if other := self._differs(began.capabilities):
            await self._call("end", EngineCall(began.session))
            raise EngineError(f"{self._client.url} was restarted with another model: {other}; remove this engine")
        self._session = began.session
        self._of_start = self._of_start and began.untouched
        if not self._capabilities.shares_weights:
            self._why_incomplete = (
                f"{self._client.url} was restarted, or had another client, and does not have the weights of this run"
            )

    def _differs(self, now: Capabilities | None) -> str:
        """Describe a change of abilities that changes the meaning of tokens or log-probabilities; empty if none."""
        before = self._capabilities
        if now is None:
            return "it does not say which one"
        for name in (*OF_THE_MODEL, "max_context"):
            there, was = getattr(now, name), getattr(before, name)
            if there != was and not (name == "max_context" and there > was):
                return f"{name} {there} instead of {was}"
        return ""

    async def pause(self) -> None:
        """Close admission, end all requests and pause the remote engine."""
        self._admission.close()
        self._keeps = False
        await self._ensure_session()
        await super().pause()
        await self._call("pause", EngineCall(self._session))

    async def pause_in_flight(self, in_flight: OnWeightUpdate) -> None:
        """Pause but keep the requests (:class:`~april.engines.protocol.KeepsRequests`), if the engine can."""
        self._admission.close()
        await self._ensure_session()
        await self._call("pause", EngineCall(self._session, in_flight=in_flight))
        self._keeps = True

    async def resume(self) -> None:
        """Resume the remote engine and reopen admission."""
        await self._call("resume", EngineCall(self._session))
        self._keeps = False
        await super().resume()

    def require_idle(self) -> None:
        """Raise if requests are running, unless the engine was paused with its requests."""
        if not self._keeps:
            super().require_idle()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Make the engine load ``path``, or activate the tensors that it has received, as this version.

        Raises:
            WeightsGone: the weights of the version were lost when a server was restarted.
            EngineError: the error of the remote engine. Unless that engine still has its previous weights, it gets no
                requests until an update succeeds.
        """
        if path is not None:
            self._require_loadable(path)
        adapter = None if path is None or not is_adapter(path) else self._adapters.new_adapter(version, path)
        if adapter is None:
            self.require_idle()
        if path is None and version == FIRST_VERSION and not self._of_start:
            raise WeightsGone(f"{self._client.url} was restarted and has lost the weights that the run began with")
        before, present = self._why_incomplete, self._version
        self._why_incomplete = f"{self._client.url} is between two versions until an update to {version} succeeds"
        try:
            await self._call("update", EngineCall(self._session, version=version, path=path))
        except (EngineBusy, WeightsGone):
            self._why_incomplete = before
            raise
        except EngineError:
            if not before and await self._has(present):
                self._why_incomplete = ""
            raise
        await self._set_version(version, adapter)

    async def _unload(self, adapter: LoadedAdapter) -> bool:
        """Do nothing: the remote engine unloads its adapters itself."""
        return True

    async def _has(self, version: PolicyVersion) -> bool:
        try:
            now = await self._call("health", EngineCall(self._session))
        except EngineError:
            return False
        return now.session == self._session and now.version == version

    def reads(self, model: Any) -> bool:
        """Return False: the remote engine generates from no model of this process."""
        return False

    async def take(self, specs: Sequence[TensorSpec], tensors: Sequence[Any], last: bool) -> None:
        """Send tensors to the engine; :meth:`update_weights` puts them into use."""
        import torch

        def raw() -> list[memoryview]:
            return [t.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data for t in tensors]

        self._why_incomplete = f"engine {self.name} has only part of the new weights until an update succeeds"
        parts = await run_in_thread(raw)
        head = pack(Tensors(self._session, list(specs), [part.nbytes for part in parts], last))
        await _answer_of(self._client, "tensors", _in_pieces(head, parts))

    async def quiet(self) -> None:
        """Wait until nothing computes on the model that the server's process trains."""
        with suppress(EngineUnreachable):  # a process that has ended computes nothing
            await self._call("quiet", EngineCall(self._session))

    async def health(self) -> Health:
        """Return the engine's own report; the engine is not healthy for this client if another client uses it."""
        try:
            now = await self._call("health", EngineCall(self._session))
        except EngineError as error:
            return Health(ok=False, detail=str(error))
        said = now.health or Health(ok=False, detail="the engine does not report its state")
        if now.session != self._session and now.client:
            # ``current`` is left as it is: False would make april load weights although another client uses the engine
            return replace(said, ok=False, detail="another client uses the engine")
        whole = now.session == self._session and now.version == self._version and not self._why_incomplete
        lost = "" if now.session == self._session else "the server was restarted, or has no client"
        detail = "; ".join(filter(None, (said.detail, self._why_incomplete, lost)))
        return replace(said, current=said.current and whole, detail=detail)

    async def close(self) -> None:
        """End the session and close the connection."""
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._call("end", EngineCall(self._session))
        await self._disconnect()
        await self._client.close()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class _ReadsPaths(ServedEngine):
    """A served engine whose own process reads weight paths; for other engines, this process reads the directories."""

    async def content_of(self, path: str) -> str:
        """Return the remote engine's fingerprint of the content of a path."""
        return (await self._call("content", EngineCall(self._session, path=path))).content


class _Connection:
    """The WebSocket that carries requests to the server and brings back the answers."""

    def __init__(self, url: str, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._url, self._socket = url, socket
        self.outbox = Outbox(socket)
        self.inboxes: dict[str, asyncio.Queue[ChunkMessage | EngineError]] = {}
        self.broken = False
        self._task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        sending = asyncio.ensure_future(self.outbox.run())
        error: EngineError = EngineUnreachable(f"the connection to {self._url} broke")
        try:
            async for message in self._socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                for piece in unpacked(message.data, ChunkMessage):
                    if (inbox := self.inboxes.get(piece.attempt_id)) is not None:
                        inbox.put_nowait(piece)
        except WireError as wrong:
            error = wrong
        finally:
            self.broken = True
            for inbox in self.inboxes.values():
                inbox.put_nowait(error)
            sending.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await sending
            await self._socket.close()

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


async def _in_pieces(head: bytes, parts: Sequence[memoryview]) -> AsyncIterator[bytes | memoryview]:
    yield len(head).to_bytes(4, "big") + head
    for part in parts:
        for at in range(0, part.nbytes, PIECE_BYTES):
            yield part[at : at + PIECE_BYTES]


async def _answer_of(client: HttpClient, name: str, body: Any) -> CallReply:
    """Make a control call without a timeout; raises the error that the server reports."""
    route = ROUTE + name
    reply = await client.call("POST", route, body, timeout_s=None, limit=MESSAGE_BYTES)
    client.require_ok(reply, route)
    try:
        answer = unpack(reply.body, CallReply)
    except LinkError as error:
        raise WireError(f"{client.url}{route} sent an answer that april cannot read: {error}") from None
    if answer.failure is not None:
        raise answer.failure.error()
    return answer


async def connect_april(config: AprilEngineConfig) -> list[ServedEngine]:
    """Begin a session with each server; the server's previous client is disconnected.

    Raises:
        ConfigError: the environment variable with the key is not set.
        EngineError: a server could not be reached, or is not an april server.
    """

    async def connect(client: HttpClient) -> ServedEngine:
        client_id = secrets.token_hex(8)
        call = EngineCall(client=client_id, present=config.first_weights == "present")
        began = await _answer_of(client, "begin", pack(call))
        kind = _ReadsPaths if began.reads_paths else ServedEngine
        return kind(client, config, began, client_id)

    return await connect_all(config, connect)
