"""A fake engine for tests: no model, deterministic tokens, scripted faults, and a record of everything it yields.

It runs on the event loop's clock, virtual or real. A token takes ``seconds_per_token`` regardless of other requests, so
all times can be computed by hand.

Invariant: every chunk is recorded in ``attempts`` before the caller gets it. Token t of a response depends only on
(conversation before the response, sample key, t), not on the engine or on the number of attempts.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import structs

from april.core.sampling import LogprobKind
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.base import WithoutWeights
from april.engines.http.wire import empty_chunk
from april.engines.protocol import Capabilities, Chunk, EngineFinish, Health, Int32, OnWeightUpdate, Request
from april.engines.simulated.engine import with_rows
from april.errors import EngineError
from april.testing.fault_script import AT_TOKENS, WRONG_CHUNKS, WRONG_ENDS, AttemptFaults, Fault, FaultKind, FaultScript
from april.testing.records import AbortRecord, AttemptRecord, fake_logprobs, fake_response, with_attachment_ids

Lengths = int | Mapping[tuple[int, int], int] | Callable[[Request], int]


@dataclass(slots=True)
class FakeStream:
    """A request at a fake engine: tokens are made as time passes, and taken out in chunks.

    Invariant: made = sent + tokens in ``unsent``, and no token is made beyond ``target``, so a fault after k tokens
    hits a stream with exactly k tokens.
    """

    record: AttemptRecord
    script: AttemptFaults
    tokens: Int32
    """All tokens that this attempt is going to yield."""
    finish: EngineFinish
    token_s: float
    chunk_tokens: int | None
    running: bool = False
    """True while the request occupies one of ``max_running`` places."""
    made: int = 0
    made_until: float = 0.0
    """Time at which work on the next token begins; if that is in the future, no token is made until then."""
    unsent: deque[tuple[PolicyVersion, int]] = field(default_factory=deque)
    """(version, count) of tokens that were made but not yielded yet."""
    sent: int = 0
    fault_tokens_checked: int = -1
    """Number of yielded tokens at which faults were last checked; only faults at a higher number can still hit."""
    empty_until: float = -math.inf
    """Time until which only empty chunks are yielded."""
    abort_at: float = math.inf
    aborts_ignored_until: float = -math.inf
    """Time until which aborts have no effect."""
    error: EngineError | None = None
    wake: asyncio.Future[None] | None = None

    @property
    def target(self) -> int:
        """Number of tokens at which something happens next: a chunk is full, or a fault is due."""
        full = len(self.tokens) if self.chunk_tokens is None else self.sent + self.chunk_tokens
        return min(full, len(self.tokens), *(k for k in self.marks if k >= self.sent and k > self.fault_tokens_checked))

    @property
    def marks(self) -> list[int]:
        """Token counts at which a fault is due."""
        return [fault.after_tokens for fault in self.script.faults if fault.kind in AT_TOKENS]

    @property
    def due_s(self) -> float:
        """Time at which ``target`` is reached, on the loop's clock."""
        return self.made_until + (self.target - self.made) * self.token_s

    def make(self, now: float, version: PolicyVersion) -> None:
        """Make the tokens for which there was time since the last call."""
        if not self.running or self.error is not None or self.made_until >= now:
            return
        # a timer of a real loop may fire slightly early
        count = min(int((now - self.made_until) / self.token_s + 1e-6), self.target - self.made)
        if count <= 0:
            return
        self.made += count
        self.made_until += count * self.token_s
        if self.unsent and self.unsent[-1][0] == version:
            count += self.unsent.pop()[1]
        self.unsent.append((version, count))

    def take(self, version: PolicyVersion) -> tuple[Int32, PolicyVersion]:
        """Take the next tokens of one version; if nothing was made, return an empty array and ``version``."""
        version, count = self.unsent.popleft() if self.unsent else (version, 0)
        tokens = self.tokens[self.sent : self.sent + count].copy()
        self.sent += count
        return tokens, version

    def withhold(self) -> None:
        """Discard the tokens that were made but not yielded."""
        self.record.withheld += sum(count for _, count in self.unsent)
        self.unsent.clear()

    def wake_up(self) -> None:
        """Wake the waiting stream."""
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)

    async def wait(self, until: float) -> None:
        """Wait until a time on the loop's clock, or until the stream is woken."""
        loop = asyncio.get_running_loop()
        self.wake = loop.create_future()
        timer = loop.call_at(until, self.wake_up) if until < math.inf else None
        try:
            await self.wake
        finally:
            self.wake = None
            if timer is not None:
                timer.cancel()


