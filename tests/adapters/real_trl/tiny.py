"""A tiny random Qwen3, a tokenizer of 64 words and a data set, all made on the spot: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE, EOS = 64, 1


def tokenizer() -> Any:
    """Words t3 to t63, between spaces."""
    words = {"<bos>": 0, "<eos>": EOS, "<pad>": 2, **{f"t{i}": i for i in range(3, VOCAB_SIZE)}}
    special = dict(zip(("bos_token", "eos_token", "pad_token"), words, strict=False))
    made = Tokenizer(models.WordLevel(words, special["pad_token"]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for m in messages %}t3 {{ m['content'] }} {% endfor %}t4"
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **special)


def model(architecture: str = "qwen3", **changes: Any) -> Any:
    """float32, about 20,000 parameters; ends a response with a probability of some 1/64 per token.

    Of Qwen3, Cohere2 (sliding windows, rotary embeddings of its own) or Glm4Moe (experts).
    """
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
        "bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": 2, "tie_word_embeddings": architecture != "glm4_moe",
    }  # fmt: skip
    if architecture == "glm4_moe":
        shape |= {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1,
        }  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **shape | changes))


def dataset(rows: int) -> Dataset:
    """Each prompt once, with a column that says which row it is."""
    prompts = [f"t{3 + i % 61} t{3 + i // 61}" for i in range(rows)]
    return Dataset.from_dict({"prompt": prompts, "number": list(range(rows))})
