"""A tiny random Qwen2, a tokenizer of 64 tokens and prompts, all made on the spot: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCAB_SIZE, EOS = 64, 1


def make(where: Path, rows: int, dtype: Any) -> dict[str, str]:
    """Files of a run: the model, and ``rows`` prompts whose labels are their numbers."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False, initializer_range=0.1,
        eos_token_id=EOS, pad_token_id=2, bos_token_id=None,
    )  # fmt: skip
    model = where / "model"
    Qwen2ForCausalLM(config).to(dtype).save_pretrained(model)
    _tokenizer().save_pretrained(model)
    data = where / "prompts.jsonl"
    texts = [f"add {i} and {i}" for i in range(rows)]
    data.write_text("".join(json.dumps({"input": text, "label": str(i)}) + "\n" for i, text in enumerate(texts)))
    return {"model": str(model), "data": str(data)}


def _tokenizer() -> Any:
    """A letter, digit or space each: byte level without merges, as transformers makes a Qwen2 tokenizer of any file."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVW", "\u0120"]
    words = {word: i for i, word in enumerate(["<bos>", "<eos>", "<pad>", *letters])}
    assert len(words) <= VOCAB_SIZE
    special = dict(zip(("eos_token", "pad_token"), ("<eos>", "<pad>"), strict=True))
    made = Tokenizer(models.BPE(words, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)
