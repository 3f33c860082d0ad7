"""Decode a few tokens with a model and compare them with full forward passes: is the slot decoder right for it?

A model that hides state from the cache, ignores the mask, or numbers its positions in its own way would generate
plausible text with wrong log-probabilities. This finds it before any training does.

What rounding explains is measured, not assumed, where it is more than a trifle. A bfloat16 model differs from itself by
tenths of a nat when a batch has another shape; in float32 by 1e-5. So below float32 the decoder is held against the
model's own noise in its own precision: the same sequences by themselves, in a padded batch, token by token with a cache
of transformers, and with embeddings that are rounded once more. No part of the decoder is in those, so no mistake of it
can pass for noise. Compared are whole distributions, [vocabulary] per token: the log-probability of one likely token
hardly moves, whatever goes wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from april.engines.transformers.model_support import cache_argument, generation_mode, text_config, why_not_exact
from april.engines.transformers.slot_batch import SlotDecoder, SlotRequest, _Batch
from april.engines.transformers.stats import EngineStats
from april.errors import ConfigError

_PROMPT_LENGTHS = (1, 4, 2, 5, 3)
_NEW_TOKENS = 6
_EARLY_TOKENS = 2
"""Of the first, shortest request, which has the first slot: when it ends, the last request moves there."""
EXACT_NATS = 1e-4
"""Largest mean difference in float32 on a CPU."""
_NOISE = 1.5
"""The decoder may differ by so many times the model's own noise: it is one more batch shape."""
_MOST_NATS, _MOST_NATS_HALF = 2e-2, 0.5
"""However noisy the model: in float32 on a GPU, where TF32 may be on, and below float32."""


def recompute(model: Any, tokens: Tensor) -> Tensor:
    """Log-probabilities float32 [T - 1, V] of what follows each of ``tokens`` int64 [T] but the last; no cache."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1)


class _WitnessedDecoder(SlotDecoder):
    """Keeps the whole distribution from which each token was drawn, float32 [V] each, by attempt."""

    def __init__(self, model: Any, max_len: int) -> None:
        super().__init__(model, len(_PROMPT_LENGTHS), max_len, EngineStats())
        self.seen: dict[str, list[Tensor]] = {}

    def _sample(self, logits: Tensor, batch: _Batch) -> Any:
        for request, row in zip(self._active[batch.lo : batch.hi], logits, strict=True):
            self.seen.setdefault(request.attempt_id, []).append(row.float().log_softmax(-1))
        return super()._sample(logits, batch)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Of the weights, and of what is computed with them: an autocast around the model shows in the keys."""
        return {p.dtype for p in self._model.parameters() if p.dtype.is_floating_point} | self._cache.stored_dtypes


@dataclass(frozen=True)
class _Trial:
    """One response: its tokens, and three times the distributions of the last ``n`` of them, float32 [n, V]."""

    tokens: Tensor
    """int64 [prompt + n]."""
    decoded: Tensor
    alone: Tensor

    @property
    def n(self) -> int:
        return len(self.decoded)


def _distances(rows: Tensor, others: Tensor) -> Tensor:
    """Root mean square over the vocabulary, [n]."""
    return (rows - others).square().mean(-1).sqrt()


