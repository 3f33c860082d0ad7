"""A simulated engine: realistic timing and synthetic tokens, without a model or a GPU.

The engine follows the clock of the event loop: in real time on an ordinary loop, and without any waiting on a loop of
``april.testing.virtual_clock``.

Invariant: token t of a response depends only on (prompt ids, sample key, t, vocabulary, stop ids). So an attempt that
resumes a sample, on this or another engine, continues the same sequence, and tests can compare a delivered sample with
``synthetic_response``. A stop id is only ever the last token of a complete response.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from april.core.sampling import LogprobKind
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.base import WithoutWeights
from april.engines.protocol import (
    Capabilities,
    Chunk,
    EngineFinish,
    EngineLoad,
    Float32,
    Health,
    Int32,
    OnWeightUpdate,
    Request,
)
from april.engines.random_bits import STEP, splitmix64
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.decoder_model import Finished, SimulatedDecoder
from april.engines.simulated.response_lengths import ResponseLengths
from april.engines.simulated.synthetic_rows import rows_of_attempt
from april.errors import EngineError

_LOWEST_LOGPROB = 4.0


def synthetic_logprobs(mixed: NDArray[np.uint64]) -> Float32:
    """Return log-probabilities in (-4, 0], of at most 24 significant bits so that they are equal on every platform."""
    logprobs: Float32 = (mixed >> np.uint64(40)).astype(np.float32) * np.float32(-_LOWEST_LOGPROB / 2**24)
    return logprobs


def by_sample_key(lengths: ResponseLengths) -> Callable[[Request], int]:
    """Make a ``length_of`` for :class:`SimulatedEngine` that looks up ``request.sample_key`` in ``lengths``."""

    def length_of(request: Request) -> int:
        if request.sample_key is None:
            raise EngineError(
                f"request {request.attempt_id} has no sample_key, from which response lengths are drawn; set "
                "Request.sample_key or give the engine a length_of that does not need it"
            )
        return lengths.sample(*request.sample_key)

    return length_of


def synthetic_response(
    prompt_ids: Int32,
    sample_key: tuple[int, int] | None,
    start: int,
    stop: int,
    vocab_size: int,
    stop_token_ids: Sequence[int],
) -> tuple[Int32, Float32]:
    """Return tokens int32 and log-probabilities float32, [stop - start] each, of positions start..stop-1."""
    stops = sorted({i for i in stop_token_ids if 0 <= i < vocab_size})
    if len(stops) >= vocab_size:
        raise ValueError(f"all {vocab_size} token ids are stop ids; nothing is left to generate")
    label = b"" if sample_key is None else b"%d/%d" % sample_key
    text = np.asarray(prompt_ids, dtype="<i4").tobytes()
    origin = np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8, key=label).digest(), "little"))
    x = splitmix64(origin + np.arange(start + 1, stop + 1, dtype=np.uint64) * STEP)
    tokens = (x % np.uint64(vocab_size - len(stops))).astype(np.int32)
    for stop_id in stops:
        tokens += tokens >= stop_id  # skips each stop id
    return tokens, synthetic_logprobs(x)


@dataclass(slots=True)
class _Stream:
    """A request that is being served; items of ``outbox`` are (number of tokens, version, finish), or an error."""

    request: Request
    new_tokens: int
    finish: EngineFinish
    handed_over: int = 0  # tokens put into the outbox
    yielded: int = 0  # tokens read from the outbox
    ended: bool = False  # the last item has been read
    taken: list[Chunk] = field(default_factory=list)
    """Chunks that were read, kept only if the request asks for extras (arrays with a row per token)."""
    outbox: asyncio.Queue[tuple[int, PolicyVersion, EngineFinish | None] | EngineError] = field(
        default_factory=asyncio.Queue
    )


def with_rows(request: Request, chunks: Sequence[Chunk]) -> Chunk:
    """Return the last of a request's chunks, with the extras that the request asked for."""
    made = np.concatenate([chunk.tokens for chunk in chunks])
    versions = [(chunk.version, len(chunk.tokens)) for chunk in chunks if len(chunk.tokens)]
    rows = rows_of_attempt(request.extras, request.token_ids, made, versions, request.extras_from)
    return replace(chunks[-1], extras=rows)


