"""Continuous batching over any Hugging Face causal model: slots, admission, prefill, decode, abort. All synchronous.

Invariants:

* Active request i is in slot i: the last active request moves into a freed slot, so the cost of a step depends on the
  number of active requests only.
* A request's keys and values all belong to one weight version: ``version`` may change only while no request is active.
* Sampled tokens are read from the device when a request ends, is aborted or is streamed, never per step. A decode step
  waits for the device once, to learn which requests sampled a stop token.

The counters of the active requests form one int64 matrix with a column per slot. The device has a copy of the rows
that a decode step needs. Both copies advance by one addition per step and are synchronised when the slots change.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from april.core.attachments import Placed
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.protocol import EngineFinish
from april.engines.transformers.id_rows import IdRows, table_of
from april.engines.transformers.model_support import DecodeMasks, attention_patterns, cache_argument, text_config
from april.engines.transformers.slot_cache import SlotCache, window_of
from april.engines.transformers.slot_requests import SlotOutput, SlotRequest
from april.engines.transformers.stats import EngineStats
from april.engines.transformers.token_sampler import SamplingRows, sample, uniforms
from april.engines.transformers.vision import Vision
from april.errors import AttachmentError

PREFILL_SEQUENCES = 16
"""Largest number of sequences per prefill call; beyond it, padding costs more than batching gains."""
PREFILL_TOKENS = 16_384
"""Largest number of tokens per prefill call, padding included; only a single sequence may be longer."""
_FIRST_COLUMNS = 128
# Number of steps for which uniform numbers are made ahead: few at first, because a change of the slots discards them.
_NOISE_AHEAD, _NOISE_AHEAD_LATER = 8, 32

# Rows of the slot matrix. The first five are also on the device and grow by one per decode step. The next token goes
# to _CELL of the cache and to element _PLACE of _new_tokens, in its row _STORE_ROW. _ROPE is the position id for the
# model; after an image it can differ from the token's index.
_POSITION, _TOKENS, _CELL, _PLACE, _ROPE, _STORE_ROW, _SEED, _MIN_TOKENS, _MAX_TOKENS = range(9)
_ON_DEVICE = 5


@dataclass(slots=True)
class _DecodeBatch:
    """Views and parameters for slots ``lo`` to ``hi - 1``; valid until a request gets or leaves a slot."""

    lo: int
    hi: int
    counters: Tensor
    position: Tensor
    cell: Tensor
    place: Tensor
    rope: Tensor
    sampling: SamplingRows
    stop_ids: Tensor | None
    banned: Tensor | None
    """Banned tokens, bool [B, V]."""
    longest: int
    most_tokens: int
    until_length: int
    until_minimum: int
    steps: int = 0
    noise: Tensor | None = None
    noise_used: int = 0
    stop_table: Tensor | None = None


class SlotDecoder:
    """Decodes up to ``slots`` requests at a time; further ones wait inside. Not thread-safe.

    Args:
        model: A causal language model that :func:`.model_support.refuse_unsupported` accepts.
        slots: Largest number of requests decoded at the same time.
        max_len: Largest number of tokens of prompt plus response.
        stats: Counters to update.
        vision: Image processing of the model; None if it gets no images.
    """

    def __init__(self, model: Any, slots: int, max_len: int, stats: EngineStats, vision: Vision | None = None) -> None:
        self._model, self._stats, self._vision = model, stats, vision
        self.slots, self.max_len = slots, max_len
        self.version: PolicyVersion = FIRST_VERSION
        config = text_config(model)
        self._vocab_size = int(config.vocab_size)
        self._patterns = attention_patterns(config)
        self.device: torch.device = next(model.parameters()).device
        self._masks = DecodeMasks(self._patterns, window_of(max_len), self.device)
        self._cache = SlotCache(slots, max_len)
        self._cached = {cache_argument(model): self._cache}
        self._active: list[SlotRequest] = []
        self._waiting: dict[str, SlotRequest] = {}
        self._queue: list[tuple[int, int, str]] = []
        self._arrivals = 0
        self._admitting: list[SlotRequest] = []
        # Outputs of the running tick or abort, kept here so that an error later in the call does not lose them.
        self._ended: list[SlotOutput] = []
        self._sound: dict[str, int] = {}
        """Number of tokens, by attempt id, that were waiting to be handed out when the last tick began."""
        self._rows = np.zeros((9, slots), dtype=np.int64)
        self._temperature = np.zeros(slots)
        self._top_p = np.ones(slots)
        self._stops, self._bans = IdRows(slots, self._vocab_size), IdRows(slots, self._vocab_size)
        self._free_rows = list(range(slots - 1, -1, -1))
        self._device_rows = torch.zeros(_ON_DEVICE, slots, dtype=torch.int64, device=self.device)
        self._new_tokens = torch.zeros(slots, _FIRST_COLUMNS, dtype=torch.int64, device=self.device)
        self._new_logprobs = torch.zeros(slots, _FIRST_COLUMNS, device=self.device)
        self._batch: _DecodeBatch | None = None
        self._last: Tensor | None = None

    # ------------------------------------------------------------------ state

    @property
    def active(self) -> int:
        """Number of requests that hold a slot."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """True if there is nothing to do."""
        return not self._active and not self._waiting

    def __repr__(self) -> str:
        return f"SlotDecoder({self.active}/{self.slots} active, {self.waiting} waiting, version {self.version})"

    # ------------------------------------------------------------------ requests

    def submit(self, request: SlotRequest) -> None:
        """Queue a request. The queue is sorted by priority number, lowest first, and then by arrival."""
        self._waiting[request.attempt_id] = request
        heapq.heappush(self._queue, (request.priority, self._arrivals, request.attempt_id))
        self._arrivals += 1
        self._stats.requests += 1

    @torch.inference_mode()
    def abort(self, attempt_ids: list[str]) -> list[SlotOutput]:
        """End these requests now, with their tokens so far; unknown ids are ignored."""
        wanted = set(attempt_ids)
        waited = [self._waiting.pop(i) for i in dict.fromkeys(attempt_ids) if i in self._waiting]
        self._ended = [self._empty_output(request, EngineFinish.ABORT) for request in waited]
        self._end({r.slot: EngineFinish.ABORT for r in self._active if r.attempt_id in wanted})
        self._stats.aborts += len(self._ended)
        return self._ended

    @torch.inference_mode()
    def tick(self, max_steps: int) -> list[SlotOutput]:
        """Admit requests, then decode until one of them ends or has a chunk to stream, at most ``max_steps`` steps."""
        self._ended = []
        self._sound = {r.attempt_id: int(self._rows[_TOKENS, r.slot]) - r.taken for r in self._active}
        if self._admission_open():
            self._admit()
        steps, most = 0, self._steps_until_partials(max_steps)
        while self._active and not self._ended and steps < most:
            self._decode()
            steps += 1
        return self._ended

    @torch.inference_mode()
    def partials(self) -> list[SlotOutput]:
        """Return the new tokens of streamed requests that have at least ``stream_interval`` new tokens."""
        made = self._rows[_TOKENS]
        streamed = [(r, r.stream_interval) for r in self._active if r.stream_interval is not None]
        return self._read([r.slot for r, interval in streamed if made[r.slot] - r.taken >= interval], {})

    def _steps_until_partials(self, at_most: int) -> int:
        """Return the decode steps until a streamed request has a chunk to hand out; ``at_most`` if none is streamed."""
        return min([at_most, *(r.stream_interval for r in self._active if r.stream_interval is not None)])

    @torch.inference_mode()
    def drop_failed(self) -> list[SlotOutput]:
        """Drop every request of a call that raised an error; return their tokens from completed steps.

        An output has no finish if the error cut the request, and a finish if the request had ended before the error.
        """
        outputs = list(self._ended)
        over = {output.request.attempt_id for output in outputs}
        cut = [r for r in self._active if r.attempt_id not in over]
        try:
            outputs += self._read([r.slot for r in cut], {})
        except Exception:  # the device has failed, and the tokens are lost
            self._stats.discarded_tokens += sum(int(self._rows[_TOKENS, r.slot]) - r.taken for r in cut)
            outputs += [self._empty_output(r, None) for r in cut]
        outputs += [self._empty_output(r, None) for r in self._admitting if r.slot < 0]
        self._stats.failures += len(outputs) - len(over)
        self._active, self._admitting, self._ended = [], [], []
        self._free_rows = list(range(self.slots - 1, -1, -1))
        self._batch = self._last = None
        self._cache.release()
        return outputs

    def drop_all(self) -> list[SlotOutput]:
        """Drop every request, and the tokens of the last tick, because the weights changed during that tick.

        The outputs have no finish; those of waiting requests are empty.
        """
        self._stats.failures += sum(output.refused is None for output in self._ended)
        outputs = self.drop_failed()
        waited = [self._empty_output(r, None) for r in self._waiting.values()]
        self._stats.failures += len(waited)
        self._waiting.clear()
        self._queue.clear()
        cut = []
        for output in outputs:
            sound = self._sound.get(output.request.attempt_id, 0)
            unsound = max(0, output.tokens.size - sound)
            self._stats.discarded_tokens += unsound
            tokens, logprobs = output.tokens[:sound], output.logprobs[:sound]
            cut.append(SlotOutput(output.request, tokens, logprobs, finish=None, unsound=unsound))
        return cut + waited

    def synchronize(self) -> None:
        """Wait until the device has finished all its work, so that another CUDA stream may write the weights."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release_memory(self) -> None:
        """Free the memory of keys and values; does nothing while a request is active."""
        if not self._active:
            self._cache.release()

    # ------------------------------------------------------------------ admission and prefill

    def _admission_open(self) -> bool:
        # A prefill delays every decoding request, so it waits until an eighth of the slots is free, or until there is
        # room for all waiting requests.
        free = self.slots - self.active
        if not self._waiting or not free:
            return False
        return not self._active or free >= min(max(1, self.slots // 8), len(self._waiting))

    def _admit(self) -> None:
        room = min(self.slots - self.active, len(self._waiting))
        while len(self._admitting) < room:
            request = self._waiting.pop(heapq.heappop(self._queue)[2], None)
            if request is not None:
                self._admitting.append(request)
        # Samples of one group begin with the same tokens and images, which are prefilled once for all of them.
        alike: dict[tuple[bytes, tuple[Placed, ...]], list[SlotRequest]] = {}
        for request in self._admitting:
            alike.setdefault((request.tokens.tobytes(), request.attached), []).append(request)
        ended: dict[int, EngineFinish] = {}
        call: list[list[SlotRequest]] = []
        for requests in sorted(alike.values(), key=lambda group: (bool(group[0].attached), group[0].tokens.size)):
            if requests[0].attached and not self._process_images(requests):
                continue
            padded = (len(call) + 1) * requests[0].tokens.size
            mixed = call and bool(call[0][0].attached) is not bool(requests[0].attached)
            if call and (mixed or len(call) == PREFILL_SEQUENCES or padded > PREFILL_TOKENS):
                ended |= self._prefill(call)
                call = []
            call.append(requests)
        if call:
            ended |= self._prefill(call)
        self._admitting = []
        self._end(ended)

    def _process_images(self, requests: list[SlotRequest]) -> bool:
        """Process the images that these requests share; if that fails, end the requests and return False."""
        assert self._vision is not None
        try:
            seen = self._vision.process(requests[0].tokens, requests[0].attached)
        except AttachmentError as error:
            self._stats.failures += len(requests)
            self._ended += [self._empty_output(request, None, error) for request in requests]
            refused = {request.attempt_id for request in requests}
            self._admitting = [r for r in self._admitting if r.attempt_id not in refused]
            return False
        for request in requests:
            request.seen = seen
        return True

    def _prefill(self, groups: list[list[SlotRequest]]) -> dict[int, EngineFinish]:
        """Prefill ``groups`` of requests with equal tokens in one right-padded call; sample their first tokens."""
        sequences = [group[0].tokens for group in groups]
        requests = [request for group in groups for request in group]
        length, first = max(s.size for s in sequences), self.active
        # padding must not look like an image
        ids = np.full((len(sequences), length), 0 if self._vision is None else self._vision.no_image, dtype=np.int64)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: sequence.size] = sequence
        lengths = np.array([s.size for s in sequences])
        of_request = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        source = None if len(requests) == len(groups) else self._upload(of_request)
        # Only logits at last positions are computed: logits at all positions would need more memory than anything else.
        kept, last = np.unique(lengths - 1, return_inverse=True)

        positions = torch.arange(length, device=self.device).expand(len(sequences), -1)
        tokens, images = self._upload(ids), dict[str, Tensor]()
        if self._vision is not None and (seen := [group[0].seen for group in groups if group[0].seen is not None]):
            positions, images = self._vision.arguments(seen, tokens, positions)

        self._cache.begin_prefill(first, len(requests), length, source)
        logits = self._model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=True,
            **images,
            **self._cached,
            logits_to_keep=self._upload(kept),
        ).logits
        if self._cache.key_dtype is not None:
            self._masks.use(self._cache.key_dtype)
        if logits.shape[1] != kept.size:  # a model that ignores ``logits_to_keep`` returns all positions
            last = lengths - 1
        logits = logits[self._upload(of_request), self._upload(last[of_request])]

        for request in requests:
            self._assign_slot(request)
        batch = self._batch_of(first, self.active)
        _, stopped = self._sample(logits, batch)
        rows = self._rows[:, first : self.active]
        rows[_TOKENS] += 1
        self._batch = self._last = None
        self._stats.generated_tokens += len(requests)
        self._stats.prefill_tokens += int(lengths.sum())
        self._stats.prefill_batches += 1
        return self._endings(batch, stopped, rows)

    def _assign_slot(self, request: SlotRequest) -> None:
        slot = request.slot = self.active
        self._active.append(request)
        self._stops.put(slot, request.stop_ids)
        self._bans.put(slot, request.banned_ids)
        column = self._rows[:, slot]
        column[_POSITION], column[_TOKENS] = request.tokens.size, 0
        column[_ROPE] = request.tokens.size + (0 if request.seen is None else request.seen.offset)
        request.seen = None  # pixels are needed for prefill only
        column[_STORE_ROW] = self._free_rows.pop()
        column[_SEED] = np.uint64(request.seed & (2**64 - 1)).astype(np.int64)
        column[_MIN_TOKENS], column[_MAX_TOKENS] = request.min_tokens, request.max_tokens
        self._temperature[slot], self._top_p[slot] = request.temperature, request.top_p

    # ------------------------------------------------------------------ decode

    def _decode(self) -> None:
        """Generate one token for every active request."""
        batch = self._batch
        if batch is not None and self._out_of_room(batch):
            batch = None
        if batch is None:
            batch = self._batch = self._align()
        if self._last is None:
            self._last = self._new_tokens.view(-1).index_select(0, batch.place - 1)
        window = self._cache.begin_decode(batch.hi, batch.longest + batch.steps + 1, batch.cell)
        logits = self._step(self._last.unsqueeze(1), batch.position.unsqueeze(1), batch.rope.unsqueeze(1), window)
        self._last, stopped = self._sample(logits, batch)
        batch.counters.add_(1)
        batch.steps += 1
        rows = self._rows[:, : batch.hi]
        rows[:_ON_DEVICE] += 1
        self._stats.count_decode_step(batch.hi, self.slots)
        self._stats.generated_tokens += batch.hi
        if batch.steps >= batch.until_length or stopped.any():
            self._end(self._endings(batch, stopped, rows))

    def _step(self, tokens: Tensor, position: Tensor, rope: Tensor, window: int) -> Tensor:
        """Return logits [B, V] after ``tokens`` int64 [B, 1] at ``position`` int64 [B, 1]; ``rope``: position ids."""
        logits: Tensor = self._model(
            input_ids=tokens,
            attention_mask=self._masks.at(position, window),
            position_ids=rope,
            use_cache=True,
            **self._cached,
        ).logits
        return logits[:, -1]

    def _out_of_room(self, batch: _DecodeBatch) -> bool:
        needs_columns = batch.longest + batch.steps + 1 > self._cache.columns
        return needs_columns or batch.most_tokens + batch.steps >= self._new_tokens.shape[1]

    def _align(self) -> _DecodeBatch:
        """Allocate memory for the next step, and make its batch with the counters copied to the device."""
        rows = self._rows[:, : self.active]
        longest = int(rows[_POSITION].max()) + 1
        self._cache.shrink_clean(longest)
        self._cache.reserve_columns(longest, self.active)
        self._reserve_tokens(int(rows[_TOKENS].max()) + 1)
        return self._batch_of(0, self.active)

    def _batch_of(self, lo: int, hi: int) -> _DecodeBatch:
        rows, counters = self._rows[:, lo:hi], self._device_rows[:, lo:hi]
        rows[_CELL] = np.arange(lo, hi) * self._cache.columns + rows[_POSITION]
        rows[_PLACE] = rows[_STORE_ROW] * self._new_tokens.shape[1] + rows[_TOKENS]
        counters.copy_(torch.from_numpy(rows[:_ON_DEVICE]))
        stop_ids, banned = self._stops.of(lo, hi), self._bans.of(lo, hi)
        return _DecodeBatch(
            lo=lo,
            hi=hi,
            counters=counters,
            position=counters[_POSITION],
            cell=counters[_CELL],
            place=counters[_PLACE],
            rope=counters[_ROPE],
            sampling=SamplingRows.of(self._temperature[lo:hi], self._top_p[lo:hi], self.device),
            stop_ids=None if stop_ids is None else self._upload(stop_ids),
            banned=None if banned is None else table_of(self._upload(banned), self._vocab_size),
            longest=int(rows[_POSITION].max()),
            most_tokens=int(rows[_TOKENS].max()),
            until_length=int((rows[_MAX_TOKENS] - rows[_TOKENS]).min()),
            until_minimum=int((rows[_MIN_TOKENS] - rows[_TOKENS]).max()),
        )

    def _sample(self, logits: Tensor, batch: _DecodeBatch) -> tuple[Tensor, NDArray[np.bool_]]:
        """Draw and store one token per row of ``batch``; return the tokens and bool [B], true for stop tokens."""
        tokens, logprobs = sample(logits, batch.sampling, self._noise(batch), self._forbidden(batch))
        self._new_tokens.view(-1).index_copy_(0, batch.place, tokens)
        self._new_logprobs.view(-1).index_copy_(0, batch.place, logprobs)
        if batch.stop_ids is None:
            return tokens, np.zeros(batch.hi - batch.lo, dtype=np.bool_)
        # This is the only place in a step where the host waits for the device.
        return tokens, (tokens.unsqueeze(1) == batch.stop_ids).any(1).cpu().numpy()

    def _noise(self, batch: _DecodeBatch) -> Tensor | None:
        """Return the uniform numbers [B, 1] of this step; None if all rows are greedy."""
        if batch.sampling.all_greedy:
            return None
        if batch.noise is None or batch.noise_used == batch.noise.shape[1]:
            rows = self._rows[:, batch.lo : batch.hi]
            ahead = _NOISE_AHEAD if batch.noise is None else _NOISE_AHEAD_LATER
            noise = uniforms(rows[_SEED].view(np.uint64), rows[_TOKENS], ahead)
            batch.noise, batch.noise_used = self._upload(noise), 0
        step = batch.noise_used
        batch.noise_used += 1
        return batch.noise[:, step : step + 1]

    def _forbidden(self, batch: _DecodeBatch) -> Tensor | None:
        """Return bool [B, V], true for tokens not to sample: banned ones, and stop tokens below the minimum length."""
        if batch.stop_ids is None or batch.steps >= batch.until_minimum:
            return batch.banned
        if batch.stop_table is None:
            batch.stop_table = table_of(batch.stop_ids, self._vocab_size)
        rows = self._rows[:, batch.lo : batch.hi]
        early = batch.stop_table & self._upload(rows[_TOKENS] < rows[_MIN_TOKENS]).unsqueeze(1)
        return early if batch.banned is None else early | batch.banned

    # ------------------------------------------------------------------ ending, reading, moving

    @staticmethod
    def _endings(batch: _DecodeBatch, stopped: NDArray[np.bool_], rows: NDArray[np.int64]) -> dict[int, EngineFinish]:
        """Return finished slots of ``batch`` with the reason; a stop token at the token limit counts as STOP."""
        full = rows[_TOKENS] >= rows[_MAX_TOKENS]
        return {
            batch.lo + int(i): EngineFinish.STOP if stopped[i] else EngineFinish.LENGTH
            for i in np.flatnonzero(stopped | full)
        }

    def _end(self, ended: dict[int, EngineFinish]) -> None:
        """Read the tokens of these slots, free the slots, and move the last active requests into the gaps."""
        if not ended:
            return
        self._ended += self._read(sorted(ended), ended)
        for slot in ended:
            self._free_rows.append(int(self._rows[_STORE_ROW, slot]))
        left = self.active - len(ended)
        to = [slot for slot in sorted(ended) if slot < left]
        source = [slot for slot in range(left, self.active) if slot not in ended]
        if to:
            self._cache.move(self._upload(np.array(to)), self._upload(np.array(source)))
            for numbers in (self._rows, self._temperature, self._top_p):
                numbers[..., to] = numbers[..., source]
            self._stops.move(to, source)
            self._bans.move(to, source)
            for i, j in zip(to, source, strict=True):
                self._active[i] = self._active[j]
                self._active[i].slot = i
        del self._active[left:]
        self._batch = self._last = None

    def _read(self, slots: list[int], ended: dict[int, EngineFinish]) -> list[SlotOutput]:
        """Return the tokens of these slots that were not handed out yet."""
        if not slots:
            return []
        counts = self._rows[_TOKENS, slots]
        stored = self._upload(self._rows[_STORE_ROW, slots])
        most = int(counts.max())
        tokens = self._new_tokens[:, :most].index_select(0, stored).cpu().numpy()
        logprobs = self._new_logprobs[:, :most].index_select(0, stored).cpu().numpy()
        outputs = []
        for i, slot in enumerate(slots):
            request, count = self._active[slot], int(counts[i])
            fresh = slice(request.taken, count)
            new = tokens[i, fresh].astype(np.int32), logprobs[i, fresh].copy()
            outputs.append(SlotOutput(request, *new, finish=ended.get(slot)))
            request.taken = count
        return outputs

    @staticmethod
    def _empty_output(
        request: SlotRequest, finish: EngineFinish | None, refused: AttachmentError | None = None
    ) -> SlotOutput:
        return SlotOutput(request, np.empty(0, np.int32), np.empty(0, np.float32), finish=finish, refused=refused)

    def _reserve_tokens(self, columns: int) -> None:
        old = self._new_tokens.shape[1]
        if columns <= old:
            return
        wider = min(max(columns, 2 * old), max(columns, self.max_len))
        for name in ("_new_tokens", "_new_logprobs"):
            values: Tensor = getattr(self, name)
            grown = values.new_zeros(self.slots, wider)
            grown[:, :old] = values
            setattr(self, name, grown)

    def _upload(self, array: NDArray[Any]) -> Tensor:
        """Copy an array to the model's device; copied even on a CPU, since the array may change before it is read."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, copy=True)
