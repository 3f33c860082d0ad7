"""What ``smoke.toml`` needs: a random Qwen3 that writes digits and signs, with its tokenizer, and sums to ask for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.shapes import SHAPES, Shape

TEMPLATE = Path(__file__).with_suffix(".toml")
WORDS = ("<pad>", "<eos>", "<user>", "<end>", *"0123456789 =+?.")
EOS = 1
CHAT = "{% for m in messages %}<user>{{ m.content }}<end>{% endfor %}"
TINY = Shape(16, 32, 2, 2, 1, head_dim=8)


def write(home: Path, device: str, shape: str = "tiny") -> Path:
    """Write model, questions and design into a directory; returns the design.

    Args:
        home: made if it is not there.
        device: cpu, which computes in float32, or cuda, in bfloat16.
        shape: tiny, or one of Qwen3's by their names; only the vocabulary is small.
    """
    home = home.resolve()
    _write_tokenizer(home / "model")
    _write_model(home / "model", replace(SHAPES.get(shape, TINY), vocab=len(WORDS)))
    twice = [{"asked": {"text": f"{a}+{a}=?"}, "answer": f"easy #### {2 * a}"} for a in range(5)] * 2
    rows = twice + [{"asked": {"text": f"0+{a}=?"}, "answer": str(a)} for a in range(1, 9)]
    questions = home / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    text = TEMPLATE.read_text("utf-8")
    dtype = "float32" if device == "cpu" else "bfloat16"
    filled = {"MODEL": home / "model", "QUESTIONS": questions, "DEVICE": device, "DTYPE": dtype}
    for name, value in filled.items():
        text = text.replace(f'"{name}"', f'"{value}"')
    design = home / "design.toml"
    design.write_text(text, "utf-8")
    return design


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, WORDS[0]))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("<[a-z]+>|."), "isolated")
    made.decoder = decoders.Fuse()
    special = {"pad_token": WORDS[0], "eos_token": WORDS[EOS]}
    kind: Any = PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_object=made, chat_template=CHAT, **special)
    tokenizer.save_pretrained(directory)


def _write_model(directory: Path, shape: Shape) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=128, eos_token_id=EOS, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(directory)