class SimulatedEngine(WithoutWeights):
    """Implements :class:`april.engines.protocol.Engine` with a :class:`SimulatedDecoder`.

    A response has ``length_of(request)`` tokens, counted over all attempts of its sample; ``response_offset`` of the
    request is the number that earlier attempts have generated. A response ends with STOP and a stop token, or with
    LENGTH if ``max_tokens`` or the context is exhausted first. ``min_tokens`` makes a response longer if necessary.
    ``temperature``, ``top_p``, ``seed`` and ``priority`` have no effect.

    Args:
        name: unique label.
        cost: cost of decoding.
        length_of: function from a request to the length of its whole response in tokens; see :func:`by_sample_key`.
        max_running: number of decode slots; further requests wait inside the engine.
        vocab_size: size of the vocabulary; token ids are in [0, vocab_size).
        eos_token_id: stop token for requests that name none.
        max_context: largest number of tokens of prompt plus response, unless the KV capacity is less.
        version: policy version of the weights at the start.
        stream_interval_s: seconds between two chunks; None means a chunk only when a request ends or weights change.
        weight_update_s: duration of ``update_weights`` in seconds. A path is accepted and not read.
        admission_reserve: number of tokens whose key-value memory stays free for each running sequence when a request
            is admitted.
        remote: whether april should ask for the engine's load while it works, as with a server.
        check_prefix: whether to refuse a resumed request if its earlier response tokens are not this engine's.
        extras: names of the arrays returned with tokens, see :mod:`april.engines.simulated.synthetic_rows`.
    """

    def __init__(
        self,
        name: str,
        cost: DecodeCost,
        length_of: Callable[[Request], int],
        *,
        max_running: int,
        vocab_size: int = 32_000,
        eos_token_id: int = 0,
        max_context: int = 1 << 20,
        version: PolicyVersion = FIRST_VERSION,
        stream_interval_s: float | None = None,
        weight_update_s: float = 0.0,
        check_prefix: bool = True,
        admission_reserve: int = 128,
        remote: bool = False,
        extras: Sequence[str] = (),
    ) -> None:
        if vocab_size < 2 or not 0 <= eos_token_id < vocab_size:
            raise ValueError(f"need vocab_size >= 2 and eos_token_id inside it, not {vocab_size}, {eos_token_id}")
        if stream_interval_s is not None and stream_interval_s <= 0:
            raise ValueError(f"stream_interval_s must be positive or None, not {stream_interval_s}")
        super().__init__(name, Capabilities(
            logprob_kind=LogprobKind.TEMPERATURE, vocab_size=vocab_size,
            max_context=min(max_context, cost.kv_capacity_tokens or max_context), max_in_flight=max_running,
            updates_from_disk=True, remote=remote, in_flight_updates=(OnWeightUpdate.KEEP,), extras=tuple(extras),
        ), version)  # fmt: skip
        self._kv_capacity = cost.kv_capacity_tokens
        self._length_of = length_of
        self._eos = eos_token_id
        self._stream_interval_s = stream_interval_s
        self._weight_update_s = weight_update_s
        self._check_prefix = check_prefix
        self._decoder = SimulatedDecoder(cost, max_running, -math.inf, admission_reserve)
        self._streams: dict[str, _Stream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._stream_timer: asyncio.TimerHandle | None = None
        self._stopped = asyncio.Event()

    def __repr__(self) -> str:
        return f"<SimulatedEngine {self._name} version {self._version}: {self._decoder!r}>"

    @property
    def decoder(self) -> SimulatedDecoder:
        """The timing model, for its counters; do not modify it."""
        return self._decoder

    # -- the protocol ------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Serve one request; raises EngineError for one that is impossible, already in flight, or sent after close."""
        stream = self._admit(request)
        try:
            while True:
                item = await stream.outbox.get()
                if isinstance(item, EngineError):
                    stream.ended = True
                    raise item
                yield self._chunk(stream, *item)
                if stream.ended:
                    return
        finally:
            if not stream.ended:  # the consumer stopped reading
                self._catch_up()
                if self._streams.pop(request.attempt_id, None) is stream:
                    self._decoder.abort([request.attempt_id])
                self._set_timer()

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        self._catch_up()
        for attempt_id, tokens in self._decoder.abort(attempt_ids).items():
            self._end(attempt_id, tokens, EngineFinish.ABORT)
        self._set_timer()

    async def pause(self) -> None:
        """Close admission; returns when the decode step in progress has ended."""
        self._catch_up()
        self._paused = True
        self._decoder.pause()
        self._set_timer()
        if not self._decoder.stopped:
            self._stopped.clear()
            await self._stopped.wait()

    async def pause_in_flight(self, in_flight: OnWeightUpdate) -> None:
        """Pause, but keep requests and their cache; returns when callers had time to read all decoded tokens."""
        await self.pause()
        self._hand_over_all()
        await self._read_by_callers(lambda: any(not stream.outbox.empty() for stream in self._streams.values()))

    async def resume(self) -> None:
        self._catch_up()
        self._paused = False
        self._decoder.resume()
        self._stopped.set()
        self._set_timer()
        self._set_stream_timer()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Change the version after ``weight_update_s``; raises EngineError unless paused."""
        self._catch_up()
        self._require_paused(stopped=self._decoder.stopped)
        self._hand_over_all()
        if self._weight_update_s > 0:
            await asyncio.sleep(self._weight_update_s)
        self._version = version

    async def health(self) -> Health:
        if self._closed:
            return Health(ok=False, detail="closed")
        self._catch_up()
        counters = {name: float(value) for name, value in asdict(self._decoder.counters()).items()}
        counters |= {
            "running": float(self._decoder.running),
            "waiting": float(self._decoder.waiting),
            "kv_tokens": float(self._decoder.kv_tokens),
        }
        capacity = self._kv_capacity
        usage = self._decoder.kv_tokens / capacity if capacity else 0.0
        load = EngineLoad(self._decoder.running, self._decoder.waiting, usage, self._decoder.counters().preemptions)
        return Health(ok=True, detail="paused" if self._paused else "", counters=counters, load=load)

    async def close(self) -> None:
        """Close the engine; streams that are still open raise EngineError."""
        if self._closed:
            return
        self._catch_up()
        self._closed = True
        self._decoder.abort()
        for stream in self._streams.values():
            stream.outbox.put_nowait(EngineError(f"engine {self._name} was closed"))
        self._streams.clear()
        self._stopped.set()
        for timer in (self._timer, self._stream_timer):
            if timer is not None:
                timer.cancel()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _admit(self, request: Request) -> _Stream:
        """Check a request and queue it."""
        where = f"engine {self._name}, request {request.attempt_id}"
        if self._closed:
            raise EngineError(f"{where}: the engine is closed")
        self._catch_up()
        if request.attempt_id in self._streams:
            raise EngineError(f"{where}: the id is already in flight; every attempt needs a new one")
        held, total = request.response_offset, len(request.token_ids)
        if total and not 0 <= request.token_ids.min() <= request.token_ids.max() < self._capabilities.vocab_size:
            raise EngineError(f"{where}: a token id is outside the vocabulary of {self._capabilities.vocab_size}")
        if not 0 <= held <= total:
            raise EngineError(f"{where}: response_offset {held} is outside its {total} token ids")
        length = self._length_of(request)
        to_stop = max(length - held, request.sampling.min_tokens, 0 if held else 1)
        if to_stop < 1:
            raise EngineError(f"{where}: the response is complete: it has {length} tokens, and {held} are there")
        budget = min(request.sampling.max_tokens, self._capabilities.max_context - total)
        if budget < 1:
            raise EngineError(
                f"{where}: no token may be generated (max_tokens {request.sampling.max_tokens}, {total} tokens of "
                f"context {self._capabilities.max_context} used); end the sample with LENGTH instead of sending it"
            )
        finish = EngineFinish.STOP if to_stop <= budget else EngineFinish.LENGTH
        stream = _Stream(request, min(to_stop, budget), finish)
        if self._check_prefix and held:
            expected, _ = self._synthetic(request, 0, held)
            differs = np.flatnonzero(expected != request.token_ids[total - held :])
            if differs.size:
                raise EngineError(f"{where}: response token {differs[0]} of {held} differs from the generated one")
        self._decoder.add(request.attempt_id, total, stream.new_tokens)
        self._streams[request.attempt_id] = stream
        self._set_timer()
        self._set_stream_timer()
        return stream

    def _catch_up(self) -> None:
        """Advance the decoder to the loop's time."""
        now = asyncio.get_running_loop().time()
        if now > self._decoder.now:
            self._deliver(self._decoder.advance(now))

    def _on_timer(self, due: float) -> None:
        self._timer = None
        # A real event loop may call this slightly early.
        now = max(due, self._decoder.now, asyncio.get_running_loop().time())
        self._deliver(self._decoder.advance(now))
        self._set_timer()

    def _deliver(self, finished: list[Finished]) -> None:
        for request_id, _ in finished:
            stream = self._streams[request_id]
            self._end(request_id, stream.new_tokens, stream.finish)
        if self._paused and self._decoder.stopped:
            self._stopped.set()

    def _set_timer(self) -> None:
        due = self._decoder.next_event_time()
        if self._timer is not None:
            if self._timer.when() == due:
                return
            self._timer.cancel()
            self._timer = None
        if due < math.inf and not self._closed:
            self._timer = asyncio.get_running_loop().call_at(due, self._on_timer, due)

    def _on_stream_timer(self) -> None:
        self._stream_timer = None
        self._catch_up()
        self._hand_over_all()
        self._set_timer()
        self._set_stream_timer()

    def _set_stream_timer(self) -> None:
        """Schedule the next chunks only while tokens may come, because a virtual clock is idle only without timers."""
        if self._stream_interval_s is None or self._stream_timer is not None or self._paused or not self._streams:
            return
        loop = asyncio.get_running_loop()
        self._stream_timer = loop.call_later(self._stream_interval_s, self._on_stream_timer)

    def _hand_over_all(self) -> None:
        """Put the new tokens of every running request into its outbox, with the present version."""
        for attempt_id, stream in self._streams.items():
            fresh = self._decoder.tokens_of(attempt_id) - stream.handed_over
            if fresh > 0:
                stream.outbox.put_nowait((fresh, self._version, None))
                stream.handed_over += fresh

    def _end(self, attempt_id: str, tokens: int, finish: EngineFinish) -> None:
        stream = self._streams.pop(attempt_id)
        stream.outbox.put_nowait((tokens - stream.handed_over, self._version, finish))
        stream.handed_over = tokens

    def _chunk(self, stream: _Stream, count: int, version: PolicyVersion, finish: EngineFinish | None) -> Chunk:
        """Build the chunk for one item of the outbox."""
        request, start = stream.request, stream.request.response_offset + stream.yielded
        tokens, logprobs = self._synthetic(request, start, start + count)
        stream.yielded += count
        stream.ended = finish is not None
        if finish is EngineFinish.STOP:
            tokens[-1] = self._stop_ids(request)[0]
        chunk = Chunk(tokens, logprobs, version, finish)
        if not request.extras:
            return chunk
        stream.taken.append(chunk)
        return with_rows(request, stream.taken) if finish is not None else chunk

    def _stop_ids(self, request: Request) -> tuple[int, ...]:
        return request.sampling.stop_token_ids or (self._eos,)

    def _synthetic(self, request: Request, start: int, stop: int) -> tuple[Int32, Float32]:
        prompt = request.token_ids[: len(request.token_ids) - request.response_offset]
        return synthetic_response(
            prompt, request.sample_key, start, stop, self._capabilities.vocab_size, self._stop_ids(request)
        )
