"""Streams one request to a server: waits for admission, sends it, and turns its response into chunks.

Parsing many one-token events together is much cheaper than one at a time. So pieces of the response collect here
unparsed until the caller takes them, which it may do at any time.

Invariant: if the server must first confirm which weights it has, no token is handed over before that confirmation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from april.config.engines import RoutingKey
from april.core.versions import PolicyVersion
from april.engines.http.http_client import HttpClient, ResponseBytes
from april.engines.http.response_reader import ReadProgress, ResponseReader
from april.engines.http.routing_key import routing_headers
from april.engines.http.sent_attachments import SentAttachments, Urls
from april.engines.http.server_engine import Admission
from april.engines.http.server_process import Confirmation
from april.engines.http.weight_labels import WeightLabels
from april.engines.http.wire import empty_chunk
from april.engines.protocol import AbortMeans, BufferedStream, Chunk, EngineFinish, Request
from april.errors import EngineError, EngineUnreachable, RequestRefused, WireError
from april.text.server_text import clean


class EventSplitter:
    """Splits a byte stream into the payloads (the text after ``data:``) of complete server-sent events.

    Lines end in LF or CRLF. Comments, other fields and events without data are skipped; several data lines of one event
    are joined. ``limit`` is the maximum number of bytes of one event.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pieces: list[bytes] = []
        self._size = 0
        self._data: list[bytes] = []
        self._data_bytes = 0
        """Number of bytes of the lines in ``_data``."""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the payloads completed by this piece. Raises WireError for a line or event that is not valid."""
        cut = piece.rfind(b"\n")
        if cut < 0:
            self._keep(piece)
            return []
        text = b"".join([*self._pieces, piece[: cut + 1]])
        self._pieces, self._size = [], 0
        self._keep(piece[cut + 1 :])
        if not self._data and (plain := _plain(text)) is not None:
            return plain
        events: list[bytes] = []
        for raw in text.split(b"\n")[:-1]:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:") or line == b"data":
                self._data.append(line[5:].removeprefix(b" "))
                self._data_bytes += len(line)
                self._require_room(self._data_bytes)
            elif not line:
                events += self._completed()
            elif not (line.startswith(b":") or line.split(b":", 1)[0] in (b"event", b"id", b"retry")):
                raise WireError(f"the stream has a line that is not a server-sent event ({len(line)} bytes)")
        return events

    def end(self) -> list[bytes]:
        """Return the event that the stream's end completes, if any. Raises EngineError if a line is not complete."""
        if self._size:
            raise EngineError(f"the stream ends inside an event, after {self._size} bytes of it")
        return self._completed()

    def _completed(self) -> list[bytes]:
        """Return the event that the lines in ``_data`` make up; none if they are empty."""
        data = b"\n".join(self._data)
        self._data, self._data_bytes = [], 0
        return [data] if data else []

    def _keep(self, piece: bytes) -> None:
        if not piece:
            return
        self._pieces.append(piece)
        self._size += len(piece)
        self._require_room(self._size)

    def _require_room(self, size: int) -> None:
        if size > self._limit:
            raise WireError(f"an event of the stream has more than {self._limit} bytes; april stops reading")


def _plain(text: bytes) -> list[bytes] | None:
    """Split events of exactly one data line each, the usual case; None if the text contains anything else."""
    blocks = text.split(b"\n\n")
    if blocks.pop() or text.count(b"\n") != 2 * len(blocks) or b"\r" in text:
        return None
    if not all(block.startswith(b"data: ") for block in blocks):
        return None
    return [block[6:] for block in blocks if len(block) > 6]


BYTES_PER_TOKEN = 1 << 12
"""Upper bound for the JSON of one token: vLLM sends about 140 bytes, or 2,000 if it adds text and bytes. Prompt tokens
count too: for each, vLLM with routed experts sends up to 2,000 bytes, and other servers send its id."""
ROW_BYTES = 1 << 14
"""Upper bound for one token's row in an extra array, such as the experts that the token was routed to: SGLang sends
12,000 bytes for 8 experts in each of 288 layers."""
OTHER_BYTES = 1 << 20


def max_response_bytes(request: Request) -> int:
    """Return the maximum size of a response, and of one event, as some servers repeat all tokens in each event."""
    each = BYTES_PER_TOKEN + ROW_BYTES * len(request.extras)
    return OTHER_BYTES + each * (len(request.token_ids) + request.sampling.max_tokens)


