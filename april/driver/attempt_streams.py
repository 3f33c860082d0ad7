"""Sends attempts (engine requests), reads their streamed responses, and posts an event when an attempt has ended.

Each attempt has a tape, the record of its tokens, log-probabilities and versions. Invariant: each submitted attempt
gives exactly one event AttemptEnded or AttemptFailed, and nothing is written to its tape after that.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from april.core import commands as do
from april.core import events as ev
from april.core.rollout_core import RolloutCore
from april.core.types import Attempt, AttemptFailure
from april.driver.detokenizer import Detokenizer, StopMatcher, matcher_of
from april.driver.loop_throttle import LoopThrottle
from april.driver.user_calls import Timeouts
from april.driver.user_code import FailureLog, describe, own_cancellation
from april.driver.wire_checks import AnswerChecks, copied, refuse_without_extras
from april.engines.protocol import PIECES_AT_ONCE, BufferedStream, Chunk, Engine, EngineFinish
from april.errors import EngineBusy, EngineError, RequestRefused, RolloutError, WeightsInUse, WireError
from april.text.server_text import clean

log = logging.getLogger("april")

CORRUPT, WEIGHTS_WRITTEN = AttemptFailure.CORRUPT, AttemptFailure.WEIGHTS_WRITTEN
DECODING_RETRIES_S = (0.05, 0.2, 0.8)
"""Seconds to wait before each further try to decode the text of a complete response."""


@dataclass(slots=True, eq=False)
class _Stream:
    attempt: Attempt
    streams: AttemptStreams
    checks: AnswerChecks
    task: asyncio.Task[None] | None = None
    sent: bool = False
    chunks: AsyncIterator[Chunk] | None = None
    """Stream of the engine's response, while it is read."""
    end: Chunk | None = None
    """Chunk with the finish reason, once it has arrived."""
    unread: list[Chunk] = field(default_factory=list)
    """Valid chunks that are not on the tape yet, because the tokenizer could not decode them to find stop strings."""
    stops: StopMatcher | None = None
    """Matcher that has seen the tokens on the tape; None without stop strings, or if a new matcher is needed."""
    failure: RolloutError | None = None
    """Last error of the tokenizer."""
    rejected: _Rejected | None = None
    """Error that :meth:`AttemptStreams.catch_up` found and the stream's task must raise; otherwise None."""
    received_s: float = 0.0
    """Loop time at which anything was last received."""
    token_s: float = 0.0
    """Loop time at which tokens were last received, or the request was sent."""

    def on_timeout(self) -> float | None:
        """Handle the stall timeout; returns the seconds until the next check, or None if the request has stalled."""
        return self.streams.check_stalled(self)


