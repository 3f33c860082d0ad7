"""The embedded engine: generates inside the trainer's process from the trainer's own Hugging Face model.

Invariants:

* The engine works in ticks: a tick runs up to MAX_STEPS_PER_TICK decode steps in one worker thread. Requests and aborts
  take effect on the event loop between two ticks. The same requests in the same order reproduce a run exactly.
* Each token is yielded once or counted in ``stats.discarded_tokens``.
* The model is in generation mode (dropout off) only during a tick. Its flags are restored before the tick's tokens are
  handed out, and an idle engine does not touch them.
* The tokens of a tick are handed out only if no other code changed the model's weights or settings during the tick
  (``model_state.py``). Other code that needs the model takes turns with the ticks (``april.hold_model``).

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from april.concurrency.model_lock import model_lock_of
from april.core.sampling import LogprobKind
from april.core.versions import PolicyVersion
from april.engines.base import EngineBase
from april.engines.protocol import Capabilities, Chunk, Health, Request
from april.engines.transformers.stats import EngineStats
from april.engines.weight_transfer import TensorSpec
from april.errors import AttachmentError, ConfigError, EngineError, ModelBroken, WeightsInUse
from april.text.install_command import require

if TYPE_CHECKING:
    from april.engines.transformers.model_weights import ModelWriter
    from april.engines.transformers.slot_requests import SlotOutput, SlotRequest

log = logging.getLogger("april")

MAX_STEPS_PER_TICK = 32
"""Largest number of decode steps per tick. A request or an abort that arrives during a tick waits for its end."""
STREAM_INTERVAL = 2
"""Default number of tokens per chunk for streamed requests (docs/measurements.md)."""
YIELDS_BETWEEN_TICKS = 8
"""Event-loop iterations between two ticks, in which consumers take chunks, submit requests and abort them. The number
is fixed, because runs with a wall-clock wait would not be reproducible."""


_OUT_OF_MEMORY_TEXTS = ("out of memory", "not enough memory", "allocate memory")
"""Phrases of torch's out-of-memory errors; "illegal memory access" and "memory format" must not match."""


