"""Checks that the embedded engine decodes a model correctly: compares a few decoded tokens with full forward passes.

A model that keeps state outside the cache, ignores the mask, or numbers its positions in its own way would generate
plausible text with wrong log-probabilities. The check refuses such models before anything is trained.

Some models change their arithmetic at a certain length (windows, chunks, scaled positions), and each model family names
that setting differently. So the check is repeated at every number in the model's configuration that may be such a
length (``named_lengths``). One sequence grows beyond the length token by token, one starts beyond it, and short ones
are in the same batch. If cheap, a long sequence is checked too, for lengths that are not in the configuration.

Decoded and recomputed results may differ by rounding: about 1e-5 nats in float32 on a CPU, but tenths of a nat in
bfloat16 when the shape of the batch changes. Except in float32 on a CPU, this noise of the model is measured: the same
sequences run alone, in a padded batch, token by token with a transformers cache, and with embeddings that are rounded
once more. None of these runs uses the decoder, so a bug of the decoder cannot pass for noise. Whole distributions are
compared, [vocabulary] per token, because the log-probability of a single likely token changes too little.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from april.engines.transformers.model_support import (
    beyond,
    cache_argument,
    cost_of_trial,
    generation_mode,
    named_lengths,
    safe_below,
    text_config,
    why_not_exact,
)
from april.engines.transformers.slot_batch import SlotDecoder, _DecodeBatch
from april.engines.transformers.slot_requests import SlotRequest
from april.engines.transformers.stats import EngineStats
from april.engines.transformers.vision import Vision
from april.engines.transformers.vision_trial import TrialPrompt, prompts_with_images
from april.errors import ConfigError

log = logging.getLogger("april")

_PROMPT_LENGTHS = (1, 4, 2, 5, 3)
_NEW_TOKENS = 6
_EARLY_TOKENS = 2
"""Number of tokens of the first request. It ends before the others, so that another one moves into its slot."""
_SHORT_NEIGHBOURS = (3, 5)
_SHORTEST = max(_PROMPT_LENGTHS) + _NEW_TOKENS
_CHEAP_TOKENS, _CHEAP, _CHEAP_ELSEWHERE = 1024, {"cpu": 10**9}, 10**13
"""Limits of the check with a long sequence (half a second): tokens; parameters x tokens on a CPU; on other devices."""
_LOGGED_COST = 10**11
"""Number of parameters x tokens above which a check is logged: about ten seconds on a CPU."""
EXACT_NATS = 1e-4
"""Largest accepted mean difference in float32 on a CPU."""
_NOISE = 1.5
"""Factor by which the decoder's difference may exceed the model's noise: the decoder adds one more batch shape."""
_MOST_NATS, _MOST_NATS_HALF = 2e-2, 0.5
"""Largest accepted difference even if there is more noise: in float32 on a GPU (perhaps TF32), in lower precision."""


def recompute(
    model: Any, tokens: Tensor, last: int | None = None, images: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Return the model's log-probabilities float32 [last, V] for the final ``last`` tokens in ``tokens`` int64 [T].

    ``last`` None means all tokens but the first. ``images`` is the processor's output for the prompt, without tokens.
    """
    last = len(tokens) - 1 if last is None else last
    with torch.no_grad():
        output = model(input_ids=tokens[None], use_cache=False, logits_to_keep=last + 1, **(images or {}))
        logits = output.logits[0, -last - 1 : -1]
    return logits.float().log_softmax(-1)  # type: ignore[no-any-return]


