"""Decode a few tokens with a model and compare them with full forward passes: is the slot decoder right for it?

A model that hides state from the cache, ignores the mask, or numbers its positions in its own way would generate
plausible text with wrong log-probabilities. This finds it before any training does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from april.engines.model_support import generation_mode, text_config
from april.engines.slot_batch import SlotDecoder, SlotRequest
from april.engines.stats import EngineStats
from april.errors import ConfigError

_PROMPT_LENGTHS = (7, 3, 5)
_NEW_TOKENS = 4


def recompute(model: Any, tokens: Tensor) -> Tensor:
    """Log-probabilities float32 [T - 1] of ``tokens`` int64 [T], each given those before it, without any cache."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)


def _tolerance(model: Any) -> float:
    """Largest mean difference, in nats, that rounding explains; loose below float32 and where TF32 may be on."""
    dtype, device = next((p.dtype, p.device) for p in model.parameters())
    if dtype not in (torch.float32, torch.float64):
        return 0.25
    return 1e-4 if device.type == "cpu" else 2e-2


def check_model(model: Any, max_len: int) -> float:
    """Mean difference in nats between decoded and recomputed log-probabilities; ConfigError if it is too large.

    Prompts of different lengths, so that padding, positions and a moved slot all take part.
    """
    longest = max(_PROMPT_LENGTHS) + _NEW_TOKENS
    if max_len < longest:
        raise ConfigError(f"max_len is {max_len}: the transformers engine needs at least {longest}")
    vocab_size = int(text_config(model).vocab_size)
    decoder = SlotDecoder(model, len(_PROMPT_LENGTHS), longest, EngineStats())
    kind = text_config(model).model_type
    for i, length in enumerate(_PROMPT_LENGTHS):
        tokens = ((np.arange(length) * 7 + 3 * i + 1) % vocab_size).astype(np.int32)
        # The first request ends early, so that the last one moves into its slot.
        new = _NEW_TOKENS - 2 if i == 0 else _NEW_TOKENS
        decoder.submit(SlotRequest(str(i), tokens, new, 0, 0.0, 1.0, (), 0))
    differences: list[Tensor] = []
    with generation_mode(model):
        try:
            while not decoder.idle:
                for output in decoder.tick(1):
                    sequence = np.concatenate([output.request.tokens, output.tokens]).astype(np.int64)
                    expected = recompute(model, torch.from_numpy(sequence).to(decoder.device))
                    got = torch.from_numpy(output.logprobs)
                    differences.append((expected[-got.numel() :].cpu() - got).abs())
        except Exception as error:
            raise ConfigError(
                f"{kind} failed a trial of the transformers engine ({type(error).__name__}: {error}): use a served "
                "engine (vllm, sglang) for this model"
            ) from error
    difference = float(torch.cat(differences).mean())
    if not difference <= _tolerance(model):
        raise ConfigError(
            f"{kind} decoded with slots differs from a full forward pass by {difference:.2g} nats: it does not keep to "
            "keys, values, masks and positions alone; use a served engine (vllm, sglang) for this model"
        )
    return difference
