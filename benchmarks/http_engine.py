"""``HttpGenerateEngine``: april's engine protocol over the fake server's wire format. For benchmarks only.

Invariant: a chunk leaves this file only if its ids are in the vocabulary, its log-probabilities are finite and
not positive, and there are as many of them as of ids and as the server says; anything else is a ``WireError``.
The version is kept here, not on the server: while paused nothing is in flight, so one answer has one version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

import aiohttp
import msgspec
import numpy as np

from april.core.sampling import LogprobKind
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.protocol import Capabilities, Chunk, EngineFinish, Health, Request
from april.errors import EngineError, WireError
from benchmarks.generate_wire import (
    JSON_HEADERS,
    VOCAB_SIZE,
    AbortBody,
    GenerateReply,
    decode_reply,
    encode_body,
    encode_generate,
    open_session,
)

MIN_LOGPROB = float(np.finfo(np.float32).min)
MAX_LOGPROB = 1e-4
"""Rounding may lift the log-probability of a certain token a little above 0."""
ABORTS_AT_ONCE = 64


class HttpGenerateEngine:
    """One fake server seen as an engine; methods must be called on one event loop."""

    def __init__(self, url: str, *, name: str = "http", max_context: int = 32_768) -> None:
        self._name = name
        self._url = url
        self._capabilities = Capabilities(
            logprob_kind=LogprobKind.TEMPERATURE, vocab_size=VOCAB_SIZE, max_context=max_context
        )
        self._version = FIRST_VERSION
        self._session: aiohttp.ClientSession | None = None  # aiohttp binds it to the loop of its first use
        self._closed = False
        self._paused = False
        # attempts that came while paused -> True: go on, False: aborted before they were sent
        self._queued: dict[str, asyncio.Future[bool]] = {}
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "paused" if self._paused else "open"
        return f"<HttpGenerateEngine {self._name} {state}, {self._in_flight} in flight, version {self._version}>"

    @property
    def name(self) -> str:
        """Label of the engine."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """What the fake server can do."""
        return self._capabilities

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """One POST, one chunk; raises EngineError for a failed exchange and WireError for a wrong answer."""
        while self._paused:
            if not await self._queue(request.attempt_id):
                yield Chunk(np.empty(0, np.int32), np.empty(0, np.float32), self._version, EngineFinish.ABORT)
                return
        self._in_flight += 1
        self._idle.clear()
        try:
            body = encode_generate(request.attempt_id, request.token_ids, request.sampling)
            raw = await self._post("/generate", body)
            chunk = parse_chunk(raw, self._version, where=f"{self._name}, attempt {request.attempt_id}")
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()
        yield chunk

    async def _queue(self, attempt_id: str) -> bool:
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queued[attempt_id] = turn
        try:
            return await turn
        finally:
            self._queued.pop(attempt_id, None)

    def _end_queued(self, attempt_ids: Iterable[str], *, admit: bool) -> None:
        for attempt_id in attempt_ids:
            turn = self._queued.get(attempt_id)
            if turn is not None and not turn.done():
                turn.set_result(admit)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """One POST for all, or one per id, ``ABORTS_AT_ONCE`` at a time."""
        self._end_queued(list(self._queued) if attempt_ids is None else attempt_ids, admit=False)
        if attempt_ids is None:
            await self._post("/abort_request", encode_body(AbortBody(abort_all=True)))
            return
        for start in range(0, len(attempt_ids), ABORTS_AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for attempt_id in attempt_ids[start : start + ABORTS_AT_ONCE]:
                    group.create_task(self._post("/abort_request", encode_body(AbortBody(rid=attempt_id))))

    async def pause(self) -> None:
        """Close admission and wait until nothing is in flight: the server cannot freeze a request."""
        self._paused = True
        await self._idle.wait()

    async def resume(self) -> None:
        """Open admission."""
        self._paused = False
        self._end_queued(list(self._queued), admit=True)

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Stamp later chunks with ``version``; raises EngineError when not paused or when given a path."""
        if path is not None:
            raise EngineError(f"engine {self._name} has no weights to load from {path!r}; pass no path")
        if not self._paused or self._in_flight:
            raise EngineError(f"engine {self._name} got version {version} while it generates; pause it first")
        self._version = version

    async def health(self) -> Health:
        """Ask /health and /stats."""
        try:
            await self._get("/health")
            counters = msgspec.json.decode(await self._get("/stats"), type=dict[str, float])
        except (EngineError, msgspec.MsgspecError) as error:
            return Health(ok=False, detail=str(error))
        return Health(ok=True, counters=counters)

    async def close(self) -> None:
        """Close every connection; requests in flight or waiting end with EngineError."""
        self._closed = True
        await self.resume()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _post(self, route: str, body: bytes) -> bytes:
        try:
            async with self._http.post(route, data=body, headers=JSON_HEADERS, allow_redirects=False) as response:
                return self._checked(route, response.status, await response.read())
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"engine {self._name}: POST {route} failed: {error!r}; is the server alive?") from error

    async def _get(self, route: str) -> bytes:
        try:
            async with self._http.get(route, allow_redirects=False) as response:
                return self._checked(route, response.status, await response.read())
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"engine {self._name}: GET {route} failed: {error!r}; is the server alive?") from error

    def _checked(self, route: str, status: int, raw: bytes) -> bytes:
        if status != 200:
            raise EngineError(f"engine {self._name}: {route} answered {status}: {raw[:200]!r}")
        return raw

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineError(f"engine {self._name} is closed; make a new one")
        if self._session is None:
            self._session = open_session(self._url)
        return self._session


def parse_chunk(raw: bytes, version: PolicyVersion, *, where: str) -> Chunk:
    """The only chunk of an answer, checked; raises WireError that names ``where``."""
    try:
        reply: GenerateReply = decode_reply(raw)
        finish = EngineFinish(reply.finish_reason.type)
        tokens = np.array(reply.output_ids, dtype=np.int32)
        logprobs = np.array(reply.output_logprobs, dtype=np.float64)
    except (ValueError, OverflowError) as error:
        raise WireError(f"{where}: the answer is not a generate reply: {error}") from error
    if not len(tokens) == len(logprobs) == reply.meta.completion_tokens:
        raise WireError(
            f"{where}: {len(tokens)} ids, {len(logprobs)} log-probabilities and "
            f"completion_tokens {reply.meta.completion_tokens} must be equal"
        )
    # NaN fails a comparison too; min and max make no temporary array
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < VOCAB_SIZE):
        raise WireError(f"{where}: a token id is outside [0, {VOCAB_SIZE})")
    if len(tokens) and not (logprobs.min() >= MIN_LOGPROB and logprobs.max() <= MAX_LOGPROB):
        raise WireError(f"{where}: a log-probability is not finite in float32 or is above {MAX_LOGPROB}")
    return Chunk(tokens, logprobs.astype(np.float32), version, finish)