class _RecordingDecoder(SlotDecoder):
    """A decoder that keeps the full log-probabilities float32 [V] of each token, in ``seen`` by attempt id."""

    def __init__(self, model: Any, max_len: int, vision: Vision | None) -> None:
        super().__init__(model, len(_PROMPT_LENGTHS), max_len, EngineStats(), vision)
        self.seen: dict[str, list[Tensor]] = {}
        self.asks_length = False
        """True if results depend on the cache's length, and thereby on the longest sequence of the batch."""

    def _sample(self, logits: Tensor, batch: _DecodeBatch) -> Any:
        for request, row in zip(self._active[batch.lo : batch.hi], logits, strict=True):
            self.seen.setdefault(request.attempt_id, []).append(row.float().log_softmax(-1))
        return super()._sample(logits, batch)

    def _step(self, tokens: Tensor, position: Tensor, rope: Tensor, window: int) -> Tensor:
        """Repeat the step while the cache reports the shortest row's length, to see if that changes the result."""
        logits = super()._step(tokens, position, rope, window)
        again = super()._step(tokens, position, rope, window)
        with self._cache.reporting_length(int(position.min())):
            other = super()._step(tokens, position, rope, window)
        first, second, third = (rows.nan_to_num() for rows in (logits, again, other))
        self.asks_length |= torch.equal(first, second) and not torch.equal(first, third)
        return logits

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Dtypes of the weights and of the cache; the cached keys have the dtype of an autocast around the model."""
        return {p.dtype for p in self._model.parameters() if p.dtype.is_floating_point} | self._cache.stored_dtypes


@dataclass(frozen=True)
class _Trial:
    """One response, with the decoded and the recomputed (``alone``) distributions of its tokens, float32 [n, V]."""

    tokens: Tensor
    """int64 [prompt + n]."""
    decoded: Tensor
    alone: Tensor
    images: Mapping[str, Tensor]

    @property
    def n(self) -> int:
        return len(self.decoded)


def _distances(rows: Tensor, others: Tensor) -> Tensor:
    """Return the root mean square difference over the vocabulary, [n]."""
    return (rows - others).square().mean(-1).sqrt()


def _upper_median(distances: Tensor) -> float:
    """Return the upper median: one token with another choice of experts does not change it, a wrong row does."""
    return float(distances.sort().values[len(distances) // 2])


def check_model(model: Any, max_len: int, vision: Vision | None = None) -> float:
    """Return the mean difference in nats of decoded and recomputed log-probabilities; ConfigError if too large.

    The prompts have different lengths, to check padding, positions and the move of a request to another slot. With
    ``vision``, prompts with images are checked too.
    """
    if max_len < _SHORTEST:
        raise ConfigError(f"max_len is {max_len}: the transformers engine needs at least {_SHORTEST}")
    difference, noise = _compare(model, _prompts(model, _PROMPT_LENGTHS), None, "")
    if vision is not None:
        with_images = prompts_with_images(model, vision, max_len - _NEW_TOKENS)
        (short,) = _prompts(model, _SHORT_NEIGHBOURS)
        _compare(model, [[*with_images, *short]], noise, " of prompts with images", vision)
    lengths = {n: name for n, name in named_lengths(model, max_len).items() if n > max(_PROMPT_LENGTHS)}
    cheap = min(
        max_len,
        _CHEAP_TOKENS,
        _CHEAP.get(next(model.parameters()).device.type, _CHEAP_ELSEWHERE) // cost_of_trial(model, 1),
    )
    if cheap > max([_SHORTEST, *map(beyond, lengths)]):
        lengths[cheap] = ""
    for length, name in sorted(lengths.items()):
        most = max_len - _NEW_TOKENS
        crossing = sorted({max(1, min(length - _NEW_TOKENS // 2, most)), min(beyond(length), most)})
        where = f" once a sequence of its batch has {length} tokens"
        if name:
            where += f" ({name} in its configuration: a max_len of at most {safe_below(length)} avoids it)"
            if cost_of_trial(model, length) > _LOGGED_COST:
                log.info("trying the model with %d tokens, because %s is %d", crossing[-1], name, length)
        _compare(model, _prompts(model, _SHORT_NEIGHBOURS, crossing), noise, where)
    return difference


def _prompts(model: Any, *admissions: Sequence[int]) -> list[list[TrialPrompt]]:
    """Make prompts of these lengths, all different."""
    vocab_size, numbers = int(text_config(model).vocab_size), itertools.count()
    return [
        [TrialPrompt(((np.arange(n) * 7 + 3 * next(numbers) + 1) % vocab_size).astype(np.int32)) for n in lengths]
        for lengths in admissions
    ]


def _compare(
    model: Any,
    admissions: Sequence[Sequence[TrialPrompt]],
    known_noise: float | None,
    where: str,
    vision: Vision | None = None,
) -> tuple[float, float]:
    """Return (mean difference, noise of the model itself) in nats; ConfigError if the difference is too large."""
    kind = text_config(model).model_type
    try:
        with generation_mode(model):
            longest = max(prompt.tokens.size for prompts in admissions for prompt in prompts)
            decoder = _RecordingDecoder(model, longest + _NEW_TOKENS, vision)
            trials = _decode(decoder, admissions)
            halves = any(dtype.itemsize < 4 for dtype in decoder.dtypes)
            exact = decoder.device.type == "cpu" and not halves
            difference = float(torch.cat([_distances(t.decoded, t.alone) for t in trials]).mean())
            noise = known_noise or 0.0
            if not exact or (known_noise is not None and difference > EXACT_NATS):
                noise = max(noise, _noise(model, trials, decoder.dtypes, batched=known_noise is None))
    except Exception as error:
        raise ConfigError(
            f"{kind} failed a trial of the transformers engine{where} ({type(error).__name__}: {error})"
            f"{why_not_exact(model)}; {'' if vision is None else 'is the processor its own? Else '}use a served engine "
            "(vllm, sglang) for this model"
        ) from error
    if decoder.asks_length:
        raise ConfigError(
            f"{kind} computes with the length of its cache, which is that of the longest sequence in a batch{where}, "
            f"so a token would depend on the other sequences{why_not_exact(model)}; use a served engine (vllm, sglang) "
            "for this model"
        )
    if exact and not noise:
        differs, allowed, known = difference, EXACT_NATS, ""
    else:
        differs = max(_upper_median(_distances(t.decoded, t.alone)) for t in trials if t.n == _NEW_TOKENS)
        allowed = min(_MOST_NATS_HALF if halves else _MOST_NATS, max(EXACT_NATS, _NOISE * noise))
        known = f", where the rounding of this precision explains {allowed:.2g}"
    if not differs <= allowed:
        raise ConfigError(
            f"{kind} decoded with slots differs from a full forward pass by {differs:.2g} nats{where}{known}: its "
            f"output depends on more than keys, values, masks and positions{why_not_exact(model)}; use a served engine "
            "(vllm, sglang) for this model"
        )
    return difference, noise


def _decode(decoder: _RecordingDecoder, admissions: Sequence[Sequence[TrialPrompt]]) -> list[_Trial]:
    """Decode responses; each list of prompts in ``admissions`` is prefilled while earlier ones are being decoded."""
    prompts: dict[str, TrialPrompt] = {}
    for together in admissions:
        for prompt in together:
            name, new = str(len(prompts)), _NEW_TOKENS if prompts else _EARLY_TOKENS
            prompts[name] = prompt
            decoder.submit(
                SlotRequest(
                    name, prompt.tokens, new, 0, 0.0, 1.0, (), 0, banned_ids=prompt.banned, attached=prompt.attached
                )
            )
        decoder.tick(0)
    trials = []
    while not decoder.idle:
        for output in decoder.tick(1):
            if output.refused is not None:
                raise output.refused
            name = output.request.attempt_id
            sequence = np.concatenate([output.request.tokens, output.tokens]).astype(np.int64)
            tokens, images = torch.from_numpy(sequence).to(decoder.device), prompts[name].images(len(sequence))
            images = {key: tensor.to(decoder.device) for key, tensor in images.items()}
            decoded = torch.stack(decoder.seen[name])
            trials.append(_Trial(tokens, decoded, recompute(decoder._model, tokens, len(decoded), images), images))
    return trials


def _noise(model: Any, trials: list[_Trial], dtypes: set[torch.dtype], batched: bool) -> float:
    """Return the largest difference between results of the model without the decoder, by :func:`_upper_median`.

    Args:
        model: The model.
        trials: The decoded responses.
        dtypes: Dtypes of the model's weights, keys and values.
        batched: Whether to include runs in a batch and with a transformers cache. False beyond a length at which the
            arithmetic may change: there, a dependence on other sequences must count as a fault, not as noise.
    """
    whole = [t for t in trials if t.n == _NEW_TOKENS]
    with torch.no_grad(), _rounded_once_more(model, max(torch.finfo(dtype).eps for dtype in dtypes)):
        found = [_upper_median(_distances(recompute(model, t.tokens, t.n, t.images), t.alone)) for t in whole]
    if not batched:
        return max(found)
    # right-padded: with causal attention the padding is invisible and needs no mask
    width = max(len(t.tokens) for t in whole)
    padded = torch.zeros(len(whole), width, dtype=torch.int64, device=whole[0].tokens.device)
    for row, trial in zip(padded, whole, strict=True):
        row[: len(trial.tokens)] = trial.tokens
    with torch.no_grad():
        together = model(input_ids=padded, use_cache=False).logits.float().log_softmax(-1)
        # token by token, while all sequences have tokens
        short = min(len(t.tokens) for t in whole)
        cached, steps = {cache_argument(model): DynamicCache(config=text_config(model))}, []
        for i in range(short):
            output = model(input_ids=padded[:, i : i + 1], use_cache=True, **cached)
            steps.append(output.logits[:, -1].float())
        one_by_one = torch.stack(steps, 1).log_softmax(-1)
    for trial, row, stepped in zip(whole, together, one_by_one, strict=True):
        end = len(trial.tokens) - 1
        first, last = end - trial.n, min(end, short)  # positions that exist in ``alone`` and in all sequences
        found.append(_upper_median(_distances(row[first:end], trial.alone)))
        found.append(_upper_median(_distances(stepped[first:last], trial.alone[: last - first])))
    return max(found)


@contextmanager
def _rounded_once_more(model: Any, eps: float) -> Iterator[None]:
    """Multiply embeddings by random factors in 1 +- ``eps``, since small models may repeat results bit for bit."""
    random = torch.Generator().manual_seed(0)

    def perturb(module: Any, arguments: Any, embedded: Tensor) -> Tensor:
        noise = torch.rand(embedded.shape, generator=random).to(embedded.device) * 2 - 1
        return (embedded.float() * (1 + eps * noise)).to(embedded.dtype)

    hook = model.get_input_embeddings().register_forward_hook(perturb)
    try:
        yield
    finally:
        hook.remove()