def _is_out_of_memory(error: Exception) -> bool:
    """Return True if a failed model call may succeed later, once memory is free."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY_TEXTS)


@dataclass(slots=True, eq=False)
class _Stream:
    """The chunks of one request that its consumer has not taken yet."""

    attempt_id: str
    chunks: deque[Chunk] = field(default_factory=deque)
    error: EngineError | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    abandoned: bool = False
    """True if the consumer has stopped reading."""


class TransformersEngine(EngineBase):
    """Continuous batching over any Hugging Face causal model with plain key-value attention.

    The engine reads the parameters in place, so ``optimizer.step()`` changes its weights. Pause the engine (or let it
    run idle) before the optimizer writes, then call :meth:`update_weights` with the new version. An optimizer step
    while the engine generates raises :class:`~april.errors.WeightsInUse`. Writes without an optimizer are detected
    after the tick, by the version counters, the addresses and a few values of the tensors. Then every request ends with
    WeightsInUse and without the tokens of that tick, and nothing is generated before the next :meth:`update_weights`.
    Writes through ``.data`` may be missed, because they change neither counter nor address.

    The engine computes in the precision of the model: the dtype of its weights, or that of an autocast, either around
    the model's ``forward`` or active when the engine is created.

    A DistributedDataParallel wrapper is removed. With FSDP2 (``fully_shard``) each rank creates an engine and generates
    between :meth:`gather` and :meth:`release`.

    Args:
        model: The model, on its final device; not copied.
        slots: Largest number of requests decoded at the same time; further ones wait.
        max_len: Largest number of tokens of prompt plus response; None means the model's context, at most 32,768.
        seed: Seed of the generator that supplies seeds for requests that have none.
        name: Label for segments, metrics and messages.
        stream_interval: Number of tokens per chunk; None means one chunk at the end, or one per two tokens if a request
                has stop strings.
        eos_token_ids: Token ids that end a response; None means those of the model's generation configuration.
        check: Whether to decode a few tokens and compare them with a full forward pass, at creation or, with FSDP2, in
            the first :meth:`gather`.
        processor: transformers' processor of a vision model; without it prompts are text only.

    Raises:
        ConfigError: an argument is out of range, or the engine cannot run this model exactly.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int = 64,
        max_len: int | None = None,
        seed: int = 0,
        name: str = "transformers",
        stream_interval: int | None = None,
        eos_token_ids: Iterable[int] | None = None,
        check: bool = True,
        processor: Any = None,
    ) -> None:
        require("the transformers engine", "torch", "transformers")
        from april.engines.transformers.model_state import ModelState, guard_optimizers
        from april.engines.transformers.model_support import (
            affordable_context,
            autocast_here,
            context_of,
            eos_ids_of,
            refuse_unsupported,
            text_config,
        )
        from april.engines.transformers.model_weights import inner_model, weights_of
        from april.engines.transformers.slot_batch import SlotDecoder
        from april.engines.transformers.vision import IMAGE, vision_of

        for label, value in (("slots", slots), ("max_len", max_len), ("stream_interval", stream_interval)):
            if value is not None and value < 1:
                raise ConfigError(f"{label} is {value}: it must be at least 1")
        model = inner_model(model)
        if not hasattr(model, "config"):
            hint = (
                "to load a model by its directory or hub name, set engine.model in the configuration"
                if isinstance(model, (str, Path))
                else "pass a Hugging Face causal language model, or the one inside the wrapper"
            )
            raise ConfigError(f"model is of type {type(model).__name__}, which has no config: {hint}")
        self._model = model
        self._max_len = max_len or (affordable_context(model) if check else context_of(model))
        refuse_unsupported(model, self._max_len)
        self._vision = vision_of(model, processor)
        self._autocast = autocast_here(next(model.parameters()).device)
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"april-{name}")
        self._weights = weights_of(model)
        self.weight_sample = self._weights.sample
        self._state = ModelState(model, self._weights)
        self._model_lock = model_lock_of(model)
        # True while the trainer has the model and may change its settings; the next tick records them anew
        self._with_trainer = True
        # True once quiet() was called; until then the trainer has the model whenever no request is active
        self._handed_back = False
        self._unchecked = check
        try:
            self._check_once()
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        self.stats = EngineStats()
        self._decoder = SlotDecoder(model, slots, self._max_len, self.stats, self._vision)
        self._eos = eos_ids_of(model) if eos_token_ids is None else tuple(sorted(set(eos_token_ids)))
        sharded = self._weights.sharded
        super().__init__(name, Capabilities(
            logprob_kind=LogprobKind.TEMPERATURE, vocab_size=int(text_config(model).vocab_size),
            max_context=self._max_len, eos_token_ids=self._eos, max_in_flight=slots, shares_weights=True,
            gathers_weights=sharded, updates_from_disk=not sharded, takes_tensors=not sharded,
            attachments=() if self._vision is None else (IMAGE,), bans=True,
        ))  # fmt: skip
        self._stream_interval = stream_interval
        self._steps_per_tick = min(MAX_STEPS_PER_TICK, stream_interval or MAX_STEPS_PER_TICK)
        self._seeds = random.Random(seed)
        self._streams: dict[str, _Stream] = {}
        # Messages that arrived during a tick: requests, and lists of attempt ids to abort.
        self._inbox: list[SlotRequest | list[str]] = []
        self._pump: asyncio.Task[None] | None = None
        self._ticking = self._loading = False
        self._failure = ""
        self._may_recover = False
        """True if the failure may be temporary; only another request can show whether it is."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer: ModelWriter | None = None
        """Writer of new tensors into the model, while their transfer is incomplete."""
        self._overwritten = ""
        """Error text after other code changed the model in a tick; until the next update every request raises it."""
        self._generated_under: tuple[PolicyVersion, int | None] | None = None
        """Version and write counter of the weights that generated last; the counter is None after a warning."""
        self._dtypes = {parameter.dtype for parameter in model.parameters()}
        self._unchanged = 0
        """Number of successive updates without a write to the weights, among updates after generating."""
        self._remove_optimizer_guard = guard_optimizers(self, self._weights)

    @classmethod
    def from_pretrained(
        cls, path: str, *, dtype: Any = "auto", device: Any = None, **options: Any
    ) -> TransformersEngine:
        """Load a model from a directory or model id (safetensors only), with its vision tower if it has one.

        ``options`` are further arguments of the class.
        """
        require("the transformers engine", "torch", "transformers", "safetensors")
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        has_vision = hasattr(AutoConfig.from_pretrained(path), "vision_config")
        kind = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
        model = kind.from_pretrained(path, dtype=dtype, use_safetensors=True)
        return cls(model if device is None else model.to(device), **options)

    @property
    def generating(self) -> bool:
        """True if writing to the weights now would corrupt running requests."""
        return self._ticking or (self._decoder.active > 0 and not self._paused and self._weights.ready)

    def __repr__(self) -> str:
        state = self._status or ("running" if self._pump else "idle")
        return f"TransformersEngine({self._name!r}, {state}, {self._decoder!r})"

    # ------------------------------------------------------------------ requests

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Yield the chunks of one request; closing the iterator early frees the slot.

        Raises EngineError if the request cannot be served. If a model call fails, the tokens of completed steps are
        yielded before the error.
        """
        slot_request = self._checked(request)
        stream = self._streams[request.attempt_id] = _Stream(request.attempt_id)
        self._send(slot_request)
        self._start_pump()
        finished = False
        try:
            while True:
                while stream.chunks:
                    chunk = stream.chunks.popleft()
                    finished = chunk.finish is not None
                    yield chunk
                    if finished:
                        return
                if stream.error is not None:
                    finished = True
                    raise stream.error
                stream.wake.clear()
                await stream.wake.wait()
        finally:
            if not finished:
                self._leave(stream)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """End these attempts (None means all), at once or after the running tick."""
        ids = list(self._streams) if attempt_ids is None else [i for i in attempt_ids if i in self._streams]
        if ids:
            self._send(ids)

    def _checked(self, request: Request) -> SlotRequest:
        """Translate the request for the decoder; raises EngineError if it is invalid."""
        from april.engines.transformers.slot_requests import slot_request, wrong_request

        where = f"{self._name}, attempt {request.attempt_id}"
        wrong: str | None
        if self._closed:
            wrong = "the engine is closed: create a new one"
        elif request.attempt_id in self._streams:
            wrong = "this id is already in flight: give every attempt an id of its own"
        else:
            wrong = wrong_request(request, self._capabilities.vocab_size, self._max_len, self._eos)
        if wrong is not None:
            raise EngineError(f"{where}: {wrong}")
        if self._vision is not None and (wrong := self._vision.wrong_places(request.attached)) is not None:
            raise AttachmentError(f"{where}: {wrong}")
        if not self._weights.ready:
            raise EngineError(
                f"{where}: the model's parameters are sharded over ranks and were not gathered; april.RankScheduler "
                "gathers them during next_batch() and evaluate(), which every rank calls; with the engine alone, "
                "generate between gather() and release()"
            )
        if self._overwritten:
            raise WeightsInUse(self._overwritten)
        interval = self._stream_interval or (STREAM_INTERVAL if request.stream else None)
        return slot_request(request, self._max_len, self._eos, self._seeds, interval)

    def _send(self, message: SlotRequest | list[str]) -> None:
        self._inbox.append(message)
        if not self._ticking:
            self._read_inbox()

    def _read_inbox(self) -> None:
        messages, self._inbox = self._inbox, []
        for message in messages:
            if not isinstance(message, list):
                self._decoder.submit(message)
                continue
            try:
                self._hand_out(self._decoder.abort(message))
            except Exception as error:  # the device failed while tokens were read from it
                self._failure = f"the last abort failed: {type(error).__name__}: {error}"
                self._hand_out(self._decoder.drop_failed(), error)

    def _leave(self, stream: _Stream) -> None:
        """Free the slot of a consumer that stopped reading, and count the tokens that it did not take."""
        stream.abandoned = True
        self.stats.discarded_tokens += sum(chunk.tokens.size for chunk in stream.chunks)
        stream.chunks.clear()
        if self._streams.get(stream.attempt_id) is stream:
            self._send([stream.attempt_id])

    def _hand_out(self, outputs: list[SlotOutput], cause: Exception | None = None) -> None:
        """Give the decoder's outputs to their streams; the error ``cause`` ends all outputs without a finish."""
        for output in outputs:
            attempt_id, tokens, logprobs = output.request.attempt_id, output.tokens, output.logprobs
            stream = self._streams[attempt_id]
            over = output.finish is not None or output.refused is not None or cause is not None
            if over:
                del self._streams[attempt_id]
            if stream.abandoned or stream.error is not None:
                self.stats.discarded_tokens += tokens.size
                continue
            finish = output.finish
            bad = np.flatnonzero(~np.isfinite(logprobs))
            if bad.size:
                good = int(bad[0])
                stream.error = EngineError(
                    f"{self._name}, attempt {attempt_id}: the model returned a log-probability of {logprobs[good]} "
                    f"under version {self._decoder.version}; look for NaN or infinity in its weights"
                )
                self.stats.failures += 1
                self.stats.discarded_tokens += tokens.size - good
                tokens, logprobs, finish = tokens[:good], logprobs[:good], None
                if not over:
                    self._inbox.append([attempt_id])
            elif output.refused is not None:
                stream.error = AttachmentError(f"{self._name}, attempt {attempt_id}: {output.refused}")
            elif isinstance(cause, WeightsInUse):
                stream.error = WeightsInUse(str(cause), output.unsound)
            elif cause is not None and finish is None:
                stream.error = EngineError(
                    f"{self._name}, attempt {attempt_id}: a model call failed ({type(cause).__name__}: {cause}); april "
                    "keeps the tokens before it"
                )
                stream.error.__cause__ = cause
            if tokens.size or finish is not None:
                stream.chunks.append(Chunk(tokens, logprobs, self._decoder.version, finish))
            stream.wake.set()

    # ------------------------------------------------------------------ ticks

    def _start_pump(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._pump is None and not self._is_idle:
            self._pump = self._loop.create_task(self._run_ticks(), name=f"april-{self._name}")

    @property
    def _is_idle(self) -> bool:
        return self._paused or self._loading or self._decoder.idle or not self._weights.ready

    async def _run_ticks(self) -> None:
        """Run ticks until nothing is left to do, or the engine is paused."""
        try:
            self._weights.list_tensors()
            self._notice_silent_update()
            while True:
                for _ in range(YIELDS_BETWEEN_TICKS):
                    await asyncio.sleep(0)
                if not await self._model_lock.wait(self):
                    break  # the engine was closed
                try:
                    if self._is_idle:
                        break
                    outputs, error = await self._tick()
                finally:
                    self._model_lock.release(self)
                self._hand_out(outputs, error)
                self._read_inbox()
        except (Exception, asyncio.CancelledError) as error:
            # This module has a bug, or the loop is shutting down; without an error, consumers would wait for ever.
            self._closed = True
            self._failure = f"the engine failed ({type(error).__name__}: {error}): create a new one"
            for stream in self._streams.values():
                stream.error = EngineError(f"{self._name}, attempt {stream.attempt_id}: {self._failure}")
                stream.error.__cause__ = error
                stream.wake.set()
            self._streams.clear()
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._pump = None

    async def _tick(self) -> tuple[list[SlotOutput], Exception | None]:
        """Run one tick in the worker thread; return its outputs, and the error if it failed."""
        self._ticking = True
        running = self._thread.submit(self._work)
        try:
            outputs, error = await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            # The loop is shutting down; wait, so that the model is restored before anything else runs.
            concurrent.futures.wait([running])
            raise
        finally:
            self._ticking = False
        if error is not None and not isinstance(error, WeightsInUse) and not _is_out_of_memory(error):
            # running out of memory may be temporary; any other error of a model call would recur with every request
            broken = ModelBroken(
                f"{self._name}: a model call failed ({type(error).__name__}: {error}), and the next one would fail as "
                "well; april keeps everything generated so far: repair the model, call weight_update(), and ask for "
                "the batch again"
            )
            broken.__cause__, error = error, broken
        if isinstance(error, WeightsInUse):
            self._failure = self._overwritten = str(error)
        else:
            self._failure = "" if error is None else f"the last tick failed: {type(error).__name__}: {error}"
        self._may_recover = error is not None and _is_out_of_memory(error)
        return outputs, error

    def _check_once(self) -> None:
        """Check the model once, as soon as this rank holds all weights."""
        if self._unchecked and self._weights.ready:
            self._thread.submit(self._check_model).result()
            self._unchecked = False

    def _check_model(self) -> None:
        """Check the model, in the worker thread like a tick, so that autocast's cache does not reach the trainer."""
        from april.engines.transformers.model_check import check_model

        self._state.note()
        with self._autocast(), self._weights.model_buffers_written():
            check_model(self._model, self._max_len, self._vision)
        self._state.ignore_changes()

    def _work(self) -> tuple[list[SlotOutput], Exception | None]:
        """Run one tick in the worker thread, and check before and after that the model is unchanged."""
        decoder, outputs, failure = self._decoder, list["SlotOutput"](), None
        if not self._weights.ready:  # the weights were released after this tick was requested
            return [], None
        if not decoder.active:
            self._state.note_weights()
        with self._generating():
            if self._with_trainer or (not self._handed_back and not decoder.active):
                self._with_trainer = False
                self._state.note()
            try:
                outputs = decoder.tick(self._steps_per_tick)
            except Exception as error:
                failure = error
            changed = self._state.changes_in_tick()
        if not changed and not self._state.weights_written():
            if failure is not None:
                return decoder.drop_failed(), failure
            return outputs + decoder.partials(), None
        outputs = decoder.drop_all()
        return outputs, self._state.changed_error(self._name, changed, len(outputs), sum(o.unsound for o in outputs))

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """Put the model into generation mode and watch its state, for one tick in the worker thread."""
        from april.engines.transformers.model_support import generation_mode

        with generation_mode(self._model), self._autocast(), self._state.watched():
            yield

    # ------------------------------------------------------------------ weights, pauses and closing

    def gather(self) -> None:
        """Gather all shards of an FSDP2 model on this rank; called in the trainer's thread.

        This is collective: every rank of the mesh calls it at the same time. The first call also does the ``check``
        of the model. Raises EngineError if another rank did not take part. If the model fails the check, shards
        the weights again and raises ConfigError.
        """
        if self._weights.sharded:
            self.release()  # then gather again in any case: gathering is collective, and other ranks may need it
            self._weights.gather()
            self._with_trainer = True
            try:
                self._check_once()
            except BaseException:
                self._weights.release()
                raise
            if (loop := self._loop) is not None and not loop.is_closed():
                loop.call_soon_threadsafe(self._start_pump)

    def release(self) -> None:
        """Shard the weights again after the running tick; idempotent, without communication.

        Unfinished requests wait for the next :meth:`gather`.
        """
        if self._weights.sharded and self._weights.ready:
            self._weights.ready = False
            with contextlib.suppress(RuntimeError):  # closed, so no tick runs
                self._thread.submit(int).result()  # runs after the last tick; later ticks find the weights not ready
            self._weights.release()

    async def pause(self) -> None:
        """Stop generating; returns when no tick runs and the model's settings are as the trainer left them.

        Active requests keep their slots. If the weights change before :meth:`resume`, abort the requests first.
        """
        self._paused = True
        await self.quiet()
        if self._closed:
            return
        await asyncio.get_running_loop().run_in_executor(self._thread, self._decoder.synchronize)
        if self._decoder.device.type != "cpu":
            # The trainer needs this GPU memory. While requests are active, release_memory() keeps it.
            self._decoder.release_memory()

    async def resume(self) -> None:
        """Continue; raises EngineError if the weights were written while requests hold keys of the old weights."""
        if self._decoder.active and self._paused and self._state.weights_written():
            raise EngineError(
                f"{self._name}: the weights were changed while {self._decoder.active} requests keep keys and values of "
                "the old ones: abort them, call update_weights, then resume"
            )
        self._paused = False
        self._writer = None  # forget an incomplete transfer
        self._start_pump()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Label the model's weights as ``version``; with ``path``, first load them from that directory, in place.

        ``save_pretrained`` writes such a directory (safetensors only). Waiting requests are generated with the new
        weights. Raises EngineError while requests are active, or if the directory does not hold exactly this model's
        weights; no weight is written then.
        """
        self._require_idle()
        if path is not None and self._weights.sharded:
            raise EngineError(
                f"{self._name}: the model's parameters are sharded over ranks: load {path} into it on every rank "
                "(set_model_state_dict), then call weight_update() without a path"
            )
        if path is not None:
            from april.engines.transformers.model_weights import load_weights

            await self._write_weights(version, load_weights, self._model, path)
        else:
            self._begin_version(version)

    def _require_idle(self) -> None:
        if self._closed:
            raise EngineError(f"{self._name}: the engine is closed: create a new one")
        if self._decoder.active or self._ticking:
            raise EngineError(
                f"{self._name}: {self._decoder.active} requests are active under version {self._decoder.version}: "
                "pause and abort them, then update the weights"
            )

    async def _write_weights(self, version: PolicyVersion | None, write: Callable[..., None], *arguments: Any) -> None:
        """Run ``write`` in the worker thread; a cancelled call does not reopen the engine before it has ended."""
        self._loading = True
        try:
            await self.quiet()
        except BaseException:
            self._loading = False
            raise
        writing = asyncio.get_running_loop().run_in_executor(self._thread, write, *arguments)
        writing.add_done_callback(lambda done: self._loaded(done, version))
        await asyncio.shield(writing)

    def _loaded(self, done: asyncio.Future[None], version: PolicyVersion | None) -> None:
        self._loading = False
        if version is not None and not done.cancelled() and done.exception() is None:
            self._begin_version(version)
        self._start_pump()

    def reads(self, model: Any) -> bool:
        """Return True if the parameters of ``model`` are the same objects as those of the engine's model."""
        return list(map(id, self._model.parameters())) == list(map(id, model.parameters()))

    async def take(self, specs: Sequence[TensorSpec], tensors: Sequence[Any], last: bool) -> None:
        """Copy tensors of another model into this one, in place; :meth:`update_weights` puts them into use.

        Raises EngineError while requests are active, or if a tensor does not match the model. Tensors that were copied
        before the error stay in the model.
        """
        self._require_idle()
        if self._writer is None:
            from april.engines.transformers.model_weights import ModelWriter

            self._writer = ModelWriter(self._model)
        try:
            await self._write_weights(None, self._writer.take, specs, tensors, last)
        except BaseException:
            self._writer = None
            raise
        if last:
            self._writer = None

    def _begin_version(self, version: PolicyVersion) -> None:
        self._notice_unchanged_weights()
        dtypes = {parameter.dtype for parameter in self._model.parameters()}
        if dtypes != self._dtypes:
            self._decoder.release_memory()  # its keys have the dtype of the old weights
            self._dtypes = dtypes
        self._decoder.version = version
        self._with_trainer = True
        if self._overwritten:
            self._overwritten = self._failure = ""

    async def health(self) -> Health:
        """Return healthy unless the engine is closed or its last tick failed; ``counters`` includes EngineStats.

        Running out of memory is reported only once: an unhealthy engine gets no requests, but only another request can
        show that there is memory again.
        """
        detail = self._failure or ("closed" if self._closed else "")
        if self._may_recover and not self._closed:
            self._failure, self._may_recover = "", False
        decoder = self._decoder
        counters = self.stats.counters() | {"active": float(decoder.active), "waiting": float(decoder.waiting)}
        return Health(ok=not detail, detail=detail, counters=counters)

    async def close(self) -> None:
        """Abort everything, stop the thread and free the memory."""
        self._closed = True
        self._remove_optimizer_guard()
        self._model_lock.excuse(self)
        await self.abort()
        await self.quiet()
        self.release()
        self._thread.shutdown(wait=False)
        self._decoder.release_memory()

    async def quiet(self) -> None:
        """Wait until no tick runs, no ``april.hold_model`` is open, and the model's settings are the trainer's own.

        Raises WeightsInUse if other code has changed the settings and does not restore them.
        """
        while (pump := self._pump) is not None:
            await asyncio.wait([pump])
        if self._closed:
            return
        await self._model_lock.free(self._name)
        if not self._with_trainer and self._weights.ready:
            await self._state.wait_until_restored(self._name, self._thread, self._generating)
        self._with_trainer = self._handed_back = True

    def _notice_unchanged_weights(self) -> None:
        """Warn after two successive updates without a write to the weights: probably a copy of the model is trained.

        One update without a write is no reason to warn, because a gradient scaler may have skipped the step.
        """
        if self._generated_under is None or self._generated_under[0] != self._decoder.version:
            return
        self._unchanged = 0 if self._state.weights_written() else self._unchanged + 1
        if self._unchanged == 2:
            log.warning(
                "%s: weight_update() was called twice, but nothing changed the weights of model= in between, so "
                "responses still come from the same weights under new versions; is a copy of the model trained? Give "
                "the scheduler the model whose parameters the optimizer holds", self._name,
            )  # fmt: skip

    def _notice_silent_update(self) -> None:
        """Warn once per version if weights were written without an update, since tokens then get a wrong version."""
        version, stamp = self._decoder.version, self._weights.stamp()[0]
        if self._generated_under is None or self._generated_under[0] != version:
            self._generated_under = (version, stamp)
        elif self._generated_under[1] not in (None, stamp):
            self._generated_under = (version, None)
            log.warning(
                "%s: the model's weights were changed, but the policy version is still %s, so new tokens count as "
                "tokens of the old weights; call weight_update() after each update of the model",
                self._name,
                version,
            )