class StreamState(StrEnum):
    """State of one request. How far its response has been read is in the reader's :class:`ReadProgress`."""

    WAITING = "waiting"
    """The request has not been admitted yet."""
    SENDING = "sending"
    """The request has been admitted, and its response has not begun."""
    HELD = "held"
    """The response is arriving; its tokens are held back until the server has confirmed its weights."""
    READING = "reading"
    """Tokens are handed over as they arrive."""
    ENDED = "ended"
    """The response is complete; the last chunk carries the finish reason."""
    FAILED = "failed"
    """The request has failed; the error is raised after the last chunk."""
    CLOSED = "closed"
    """The caller has closed the stream."""


# module-level names are faster than enum attributes, and these are read for every piece of a response
_HELD, _READING = StreamState.HELD, StreamState.READING
_OVER = frozenset({StreamState.ENDED, StreamState.FAILED, StreamState.CLOSED})

@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRoute:
    """The route to which one engine sends its requests, with the state that its streams share."""

    client: HttpClient
    route: str
    admission: Admission
    labels: WeightLabels
    prepare: Callable[[Request, bool, Urls], tuple[ResponseReader, bytes]]
    """Called as ``prepare(request, streamed, urls)``, returns the reader and the body of the request; ``urls`` holds
    the attachments to send. Raises EngineError for a request that must not be sent."""
    abort_means: AbortMeans
    marks_end: bool
    """True if a stream is complete only with its end mark ([DONE]), because the server sends its token count between
    the finish reason and the mark."""
    confirmation: Confirmation | None = None
    """Check that the server has the right weights, if its responses do not say this from the start; else None."""
    paused_by_others: Callable[[], Awaitable[bool]] | None = None
    """Function that returns whether somebody else has paused the server; called if the server ends a request."""
    attachments: SentAttachments = field(default_factory=SentAttachments)
    """Record of the attachments that the server has received."""
    routing_key: RoutingKey = "off"
    """Value of the setting ``routing_key``, which says which requests a router should send to the same server."""
    open_streams: dict[str, ResponseStream] = field(default_factory=dict)
    """Streams that were admitted and have not ended, by attempt id."""

    def abort(self, attempt_ids: Iterable[str]) -> None:
        """Abort these attempts; see :meth:`ResponseStream.abort`."""
        for attempt_id in attempt_ids:
            if (stream := self.open_streams.get(attempt_id)) is not None:
                stream.abort()

    def set_version(self, version: PolicyVersion) -> None:
        """Switch to ``version`` in all open streams; the server is paused and keeps their requests."""
        for stream in self.open_streams.values():
            stream.set_version(version)

    def recall_unstarted(self) -> None:
        """Take back all requests without tokens, because the server is paused; they wait for admission again."""
        for stream in list(self.open_streams.values()):
            stream.recall()