def _typical(distances: Tensor) -> float:
    """The upper median: a token on which an expert was chosen otherwise does not count, a row that is wrong does."""
    return float(distances.sort().values[len(distances) // 2])


def check_model(model: Any, max_len: int) -> float:
    """Mean difference in nats between decoded and recomputed log-probabilities; ConfigError if it is too large.

    Prompts of different lengths, so that padding, positions and a moved slot all take part.
    """
    longest = max(_PROMPT_LENGTHS) + _NEW_TOKENS
    if max_len < longest:
        raise ConfigError(f"max_len is {max_len}: the transformers engine needs at least {longest}")
    kind = text_config(model).model_type
    try:
        with generation_mode(model):
            decoder = _WitnessedDecoder(model, longest)
            trials = _decode(decoder)
            halves = any(dtype.itemsize < 4 for dtype in decoder.dtypes)
            exact = decoder.device.type == "cpu" and not halves
            noise = 0.0 if exact else _noise(model, trials, decoder.dtypes)
    except Exception as error:
        raise ConfigError(
            f"{kind} failed a trial of the transformers engine ({type(error).__name__}: {error})"
            f"{why_not_exact(model)}; use a served engine (vllm, sglang) for this model"
        ) from error
    difference = float(torch.cat([_distances(t.decoded, t.alone) for t in trials]).mean())
    if exact:
        differs, allowed, known = difference, EXACT_NATS, ""
    else:
        differs = max(_typical(_distances(t.decoded, t.alone)) for t in trials if t.n == _NEW_TOKENS)
        allowed = min(_MOST_NATS_HALF if halves else _MOST_NATS, max(EXACT_NATS, _NOISE * noise))
        known = f", where its own noise in this precision explains {allowed:.2g}"
    if not differs <= allowed:
        raise ConfigError(
            f"{kind} decoded with slots differs from a full forward pass by {differs:.2g} nats{known}: it does not keep"
            f" to keys, values, masks and positions alone{why_not_exact(model)}; use a served engine (vllm, sglang) "
            "for this model"
        )
    return difference


def _decode(decoder: _WitnessedDecoder) -> list[_Trial]:
    vocab_size = int(text_config(decoder._model).vocab_size)
    for i, length in enumerate(_PROMPT_LENGTHS):
        prompt = ((np.arange(length) * 7 + 3 * i + 1) % vocab_size).astype(np.int32)
        new = _NEW_TOKENS if i else _EARLY_TOKENS
        decoder.submit(SlotRequest(str(i), prompt, new, 0, 0.0, 1.0, (), 0))
    trials = []
    while not decoder.idle:
        for output in decoder.tick(1):
            sequence = np.concatenate([output.request.tokens, output.tokens]).astype(np.int64)
            tokens = torch.from_numpy(sequence).to(decoder.device)
            decoded = torch.stack(decoder.seen[output.request.attempt_id])
            trials.append(_Trial(tokens, decoded, recompute(decoder._model, tokens)[-len(decoded) :]))
    return trials


def _noise(model: Any, trials: list[_Trial], dtypes: set[torch.dtype]) -> float:
    """How far the model is from itself, as :func:`_typical` has it, where no part of the decoder is involved."""
    whole = [t for t in trials if t.n == _NEW_TOKENS]
    # right-padded: with causal attention the padding cannot be seen, and needs no mask
    width = max(len(t.tokens) for t in whole)
    padded = torch.zeros(len(whole), width, dtype=torch.int64, device=whole[0].tokens.device)
    for row, trial in zip(padded, whole, strict=True):
        row[: len(trial.tokens)] = trial.tokens
    with torch.no_grad():
        together = model(input_ids=padded, use_cache=False).logits.float().log_softmax(-1)
        # token by token, for as long as all have tokens
        short = min(len(t.tokens) for t in whole)
        cached, steps = {cache_argument(model): DynamicCache(config=text_config(model))}, []
        for i in range(short):
            output = model(input_ids=padded[:, i : i + 1], use_cache=True, **cached)
            steps.append(output.logits[:, -1].float())
        one_by_one = torch.stack(steps, 1).log_softmax(-1)
        with _rounded_once_more(model, max(torch.finfo(dtype).eps for dtype in dtypes)):
            rounded = [recompute(model, t.tokens) for t in whole]
    found = []
    for trial, batched, stepped, moved in zip(whole, together, one_by_one, rounded, strict=True):
        end = len(trial.tokens) - 1
        first, last = end - trial.n, min(end, short)  # the positions that ``alone`` has, and all have
        found.append(_typical(_distances(batched[first:end], trial.alone)))
        found.append(_typical(_distances(stepped[first:last], trial.alone[: last - first])))
        found.append(_typical(_distances(moved[first:], trial.alone)))
    return max(found)


@contextmanager
def _rounded_once_more(model: Any, eps: float) -> Iterator[None]:
    """The embedded tokens are off by up to one part in 1 / ``eps``: small models may repeat themselves bit for bit."""
    random = torch.Generator().manual_seed(0)

    def off(module: Any, arguments: Any, embedded: Tensor) -> Tensor:
        noise = torch.rand(embedded.shape, generator=random).to(embedded.device) * 2 - 1
        return (embedded.float() * (1 + eps * noise)).to(embedded.dtype)

    hook = model.get_input_embeddings().register_forward_hook(off)
    try:
        yield
    finally:
        hook.remove()