def faulty_chunk(chunk: Chunk, kind: FaultKind, vocab_size: int, room: int) -> Chunk:
    """Apply the fault ``kind`` to a chunk with tokens; ``room`` is the number of tokens that are left of the budget."""
    tokens, logprobs, version = chunk.tokens, chunk.logprobs.copy(), chunk.version
    match kind:
        case FaultKind.NAN_LOGPROB:
            logprobs[-1] = np.nan
        case FaultKind.POSITIVE_LOGPROB:
            logprobs[-1] = 0.5
        case FaultKind.CLAMPED_LOGPROB:
            logprobs[-1] = -9999.0
        case FaultKind.UNKNOWN_TOKEN:
            tokens = np.append(tokens[:-1], np.int32(vocab_size))
        case FaultKind.LENGTHS_DIFFER:
            logprobs = np.append(logprobs, np.float32(-1.0))
        case FaultKind.TOO_MANY_TOKENS:
            tokens, logprobs = np.resize(tokens, room + 1), np.resize(logprobs, room + 1)
        case FaultKind.FUTURE_VERSION:
            version = PolicyVersion(version.incarnation, version.n + 1)
        case FaultKind.OLDER_VERSION:
            version = PolicyVersion(version.incarnation, version.n - 1)
        case _:
            raise ValueError(f"{kind} is not a fault of a chunk")
    return replace(chunk, tokens=tokens, logprobs=logprobs, version=version)


EMPTY_CHUNK_S = 1.0
"""Seconds between two chunks without tokens."""


