"""The embedded engine: generates inside the trainer's process from the trainer's own Hugging Face model.

Invariants:

* decode ticks run in one worker thread; everything else, requests and aborts included, happens on the event loop
  between two ticks. With the same requests in the same order a run is exactly reproducible;
* each token is yielded once or counted in ``stats.discarded_tokens``;
* the model is in generation mode (dropout off) only during a tick: what a tick has generated is handed out after the
  modules have their flags back, and an engine that is quiet touches them no more;
* what a tick samples is handed out only if the model is as the trainer has left it from its beginning to its end
  (``model_state.py``); whoever asks for the model in between takes turns with ticks (``april.hold_model``).

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from april.core.sampling import LogprobKind
from april.core.versions import PolicyVersion
from april.engines.protocol import Capabilities, Chunk, Health, Request
from april.engines.transformers.stats import EngineStats
from april.engines.weight_routes import TensorSpec
from april.errors import AttachmentError, ConfigError, EngineError, WeightsInUse
from april.extras import require
from april.model_turns import turns_of

if TYPE_CHECKING:
    from april.engines.transformers.model_weights import TakenWeights
    from april.engines.transformers.slot_requests import SlotOutput, SlotRequest

log = logging.getLogger("april")

MAX_STEPS_PER_TICK = 32
"""Decode steps before the event loop is looked at again, and thus before an abort can take effect."""
STREAM_INTERVAL = 2
"""Tokens per chunk of requests that want theirs as they come, where none is configured (docs/measurements.md)."""
YIELDS_BETWEEN_TICKS = 8
"""Event-loop cycles between two ticks: consumers take chunks, submit and abort in them. A fixed number, for with a
wall-clock wait runs would not repeat."""


@dataclass(slots=True, eq=False)
class _Stream:
    """The chunks that one consumer has not taken yet."""

    attempt_id: str
    chunks: deque[Chunk] = field(default_factory=deque)
    error: EngineError | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    left: bool = False
    """The consumer went away."""


class TransformersEngine:
    """Continuous batching over any Hugging Face causal model with plain key-value attention.

    ``optimizer.step()`` is the weight update: the parameters are read in place. Pause the engine (or let it run idle)
    before the optimizer writes, then call :meth:`update_weights` with the new version. A step while it generates is
    refused (:class:`~april.errors.WeightsInUse`). Writes without an optimizer are found after the fact, by the version
    counters and addresses of the tensors: every request ends with that error, without the tokens of that tick, and
    nothing is generated before the next :meth:`update_weights`. Writes through ``.data`` alone move neither.

    It generates in the precision of the model: that of its weights, or of an autocast, be it around its ``forward`` or
    around the line that makes the engine.

    With DistributedDataParallel around it, the model inside is used. With FSDP2 (``fully_shard``) each rank makes an
    engine, and :meth:`gather` and :meth:`release` go around generating.

    Args:
        model: the model, on its final device; not copied.
        slots: most requests decoded at the same time; further ones wait.
        max_len: most tokens of prompt plus response; None means the model's own context, at most 32,768.
        seed: seed of the stream from which requests without a seed get theirs.
        name: label for segments, metrics and messages.
        stream_interval: yield a chunk about every so many tokens; None means one chunk when it ends.
        eos_token_ids: ids that end every response; None means those of the generation configuration.
        num_threads: set torch's thread count, which is the whole process's; None means leave it alone.
        check: decode a few tokens at once (FSDP2: in the first :meth:`gather`) and compare with a full forward pass.
        processor: transformers' processor of a model that sees; without it prompts are text alone.

    Raises:
        ConfigError: an argument is out of range, or the model is one that this engine cannot drive exactly.
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
        num_threads: int | None = None,
        check: bool = True,
        processor: Any = None,
    ) -> None:
        require("the transformers engine", "torch", "transformers")
        import torch

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
                "a directory or hub name goes to engine.model of the configuration"
                if isinstance(model, (str, Path))
                else "pass a Hugging Face causal language model, the one inside the wrapper if there is one"
            )
            raise ConfigError(f"model is of type {type(model).__name__}, which has no config: {hint}")
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._model = model
        self._max_len = max_len or (affordable_context(model) if check else context_of(model))
        refuse_unsupported(model, self._max_len)
        self._vision = vision_of(model, processor)
        self._autocast = autocast_here(next(model.parameters()).device)
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"april-{name}")
        self._weights = weights_of(model)
        self.weight_sample = self._weights.sample
        self._state = ModelState(model, self._weights)
        self._turns = turns_of(model)
        self._trainers = True  # it has had the model: as that is at the next tick it is meant to be
        self._handed_back = False  # whoever drives this says when the trainer has it; else, whenever nothing is active
        self._unchecked = check
        try:
            self._check_once()
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        self.stats = EngineStats()
        self._decoder = SlotDecoder(model, slots, self._max_len, self.stats, self._vision)
        self._name = name
        self._eos = eos_ids_of(model) if eos_token_ids is None else tuple(sorted(set(eos_token_ids)))
        self._capabilities = Capabilities(
            logprob_kind=LogprobKind.TEMPERATURE,
            vocab_size=int(text_config(model).vocab_size),
            max_context=self._max_len,
            eos_token_ids=self._eos,
            max_in_flight=slots,
            shares_weights=True,
            gathers_weights=self._weights.sharded,
            updates_from_disk=not self._weights.sharded,
            takes_tensors=not self._weights.sharded,
            attachments=() if self._vision is None else (IMAGE,),
            bans=True,
        )
        self._stream_interval = stream_interval
        self._steps_per_tick = min(MAX_STEPS_PER_TICK, stream_interval or MAX_STEPS_PER_TICK)
        self._seeds = random.Random(seed)
        self._streams: dict[str, _Stream] = {}
        # Requests, and lists of attempts to end, that came while a tick was running.
        self._inbox: list[SlotRequest | list[str]] = []
        self._pump: asyncio.Task[None] | None = None
        self._ticking = self._paused = self._closed = self._loading = False
        self._failure = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._taken: TakenWeights | None = None
        """The weights that are on their way into the model, a part of which has come."""
        self._overwritten = ""
        """The reason why nothing is generated before the next update: the model has changed."""
        self._generated_under: tuple[PolicyVersion, int | None] | None = None
        """The version that last generated, and the writes to its weights (None means that a change was reported)."""
        self._unguard = guard_optimizers(self, self._weights)

    @classmethod
    def from_pretrained(
        cls, path: str, *, dtype: Any = "auto", device: Any = None, **options: Any
    ) -> TransformersEngine:
        """Load the model of a directory or model id (safetensors only), its vision tower included; options as for the
        class.
        """
        require("the transformers engine", "torch", "transformers", "safetensors")
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        sees = hasattr(AutoConfig.from_pretrained(path), "vision_config")
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = kind.from_pretrained(path, dtype=dtype, use_safetensors=True)
        return cls(model if device is None else model.to(device), **options)

    @property
    def name(self) -> str:
        """Label given at construction."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """Constant; see :class:`~april.engines.protocol.Capabilities`."""
        return self._capabilities

    @property
    def generating(self) -> bool:
        """Return whether a write to the weights, now, would spoil something."""
        return self._ticking or (self._decoder.active > 0 and not self._paused and self._weights.ready)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "paused" if self._paused else "running" if self._pump else "idle"
        return f"TransformersEngine({self._name!r}, {state}, {self._decoder!r})"

    # ------------------------------------------------------------------ requests

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Yield the chunks of one request; closing the iterator early frees the slot.

        Raises EngineError for a request that cannot be served as it stands, or for a model call that failed, after the
        tokens of completed steps.
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
        """End these attempts (None means all there are now), at once or after the tick that is running."""
        ids = list(self._streams) if attempt_ids is None else [i for i in attempt_ids if i in self._streams]
        if ids:
            self._send(ids)

    def _checked(self, request: Request) -> SlotRequest:
        """The request in the decoder's terms; EngineError, before anything is spent, if it makes no sense."""
        from april.engines.transformers.slot_requests import slot_request, wrong_images, wrong_request

        where = f"{self._name}, attempt {request.attempt_id}"
        wrong: str | None
        if self._closed:
            wrong = "the engine is closed: make a new one"
        elif request.attempt_id in self._streams:
            wrong = "this id is already in flight: give every attempt an id of its own"
        else:
            wrong = wrong_request(request, self._capabilities.vocab_size, self._max_len, self._eos)
        if wrong is not None:
            raise EngineError(f"{where}: {wrong}")
        if (wrong := wrong_images(request, self._vision)) is not None:
            raise AttachmentError(f"{where}: {wrong}")
        if not self._weights.ready:
            raise EngineError(
                f"{where}: the model's parameters are sharded over ranks and were not gathered; they are inside "
                "next_batch() and evaluate() of april.RankScheduler, which every rank calls, and between gather() and "
                "release() of the engine"
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
                self._hand_out(self._decoder.fail(), error)

    def _leave(self, stream: _Stream) -> None:
        """The consumer is gone: free the slot, count what it did not take."""
        stream.left = True
        self.stats.discarded_tokens += sum(chunk.tokens.size for chunk in stream.chunks)
        stream.chunks.clear()
        if self._streams.get(stream.attempt_id) is stream:
            self._send([stream.attempt_id])

    def _hand_out(self, outputs: list[SlotOutput], cause: Exception | None = None) -> None:
        """Give outputs of the decoder to their streams; without a finish they fail if there is a ``cause``."""
        for output in outputs:
            attempt_id, tokens, logprobs = output.request.attempt_id, output.tokens, output.logprobs
            stream = self._streams[attempt_id]
            over = output.finish is not None or output.refused is not None or cause is not None
            if over:
                del self._streams[attempt_id]
            if stream.left or stream.error is not None:
                self.stats.discarded_tokens += tokens.size
                continue
            finish = output.finish
            bad = np.flatnonzero(~np.isfinite(logprobs))
            if bad.size:
                good = int(bad[0])
                stream.error = EngineError(
                    f"{self._name}, attempt {attempt_id}: the model gave a log-probability of {logprobs[good]} under "
                    f"version {self._decoder.version}; look for NaN or infinity in its weights"
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
                    f"{self._name}, attempt {attempt_id}: a model call failed ({type(cause).__name__}: {cause}); "
                    "the tokens before it were handed over"
                )
                stream.error.__cause__ = cause
            if tokens.size or finish is not None:
                stream.chunks.append(Chunk(tokens, logprobs, self._decoder.version, finish))
            stream.wake.set()

    # ------------------------------------------------------------------ ticks

    def _start_pump(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._pump is None and not self._stands_still:
            self._pump = self._loop.create_task(self._run_ticks(), name=f"april-{self._name}")

    @property
    def _stands_still(self) -> bool:
        return self._paused or self._loading or self._decoder.idle or not self._weights.ready

    async def _run_ticks(self) -> None:
        """Ticks until nothing is left to do, or the engine is paused."""
        try:
            self._weights.look_again()
            self._notice_silent_update()
            while True:
                for _ in range(YIELDS_BETWEEN_TICKS):
                    await asyncio.sleep(0)
                if not await self._turns.wait(self):
                    break  # closed
                try:
                    if self._stands_still:
                        break
                    outputs, error = await self._tick()
                finally:
                    self._turns.give(self)
                self._hand_out(outputs, error)
                self._read_inbox()
        except (Exception, asyncio.CancelledError) as error:
            # A mistake in this file, or the loop is going down: no consumer may wait for ever because of it.
            self._closed = True
            self._failure = f"the engine broke down ({type(error).__name__}: {error}): make a new one"
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
        """Run one tick in the worker thread; returns its outputs, and the error if it failed."""
        self._ticking = True
        running = self._thread.submit(self._work)
        try:
            outputs, error = await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            # The loop is shutting down, and whatever comes next must find the model as it was.
            concurrent.futures.wait([running])
            raise
        finally:
            self._ticking = False
        if isinstance(error, WeightsInUse):
            self._failure = self._overwritten = str(error)
        else:
            self._failure = "" if error is None else f"the last tick failed: {type(error).__name__}: {error}"
        return outputs, error

    def _check_once(self) -> None:
        """Before anything is generated, and not before the weights are whole."""
        if self._unchecked and self._weights.ready:
            self._thread.submit(self._try_out).result()
            self._unchecked = False

    def _try_out(self) -> None:
        """In the worker thread, as ticks are: what autocast keeps there never meets the trainer's gradients."""
        from april.engines.transformers.model_check import check_model

        self._state.note()
        with self._autocast(), self._weights.tried():
            check_model(self._model, self._max_len, self._vision)
        self._state.ignore_changes()

    def _work(self) -> tuple[list[SlotOutput], Exception | None]:
        """In the worker thread: one tick, looked at from both sides."""
        decoder, outputs, failure = self._decoder, list["SlotOutput"](), None
        if not self._weights.ready:  # since this tick was asked for
            return [], None
        if not decoder.active:
            self._state.note_weights()
        with self._generating():
            if self._trainers or (not self._handed_back and not decoder.active):
                self._trainers = False
                self._state.note()
            try:
                outputs = decoder.tick(self._steps_per_tick)
            except Exception as error:
                failure = error
            torn = self._state.torn()
        if not torn and not self._state.weights_written():
            if failure is not None:
                return decoder.fail(), failure
            return outputs + decoder.partials(), None
        outputs = decoder.disown()
        return outputs, self._state.torn_error(self._name, torn, len(outputs), sum(o.unsound for o in outputs))

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """Around a tick, in the worker thread: the model generates, and its state is looked at."""
        from april.engines.transformers.model_support import generation_mode

        with generation_mode(self._model), self._autocast(), self._state.watched():
            yield

    # ------------------------------------------------------------------ weights and life

    def gather(self) -> None:
        """Make the weights whole on this rank, where FSDP2 has spread them; in the trainer's thread.

        Collective: every rank of the mesh calls it at the same time. The first call makes the ``check`` of the model.
        Raises EngineError where another rank did not take part, ConfigError (weights are spread again) where the model
        does not fit.
        """
        if self._weights.sharded:
            self.release()  # gathered again even so: other ranks may have to
            self._weights.gather()
            self._trainers = True
            try:
                self._check_once()
            except BaseException:
                self._weights.release()
                raise
            if (loop := self._loop) is not None and not loop.is_closed():
                loop.call_soon_threadsafe(self._start_pump)

    def release(self) -> None:
        """Spread the weights again, once the tick that runs has ended; idempotent, without communication.

        Requests that are still there wait for the next :meth:`gather`.
        """
        if self._weights.sharded and self._weights.ready:
            self._weights.ready = False
            with contextlib.suppress(RuntimeError):  # closed, so that no tick runs
                self._thread.submit(int).result()  # behind the last tick: a later one finds nothing ready
            self._weights.release()

    async def pause(self) -> None:
        """Stop generating; returns when no tick runs and the model is as the trainer left it.

        Active requests keep their slots. If the weights change before :meth:`resume`, abort them first.
        """
        self._paused = True
        await self.quiet()
        if self._closed:
            return
        await asyncio.get_running_loop().run_in_executor(self._thread, self._decoder.synchronize)
        if self._decoder.device.type != "cpu":
            # The trainer wants the memory; without active requests there is nothing in it.
            self._decoder.release_memory()

    async def resume(self) -> None:
        """Generate again; EngineError if weights were written while active requests keep keys of the old ones."""
        if self._decoder.active and self._paused and self._state.weights_written():
            raise EngineError(
                f"{self._name}: the weights were written while {self._decoder.active} requests keep keys and values of "
                "the old ones: abort them, call update_weights, then resume"
            )
        self._paused = False
        self._taken = None  # of a transfer that has broken off
        self._start_pump()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Begin ``version``; with ``path``, after loading that directory (of ``save_pretrained``, safetensors) in
        place.

        Waiting requests stay and will be generated under the new version. Raises EngineError while requests are active,
        and for a directory that does not hold exactly this model's weights, of which nothing is written then.
        """
        self._require_idle()
        if path is not None and self._weights.sharded:
            raise EngineError(
                f"{self._name}: the model's parameters are sharded over ranks: load {path} into it on every rank "
                "(set_model_state_dict), then call weight_update() without a path"
            )
        if path is not None:
            from april.engines.transformers.model_weights import load_weights

            self._loading = True
            await self.quiet()
            loading = asyncio.get_running_loop().run_in_executor(self._thread, load_weights, self._model, path)
            # A cancelled call must not open the engine over half-written weights.
            loading.add_done_callback(lambda done: self._loaded(done, version))
            await asyncio.shield(loading)
        else:
            self._renewed(version)

    def _require_idle(self) -> None:
        if self._closed:
            raise EngineError(f"{self._name}: the engine is closed: make a new one")
        if self._decoder.active or self._ticking:
            raise EngineError(
                f"{self._name}: {self._decoder.active} requests are active under version {self._decoder.version}: "
                "pause and abort them, then update the weights"
            )

    def _loaded(self, done: asyncio.Future[None], version: PolicyVersion | None) -> None:
        self._loading = False
        if version is not None and not done.cancelled() and done.exception() is None:
            self._renewed(version)
        self._start_pump()

    def reads(self, model: Any) -> bool:
        """Return whether the parameters of this model are those that it generates from."""
        ours, theirs = list(self._model.parameters()), list(model.parameters())
        return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))

    async def take(self, specs: Sequence[TensorSpec], tensors: Sequence[Any], last: bool) -> None:
        """Copy tensors of another model into this one, in place; :meth:`update_weights` begins their version.

        Raises EngineError while requests are active, and for tensors that are not those of the model; it has a part of
        the new weights then, if any had come before.
        """
        self._require_idle()
        if self._taken is None:
            from april.engines.transformers.model_weights import TakenWeights

            await self.quiet()
            self._taken = TakenWeights(self._model)
        self._loading, taken = True, self._taken
        taking = asyncio.get_running_loop().run_in_executor(self._thread, taken.take, specs, tensors, last)
        # a cancelled call must not open the engine over half a tensor
        taking.add_done_callback(lambda done: self._loaded(done, None))
        try:
            await asyncio.shield(taking)
        except BaseException:
            self._taken = None
            raise
        if last:
            self._taken = None

    def _renewed(self, version: PolicyVersion) -> None:
        self._decoder.version = version
        self._trainers = True
        if self._overwritten:
            self._overwritten = self._failure = ""

    async def health(self) -> Health:
        """Healthy unless closed or the last tick failed; counters are those of :class:`EngineStats` and more."""
        detail = self._failure or ("closed" if self._closed else "")
        decoder = self._decoder
        counters = self.stats.counters() | {"active": float(decoder.active), "waiting": float(decoder.waiting)}
        return Health(ok=not detail, detail=detail, counters=counters)

    async def close(self) -> None:
        """Abort everything, stop the thread, give the memory back."""
        self._closed = True
        self._unguard()
        self._turns.excuse(self)
        await self.abort()
        await self.quiet()
        self.release()
        self._thread.shutdown(wait=False)
        self._decoder.release_memory()

    async def quiet(self) -> None:
        """Wait until no ticks run, nobody holds the model, and it is as the trainer has left it.

        Raises WeightsInUse where somebody has switched it and does not switch it back.
        """
        while (pump := self._pump) is not None:
            await asyncio.wait([pump])
        if self._closed:
            return
        await self._turns.free(self._name)
        if not self._trainers and self._weights.ready:
            await self._state.as_noted(self._name, self._thread, self._generating)
        self._trainers = self._handed_back = True

    def _notice_silent_update(self) -> None:
        """Warn, once per version, if the weights were written and nobody told: tokens would carry a wrong version."""
        version, stamp = self._decoder.version, self._weights.stamp()[0]
        if self._generated_under is None or self._generated_under[0] != version:
            self._generated_under = (version, stamp)
        elif self._generated_under[1] not in (None, stamp):
            self._generated_under = (version, None)
            log.warning(
                "%s: the model's weights were written, but the policy version is still %s, so new tokens are taken for "
                "those of the old weights; call weight_update() after each update of the model",
                self._name,
                version,
            )
