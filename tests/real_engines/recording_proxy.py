"""An HTTP proxy between april and one server that records the tokens of every answer it passes on.

Bytes pass unchanged in both directions. The proxy parses them afterwards with its own parser, which shares no code
with the engines' clients, so its record is independent evidence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp
import msgspec
import numpy as np
from aiohttp import web

from april.concurrency.http_listener import HttpListener
from april.config.engines import checked_url
from april.engines.protocol import AbortMeans, EngineFinish, Int32, Request
from april.testing.conformance import Broken
from april.testing.conformance.subject import ClientTokens, Figures

_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
     "upgrade", "host", "content-length")
)  # fmt: skip
_ROUTES = ("/generate", "/inference/v1/generate", "/v1/completions")
MAX_BODY_BYTES = 1 << 30


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A request for tokens, and the part of its answer that was passed on."""

    ids: frozenset[str]
    """Ids of the request: ``rid``, ``request_id``, ``X-Request-Id``."""
    content: tuple[bytes, int | None]
    """Prompt ids and seed, which identify a request without an id."""
    status: int = 0
    streamed: bool = False
    sent: list[bytes] = field(default_factory=list)
    """Pieces that were written to the client while it was connected."""
    done: bool = False
    closed_early: bool = False
    """True if the client disconnected before the answer was complete."""
    _tokens: list[int] | None = None

    @property
    def tokens(self) -> list[int]:
        """Token ids of the complete events (or of the complete answer) that were passed on."""
        if self._tokens is not None:
            return self._tokens
        tokens = tokens_in(b"".join(self.sent), self.streamed) if self.status == 200 else []
        if self.done:
            self._tokens, self.sent = tokens, []
        return tokens


class Answer(Protocol):
    """An answer that was sent for one request."""

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids, in order."""
        ...

    @property
    def closed_early(self) -> bool:
        """True if the client disconnected before the answer was complete."""
        ...


def compare_with_wire(
    answers_to: Callable[[Request], Sequence[Answer]], held: Sequence[ClientTokens], means: AbortMeans
) -> Figures:
    """Compare the tokens that the client has with those that were sent; ``answers_to`` returns a request's answers.

    ``lost`` counts tokens of answers that the client had to read to the end, but does not have. ``never read`` counts
    tokens that were sent to a client that had disconnected, which is how some engines abort (``means``).

    Raises:
        Broken: a token is lost, or the client has tokens that were not sent.
    """
    count: dict[int, int] = {}
    for request, tokens, _ in held:
        if len(tokens):
            answer = _answer_of(answers_to(request), tokens, count)
            if answer is None:
                sent = max((len(a.tokens) for a in answers_to(request)), default=0)
                raise Broken(
                    f"request {request.attempt_id} holds {len(tokens)} tokens that are not the {sent} that were sent"
                )
            count[id(answer)] = len(tokens)
    seen = lost = never_read = 0
    looked_at: set[int] = set()
    for request, _, finish in held:
        for answer in answers_to(request):
            if id(answer) in looked_at:
                continue
            looked_at.add(id(answer))
            seen += len(answer.tokens)
            more = len(answer.tokens) - count.get(id(answer), 0)
            if answer.closed_early or (means is AbortMeans.CLOSE and finish is EngineFinish.ABORT):
                never_read += more
            else:
                lost += more
    if lost:
        raise Broken(f"{lost} of {seen} tokens are lost: the server sent them, but the engine does not hold them")
    return {"lost": 0, "never read": never_read, "seen on the wire": seen}


def _answer_of(answers: Iterable[Answer], tokens: Int32, taken: dict[int, int]) -> Answer | None:
    """Find the shortest unused answer that begins with these tokens; None if there is none."""
    fits = [
        answer
        for answer in answers
        if id(answer) not in taken and np.array_equal(np.asarray(answer.tokens[: len(tokens)], np.int32), tokens)
    ]
    return min(fits, key=lambda answer: len(answer.tokens), default=None)


class RecordingProxy:
    """Records the answers of one server.

    Use ``async with RecordingProxy("http://host:port") as proxy`` and give the engine ``proxy.url``, and the suite
    :meth:`compare`.
    """

    def __init__(self, server: str) -> None:
        self._server = checked_url(server)
        self.exchanges: list[Exchange] = []
        """Requests for tokens, in the order of their arrival."""
        self._by_id: dict[str, list[Exchange]] = {}
        self._nameless: dict[tuple[bytes, int | None], list[Exchange]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._listener: HttpListener | None = None
        self.url = ""
        """Address of the proxy."""

    def answers(self, request: Request) -> Sequence[Exchange]:
        """Return the answers to this request; if requests carry no id, those to the same prompt with the same seed.

        If requests carry no seed either, these are the answers to the same prompt.
        """
        named = self._by_id.get(request.attempt_id)
        if named is not None:
            return named
        prompt = request.token_ids.astype("<i4").tobytes()
        seeded = self._nameless.get((prompt, request.sampling.seed))
        return seeded if seeded is not None else self._nameless.get((prompt, None), ())

    def compare(self, held: Sequence[ClientTokens], means: AbortMeans) -> Figures:
        """Compare the tokens that the client has with those that passed the proxy."""
        return compare_with_wire(self.answers, held, means)

    # ---------------------------------------------------------------- start and stop

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen on a free port of this machine."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Content-Type", "Accept"),
            trust_env=False,
        )
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        # the server must notice at once when a client disconnects
        self._listener = HttpListener(app, 1.0, cancel_handlers=True)
        host, port = await self._listener.start(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        """Close all connections; the records remain."""
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # ---------------------------------------------------------------- one exchange

    def _servers(self, request: web.Request) -> Iterable[str]:
        """Addresses that are asked one after the other until one answers."""
        return (self._server,)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        exchange = self._exchange(request, body)
        try:
            return await self._answer(request, body, exchange)
        except asyncio.CancelledError:
            exchange.closed_early = True
            raise
        finally:
            exchange.done = True

    def _exchange(self, request: web.Request, body: bytes) -> Exchange:
        """Describe the request, and record it if it asks for tokens."""
        value = None
        if request.method == "POST" and request.path in _ROUTES:
            with suppress(msgspec.DecodeError):
                value = msgspec.json.decode(body)
        if not isinstance(value, dict):
            return Exchange(ids=frozenset(), content=(b"", None))
        names = [value.get("rid"), value.get("request_id"), request.headers.get("X-Request-Id")]
        # april appends a full stop to the ids that it gives to SGLang
        ids = frozenset(n.removesuffix(".") for n in names if isinstance(n, str))
        exchange = Exchange(ids=ids, content=_content(value))
        self.exchanges.append(exchange)
        for name in ids:
            self._by_id.setdefault(name, []).append(exchange)
        if not ids:
            self._nameless.setdefault(exchange.content, []).append(exchange)
        return exchange

    async def _answer(self, request: web.Request, body: bytes, exchange: Exchange) -> web.StreamResponse:
        assert self._session is not None
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP]
        for server in self._servers(request):
            with suppress(aiohttp.ClientError):
                upstream = await self._session.request(
                    request.method, server + request.raw_path, data=body or None, headers=headers,
                    allow_redirects=False,
                )  # fmt: skip
                break
        else:
            return _hang_up(request, web.Response(status=502))
        async with upstream:
            exchange.status = upstream.status
            exchange.streamed = upstream.content_type == "text/event-stream"
            kept = [(k, v) for k, v in upstream.headers.items() if k.lower() not in _HOP_BY_HOP]
            response = web.StreamResponse(status=upstream.status, reason=upstream.reason)
            response.headers.extend(kept)
            if upstream.content_length is not None:
                response.content_length = upstream.content_length
            try:
                await response.prepare(request)
            except ConnectionError:
                exchange.closed_early = True
                return response
            try:
                async for piece in upstream.content.iter_any():
                    exchange.sent.append(piece)
                    try:
                        await response.write(piece)
                    except ConnectionResetError:
                        exchange.sent.pop()
                        exchange.closed_early = True
                        return response
            except (aiohttp.ClientError, OSError):
                return _hang_up(request, response)
            with suppress(ConnectionResetError):
                await response.write_eof()
            return response


def _hang_up(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Abort the client's connection because the server's has failed."""
    if request.transport is not None:
        request.transport.abort()
    return response