class FakeEngine(WithoutWeights):
    """Implements :class:`april.engines.protocol.Engine` without a model.

    Args:
        name: Unique label.
        lengths: Response length in tokens, including the stop token: a number, a table by sample key (group, index), or
            a function of the request that only uses its sample key and :func:`conversation`.
        responses: Function that replaces ``lengths``: it returns the response's token ids, and may use the same parts
            of the request. The response ends at the first stop id, which is appended if it is missing.
        faults: Script of faults; several engines may share one.
        seconds_per_token: Time per token and request.
        chunk_tokens: Tokens per chunk; None means that tokens are yielded only at the end, an abort or a pause.
        max_running: Number of requests served at the same time; further requests wait in the engine.
        weight_update_s: Duration of ``update_weights`` in seconds. Paths of weights are recorded, but not read.
        extras: Names of the arrays returned with tokens, see :mod:`april.engines.simulated.synthetic_rows`.
        vocab_size, eos_token_id, max_context, version: as in :class:`april.engines.protocol.Capabilities`.

    Requests that april must not make (a reused id, a response continued after its end) are refused and recorded in
    ``violations``.
    """

    def __init__(
        self,
        name: str = "fake",
        *,
        lengths: Lengths = 8,
        responses: Callable[[Request], Sequence[int] | Int32] | None = None,
        faults: FaultScript | None = None,
        seconds_per_token: float = 1.0,
        chunk_tokens: int | None = None,
        max_running: int = 64,
        weight_update_s: float = 0.0,
        vocab_size: int = 1000,
        eos_token_id: int = 0,
        max_context: int = 1 << 20,
        version: PolicyVersion = FIRST_VERSION,
        extras: Sequence[str] = (),
    ) -> None:
        for what, value, good in (
            ("seconds_per_token", seconds_per_token, 0 < seconds_per_token < math.inf),
            ("chunk_tokens", chunk_tokens, chunk_tokens is None or chunk_tokens >= 1),
            ("max_running", max_running, max_running >= 1),
            ("eos_token_id", eos_token_id, 0 <= eos_token_id < vocab_size),
        ):
            if not good:
                raise ValueError(f"FakeEngine {name}: {what}={value} is out of range")
        if faults is not None and not isinstance(faults, FaultScript):
            raise TypeError(f"FakeEngine {name}: faults must be a FaultScript, got {type(faults).__name__}")
        super().__init__(name, Capabilities(
            logprob_kind=LogprobKind.TEMPERATURE, vocab_size=vocab_size, max_context=max_context,
            eos_token_ids=(eos_token_id,), max_in_flight=max_running, updates_from_disk=True,
            in_flight_updates=(OnWeightUpdate.KEEP, OnWeightUpdate.RECOMPUTE), attachments=("image",), bans=True,
            extras=tuple(extras), constrains=responses is not None,  # ``responses`` can follow a request's grammar
        ), version)  # fmt: skip
        self._lengths, self._responses, self._eos = lengths, responses, eos_token_id
        self.faults = faults if faults is not None else FaultScript()
        self._token_s = seconds_per_token
        self._chunk_tokens = chunk_tokens
        self._weight_update_s = weight_update_s
        self._streams: dict[str, FakeStream] = {}
        self._queue: deque[FakeStream] = deque()
        self._running = 0
        self._dead_until = -math.inf
        self._origin: float | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._id_lengths: set[int] = set()
        self.attempts: dict[str, AttemptRecord] = {}
        """Every request, by attempt id, in the order of arrival."""
        self.aborts: list[AbortRecord] = []
        self.updates: list[tuple[float, PolicyVersion, str | None]] = []
        """(time, version, path) of every successful weight update."""
        self.probes: list[float] = []
        self.violations: list[str] = []
        """Descriptions of requests by which april broke the protocol."""
        try:
            self._start_clock()
        except RuntimeError:
            return  # no loop is running yet, so the engine's time begins with the first call

    def __repr__(self) -> str:
        return (
            f"<FakeEngine {self._name} {self._status or 'open'} version {self._version}: {len(self._streams)} requests "
            f"in work, {len(self.attempts)} so far, {self.handed_over_tokens} tokens handed over, {self.faults!r}>"
        )

    @property
    def version(self) -> PolicyVersion:
        """Version of the engine's weights."""
        return self._version

    @property
    def handed_over_tokens(self) -> int:
        """Number of all tokens that have left the engine, including those of evaluations and invalid tokens."""
        return sum(record.count for record in self.attempts.values())

    @property
    def open_streams(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    def attempts_of(self, sample: tuple[int, int]) -> list[AttemptRecord]:
        """Return the attempts of one training sample, in order."""
        return [r for r in self.attempts.values() if r.request.sample_key == sample and not r.evaluation]

    # ---------------------------------------------------------------- the protocol

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Serve one request. Raises EngineError if the fault script says so, or if april must not make the request."""
        stream = self._admit(request)
        record = stream.record
        try:
            while not record.end:
                chunk = await self._next(stream)
                if chunk is not None:
                    if record.end and request.extras:
                        chunk = self._with_rows(stream, chunk)
                    yield self._record_chunk(record, chunk)
            if stream.finish.value == record.end and self._due_fault(stream, FaultKind.CHUNK_AFTER_FINISH):
                record.wrong = FaultKind.CHUNK_AFTER_FINISH
                yield self._record_chunk(record, record.chunks[-1])
        except EngineError as error:
            record.end = str(error)
            raise
        finally:
            record.end = record.end or "the caller left"
            record.ended_s = asyncio.get_running_loop().time()
            self._make(stream)
            stream.withhold()
            self._leave(stream)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        now = self._start_clock()
        self.aborts.append(AbortRecord(now, None if attempt_ids is None else tuple(attempt_ids)))
        self._raise_if_dead("abort")
        for attempt_id, stream in list(self._streams.items()):
            if attempt_ids is None or attempt_id in attempt_ids:
                self._abort(stream, now)

    async def pause(self) -> None:
        """Stop making tokens; the tokens made so far are yielded under the present version."""
        self._start_clock()
        self._raise_if_dead("pause")
        self._make_all()
        self._paused = True
        self._wake_all()

    async def pause_in_flight(self, in_flight: OnWeightUpdate) -> None:
        """Pause without ending any request, and let the callers take the tokens made so far."""
        await self.pause()
        await self._read_by_callers(lambda: any(stream.unsent for stream in self._streams.values()))

    async def resume(self) -> None:
        now = self._start_clock()
        self._raise_if_dead("resume")
        if self._paused:
            self._paused = False
            for stream in self._streams.values():
                stream.made_until = max(stream.made_until, now)
            self._wake_all()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Change the version after ``weight_update_s``; raises EngineError unless paused, or if the script says so."""
        self._start_clock()
        if self._weight_update_s > 0:
            await asyncio.sleep(self._weight_update_s)
        self._raise_if_dead("update_weights")
        self._require_paused()
        if self.faults.call_fails(FaultKind.FAILED_UPDATE, self._name, self._seconds()):
            raise EngineError(f"engine {self._name}: the fault script makes this weight update fail")
        for name, stream in self._streams.items():
            kept = stream.record.request.in_flight is OnWeightUpdate.KEEP
            if kept and not stream.made and stream.abort_at == math.inf:
                self.violations.append(f"attempt {name} begins over keys of older weights")
        self._version = version
        self.updates.append((self._start_clock(), version, path))

    async def health(self) -> Health:
        self.probes.append(self._start_clock())
        if self._closed or self._is_dead():
            return Health(ok=False, detail="closed" if self._closed else "dead")
        if self.faults.call_fails(FaultKind.SICK_PROBE, self._name, self._seconds()):
            return Health(ok=False, detail="the fault script makes this probe fail")
        counters = {"running": float(self._running), "waiting": float(len(self._queue))}
        return Health(ok=True, detail="paused" if self._paused else "", counters=counters)

    async def close(self) -> None:
        """Close the engine; streams that are still open raise EngineError."""
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        self._break_all(f"engine {self._name} was closed")

    # ---------------------------------------------------------------- the clock, and the death of the engine

    def _start_clock(self) -> float:
        """Return the loop's time; the first call starts the engine's clock, and timers for faults at a set time."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._origin is None:
            self._origin = now
            for fault in self.faults.faults:
                if fault.by_time_alone and fault.engine in (None, self._name):
                    self._timers.append(loop.call_at(now + fault.from_s, self._die_by_time, fault))
        return now

    def _seconds(self) -> float:
        """Return the seconds since the engine's own time began."""
        assert self._origin is not None
        return asyncio.get_running_loop().time() - self._origin

    def _die_by_time(self, fault: Fault) -> None:
        # a real event loop may call this slightly early
        if self.faults.hits(fault, self._name, max(fault.from_s, self._seconds())):
            self.die(fault.duration_s)

    def die(self, seconds: float = math.inf) -> None:
        """Break all streams and refuse all calls for ``seconds``; then run again, unpaused, with the same weights."""
        self._dead_until = self._start_clock() + seconds
        self._paused = False
        self._break_all(f"engine {self._name} died")

    def _is_dead(self) -> bool:
        return asyncio.get_running_loop().time() < self._dead_until

    def _raise_if_dead(self, what: str) -> None:
        if self._closed or self._is_dead():
            raise EngineError(f"engine {self._name} is {'closed' if self._closed else 'dead'}: {what} refused")

    def _break_all(self, why: str) -> None:
        self._make_all()
        for stream in self._streams.values():
            stream.error = stream.error or EngineError(why)
        self._wake_all()

    def _wake_all(self) -> None:
        for stream in self._streams.values():
            stream.wake_up()

    # ---------------------------------------------------------------- one stream

    def _admit(self, request: Request) -> FakeStream:
        """Check a request, record it and queue it."""
        now = self._start_clock()
        self._raise_if_dead("request")
        tokens, finish = self._plan(request)
        record = AttemptRecord(
            engine=self._name, request=structs.replace(request, token_ids=request.token_ids.copy()), started_s=now
        )
        faults = self.faults.attempt(self._name, request)
        stream = FakeStream(record, faults, tokens, finish, self._token_s, self._chunk_tokens)
        self.attempts[request.attempt_id] = record
        self._id_lengths.add(len(request.attempt_id))
        self._streams[request.attempt_id] = stream
        self._queue.append(stream)
        self._start_next()
        return stream

    def _plan(self, request: Request) -> tuple[Int32, EngineFinish]:
        """Return the tokens that this attempt will yield, and its finish; refuses requests that april must not make."""
        held, total, attempt_id = request.response_offset, len(request.token_ids), request.attempt_id
        room = min(request.sampling.max_tokens, self._capabilities.max_context - total)
        if attempt_id in self.attempts:
            raise self._violation(request, "the id was used before; every attempt needs a new one")
        if not attempt_id or (
            {len(attempt_id)} != self._id_lengths
            and any(attempt_id.startswith(i) or i.startswith(attempt_id) for i in self.attempts)
        ):
            raise self._violation(request, "the id is empty, or one id is a prefix of another")
        if total and not 0 <= request.token_ids.min() <= request.token_ids.max() < self._capabilities.vocab_size:
            raise self._violation(request, f"a token id is outside the vocabulary of {self._capabilities.vocab_size}")
        if not 0 <= held < total:
            raise self._violation(request, f"response_offset {held} leaves no prompt in its {total} token ids")
        if held and int(request.token_ids[-1]) in self._stops(request):
            raise self._violation(request, "it continues a response that has already ended with a stop token")
        if room < 1:
            raise self._violation(
                request, f"no token may be generated: max_tokens {request.sampling.max_tokens}, context used {total}"
            )
        whole = self._whole(request)
        # an engine always yields at least one token
        new = whole[held:] if held < len(whole) else whole[-1:]
        return (new, EngineFinish.STOP) if len(new) <= room else (new[:room], EngineFinish.LENGTH)

    def _stops(self, request: Request) -> set[int]:
        return {self._eos, *request.sampling.stop_token_ids}

    def _whole(self, request: Request) -> Int32:
        """Return the whole response that a request begins or continues, int32 [T]; it ends in a stop token."""
        stop_ids = request.sampling.stop_token_ids
        least = max(request.response_offset + request.sampling.min_tokens, 1)
        if self._responses is None:
            said, length = np.empty(0, np.int32), max(self._length(request), least)
        else:
            said = np.asarray(self._responses(request), np.int32)
            ends = np.flatnonzero(np.isin(said, list(self._stops(request))))
            stop = np.int32((*stop_ids, self._eos)[0])
            said = said[: ends[0] + 1] if ends.size else np.append(said, stop).astype(np.int32)
            if len(said) >= least:
                return said
            said, length = said[:-1], least
        vocab_size = self._capabilities.vocab_size
        drawn = fake_response(
            with_attachment_ids(request), request.sample_key, length, vocab_size, self._eos, stop_ids,
            request.sampling.banned_ids,
        )  # fmt: skip
        return np.concatenate((said, drawn[len(said) :]))

    def _length(self, request: Request) -> int:
        if isinstance(self._lengths, int):
            return self._lengths
        if not isinstance(self._lengths, Mapping):
            return self._lengths(request)
        try:
            return self._lengths[request.sample_key]  # type: ignore[index]  # a key of None raises KeyError, too
        except KeyError:
            raise EngineError(
                f"engine {self._name}: the table of lengths has no entry for sample {request.sample_key}; add it, or "
                "give a number, a function or a defaultdict"
            ) from None

    def _violation(self, request: Request, what: str) -> EngineError:
        text = f"engine {self._name}, request {request.attempt_id} of sample {request.sample_key}: {what}"
        self.violations.append(text)
        return EngineError(text)

    def _start_next(self) -> None:
        """Give free places to waiting requests."""
        now = asyncio.get_running_loop().time()
        while self._queue and self._running < (self._capabilities.max_in_flight or math.inf):
            stream = self._queue.popleft()
            stream.running, stream.made_until = True, now
            self._running += 1
            stream.wake_up()

    def _leave(self, stream: FakeStream) -> None:
        self._streams.pop(stream.record.attempt_id, None)
        if stream.running:
            self._running -= 1
        elif stream in self._queue:
            self._queue.remove(stream)
        self._start_next()

    def _make_all(self) -> None:
        for stream in self._streams.values():
            self._make(stream)

    def _make(self, stream: FakeStream) -> None:
        if not self._paused:
            stream.make(asyncio.get_running_loop().time(), self._version)

    async def _next(self, stream: FakeStream) -> Chunk | None:
        """Return the next chunk, or None if the caller must try again; the last chunk sets ``record.end``."""
        self._make(stream)
        now = asyncio.get_running_loop().time()
        if stream.error is not None:
            raise stream.error
        if now >= stream.abort_at:
            return self._aborted(stream)
        if not stream.unsent and self._break_here(stream, now):
            return None
        ready = stream.made >= stream.target or self._paused or len(stream.unsent) > 1
        if ready and (stream.unsent or stream.sent == len(stream.tokens)):
            return self._chunk(stream)
        makes = stream.running and not self._paused
        empty_at = now + EMPTY_CHUNK_S if stream.empty_until > now else math.inf
        await stream.wait(min(empty_at, stream.abort_at, stream.due_s if makes else math.inf))
        if asyncio.get_running_loop().time() < empty_at:
            return None
        return empty_chunk(self._version, None)

    def _break_here(self, stream: FakeStream, now: float) -> bool:
        """Apply faults that hit between two chunks; return True if one of them changes what the stream does next."""
        if self._due_fault(stream, FaultKind.BREAK_OFF):
            raise EngineError(f"engine {self._name}: the fault script breaks the stream off after {stream.sent} tokens")
        fault = self._due_fault(stream, FaultKind.ENGINE_DIES)
        if fault is not None:
            self.die(fault.duration_s)
            return True
        if not stream.running or self._paused:
            return False
        stream.fault_tokens_checked = stream.sent
        fault = self._due_fault(stream, FaultKind.STALL)
        if fault is None and (fault := self._due_fault(stream, FaultKind.EMPTY_CHUNKS)) is not None:
            stream.empty_until = now + fault.duration_s
        if fault is not None:
            stream.made_until = now + fault.duration_s
        return fault is not None

    def _chunk(self, stream: FakeStream) -> Chunk:
        """Return the next tokens made under one version; if they finish the response, also set ``record.end``."""
        wrong = [kind for kind in WRONG_CHUNKS if stream.unsent and self._due_fault(stream, kind)]
        room = stream.record.request.sampling.max_tokens - stream.sent
        tokens, version = stream.take(self._version)
        last = stream.sent == len(stream.tokens)
        # if a fault is due after the last token, the stream yields this token without a finish, and the fault follows
        breaks = len(tokens) and len(stream.tokens) in stream.marks
        finish = stream.finish if last and not breaks else None
        if finish is not None:
            stream.record.end = str(finish)
            if self._due_fault(stream, FaultKind.NO_FINISH):
                finish, stream.record.end = None, "without a finish reason"
        if not last:
            for kind, lie in WRONG_ENDS.items():
                if stream.sent and self._due_fault(stream, kind):
                    stream.record.wrong, stream.record.end, finish = kind, str(lie), lie
        chunk = Chunk(tokens, fake_logprobs(tokens, version), version, finish)
        for kind in wrong:
            stream.record.wrong = kind
            chunk = faulty_chunk(chunk, kind, self._capabilities.vocab_size, room)
        return chunk

    def _with_rows(self, stream: FakeStream, chunk: Chunk) -> Chunk:
        """Add the extras to the last chunk of a request that asked for them, unless the script says otherwise."""
        record = stream.record
        aborted = chunk.finish is EngineFinish.ABORT
        if chunk.finish is None or (aborted and self._due_fault(stream, FaultKind.ABORT_NO_ROWS)):
            return chunk
        if not aborted and self._due_fault(stream, FaultKind.NO_ROWS):
            record.wrong = FaultKind.NO_ROWS
            return chunk
        chunk = with_rows(record.request, [*record.chunks, chunk])
        if chunk.extras and self._due_fault(stream, FaultKind.SHORT_ROWS):
            record.wrong = FaultKind.SHORT_ROWS
            chunk = replace(chunk, extras={name: rows[:-1] for name, rows in chunk.extras.items()})
        return chunk

    def _due_fault(self, stream: FakeStream, kind: FaultKind) -> Fault | None:
        """Return the fault of this kind that hits the stream now, if any."""
        for fault in stream.script.faults:
            due = fault.kind is kind and (kind not in AT_TOKENS or fault.after_tokens <= stream.sent)
            if due and self.faults.hits(fault, self._name, self._seconds(), stream.script):
                return fault
        return None

    @staticmethod
    def _record_chunk(record: AttemptRecord, chunk: Chunk) -> Chunk:
        """Record a copy before the caller gets the chunk."""
        record.chunks.append(replace(chunk, tokens=chunk.tokens.copy(), logprobs=chunk.logprobs.copy()))
        record.times_s.append(asyncio.get_running_loop().time())
        return chunk

    # ---------------------------------------------------------------- aborts

    def _abort(self, stream: FakeStream, now: float) -> None:
        """Apply an abort to a stream, unless the script delays or ignores it."""
        if now < stream.aborts_ignored_until:
            return
        for fault in stream.script.faults:
            until = stream.record.started_s + fault.duration_s
            missed = fault.kind is FaultKind.ABORT_MISSED and now < until
            if missed and self.faults.hits(fault, self._name, self._seconds(), stream.script):
                stream.aborts_ignored_until = until
                return
        for kind in (FaultKind.ABORT_IGNORED, FaultKind.ABORT_HANGS, FaultKind.ABORT_LATE):
            hit = self._due_fault(stream, kind)
            if hit is not None:
                stream.aborts_ignored_until = math.inf
                stream.abort_at = now + hit.duration_s
                if kind is FaultKind.ABORT_HANGS:
                    self._make(stream)
                    stream.made_until = math.inf
                stream.wake_up()
                return
        self._make(stream)
        stream.abort_at, stream.aborts_ignored_until = now, math.inf
        stream.wake_up()

    def _aborted(self, stream: FakeStream) -> Chunk:
        """Return the next chunk of an aborted stream; the last one has finish ABORT unless all tokens were yielded."""
        if self._due_fault(stream, FaultKind.ABORT_EMPTY):
            stream.withhold()
        tokens, version = stream.take(self._version)
        if stream.unsent:
            finish = None
        else:
            finish = stream.finish if stream.sent == len(stream.tokens) else EngineFinish.ABORT
            stream.record.end = str(finish)
        return Chunk(tokens, fake_logprobs(tokens, version), version, finish)
