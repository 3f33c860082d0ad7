"""april's engine for servers that a trainer owns: the trainer's client sends and balances requests and loads weights.

The servers can abort only all requests at once. Invariant: a generate call of a rollout function never has two requests
at the servers. If april stops waiting for a request, its response answers the next request of the same call, or its
tokens are counted as dropped (LATE).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from april.core.attachments import NO_EXTRAS, Extras
from april.core.saved_state import rows_in, rows_out
from april.core.tape import Float32, Int32
from april.core.types import DropReason, EngineFinish, SampleId
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.base import VersionedEngine
from april.engines.http.wire import empty_chunk
from april.engines.protocol import AbortMeans, Capabilities, Chunk, Health, LogprobKind, Request
from april.errors import EngineError

FIRST_RESEND_S, LONGEST_RESEND_S = 0.05, 1.0
"""Shortest and longest pause, in seconds, before a request that a server aborted without a token is sent again."""
ANY_TOKEN = 2**31 - 1
"""Vocabulary size that accepts any token id, because the servers' vocabulary is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerResult:
    """A server's response to one request.

    ``label`` is the trainer's version number of the weights (None if the server does not report it). ``unused`` is the
    number of generated tokens that ``tokens`` omits, and the reason. ``own_end`` is True if the last token cannot show
    why the response ended, as with stop strings. ``extras`` are per-token rows, from the first prompt token on.
    """

    tokens: Int32
    logprobs: Float32
    label: int | None
    aborted: bool
    unused: tuple[int, DropReason] | None = None
    own_end: bool = False
    extras: Extras = field(default_factory=lambda: NO_EXTRAS)