def _content(value: dict[str, Any]) -> tuple[bytes, int | None]:
    """Extract the prompt ids and the seed of a request to any of the _ROUTES."""
    prompts = [value[k] for k in ("token_ids", "input_ids", "prompt") if isinstance(value.get(k), list)]
    inner = value.get("sampling_params")
    places = [value, *([inner] if isinstance(inner, dict) else [])]
    seeds = [place[k] for place in places for k in ("seed", "sampling_seed") if isinstance(place.get(k), int)]
    return np.array(prompts[0] if prompts else [], "<i4").tobytes(), seeds[0] if seeds else None


def tokens_in(body: bytes, streamed: bool) -> list[int]:
    """Return the token ids of an answer from any of the _ROUTES.

    Of a stream only complete events count; an answer that is not streamed counts only if it is complete.
    """
    tokens: list[int] = []
    if not streamed:
        with suppress(msgspec.DecodeError):
            _append_tokens(msgspec.json.decode(body), tokens)
        return tokens
    for event in body.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:
        data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if not data or data == b"[DONE]":
            continue
        with suppress(msgspec.DecodeError):
            _append_tokens(msgspec.json.decode(data), tokens)
    return tokens


def _append_tokens(value: Any, tokens: list[int]) -> None:
    """Append the tokens of one answer or event to the earlier ones."""
    if not isinstance(value, dict):
        return
    if isinstance(ids := value.get("output_ids"), list):
        total = (value.get("meta_info") or {}).get("completion_tokens")
        # SGLang repeats all tokens in each event, unless configured otherwise
        if total is not None and len(ids) >= total and ids[: len(tokens)] == tokens:
            tokens[:] = ids
        else:
            tokens += ids
        if total is not None:
            del tokens[total:]  # an echo of the last token at an abort is no token
        return
    for choice in value.get("choices") or ():
        tokens += choice.get("token_ids") or ()
