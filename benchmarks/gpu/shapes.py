"""Models with the shapes of Qwen3 and random weights, whose responses end when they are told to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

EOS = 1
"""A real stop id, so that every decode step looks for it as in training; no model here ever draws it."""
_NEVER = -1e4


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes out of a model's config.json; input and output embeddings are one matrix."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocab: int = 151_936
    context: int = 40_960


SHAPES = {
    "0.6b": Shape(1024, 3072, 28, 16, 8),
    "1.7b": Shape(2048, 6144, 28, 16, 8),
    "4b": Shape(2560, 9728, 36, 32, 8),
}
MINIATURE = {"tiny": Shape(32, 64, 2, 4, 2, head_dim=8, vocab=101, context=512)}


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """The model on ``device``, in eval mode, seeded."""
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        # logits that differ by nats, as a trained model's do: a wrong mask or position cannot hide in rounding
        initializer_range=2.0 * shape.hidden**-0.5,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        of = AutoModelForCausalLM
        model: Any = of.from_config(config, dtype=dtype, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    bias = torch.zeros(shape.vocab, device=device, dtype=dtype)
    bias[EOS] = _NEVER
    model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    return model.eval()


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a decode step must read from memory at least."""

    weight_bytes: int
    """All parameters once."""
    kv_bytes_per_token: int

    def step_bytes(self, batch: int, held: float) -> float:
        """Of a step of ``batch`` sequences that hold ``held`` tokens each."""
        return self.weight_bytes + batch * held * self.kv_bytes_per_token


def traffic(model: Any, shape: Shape) -> Traffic:
    """Of this model, by the types of its numbers."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    size = next(model.parameters()).element_size()
    return Traffic(weights, 2 * shape.layers * shape.kv_heads * shape.head_dim * size)
