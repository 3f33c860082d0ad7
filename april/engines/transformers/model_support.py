"""Decides which Hugging Face causal models the embedded engine can run, and how their layers are masked.

The engine calls the model as it is and re-implements no layer, so it needs to know little: the attention patterns
of the layers, the context, the vocabulary. Models that keep more than keys and values (recurrent or convolutional
state, indexers) are refused with an explanation. Accepted models are then checked by ``model_check.py``.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from april.engines.transformers.model_weights import refuse_shards
from april.engines.transformers.slot_cache import WINDOW_STEP
from april.errors import ConfigError

log = logging.getLogger("april")

DEFAULT_MAX_LEN = 32_768
"""Default ``max_len`` of models with a longer context. Memory depends on the requests, not on ``max_len``."""

_PATTERN_SIZE = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
_MOST_COST, _MOST_COST_ELSEWHERE = {"cpu": 3 * 10**11}, 10**14
"""Highest :func:`cost_of_trial` if the user did not set ``max_len``: by device type, and on other devices."""
_MASKED_ATTENTION = ("sdpa", "eager")
# Words in the names of settings that count something other than positions: layer sizes, numbers of layers, ids.
_OTHER_COUNTS = {
    "num", "hidden", "intermediate", "inner", "vocab", "vocabulary", "head", "heads", "headdim", "layer", "layers",
    "expert", "experts", "dim", "dims", "d", "rank", "lowrank", "id", "ids", "idx", "idxs", "ffn", "dff", "ff",
    "embd", "embed", "embedding", "channels", "groups", "theta", "scalar", "seed",
}  # fmt: skip
# Rotary embeddings that depend on the longest sequence of the batch, cached keys included.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """Earlier positions that layers of one type attend to: all (size None), the last ``size``, or the same chunk's."""

    name: str
    size: int | None

    def allowed(self, positions: Tensor, columns: Tensor) -> Tensor:
        """Return bool [B, W]: whether the query at ``positions`` int64 [B, 1] sees ``columns`` int64 [W]."""
        causal = columns <= positions
        if self.size is None:
            return causal
        if self.name == "chunked_attention":
            return causal & (columns // self.size == positions // self.size)
        return causal & (columns > positions - self.size)


def text_config(model: Any) -> Any:
    """Return the configuration of the model's text decoder."""
    return model.config.get_text_config(decoder=True)


def attention_patterns(config: Any) -> tuple[AttentionPattern, ...]:
    """Return one pattern per layer type, in a fixed order; ConfigError for layers without plain keys and values."""
    names = getattr(config, "layer_types", None)
    if names is None:
        # Older configurations have no ``layer_types``; all layers have the type whose size setting is present.
        names = [name for name, size in _PATTERN_SIZE.items() if size and getattr(config, size, None) is not None][:1]
    distinct = sorted(set(names or ["full_attention"]))
    unknown = [name for name in distinct if name not in _PATTERN_SIZE]
    if unknown:
        raise ConfigError(
            f"{config.model_type} has layers of type {', '.join(unknown)}: the transformers engine keeps only keys and "
            "values, not recurrent or other state; use a served engine (vllm, sglang) for this model"
        )
    return tuple(
        AttentionPattern(name, None if (size := _PATTERN_SIZE[name]) is None else int(getattr(config, size)))
        for name in distinct
    )


def named_lengths(model: Any, max_len: int) -> dict[int, str]:
    """Return lengths at which a model may change its arithmetic, with the names of the settings that have this value.

    Families name their windows, chunks and scaled positions differently. So the result has every whole number of the
    configuration that is small enough to matter for ``max_len``, unless its name contains a word of _OTHER_COUNTS.
    """
    found: dict[int, list[str]] = {}

    def look(name: str, value: Any) -> None:
        if not _OTHER_COUNTS.isdisjoint(name.split("_")):
            return
        if isinstance(value, dict):
            for key, inside in value.items():
                look(str(key), inside)
        elif isinstance(value, list | tuple):
            for inside in value:
                look(name, inside)
        elif isinstance(value, int | float) and 1 < value == value // 1 and safe_below(int(value)) < max_len:
            names = found.setdefault(int(value), [])
            if name not in names:
                names.append(name)

    config = text_config(model)
    for name, value in {**config.to_dict(), **vars(config)}.items():
        look(name, value)
    return {length: ", ".join(names) for length, names in found.items()}


def cache_argument(model: Any) -> str:
    """Return the name of the model's cache argument and output, which transformers 5.24 renames."""
    for module in model.modules():  # a wrapper (PEFT) may take the argument as **kwargs, without its name
        forwards: tuple[Any, ...] = (module.forward, getattr(type(module), "forward", None))
        for forward in forwards:  # an instance attribute may replace the method
            try:
                named = inspect.signature(forward).parameters
            except (TypeError, ValueError):  # compiled code has no signature
                continue
            for name in ("cache", "past_key_values"):
                if name in named:
                    return name
    return "past_key_values"


def refuse_unsupported(model: Any, max_len: int) -> None:
    """Raise ConfigError if the model's configuration or layers rule it out."""
    config = text_config(model)
    kind = config.model_type
    refuse_shards(model, kind)
    if any(getattr(c, "is_prompt_learning", False) for c in getattr(model, "peft_config", {}).values()):
        raise ConfigError(
            f"{kind} has a PEFT adapter of the kind prompt learning, which puts virtual tokens before every prompt, "
            "but the transformers engine resumes from real tokens only: use LoRA, or a served engine (vllm, sglang)"
        )
    if getattr(model, "_is_stateful", False):
        raise ConfigError(
            f"{kind} keeps recurrent state, but the transformers engine keeps only keys and values; use a served "
            "engine (vllm, sglang) for this model"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{kind} is an encoder-decoder model, but the transformers engine supports only decoder-only models"
        )
    attention_patterns(config)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    context: int = getattr(config, "max_position_embeddings", max_len)
    for scaled in (rope, *(inside for inside in rope.values() if isinstance(inside, dict))):  # a dict per layer type
        trained: int = scaled.get("original_max_position_embeddings", context)
        if scaled.get("rope_type") in _BATCH_DEPENDENT_ROPE and max_len > trained:
            raise ConfigError(
                f"{kind} scales its rotary embedding ({scaled['rope_type']}) with the longest sequence of a batch "
                f"beyond {trained} tokens, so a token would depend on the other sequences: set max_len to at most "
                f"{trained}"
            )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise ConfigError(
            f"the parameters of {kind} are on {sorted(map(str, devices))}, but the transformers engine needs all of "
            "them on one real device"
        )


def why_not_exact(model: Any) -> str:
    """Return possible reasons why a model failed its check, to append to the error; may be empty."""
    known = []
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        known.append("it is compiled: give the engine the model from before torch.compile, which has the same weights")
    method = getattr(getattr(model.config, "quantization_config", None), "quant_method", None)
    if method is not None:
        known.append(f"it is quantised ({getattr(method, 'value', method)}): give the engine unquantised weights")
    return "".join(f"; {sentence}" for sentence in known)


def autocast_here(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return a factory of contexts with this thread's autocast for ``device``, to enter them in another thread."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext
    return partial(torch.autocast, device.type, dtype=torch.get_autocast_dtype(device.type))


def context_of(model: Any) -> int:
    """Return the default ``max_len``: the model's context, at most :data:`DEFAULT_MAX_LEN`."""
    return min(int(getattr(text_config(model), "max_position_embeddings", DEFAULT_MAX_LEN)), DEFAULT_MAX_LEN)


def affordable_context(model: Any) -> int:
    """Return the default ``max_len`` of a checked model: the context, or less if checking takes over half a minute."""
    context = context_of(model)
    for length, name in sorted(named_lengths(model, context).items()):
        if cost_of_trial(model, length) > _MOST_COST.get(next(model.parameters()).device.type, _MOST_COST_ELSEWHERE):
            log.warning(
                "max_len is %d: beyond it the arithmetic of %s may change (%s in its configuration), and testing that "
                "would take long on this device; set max_len to allow longer sequences",
                safe_below(length),
                text_config(model).model_type,
                name,
            )
            return safe_below(length)
    return context


def cost_of_trial(model: Any, length: int) -> int:
    """Return the cost of checking ``length``: number of parameters x number of tokens of the longest test sequence."""
    size: int = sum(p.numel() for p in model.parameters())
    return size * beyond(length)


def safe_below(length: int) -> int:
    """Return the largest ``max_len`` whose attention window, a multiple of WINDOW_STEP, stays within ``length``."""
    return length // WINDOW_STEP * WINDOW_STEP


def beyond(length: int) -> int:
    """Return how long a test sequence must be so that a mask that is wrong beyond ``length`` has a clear effect."""
    return length + length // 4


def eos_ids_of(model: Any) -> tuple[int, ...]:
    """Return the end-of-sequence ids of the generation configuration, or else of the model's; sorted, may be empty."""
    for config in (getattr(model, "generation_config", None), text_config(model)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(sorted({int(i) for i in (ids if isinstance(ids, list | tuple) else [ids])}))
    return ()


_checked_for_dropout: WeakSet[Any] = WeakSet()
"""Models for which training mode was already checked for dropout."""


def _warn_of_dropout(training: list[Any]) -> None:
    names = ("p", "attention_dropout", "dropout")
    shares = [getattr(module, name, 0.0) for module in training for name in names]
    most = max((share for share in shares if isinstance(share, float)), default=0.0)
    if most > 0.0:
        log.warning(
            "the model is in training mode with dropout of %g, but responses are sampled without dropout, so the "
            "trainer's log-probabilities of the same tokens differ by noise; call model.eval() (gradients stay the "
            "same), or set dropout to 0", most,
        )  # fmt: skip


@contextmanager
def generation_mode(model: Any) -> Iterator[None]:
    """Inside the block, switch dropout off and use an attention implementation that takes masks.

    Flash and flex attention take no mask per row, so ``sdpa`` (or else ``eager``) replaces them.
    """
    training = [module for module in model.modules() if module.training]
    if training and model not in _checked_for_dropout:
        _checked_for_dropout.add(model)
        _warn_of_dropout(training)
    attention = model.config._attn_implementation
    for module in training:
        module.training = False
    exchange = attention not in _MASKED_ATTENTION
    try:
        if exchange:
            model.config._attn_implementation = "sdpa" if getattr(model, "_supports_sdpa", True) else "eager"
        yield
    finally:
        if exchange:
            model.config._attn_implementation = attention
        for module in training:
            module.training = True


class DecodeMasks:
    """Additive attention masks of one decode step, in the form that the model takes: one per attention pattern."""

    def __init__(self, patterns: tuple[AttentionPattern, ...], columns: int, device: torch.device) -> None:
        self._patterns = patterns
        self._columns = torch.arange(columns, device=device)
        self._zero = torch.zeros((), device=device)
        self._never = torch.full((), -torch.inf, device=device)

    def use(self, dtype: torch.dtype) -> None:
        """Set the dtype of the masks to that of the queries, which saves a conversion in every layer."""
        if self._zero.dtype != dtype:
            self._zero, self._never = self._zero.to(dtype), self._never.to(dtype)

    def at(self, positions: Tensor, window: int) -> Tensor | dict[str, Tensor]:
        """Return masks [B, 1, 1, window], 0 where visible, else -inf; several patterns give a dict by name.

        Args:
            positions: int64 [B, 1], position of each row's query.
            window: Number of columns attended to.
        """
        columns = self._columns[:window]
        masks = {
            pattern.name: torch.where(pattern.allowed(positions, columns), self._zero, self._never)[:, None, None]
            for pattern in self._patterns
        }
        return masks if len(masks) > 1 else masks[self._patterns[0].name]
