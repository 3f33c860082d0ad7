"""One request at a server: its answer read as it comes, made into chunks when they are wanted.

An event of one token costs far more to look at by itself than among others. So who drives a stream may let pieces
of the answer pile up here and take them together; what has arrived can be taken at any time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Protocol

from april.core.versions import PolicyVersion
from april.engines.http.admission import Admission
from april.engines.http.answer_size import answer_bytes
from april.engines.http.http_client import Answer, HttpClient
from april.engines.http.server_sent_events import EventSplitter
from april.engines.http.wire_arrays import empty_chunk
from april.engines.protocol import Chunk, EngineFinish, Piling, Request
from april.errors import EngineError, EngineUnreachable

_DONE = b"[DONE]"


class Reader(Protocol):
    """Makes chunks of what one server says."""

    count: int
    finish: EngineFinish | None
    failure: EngineError | None

    def read_all(self, payloads: list[bytes]) -> list[Chunk]:
        """The chunks of several answers or events, in order; what is wrong with them becomes ``failure``."""
        ...


class ServerStream(Piling):
    """An iterator of chunks (one event at a time), or :meth:`arrived` and :meth:`take` for who can wait.

    Subclasses say what is sent and who reads the answer. Must be closed with :meth:`aclose`.

    Args:
        stream: the answer comes as server-sent events.
        needs_done: without the mark at its end a stream has broken off; what ends the request counts only then, for
            the server's own count of tokens comes after it.
    """

    __slots__ = (
        "_admission", "_answer", "_chunks", "_client", "_done", "_ended", "_inside", "_last", "_needs_done",
        "_pieces", "_reader", "_request", "_route", "_splitter", "_stream", "_sure_of_weights", "over",
        "waiting",
    )  # fmt: skip

    def __init__(
        self, client: HttpClient, admission: Admission, request: Request, route: str, *, stream: bool, needs_done: bool
    ) -> None:
        self._client = client
        self._admission = admission
        self._request = request
        self._route = route
        self._stream = stream
        self._needs_done = needs_done
        self._reader: Reader | None = None
        self._answer: Answer | None = None
        self._splitter: EventSplitter | None = None
        self._pieces: list[bytes] = []
        self._chunks: deque[Chunk] = deque()
        self._last: Chunk | None = None
        """What ends the request, until it is sure."""
        self._inside = self._done = self._ended = self._sure_of_weights = False
        self.over = False
        self.waiting = 0

    # ---------------------------------------------------------------- what subclasses say

    def _prepare(self) -> tuple[Reader, bytes]:
        """Who reads the answer, and the request's body; raises RequestRefused for what must not be asked."""
        raise NotImplementedError

    def _again(self) -> bool:
        """Whether an answer that has ended is to be forgotten, and the request sent once more."""
        return False

    async def _confirm(self) -> None:
        """Raises EngineError unless what has begun to come is of the weights that the engine has."""

    def _left(self) -> None:
        """The request has ended, however."""

    def _weights(self) -> PolicyVersion:
        """The present ones."""
        raise NotImplementedError

    # ---------------------------------------------------------------- in two steps

    async def arrived(self) -> bool:
        """Wait until more is there to :meth:`take`; False: the request has ended, and everything was taken.

        Raises:
            EngineError: the request was refused, or broke off, or has answers that cannot be true; what came before
                was there to be taken.
        """
        reader = self._reader
        if reader is not None and reader.failure is not None and not self._chunks:
            raise reader.failure
        if self.over:
            return self._end()
        if self._answer is None:
            await self._begin()
            if self._answer is None:
                return True
        try:
            piece = await self._answer.read()
        except EngineError as error:
            self._broke(error)
            return True
        if piece:
            if not self._sure_of_weights:
                await self._confirm()
                self._sure_of_weights = True
            self._pieces.append(piece)
            self.waiting += 1
        else:
            self._whole()
        return True

    def take(self) -> list[Chunk]:
        """The chunks of everything that has arrived; the last of a request has its finish."""
        if self._pieces:
            self._read()
        chunks = list(self._chunks)
        self._chunks.clear()
        return chunks

    # ---------------------------------------------------------------- as an iterator

    def __aiter__(self) -> ServerStream:
        return self

    async def __anext__(self) -> Chunk:
        while not self._chunks:
            if not await self.arrived():
                raise StopAsyncIteration
            self._read()
        return self._chunks.popleft()

    async def aclose(self) -> None:
        """End the request; the server drops what it has not sent."""
        self.over = self._ended = True
        self._leave()

    # ---------------------------------------------------------------- inside

    async def _begin(self) -> None:
        """Send the request, unless it was aborted before; an answer that is no stream has come then."""
        if not self._inside:
            if not self._admission.is_open and not await self._admission.wait(self._request.attempt_id):
                self._chunks.append(empty_chunk(self._weights(), EngineFinish.ABORT))
                self.over = self._ended = True
                return
            self._admission.enter(self._request.attempt_id)
            self._inside = True
        self._reader, body = self._prepare()
        if self._stream:
            self._splitter, self._done = EventSplitter(answer_bytes(self._request)), False
            self._answer = await self._client.post(self._route, body)
            return
        limit = answer_bytes(self._request)
        reply = await self._client.call("POST", self._route, body, timeout_s=None, limit=limit)
        if not reply.ok:
            self._client.require_ok(reply, self._route)
        await self._confirm()
        chunks = self._reader.read_all([reply.body])
        if not self._again():
            if self._reader.failure is not None:
                chunks = [c for c in chunks if c.finish is None]  # the end cannot be true, nor what came with it
            self._chunks += chunks
            self.over = True

    def _whole(self) -> None:
        """The stream has ended."""
        self._read()
        self._rest()
        assert self._answer is not None
        self._answer.close()
        self._answer = None
        if self._again():
            self._chunks.clear()
        else:
            self.over = True

    def _read(self) -> None:
        """Make chunks of the pieces."""
        pieces, self._pieces, self.waiting = self._pieces, [], 0
        splitter, reader = self._splitter, self._reader
        if not pieces or splitter is None or reader is None or reader.failure is not None:
            return
        try:
            payloads = splitter.feed(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        except EngineError as error:
            reader.failure = error
            return
        self._payloads(payloads)

    def _broke(self, error: EngineError) -> None:
        """The connection has broken: what came before counts, and so does an end that nothing can follow."""
        self._read()
        reader = self._reader
        assert reader is not None
        whole = self._last is not None and self._sure and reader.failure is None
        self._keep_last(sure=whole)
        if not whole:
            reader.failure = reader.failure or error
        self.over = True

    def _rest(self) -> None:
        """What the end of the stream says of the chunks before it."""
        splitter, reader = self._splitter, self._reader
        assert splitter is not None
        assert reader is not None
        if reader.failure is None:
            try:
                self._payloads(splitter.end())
            except EngineError as error:
                reader.failure = error
        if reader.failure is None:
            self._keep_last(sure=self._sure)
            if not self._sure:
                reader.failure = EngineUnreachable(
                    f"{self._client.url}{self._route}: the stream broke off; has the server died?"
                )

    @property
    def _sure(self) -> bool:
        """Whether what has ended the request is the end of it."""
        return self._done or not self._needs_done

    def _keep_last(self, *, sure: bool) -> None:
        """Its tokens are good in any case; that they are the last ones is not."""
        last, self._last = self._last, None
        if last is not None:
            self._chunks.append(last if sure else replace(last, finish=None))

    def _payloads(self, payloads: list[bytes]) -> None:
        reader = self._reader
        assert reader is not None
        if payloads and payloads[-1] == _DONE:
            self._done = True
            payloads.pop()
        self._chunks += reader.read_all(payloads)
        if self._chunks and self._chunks[-1].finish is not None:
            self._last = self._chunks.pop()

    def _end(self) -> bool:
        """Everything was taken: False if the answer was whole."""
        if self._ended:
            return False
        self._ended = True
        reader = self._reader
        assert reader is not None
        if reader.failure is not None:
            raise reader.failure
        if reader.finish is None:
            raise EngineUnreachable(
                f"{self._client.url}{self._route} ended without a finish reason after {reader.count} tokens of attempt "
                f"{self._request.attempt_id}; has the server died?"
            )
        self._leave()
        return False

    def _leave(self) -> None:
        """The server is not asked for anything any more."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.close()
        if self._inside:
            self._inside = False
            self._left()
            self._admission.leave(self._request.attempt_id)
