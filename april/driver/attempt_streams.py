"""Attempt streams: every engine request, from its submission to the event that accounts for it.

Invariant: each submitted attempt gives exactly one AttemptEnded or AttemptFailed, with the counts of its tape; after
that event nothing is written to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from april.core import commands as do
from april.core import events as ev
from april.core.types import Attempt, AttemptFailure
from april.core.versions import PolicyVersion
from april.driver.detokenizer import Detokenizer
from april.driver.failure_log import FailureLog
from april.driver.host_view import HostView
from april.driver.stop_strings import StopMatcher
from april.driver.time_limits import TimeLimits
from april.driver.user_code import describe, own_cancellation
from april.driver.wire_checks import check_chunk, check_end
from april.engines.protocol import BufferedStream, Chunk, Engine, EngineFinish, Request
from april.errors import EngineBusy, EngineError, RequestRefused, RolloutError, WeightsInUse, WireError

log = logging.getLogger("april")

PIECES_AT_ONCE = 32
"""Pieces of one answer that may pile up before they are looked at."""


@dataclass(slots=True, eq=False)
class _Stream:
    """One attempt at an engine."""

    attempt: Attempt
    streams: AttemptStreams
    response_offset: int
    """Tokens of the present llm.generate call that earlier attempts generated."""
    task: asyncio.Task[None] | None = None
    sent: bool = False
    aborted: bool = False
    chunks: AsyncIterator[Chunk] | None = None
    """The engine's answer, while it is read."""
    oldest: PolicyVersion | None = None
    """Version of the token before the next one."""
    end: Chunk | None = None
    """The one with the finish."""
    stops: StopMatcher | None = None
    rejected: _Rejected | None = None
    """What :meth:`AttemptStreams.catch_up` has found to be wrong."""
    heard_s: float = 0.0
    """When something came last, in loop time."""
    token_s: float = 0.0
    """When tokens came last, as far as pieces have been looked at; at first: when the request was sent."""

    def late(self) -> float | None:
        """No token is known to have come for too long."""
        return self.streams.look_for_tokens(self)


