"""Tiny Hugging Face models, seeded, built from their configuration: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch

VOCAB_SIZE = 97
EOS = 1

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": 0,
    # Ten times the usual: logits that differ by nats, so that a wrong mask cannot hide in rounding.
    "initializer_range": 0.2,
}
ARCHITECTURES = ("qwen2", "qwen3", "llama", "glm4")


def tiny_model(architecture: str = "qwen3", seed: int = 0, **changes: Any) -> Any:
    """A float32 model of about 30,000 parameters in training mode, as a trainer would hold it.

    Args:
        architecture: a ``model_type`` of transformers: one of :data:`ARCHITECTURES` or another decoder.
        seed: of the weights.
        changes: to the configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = dict(_SHAPE)
    if architecture in ("qwen3", "glm", "glm4"):
        shape["head_dim"] = 8
    if architecture in ("glm", "glm4"):
        shape["partial_rotary_factor"] = 0.5
    config = AutoConfig.for_model(architecture, **(shape | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=changes.get("attn_implementation", "sdpa"))
    return model.train()
