"""Attempt streams: every engine request, from its submission to the event that accounts for it.

Invariant: each submitted attempt gives exactly one AttemptEnded or AttemptFailed, with the counts of its tape; after
that event nothing is written to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from april.core import commands as do
from april.core import events as ev
from april.core.types import Attempt, AttemptFailure, OnWeightUpdate
from april.driver.detokenizer import Detokenizer, StopMatcher, matcher_of
from april.driver.host_view import HostView
from april.driver.user_calls import TimeLimits
from april.driver.user_code import FailureLog, describe, own_cancellation
from april.driver.wire_checks import AnswerChecks
from april.engines.protocol import BufferedStream, Chunk, Engine, EngineFinish, Request
from april.errors import EngineBusy, EngineError, RequestRefused, RolloutError, WeightsInUse, WireError

log = logging.getLogger("april")

PIECES_AT_ONCE = 32
"""The most pieces of one response that pile up before they are looked at."""
CORRUPT, WEIGHTS_WRITTEN = AttemptFailure.CORRUPT, AttemptFailure.WEIGHTS_WRITTEN
LAST_TRIES_S = (0.05, 0.2, 0.8)
"""Pauses between the last tries to get the text of a complete response."""


@dataclass(slots=True, eq=False)
class _Stream:
    """The stream of one attempt."""

    attempt: Attempt
    streams: AttemptStreams
    checks: AnswerChecks
    task: asyncio.Task[None] | None = None
    sent: bool = False
    chunks: AsyncIterator[Chunk] | None = None
    """The engine's response, while it is read."""
    end: Chunk | None = None
    """The chunk with the finish reason."""
    unread: list[Chunk] = field(default_factory=list)
    """Good chunks without text, as the tokenizer fails; they are not on the tape yet."""
    stops: StopMatcher | None = None
    """The matcher after what is on the tape; None without stop strings, or if it has to be made anew."""
    failure: RolloutError | None = None
    """The tokenizer's last error."""
    rejected: _Rejected | None = None
    """The error that :meth:`AttemptStreams.catch_up` has found."""
    heard_s: float = 0.0
    """The loop time at which something came last."""
    token_s: float = 0.0
    """The loop time at which tokens came last, or the request was sent."""

    def late(self) -> float | None:
        """Handle a time without tokens."""
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
        attempt = command.attempt
        able = self._engines[attempt.engine].capabilities
        checks = AnswerChecks(
            attempt, vocab_size=able.vocab_size, max_context=able.max_context,
            eos_token_ids=self._view.eos_token_ids, oldest=attempt.oldest, held=attempt.call.chain.extras,
        )  # fmt: skip
        stream = _Stream(attempt, self, checks)
        self._open[attempt.id] = stream
        stream.task = self._spawn(self._run_attempt(stream))

    async def _run_attempt(self, stream: _Stream) -> None:
        attempt = stream.attempt
        event: ev.AttemptEnded | ev.AttemptFailed
        try:
            # an abort of everything that is on its way would hit a request that is sent now; one that takes longer is a
            # hanging call, and what it cuts all the same is a partial, which goes on (but of an evaluation, it is lost)
            if sweeps := self._sweeps[attempt.engine]:
                training = attempt.sample.evaluation is None
                await asyncio.wait(set(sweeps), timeout=self._view.abort_resend_s if training else None)
            finish = EngineFinish.ABORT if stream.checks.aborted else await self._read(stream)
            event = ev.AttemptEnded.of(attempt, finish)
        except _Rejected as rejected:
            log.warning("attempt %s of %s: %s", attempt.id, attempt.sample.key, rejected)
            # what a stop string has ended was found good before
            kind = AttemptFailure.BROKE_OFF if attempt.tape.stopped else CORRUPT
            event = ev.AttemptFailed.of(attempt, str(rejected), kind, rejected=rejected.tokens)
        except WireError as error:
            # it contradicts itself: nobody knows since when, so nothing of it is believed
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
        self._silence.stop(stream)
        if self._open.pop(attempt.id, None) is stream:
            self._over(stream, event)

    async def _read(self, stream: _Stream) -> EngineFinish:
        """Append the stream's chunks to the attempt's tape; returns why it ended."""
        attempt, stops = stream.attempt, bool(stream.attempt.sampling.stop)
        engine = self._engines[attempt.engine]
        if stops and self._detokenizer is None:  # a function on a host with a tokenizer asks for it
            raise RequestRefused("llm.generate: stop strings are matched on text; give the scheduler tokenizer=...")
        if attempt.attached or attempt.sampling.banned_ids:
            refuse_attached(attempt, engine.capabilities.attachments)
        request = Request(
            attempt_id=attempt.id,
            token_ids=attempt.token_ids,
            sampling=replace(attempt.sampling, stop=()) if stops else attempt.sampling,
            priority=0 if attempt.urgent else 1,
            sample_key=attempt.sample.key,
            response_offset=attempt.in_call,
            # with KEEP, whoever has a token at a weight update goes on
            stream=stops or (attempt.in_flight is OnWeightUpdate.KEEP and attempt.sample.evaluation is None),
            in_flight=attempt.in_flight,
            attached=attempt.attached,
            extras=attempt.extras,
            extras_from=attempt.extras_from,
        )
        stream.sent = True
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
            self._read_text(stream)
            self._settle(stream)
        if stream.end is None:
            raise EngineError("the stream ended without a finish reason")
        if stream.unread:
            self._silence.stop(stream)
            await self._last_tries(stream)
            self._settle(stream)
        return stream.checks.end(stream.end, matched=attempt.tape.stopped)

    async def _read_buffered(self, stream: _Stream, chunks: BufferedStream) -> None:
        """Read small pieces together, or each at once where a stop string may end the response."""
        most = 1 if stream.attempt.sampling.stop else PIECES_AT_ONCE
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

    def _settle(self, stream: _Stream) -> None:
        """Take the versions and rows that the end has told; without them, forget the tokens that want them."""
        tape, end = stream.attempt.tape, stream.end
        if end is not None and end.extras:
            tape.give_rows(end.extras, stream.attempt.missing_rows)
        if end is not None and end.versions is not None:
            tape.settle(end.versions)
        tape.cut_unsaid()

    def silent(self, engine: str) -> tuple[str, ...]:
        """The requests at an engine that have no token."""
        there = [stream for stream in self._open.values() if stream.attempt.engine == engine]
        for stream in there:
            self._catch_up(stream)
        return tuple(s.attempt.id for s in there if not (s.attempt.tape.parsed or s.unread))

    def catch_up(self) -> None:
        """Look at everything that has arrived: whoever reads the tapes now misses nothing."""
        for stream in self._open.values():
            self._catch_up(stream)

    def _catch_up(self, stream: _Stream) -> None:
        self._read_text(stream)
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
        """Put a chunk onto the tape if it can be true, else raise _Rejected."""
        attempt = stream.attempt
        try:
            stream.checks.piece(chunk, self._view.current)
        except WireError as error:
            raise _Rejected(f"engine {attempt.engine}: {error}", len(chunk.tokens)) from None
        if chunk.finish is not None:
            stream.end = chunk
        if not attempt.sampling.stop:
            attempt.tape.append(chunk.tokens, chunk.logprobs, chunk.version, sure=chunk.sure)
        elif len(chunk.tokens):
            stream.unread.append(chunk)
            self._read_text(stream)

    def _read_text(self, stream: _Stream) -> bool:
        """Move chunks onto the tape as far as their text can be searched for stop strings; returns whether that is all.

        If the tokenizer fails, it is asked again with the next chunk.
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

    async def _last_tries(self, stream: _Stream) -> None:
        """Try to read the text of a complete response again, as the tokenizer may work again soon."""
        for pause_s in LAST_TRIES_S:
            await asyncio.sleep(pause_s)
            if self._read_text(stream):
                return

    def _over(self, stream: _Stream, event: ev.AttemptEnded | ev.AttemptFailed) -> None:
        """Post the end of an attempt; if some of it is still unread, the tokenizer has failed."""
        if stream.unread:
            attempt, unread = stream.attempt, sum(len(chunk.tokens) for chunk in stream.unread)
            if isinstance(event, ev.AttemptFailed) and event.kind in (CORRUPT, WEIGHTS_WRITTEN):
                event = msgspec.structs.replace(event, rejected=event.rejected + unread)
            else:
                assert stream.failure is not None
                self._failures.warn(stream.failure, "attempt %s of %s cannot be read", attempt.id, attempt.sample.key)
                event = ev.AttemptFailed.of(attempt, str(stream.failure), AttemptFailure.NO_TEXT, rejected=unread)
        self._post(event)

    def _append(self, stream: _Stream, chunk: Chunk, kept: int | None) -> None:
        """Put a chunk onto the tape up to the token that completes a stop string; only count what follows."""
        tape, tokens = stream.attempt.tape, chunk.tokens
        if tape.stopped:
            tape.after_stop += len(tokens)
            return
        tape.append(tokens[:kept], chunk.logprobs[:kept], chunk.version, sure=chunk.sure)
        if kept is not None:
            tape.stopped, tape.after_stop = True, len(tokens) - kept
            if stream.end is None:
                self._post(ev.StopFound(stream.attempt.id))

    def abort(self, command: do.Abort) -> None:
        """Ask for the end of attempts; one whose request was not sent yet never will be."""
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
            sweeps = self._sweeps[command.engine]
            task = self._spawn(self._ask_abort(engine, None))
            sweeps.add(task)
            task.add_done_callback(sweeps.discard)
        else:
            self._spawn(self._ask_abort(engine, command.attempt_ids))

    async def _ask_abort(self, engine: Engine, attempt_ids: tuple[str, ...] | None) -> None:
        """Call the engine's abort once; a failure is no error, as the abort is repeated if need be."""
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
                stream.attempt.tape.cut_unsaid()
                del self._open[attempt_id]
                self._silence.stop(stream)
                stream.task.cancel()
                self._over(stream, ev.AttemptEnded.of(stream.attempt, EngineFinish.ABORT, fenced=True))


def refuse_attached(attempt: Attempt, kinds: Collection[str]) -> None:
    """Raise RequestRefused for an attachment of another kind than these, which the engine would not see, and for a
    token that stands for one where none is: engines take it for text, and trainers for an attachment that is missing.
    """
    for kind in {placed.attachment.kind for placed in attempt.attached}.difference(kinds):
        raise RequestRefused(f"engine {attempt.engine} takes no {kind}s, and the conversation has one attached")
    loose = np.isin(attempt.token_ids, attempt.sampling.banned_ids)
    if loose.any():
        for placed in attempt.attached:
            loose[placed.at : placed.end] = False
    if loose.any():
        at = int(loose.argmax())
        raise RequestRefused(
            f"token {attempt.token_ids[at]} at place {at} of the conversation stands for an image, or the like, and "
            "none is attached there; give as many images as there are placeholders"
        )


class _Rejected(Exception):
    """A chunk that cannot be true, with the tokens it had."""

    def __init__(self, error: str, tokens: int) -> None:
        super().__init__(error)
        self.tokens = tokens