@dataclass(slots=True, eq=False, repr=False)
class AttemptStreams:
    """Sends requests to the engines and reads the responses.

    ``_post`` is called with events for the core; ``_spawn`` starts background tasks.
    """

    _engines: Mapping[str, Engine]
    _core: RolloutCore
    _post: Callable[[ev.Event], None]
    _spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    _detokenizer: Detokenizer | None
    _stall_timeouts: Timeouts
    _throttle: LoopThrottle
    _open: dict[str, _Stream] = field(default_factory=dict)
    unrequested_extras: Counter[str] = field(default_factory=Counter)
    """Number of chunks that came with an extra (additional array) that was not requested, by the extra's name."""
    _resumed_s: dict[str, float] = field(default_factory=dict)
    """Loop time at which each engine was last resumed; infinite while it is paused."""
    _failures: FailureLog = field(default_factory=FailureLog)
    _abort_all_tasks: defaultdict[str, set[asyncio.Task[None]]] = field(default_factory=lambda: defaultdict(set))

    def __len__(self) -> int:
        return len(self._open)

    def clear(self) -> None:
        """Forget all streams, after their tasks have ended."""
        self._open.clear()
        self._stall_timeouts.close()

    def submit(self, command: do.Submit) -> None:
        """Send one attempt to its engine; an event is posted when it ends."""
        attempt = command.attempt
        able = self._engines[attempt.engine].capabilities
        oldest = attempt.call.chain.tape.newest_version if able.answers_late else attempt.oldest
        checks = AnswerChecks(
            attempt.request, vocab_size=able.vocab_size, max_context=able.max_context,
            eos_token_ids=self._core.engines.eos_token_ids, oldest=oldest, layout=self._core.engines.row_layout,
        )  # fmt: skip
        stream = _Stream(attempt, self, checks)
        self._open[attempt.id] = stream
        stream.task = self._spawn(self._run_attempt(stream))

    async def _run_attempt(self, stream: _Stream) -> None:
        attempt = stream.attempt
        event: ev.AttemptEnded | ev.AttemptFailed
        try:
            await self._throttle.wait_turn()  # thousands of attempts that start together would block the loop
            # An abort-all call that is under way would also abort a request that is sent now, so wait for it. Training
            # waits for a limited time, as its requests keep their tokens if the call hangs and aborts them later; a
            # request of an evaluation would lose its tokens.
            if abort_tasks := self._abort_all_tasks[attempt.engine]:
                training = attempt.sample.evaluation is None
                await asyncio.wait(set(abort_tasks), timeout=self._core.settings.abort_resend_s if training else None)
            finish = EngineFinish.ABORT if stream.checks.aborted else await self._read(stream)
            await self._throttle.wait_turn()  # thousands of attempts may end together with a step
            event = ev.AttemptEnded.of(attempt, finish)
        except _Rejected as rejected:
            log.warning("attempt %s of %s: %s", attempt.id, attempt.sample.key, rejected)
            # the tokens up to a stop string were checked before and are kept
            kind = AttemptFailure.BROKE_OFF if attempt.tape.stopped else CORRUPT
            event = ev.AttemptFailed.of(attempt, str(rejected), kind, rejected=rejected.tokens)
        except WireError as error:
            # the answer contradicts itself, and it is unknown from which token on, so all its tokens are dropped
            log.warning("attempt %s of %s: %s", attempt.id, attempt.sample.key, error)
            event = ev.AttemptFailed.of(attempt, f"engine {attempt.engine}: {error}", CORRUPT)
        except EngineBusy as busy:
            event = ev.AttemptFailed.of(attempt, str(busy), AttemptFailure.BUSY, busy_s=busy.retry_after_s or 0.0)
        except RequestRefused as refused:
            log.error("attempt %s of %s was refused: %s", attempt.id, attempt.sample.key, refused)
            event = ev.AttemptFailed.of(attempt, str(refused), AttemptFailure.REFUSED)
        except WeightsInUse as error:
            self._post(ev.WeightsWritten(str(error)))
            event = ev.AttemptFailed.of(attempt, str(error), WEIGHTS_WRITTEN, rejected=error.unsound)
        except Exception as error:
            self._failures.warn(error, "attempt %s of %s broke off", attempt.id, attempt.sample.key)
            event = ev.AttemptFailed.of(attempt, f"engine {attempt.engine}: {describe(error)}")
        except asyncio.CancelledError as error:
            event = ev.AttemptFailed.of(attempt, f"engine {attempt.engine}: {describe(own_cancellation(error))}")
        self._stall_timeouts.stop(stream)
        if self._open.pop(attempt.id, None) is stream:
            self._post_end(stream, event)

    async def _read(self, stream: _Stream) -> EngineFinish:
        """Append the stream's chunks to the attempt's tape; returns the finish reason."""
        attempt, request = stream.attempt, stream.attempt.request
        engine = self._engines[attempt.engine]
        if request.attached or request.sampling.banned_ids:
            refuse_attached(attempt, engine.capabilities.attachments)
        stream.sent = True
        loop = asyncio.get_running_loop()
        stream.received_s = stream.token_s = loop.time()
        self._stall_timeouts.start(stream)
        chunks = stream.chunks = engine.generate(request)
        try:
            if isinstance(chunks, BufferedStream):
                await self._read_buffered(stream, chunks)
            else:
                async for chunk in chunks:
                    if self._open.get(attempt.id) is not stream:
                        break  # fence() has ended the attempt, but the engine ignores the cancellation
                    self._accept(stream, self._copied(attempt, chunk))
                    if len(chunk.tokens):
                        stream.token_s = loop.time()
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]
            self._read_text(stream)
            self._apply_final_chunk(stream)
        if stream.end is None:
            raise EngineError("the stream ended without a finish reason")
        if stream.unread:
            self._stall_timeouts.stop(stream)
            await self._retry_decoding(stream)
            self._apply_final_chunk(stream)
        finish = stream.checks.end(stream.end, matched=attempt.tape.stopped)
        refuse_without_extras(attempt, finish)
        return finish

    async def _read_buffered(self, stream: _Stream, chunks: BufferedStream) -> None:
        """Read the response's pieces in batches, or one by one if the engine was not told the stop strings."""
        attempt = stream.attempt
        most = 1 if attempt.call.sampling.stop and not attempt.request.sampling.stop else PIECES_AT_ONCE
        attempt_id, streams, loop = stream.attempt.id, self._open, asyncio.get_running_loop()
        try:
            while await chunks.arrived():
                if streams.get(attempt_id) is not stream:
                    return
                stream.received_s = loop.time()
                if chunks.waiting >= most or chunks.over or stream.rejected is not None:
                    self._accept_buffered(stream, chunks)
        finally:
            if chunks.waiting and streams.get(attempt_id) is stream:
                self._accept_buffered(stream, chunks)  # the stream was cut; keep what has arrived

    def _apply_final_chunk(self, stream: _Stream) -> None:
        """Apply the versions and extras that arrive with the last chunk; drop tokens that still lack one of them."""
        tape, end = stream.attempt.tape, stream.end
        if end is not None and end.extras:
            request = stream.attempt.request
            tape.set_extras({name: end.extras[name] for name in request.extras}, request.rows_wanted(0))
        if end is not None and end.versions is not None:
            tape.set_versions(end.versions)
        if end is not None:
            tape.cached = end.cached_tokens
        tape.drop_unnamed()

    def without_tokens(self, engine: str) -> tuple[str, ...]:
        """Return the attempt ids of an engine's requests that have no token yet.

        Training requests that were sent and are answered without streaming are left out: the engine may already have
        made tokens for them.
        """
        there = [
            stream for stream in self._open.values() if stream.attempt.engine == engine
            and (stream.attempt.request.stream or stream.attempt.sample.evaluation is not None or not stream.sent)
        ]  # fmt: skip
        for stream in there:
            self._catch_up(stream)
        return tuple(s.attempt.id for s in there if not (s.attempt.tape.parsed or s.unread))

    def paused(self, engine: str) -> None:
        """Suspend the stall timeout of an engine's requests until :meth:`resumed`, as april has paused the engine."""
        self._resumed_s[engine] = math.inf

    def resumed(self, engine: str) -> None:
        """Start the stall timeout of an engine's requests again."""
        self._resumed_s[engine] = asyncio.get_running_loop().time()

    def catch_up(self) -> None:
        """Put all chunks that have arrived onto the tapes, so that readers of the tapes miss nothing."""
        for stream in self._open.values():
            self._catch_up(stream)

    def _catch_up(self, stream: _Stream) -> None:
        self._read_text(stream)
        if isinstance(stream.chunks, BufferedStream) and stream.chunks.waiting and stream.rejected is None:
            try:
                self._accept_buffered(stream, stream.chunks)
            except _Rejected as rejected:
                stream.rejected = rejected  # the stream's own task raises it

    def check_stalled(self, stream: _Stream) -> float | None:
        """Return the seconds left before a request counts as stalled, or post AttemptStalled and return None.

        Only tokens count as progress: a server, or a gateway before it, may send comments and empty events without end.
        The time for which april has paused the engine does not count.
        """
        limit = self._stall_timeouts.seconds
        assert limit is not None
        self._catch_up(stream)
        resumed_s = self._resumed_s.get(stream.attempt.engine, 0.0)
        left = max(stream.token_s, resumed_s) + limit - asyncio.get_running_loop().time()
        if left > 0:
            return min(left, limit)
        attempt = stream.attempt
        log.warning((
            "attempt %s of %s: engine %s has sent nothing for too long"
        ), attempt.id, attempt.sample.key, attempt.engine)
        self._post(ev.AttemptStalled(attempt.id, limit))
        return None

    def _accept_buffered(self, stream: _Stream, chunks: BufferedStream) -> None:
        if stream.rejected is not None:
            raise stream.rejected
        for chunk in chunks.take():
            self._accept(stream, chunk)
            if len(chunk.tokens):
                stream.token_s = stream.received_s  # a little too late if the newest of the chunks has no tokens

    def _copied(self, attempt: Attempt, chunk: Chunk) -> Chunk:
        """Return a copy of the chunk, without extras that were not requested; warns once for each such extra."""
        for name in chunk.extras:
            if name not in attempt.request.extras and attempt.sample.evaluation is None:
                self.unrequested_extras[name] += 1
                if self.unrequested_extras[name] == 1:
                    log.warning(
                        "engine %s returns %s with its tokens, which the setting extras does not name; april drops "
                        "these rows",
                        attempt.engine, clean(name, 40),
                    )  # fmt: skip
        return copied(chunk, attempt.request.extras)

    def _accept(self, stream: _Stream, chunk: Chunk) -> None:
        """Check a chunk and put it onto the tape; raises _Rejected if it is invalid."""
        attempt = stream.attempt
        try:
            stream.checks.check_next(chunk, self._core.clock.current)
        except WireError as error:
            raise _Rejected(f"engine {attempt.engine}: {error}", len(chunk.tokens)) from None
        if chunk.finish is not None:
            stream.end = chunk
        if not attempt.call.sampling.stop:
            attempt.tape.append(chunk.tokens, chunk.logprobs, chunk.version, sure=chunk.sure)
        elif len(chunk.tokens):
            stream.unread.append(chunk)
            self._read_text(stream)

    def _read_text(self, stream: _Stream) -> bool:
        """Search waiting chunks for stop strings and move them onto the tape; returns True if no chunk is left.

        If the tokenizer fails, the chunks wait, and april tries again when the next chunk arrives.
        """
        attempt, tape = stream.attempt, stream.attempt.tape
        try:
            while stream.unread:
                chunk, kept = stream.unread[0], None
                if not tape.stopped:
                    if stream.stops is None:
                        assert self._detokenizer is not None
                        stream.stops = matcher_of(attempt, self._detokenizer.text, tape.packed()[0])
                    kept = stream.stops.feed(chunk.tokens)
                del stream.unread[0]
                self._append(stream, chunk, kept)
        except RolloutError as error:
            stream.stops, stream.failure = None, error
        return not stream.unread

    async def _retry_decoding(self, stream: _Stream) -> None:
        """Try again to decode the text of a complete response, as the tokenizer may work again soon."""
        for pause_s in DECODING_RETRIES_S:
            await asyncio.sleep(pause_s)
            if self._read_text(stream):
                return

    def _post_end(self, stream: _Stream, event: ev.AttemptEnded | ev.AttemptFailed) -> None:
        """Post the end of an attempt; if the tokenizer could not decode all chunks, the attempt has failed."""
        if stream.unread:
            attempt, unread = stream.attempt, sum(len(chunk.tokens) for chunk in stream.unread)
            if isinstance(event, ev.AttemptFailed) and event.kind in (CORRUPT, WEIGHTS_WRITTEN):
                event = msgspec.structs.replace(event, rejected=event.rejected + unread)
            else:
                assert stream.failure is not None
                self._failures.warn(stream.failure, (
                    "the stream of attempt %s of %s cannot be read"
                ), attempt.id, attempt.sample.key)
                event = ev.AttemptFailed.of(attempt, str(stream.failure), AttemptFailure.NO_TEXT, rejected=unread)
        self._post(event)

    def _append(self, stream: _Stream, chunk: Chunk, kept: int | None) -> None:
        """Put a chunk's first ``kept`` tokens onto the tape (None means all); tokens after a stop are only counted."""
        tape, tokens, logprobs = stream.attempt.tape, chunk.tokens, chunk.logprobs
        if tape.stopped:
            tape.after_stop += len(tokens)
        elif kept is None:
            tape.append(tokens, logprobs, chunk.version, sure=chunk.sure)
        else:
            tape.append(tokens[:kept], logprobs[:kept], chunk.version, sure=chunk.sure)
            tape.stopped, tape.after_stop = True, len(tokens) - kept
            if stream.end is None:
                self._post(ev.StopFound(stream.attempt.id))

    def abort(self, command: do.Abort) -> None:
        """Ask the engine to abort attempts; requests that were not sent yet are never sent."""
        sent = False
        for attempt_id in command.attempt_ids:
            stream = self._open.get(attempt_id)
            if stream is not None:
                stream.checks.aborted = True
                sent |= stream.sent
        if not sent:
            return
        engine = self._engines[command.engine]
        if command.everything:
            abort_tasks = self._abort_all_tasks[command.engine]
            task = self._spawn(self._ask_abort(engine, None))
            abort_tasks.add(task)
            task.add_done_callback(abort_tasks.discard)
        else:
            self._spawn(self._ask_abort(engine, command.attempt_ids))

    async def _ask_abort(self, engine: Engine, attempt_ids: tuple[str, ...] | None) -> None:
        """Call the engine's abort once; a failure is only logged."""
        try:
            async with asyncio.timeout(self._core.settings.abort_deadline_s):
                await engine.abort(attempt_ids)
        except Exception as error:
            # the core sends the abort again until every attempt has ended
            log.warning("abort on engine %s failed: %s", engine.name, describe(error))

    def fence(self, command: do.Fence) -> None:
        """Close streams that did not end in time; tokens that arrive later are ignored."""
        for attempt_id in command.attempt_ids:
            stream = self._open.get(attempt_id)
            if stream is not None and stream.task is not None:
                self._catch_up(stream)
                stream.attempt.tape.drop_unnamed()
                del self._open[attempt_id]
                self._stall_timeouts.stop(stream)
                stream.task.cancel()
                self._post_end(stream, ev.AttemptEnded.of(stream.attempt, EngineFinish.ABORT, fenced=True))


def refuse_attached(attempt: Attempt, kinds: Collection[str]) -> None:
    """Raise RequestRefused for an attachment whose kind is not in ``kinds``, as the engine would ignore it.

    Also raised for a placeholder token without an attachment: engines would read it as text, and trainers would look
    for an image.
    """
    request = attempt.request
    for kind in {placed.attachment.kind for placed in request.attached}.difference(kinds):
        raise RequestRefused(f"engine {attempt.engine} accepts no {kind}s, but the conversation contains one")
    loose = np.isin(request.token_ids, request.sampling.banned_ids)
    if loose.any():
        for placed in request.attached:
            loose[placed.at : placed.end] = False
    if loose.any():
        at = int(loose.argmax())
        raise RequestRefused(
            f"token {request.token_ids[at]} at position {at} of the conversation is a placeholder, for an image or the "
            "like, but nothing is attached there; give as many images as there are placeholders"
        )


class _Rejected(Exception):
    """Raised for an invalid chunk; ``tokens`` is the number of its tokens."""

    def __init__(self, error: str, tokens: int) -> None:
        super().__init__(error)
        self.tokens = tokens