class AttemptStreams:
    """The requests at all engines; ``post`` takes events, ``spawn`` starts background tasks."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        view: HostView,
        post: Callable[[ev.Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        detokenizer: Detokenizer | None = None,
        stall_timeout_s: float | None = None,
    ) -> None:
        self._engines = engines
        self._view = view
        self._post = post
        self._spawn = spawn
        self._detokenizer = detokenizer
        self._silence = TimeLimits(stall_timeout_s)
        self._open: dict[str, _Stream] = {}
        self._failures = FailureLog()
        self._sweeps: dict[str, set[asyncio.Task[None]]] = {name: set() for name in engines}

    def __len__(self) -> int:
        return len(self._open)

    def clear(self) -> None:
        """Forget all streams; their tasks have ended."""
        self._open.clear()
        self._silence.close()

    def submit(self, command: do.Submit) -> None:
        """Send one attempt to its engine; its end is an event."""
        call = command.attempt.call
        stream = _Stream(command.attempt, self, len(call.sample.tape) - call.start)
        self._open[command.attempt.id] = stream
        stream.task = self._spawn(self._run_attempt(stream))

    async def _run_attempt(self, stream: _Stream) -> None:
        attempt = stream.attempt
        event: ev.Event
        try:
            # an abort of everything that is on its way would hit a request that is sent now; one that takes longer is a
            # hanging call, and what it cuts all the same is a partial, which goes on (but of an evaluation, it is lost)
            if sweeps := self._sweeps[attempt.engine]:
                training = attempt.sample.evaluation is None
                await asyncio.wait(set(sweeps), timeout=self._view.abort_resend_s if training else None)
            finish = EngineFinish.ABORT if stream.aborted else await self._read(stream)
            event = ev.AttemptEnded.of(attempt, finish)
        except _Rejected as rejected:
            log.warning("attempt %s of %s: %s", attempt.id, attempt.sample.key, rejected)
            # what a stop string has ended was found good before
            kind = AttemptFailure.BROKE_OFF if attempt.tape.stopped else AttemptFailure.CORRUPT
            event = ev.AttemptFailed.of(attempt, str(rejected), kind, rejected=rejected.tokens)
        except WireError as error:
            # it contradicts itself: nobody knows since when, so nothing of it is believed
            log.warning("attempt %s of %s: %s", attempt.id, attempt.sample.key, error)
            event = ev.AttemptFailed.of(attempt, f"engine {attempt.engine}: {error}", AttemptFailure.CORRUPT)
        except EngineBusy as busy:
            event = ev.AttemptFailed.of(attempt, str(busy), AttemptFailure.BUSY, busy_s=busy.retry_after_s or 0.0)
        except RequestRefused as refused:
            log.error("attempt %s of %s was refused: %s", attempt.id, attempt.sample.key, refused)
            event = ev.AttemptFailed.of(attempt, str(refused), AttemptFailure.REFUSED)
        except WeightsInUse as error:
            self._post(ev.WeightsWritten(str(error)))
            event = ev.AttemptFailed.of(attempt, str(error), AttemptFailure.WEIGHTS_WRITTEN, rejected=error.unsound)
        except Exception as error:
            self._failures.warn(error, "attempt %s of %s broke off", attempt.id, attempt.sample.key)
            event = ev.AttemptFailed.of(attempt, f"engine {attempt.engine}: {describe(error)}")
        except asyncio.CancelledError as error:
            event = ev.AttemptFailed.of(attempt, f"engine {attempt.engine}: {describe(own_cancellation(error))}")
        self._silence.stop(stream)
        if self._open.pop(attempt.id, None) is stream:
            self._post(event)

    async def _read(self, stream: _Stream) -> EngineFinish:
        """Append the stream's chunks to the attempt's tape; returns why it ended."""
        attempt = stream.attempt
        engine = self._engines[attempt.engine]
        stops = self._stop_matcher(stream)
        request = Request(
            attempt_id=attempt.id,
            token_ids=attempt.token_ids,
            sampling=attempt.sampling if stops is None else replace(attempt.sampling, stop=()),
            priority=0 if attempt.urgent else 1,
            sample_key=attempt.sample.key,
            response_offset=stream.response_offset,
            stream=stops is not None,
        )
        stream.sent = True
        stream.oldest, stream.stops = attempt.oldest, stops
        stream.heard_s = stream.token_s = asyncio.get_running_loop().time()
        self._silence.start(stream)
        chunks = stream.chunks = engine.generate(request)
        try:
            if isinstance(chunks, BufferedStream):
                await self._read_buffered(stream, chunks)
            else:
                async for chunk in chunks:
                    if self._open.get(attempt.id) is not stream:
                        break  # fenced: its tape is closed, whatever the engine makes of the cancellation
                    self._accept(stream, chunk)
                    if len(chunk.tokens):
                        self._silence.restart(stream)
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]
        end, tape = stream.end, attempt.tape
        if end is None or end.finish is None:
            raise EngineError("the stream ended without a finish reason")
        if tape.count == 0 and not (end.finish is EngineFinish.ABORT and stream.aborted):
            raise EngineError(f"the stream ended ({end.finish}) without a token, and april had not asked for its end")
        if tape.count and not tape.stopped:  # where a stop string ends it, the engine's end is another one
            eos = self._view.eos_token_ids
            check_end(end, request, tape.count, tape.last_token, engine.capabilities.max_context, eos)
        return end.finish

    async def _read_buffered(self, stream: _Stream, chunks: BufferedStream) -> None:
        """Small pieces are looked at together, each at once only where a stop string may end the response."""
        most = 1 if stream.stops is not None else PIECES_AT_ONCE
        attempt_id, streams, loop = stream.attempt.id, self._open, asyncio.get_running_loop()
        try:
            while await chunks.arrived():
                if streams.get(attempt_id) is not stream:
                    return
                stream.heard_s = loop.time()
                if chunks.waiting >= most or chunks.over or stream.rejected is not None:
                    self._take(stream, chunks)
        finally:
            if chunks.waiting and streams.get(attempt_id) is stream:
                self._take(stream, chunks)  # cut off in the middle: what has come is kept

    def catch_up(self) -> None:
        """Look at everything that has arrived: whoever reads the tapes now misses nothing."""
        for stream in self._open.values():
            self._catch_up(stream)

    def _catch_up(self, stream: _Stream) -> None:
        if isinstance(stream.chunks, BufferedStream) and stream.chunks.waiting and stream.rejected is None:
            try:
                self._take(stream, stream.chunks)
            except _Rejected as rejected:
                stream.rejected = rejected  # the stream's own task ends it

    def look_for_tokens(self, stream: _Stream) -> float | None:
        """Seconds until the engine has been silent for too long, by the tokens in what has piled up; None: it has.

        Only tokens count: a server, or a gateway before it, may send comments and empty events for ever.
        """
        assert self._silence.seconds is not None
        self._catch_up(stream)
        left = stream.token_s + self._silence.seconds - asyncio.get_running_loop().time()
        if left > 0:
            return left
        attempt = stream.attempt
        log.warning("attempt %s of %s: engine %s is silent", attempt.id, attempt.sample.key, attempt.engine)
        self._post(ev.AttemptStalled(attempt.id, self._silence.seconds))
        return None

    def _take(self, stream: _Stream, chunks: BufferedStream) -> None:
        if stream.rejected is not None:
            raise stream.rejected
        for chunk in chunks.take():
            self._accept(stream, chunk)
            if len(chunk.tokens):
                stream.token_s = stream.heard_s  # the pile's last piece may be a younger one, without tokens

    def _accept(self, stream: _Stream, chunk: Chunk) -> None:
        """A chunk that can be true goes onto the tape; raises _Rejected for others."""
        attempt = stream.attempt
        room = attempt.sampling.max_tokens - attempt.tape.parsed
        try:
            if stream.end is not None:
                raise WireError(f"a chunk came after the one that ended the stream ({stream.end.finish})")
            vocab_size = self._engines[attempt.engine].capabilities.vocab_size
            check_chunk(chunk, vocab_size, room, stream.oldest, self._view.current)
            self._append(attempt, chunk, stream.stops)
        except WireError as error:
            raise _Rejected(f"engine {attempt.engine}: {error}", len(chunk.tokens)) from None
        except RolloutError as error:  # of the tokenizer
            raise _Rejected(str(error), len(chunk.tokens)) from error
        stream.oldest, stream.end = chunk.version, chunk if chunk.finish is not None else None

    def _stop_matcher(self, stream: _Stream) -> StopMatcher | None:
        attempt = stream.attempt
        if not attempt.sampling.stop:
            return None
        assert self._detokenizer is not None  # calls with stop strings are refused without one
        return StopMatcher(
            self._detokenizer.text,
            attempt.sampling.stop,
            attempt.token_ids,
            stream.response_offset,
            attempt.sampling.min_tokens,
        )

    def _append(self, attempt: Attempt, chunk: Chunk, stops: StopMatcher | None) -> None:
        """A chunk goes onto the tape up to the token that completes a stop string; what follows is counted only."""
        tape, tokens = attempt.tape, chunk.tokens
        if tape.stopped:
            tape.after_stop += len(tokens)
            return
        kept = None if stops is None else stops.feed(tokens)
        if kept is None:
            tape.append(tokens, chunk.logprobs, chunk.version)
            return
        tape.append(tokens[:kept], chunk.logprobs[:kept], chunk.version)
        tape.stopped, tape.after_stop = True, len(tokens) - kept
        if chunk.finish is None:
            self._post(ev.StopFound(attempt.id))

    def abort(self, command: do.Abort) -> None:
        """Ask for the end of attempts; one whose request was not sent yet never will be."""
        sent = False
        for attempt_id in command.attempt_ids:
            stream = self._open.get(attempt_id)
            if stream is not None:
                stream.aborted = True
                sent |= stream.sent
        if not sent:
            return
        engine = self._engines[command.engine]
        if command.everything:
            sweeps = self._sweeps[engine.name]
            task = self._spawn(self._ask_abort(engine, None))
            sweeps.add(task)
            task.add_done_callback(sweeps.discard)
        else:
            self._spawn(self._ask_abort(engine, command.attempt_ids))

    async def _ask_abort(self, engine: Engine, attempt_ids: tuple[str, ...] | None) -> None:
        """One call of the engine's abort; that it failed is no error, for it is asked again if need be."""
        try:
            async with asyncio.timeout(self._view.abort_deadline_s):
                await engine.abort(attempt_ids)
        except Exception as error:
            # the core asks again until every attempt has ended
            log.warning("abort on engine %s failed: %s", engine.name, describe(error))

    def fence(self, command: do.Fence) -> None:
        """Close streams that did not end in time; whatever they still yield goes nowhere."""
        for attempt_id in command.attempt_ids:
            stream = self._open.get(attempt_id)
            if stream is not None and stream.task is not None:
                self._catch_up(stream)
                del self._open[attempt_id]
                self._silence.stop(stream)
                stream.task.cancel()
                self._post(ev.AttemptEnded.of(stream.attempt, EngineFinish.ABORT, fenced=True))


class _Rejected(Exception):
    """A chunk that cannot be true, with the tokens it had."""

    def __init__(self, error: str, tokens: int) -> None:
        super().__init__(error)
        self.tokens = tokens