@dataclass(slots=True, eq=False)
class _SentRequest:
    """A request that is at the servers or has ended; ``offset`` is its number of input tokens."""

    offset: int
    no_resend: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if the request must not be sent again, because all requests were aborted or nobody waits for its response."""
    task: asyncio.Task[None] | None = None
    result: ServerResult | None = None
    version: PolicyVersion = FIRST_VERSION
    error: str = ""
    has_reader: bool = True


class TrainerServers(VersionedEngine):
    """An :class:`april.engines.protocol.Engine` that sends requests through a trainer's own client.

    Args:
        send: Coroutine function that sends a request, ``(entry of .requests, token ids int32 [T], maximum number of
            new tokens)``.
        abort_all: Coroutine function that makes the servers abort every request.
        max_context: Maximum number of tokens of a conversation, not counting its first token.
        max_in_flight: Maximum number of concurrent requests; None means no limit.
        attachments, extras: Media kinds and per-token arrays that the servers support, as in Capabilities.
    """

    unused: Callable[[int, DropReason], None] = staticmethod(lambda count, reason: None)

    def __init__(
        self, name: str, send: Callable[[Any, Int32, int], Awaitable[ServerResult]],
        abort_all: Callable[[], Awaitable[None]], *, max_context: int, max_in_flight: int | None = None,
        eos_token_ids: Sequence[int] = (), attachments: Sequence[str] = (), extras: Sequence[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(name, Capabilities(
            logprob_kind=LogprobKind.TEMPERATURE, vocab_size=ANY_TOKEN,
            max_context=max_context + 1,  # for the first token, since prompts have no tokens when they are drawn
            eos_token_ids=tuple(eos_token_ids), max_in_flight=max_in_flight, abort_means=AbortMeans.PAUSE,
            streams=False, honours_seeds=False, attachments=tuple(attachments), extras=tuple(extras), answers_late=True,
        ))  # fmt: skip
        self._send_to_server, self._abort_all = send, abort_all
        self.requests: dict[SampleId, Any] = {}
        """Data that ``send`` needs for the current call of each sample, besides the tokens; by sample id."""
        self._sent: dict[SampleId, _SentRequest] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._aborted: dict[str, asyncio.Future[None]] = {}

    @property
    def busy(self) -> bool:
        """True if requests are at the servers, whether or not anybody waits for them."""
        return bool(self._running)

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Yield the response in one chunk. Sends no request if an earlier one of the call is running or unread."""
        key = SampleId(*(request.sample_key or (0, 0)))
        sent = self._sent.get(key)
        fits = sent is not None and sent.offset == len(request.token_ids) and not sent.error
        if sent is None or not fits or (sent.result is not None and not len(sent.result.tokens)):
            self._discard(key)
            sent = self._sent[key] = _SentRequest(len(request.token_ids))
            sent.task = asyncio.get_running_loop().create_task(self._send(sent, request, self.requests[key]))
            self._running.add(sent.task)
            sent.task.add_done_callback(self._running.discard)
        if sent.task is not None and not sent.task.done():
            aborted = self._aborted[request.attempt_id] = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait((sent.task, aborted), return_when=asyncio.FIRST_COMPLETED)
            finally:
                del self._aborted[request.attempt_id]
            if not sent.task.done():
                sent.no_resend.set()
                yield empty_chunk(self._version, EngineFinish.ABORT)
                return
        del self._sent[key]
        if sent.result is None:
            raise EngineError(sent.error)
        yield _chunk(request, sent.result, sent.version)

    async def _send(self, sent: _SentRequest, request: Request, call_data: Any) -> None:
        """Send a request, repeatedly while the servers abort it without a token, and store its result."""
        ids, max_tokens, version, wait_s = request.token_ids, request.sampling.max_tokens, self._version, FIRST_RESEND_S
        try:
            while True:
                result = await self._send_to_server(call_data, ids, max_tokens)
                if result.unused is not None:
                    self.unused(*result.unused)
                if not result.aborted or len(result.tokens) or sent.no_resend.is_set():
                    break
                try:
                    async with asyncio.timeout(wait_s):
                        await sent.no_resend.wait()
                    break
                except TimeoutError:
                    wait_s = min(2 * wait_s, LONGEST_RESEND_S)
        except Exception as error:  # a server died or refuses the request; april's core decides about a retry
            sent.error = f"{type(error).__name__}: {error}".partition("\n")[0]
            return
        weights_unknown = result.label is None and version != self._version  # they may have changed during the request
        if not sent.has_reader or weights_unknown:
            self._count_unused(result)
            sent.error = "its answer came after the weights had changed, and does not show which weights made it"
            return
        sent.version = version if result.label is None else self._version._replace(n=result.label)
        sent.result = result

    def _count_unused(self, result: ServerResult) -> None:
        if len(result.tokens):
            self.unused(len(result.tokens), DropReason.LATE)

    def _discard(self, key: SampleId) -> None:
        sent = self._sent.pop(key, None)
        if sent is not None:
            sent.has_reader = False
            sent.no_resend.set()
            if sent.result is not None:
                self._count_unused(sent.result)

    def forget(self, key: SampleId) -> None:
        """Drop a sample's request data and late response, because its rollout function has ended."""
        self.requests.pop(key, None)
        self._discard(key)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Abort all requests. If only some are given, just stop waiting: the servers cannot abort single requests."""
        if attempt_ids is None:
            for sent in self._sent.values():
                sent.no_resend.set()
            await self._abort_all()
            return
        for attempt_id in attempt_ids:
            if (aborted := self._aborted.get(attempt_id)) is not None and not aborted.done():
                aborted.set_result(None)

    async def health(self) -> Health:
        """Report the servers as healthy, because the trainer monitors and restarts them itself."""
        return Health(ok=True)

    async def close(self) -> None:
        """Cancel all requests without waiting for them."""
        for task in self._running:
            task.cancel()

    def late_responses(self) -> list[list[Any]]:
        """Return the responses that april has not read yet, as plain data for a saved state."""
        return [
            [*key, s.offset, r.tokens.tolist(), r.logprobs.tolist(), list(s.version), r.aborted, r.own_end,
             {name: rows_out(rows) for name, rows in r.extras.items()}]
            for key, s in self._sent.copy().items() if (r := s.result) is not None and len(r.tokens)
        ]  # fmt: skip

    def restore(self, saved: Sequence[Sequence[Any]]) -> None:
        """Restore what :meth:`late_responses` returned. Damaged data raise ValueError, TypeError or similar errors."""
        for group, index, offset, tokens, logprobs, version, aborted, own_end, extras in saved:
            result = ServerResult(
                tokens=np.array(tokens, np.int32), logprobs=np.array(logprobs, np.float32), label=None,
                aborted=aborted, own_end=own_end,
                extras={name: rows_in(rows) for name, rows in extras.items()},
            )  # fmt: skip
            self._sent[SampleId(group, index)] = _SentRequest(offset, result=result, version=PolicyVersion(*version))


def _chunk(request: Request, result: ServerResult, version: PolicyVersion) -> Chunk:
    full = len(result.tokens) >= request.sampling.max_tokens
    whole = EngineFinish.LENGTH if full else EngineFinish.STOP
    return Chunk(
        result.tokens, result.logprobs, version, EngineFinish.ABORT if result.aborted else whole,
        extras={name: rows[request.extras_from :] for name, rows in result.extras.items()}, own_end=result.own_end,
    )  # fmt: skip