class ResponseStream(BufferedStream):
    """Streams the response to one request as chunks; must be closed with :meth:`aclose`.

    Iterate over it to get one event at a time, or call :meth:`arrived` and :meth:`take` to get all pending events at
    once. ``streamed`` means that the response comes as server-sent events.
    """

    __slots__ = (
        "_abort_wanted", "_body", "_chunks", "_endpoint", "_failure", "_pieces", "_reader",
        "_recalled", "_request", "_splitter", "_streamed", "_task", "state", "waiting",
    )  # fmt: skip

    def __init__(self, endpoint: GenerateRoute, request: Request, *, streamed: bool) -> None:
        self._endpoint = endpoint
        self._request = request
        self._streamed = streamed
        self.state = StreamState.WAITING
        self._abort_wanted = self._recalled = False
        self._failure: EngineError | None = None
        self._task: asyncio.Task[Any] | None = None
        self._reader: ResponseReader | None = None
        self._body: ResponseBytes | None = None
        self._splitter: EventSplitter | None = None
        self._pieces: list[bytes] = []
        self._chunks: list[Chunk] = []
        self.waiting = 0

    @property
    def over(self) -> bool:
        """Return whether nothing more will arrive."""
        return self.state in _OVER

    # ---------------------------------------------------------------- reading with arrived() and take()

    async def arrived(self) -> bool:
        """Wait until :meth:`take` has something to return; False means that the request has ended and all was taken.

        Raises EngineError if the request was refused, broke off or got an invalid response; earlier tokens come first.
        """
        if self.state in _OVER:
            if not self._chunks:
                self._release()
                if self.state is StreamState.FAILED and self._failure is not None:
                    raise self._failure
            return bool(self._chunks)
        try:
            if self._body is None and not await self._send():
                return True
            assert self._body is not None
            piece = await self._body.read()
        except EngineError as error:
            await self._end_request(error)
            return True
        if not piece:
            await self._end_request(None)
        elif self.state is _READING:
            self._pieces.append(piece)
            self.waiting += 1
        elif self.state is _HELD:
            self._pieces.append(piece)
            await self._confirm(self._read().take())
        return True

    def take(self) -> list[Chunk]:
        """Return the chunks of everything that has arrived; the last chunk of a request carries the finish reason."""
        if self._pieces:
            self._chunks += self._read().take()
            self._next(_READING)
        chunks, self._chunks, self.waiting = self._chunks, [], 0
        return chunks

    def abort(self) -> None:
        """Abort the request. With AbortMeans.CLOSE the stream is closed here, and the bytes that have arrived are still
        read. Otherwise the abort is only noted here; the engine asks the server, which ends the response."""
        self._abort_wanted = True
        if self._endpoint.abort_means is AbortMeans.CLOSE:
            self._break_off()

    def set_version(self, version: PolicyVersion) -> None:
        """Assign ``version`` to tokens that arrive from now on; tokens that have arrived keep the old version."""
        if self._pieces and self.state is _READING:
            self._chunks += self._read().take()
            self._next(_READING)
        if self._reader is not None:
            self._read().set_version(version)

    def recall(self) -> None:
        """Take the request back if it has no token yet: a paused server would start it later, under other weights."""
        if self._pieces and self.state is _READING:
            self._chunks += self._read().take()
        if self._reader is None or not (self._pieces or self._reader.count):
            self._recalled = True
            self._break_off()

    def _break_off(self) -> None:
        if self._body is not None:
            self._body.stop()
        elif self._task is not None and self.state is StreamState.SENDING:
            self._endpoint.client.break_off(self._task)

    # ---------------------------------------------------------------- reading as an iterator

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> Chunk:
        try:
            while not self._chunks:
                if not await self.arrived():
                    raise StopAsyncIteration
                if self._pieces:
                    self._chunks = self.take()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        self.waiting = 0
        return self._chunks.pop(0)

    async def aclose(self) -> None:
        """Close the stream. The server drops the tokens that it has not sent yet."""
        if self.state is not StreamState.CLOSED:
            self.state = StreamState.CLOSED
        self._pieces, self.waiting = [], 0
        self._release()

    # ---------------------------------------------------------------- inside

    async def _send(self) -> bool:
        """Wait for admission and send the request; False if the request has ended or must be sent again."""
        endpoint, request = self._endpoint, self._request
        admission, attempt_id = endpoint.admission, request.attempt_id
        if self.state is StreamState.WAITING:
            if not admission.is_open and not await admission.wait(attempt_id):
                self._chunks.append(empty_chunk(endpoint.labels.present, EngineFinish.ABORT))
                self.state = StreamState.ENDED
                return False
            admission.enter(attempt_id)
            endpoint.open_streams[attempt_id] = self
            self.state = StreamState.SENDING
        self._task = asyncio.current_task()
        if not request.attached:
            return await self._post({})
        return await endpoint.attachments.send(attempt_id, request.attached, self._post)

    async def _post(self, urls: Urls) -> bool:
        """Send the request with the attachments in ``urls``; False if it has already ended."""
        endpoint, request = self._endpoint, self._request
        # stream if attachments are sent: other requests wait for their arrival, and the first event shows it
        self._streamed = self._streamed or (bool(urls) and endpoint.attachments.by_name)
        try:
            self._reader, body = endpoint.prepare(request, self._streamed, urls)
        except UnicodeEncodeError as error:
            raise RequestRefused(f"attempt {request.attempt_id} has text that cannot be sent: {clean(error)}") from None
        if self._closing:
            raise EngineUnreachable(f"attempt {request.attempt_id} was ended before it was sent")
        limit, headers = max_response_bytes(request), routing_headers(request, endpoint.routing_key)
        if self._streamed:
            self._splitter = EventSplitter(limit)
            self._body = await endpoint.client.post(endpoint.route, body, headers)
            self._begin(self._reader)
            return True
        reply = await endpoint.client.call(
            "POST", endpoint.route, body, timeout_s=None, limit=limit, headers=headers
        )
        endpoint.client.require_ok(reply, endpoint.route)
        self._begin(self._reader)
        self._reader.read([reply.body])
        await self._end_request(None)
        return False

    def _begin(self, reader: ResponseReader) -> None:
        """Go to HELD if the tokens need a confirmation of the server's weights, else to READING.

        A response that is not streamed needs no confirmation if it names its weights itself.
        """
        confirmation = self._endpoint.confirmation
        held = confirmation is not None and confirmation.needed() and (self._streamed or reader.labels is None)
        self.state = StreamState.HELD if held else StreamState.READING

    def _read(self, *, to_the_end: bool = False) -> ResponseReader:
        """Parse the pending pieces and return the reader; ``to_the_end`` means that nothing follows them."""
        pieces, self._pieces = self._pieces, []
        splitter, reader = self._splitter, self._reader
        assert reader is not None
        if splitter is not None:
            try:
                reader.read(splitter.feed(pieces[0] if len(pieces) == 1 else b"".join(pieces)))
                if to_the_end and not self._closing:  # a stream closed by april may end inside an event
                    reader.read(splitter.end())
            except EngineError as error:
                reader.fail(error)
        return reader

    async def _end_request(self, error: EngineError | None) -> None:
        """Read the rest of the response and end the stream, or let the request wait for admission again.

        Tokens that came before ``error`` are kept, and so is a finish reason, unless the end mark had to follow it.
        """
        reader = self._reader
        if reader is None:
            self._failure = error
            self.state = StreamState.FAILED
            return
        self._read(to_the_end=error is None)
        self._check_complete(reader, error)
        if self._body is not None:
            self._body.close()
            self._body = None
        if await self._is_taken_back(reader):
            self._release()
            self._reader, self._splitter, self._recalled = None, None, False
            self.state = StreamState.WAITING
            return
        await self._confirm(reader.take(last=True), StreamState.ENDED)

    def _check_complete(self, reader: ResponseReader, error: EngineError | None) -> None:
        if reader.progress is ReadProgress.WRONG:
            return
        needs_mark = self._streamed and self._endpoint.marks_end
        sure = reader.progress is ReadProgress.DONE or self._closing or not needs_mark
        if reader.finish is not None and sure:
            return
        where = f"{self._endpoint.client.url}{self._endpoint.route}"
        if self._closing:
            reader.cut()
        elif error is not None:
            reader.fail(error)
        elif reader.finish is None and sure:
            reader.fail(EngineUnreachable(
                f"{where} ended without a finish reason after {reader.count} tokens of attempt "
                f"{self._request.attempt_id}; has the server died?"
            ))  # fmt: skip
        else:
            reader.fail(EngineUnreachable(f"{where}: the stream was interrupted; has the server died?"))

    @property
    def _closing(self) -> bool:
        return self._recalled or (self._abort_wanted and self._endpoint.abort_means is AbortMeans.CLOSE)

    async def _is_taken_back(self, reader: ResponseReader) -> bool:
        """Return whether the request must wait for admission again: it has no token, and the server is paused."""
        is_paused = self._endpoint.paused_by_others
        if self._recalled:
            return not reader.count  # a request that has tokens ends here with these instead of being sent again
        if is_paused is None or self._abort_wanted:
            return False
        by_others = reader.finish is EngineFinish.ABORT or reader.failure is not None
        return by_others and await is_paused() and not (reader.count or self._abort_wanted)

    async def _confirm(self, chunks: list[Chunk], then: StreamState | None = None) -> None:
        """Hand chunks over; the first tokens wait until the server has confirmed its weights."""
        if self.state is StreamState.HELD:
            tokens = any(len(chunk.tokens) for chunk in chunks)
            if tokens:
                confirmation = self._endpoint.confirmation
                assert confirmation is not None
                try:
                    await confirmation.wait_since(asyncio.get_running_loop().time(), broken=self._is_broken)
                except EngineError as error:
                    self._failure = error
                    self.state = StreamState.FAILED
                    return
            then = then or (StreamState.READING if tokens else StreamState.HELD)
        self._chunks += chunks
        self.waiting += bool(chunks)
        self._next(then or self.state)

    def _is_broken(self) -> bool:
        reader, body = self._reader, self._body
        return (reader is not None and reader.failure is not None) or (body is not None and body.broken)

    def _next(self, state: StreamState) -> None:
        """Go to ``state``, or to FAILED if the reader has found an error."""
        reader = self._reader
        if reader is not None and reader.failure is not None:
            self._failure, state = reader.failure, StreamState.FAILED
        self.state = state

    def _release(self) -> None:
        """Release the connection, and tell the admission that the request has ended."""
        body, self._body = self._body, None
        if body is not None:
            body.close()
        endpoint, attempt_id = self._endpoint, self._request.attempt_id
        if endpoint.open_streams.get(attempt_id) is self:
            del endpoint.open_streams[attempt_id]
            endpoint.admission.leave(attempt_id)
