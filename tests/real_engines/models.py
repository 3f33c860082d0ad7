"""Two tiny models of one shape, made on the spot: random weights from two seeds, a tokenizer trained on a few lines.

They are Qwen3 in float32 with 512 tokens, about 0.4 M parameters, wide enough initial weights that greedy decoding does
not fall into one token, and a head size that both servers take on a CPU.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from tests.tiny_tokenizers import byte_level

VOCAB_SIZE = 512
CONTEXT = 4096
EOS, END = 2, "<|im_end|>"
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SEEDS = {"first": 0, "second": 1}
MARKS = ("<|endoftext|>", "<|im_start|>", END)


def make_models(where: Path, *, eos: bool = True, marks: Sequence[str] = MARKS) -> dict[str, Path]:
    """The directories of the models by name, written into ``where``.

    Without ``eos`` no token ends a response, so that its length is what a benchmark says. ``marks`` are the tokenizer's
    special tokens.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    made = {}
    for name, seed in SEEDS.items():
        made[name] = where / name
        _model(seed, EOS if eos else None).save_pretrained(made[name])
        _tokenizer(eos, marks).save_pretrained(made[name])
    return made


def _model(seed: int, eos: int | None) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT, initializer_range=0.2,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=None, eos_token_id=eos,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def make_experts(where: Path) -> Path:
    """The directory of a model with experts: 8 per layer, of which a token is read by 2."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    config = Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim is one of the model's
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        initializer_range=0.2, pad_token_id=0, bos_token_id=None, eos_token_id=EOS,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(where)
    _tokenizer(True, MARKS).save_pretrained(where)
    return where


class Updates:
    """Directories of a model after so many updates at random; update 0 is the model itself."""

    noise = 0.02
    """Share of each weight matrix's standard deviation that an update adds."""

    def __init__(self, model: Path, where: Path) -> None:
        self.model, self._where = model, where

    def directory(self, n: int) -> Path:
        """Written when first asked for."""
        if n == 0:
            return self.model
        target = self._where / f"update_{n}"
        if not target.is_dir():
            shutil.copytree(self.model, target)
            self.load(n).save_pretrained(target)
        return target

    def load(self, n: int) -> Any:
        """The model after ``n`` updates, in float32."""
        model: Any = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32, use_safetensors=True)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _ in range(n):
                for weight in model.parameters():
                    if weight.ndim > 1:
                        drawn = torch.randn(weight.shape, generator=generator)
                        weight.add_(drawn, alpha=self.noise * float(weight.std()))
        return model.eval()


def _tokenizer(eos: bool, marks: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte level, as Qwen's own."""
    lines = (f"a tiny model counts to {n}, then to {n * 7}, and the answer is {n * 8}" for n in range(2000))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=byte_level(lines, VOCAB_SIZE, marks), eos_token=END if eos else None, chat_template=CHAT,
        pad_token="<|endoftext|>",  # noqa: S106 - no secret
    )  # fmt: skip
