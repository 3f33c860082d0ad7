"""Tiny real tokenizers, trained on a few lines: nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|im_end|>"
LINES = [
    "Hello world! The answer is 42. </answer> Hello again, world.",
    "Grüße aus München: 🙂🚀 und 日本語 テスト, 日本 again.",
    "stop \n\nObservation: x\n\nThought: the answer is 42 </think>",
]
KINDS = ("byte level", "metaspace", "sentencepiece")


def byte_level(lines: Iterable[str], vocab_size: int, special: Sequence[str]) -> Tokenizer:
    """One whose tokens are bytes, as that of Qwen and GPT, with these special tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )  # fmt: skip
    return made


@cache
def tokenizer(kind: str) -> Any:
    """One of :data:`KINDS`, or ``text``: a metaspace one without byte tokens, so that whatever a model writes is text.

    ``byte level`` is that of Qwen and GPT: tokens are bytes, a character may lie in several and a token may end inside
    one. ``metaspace`` and ``sentencepiece`` (Llama's decoder) strip a leading space and spell unknown characters in
    byte tokens.
    """
    if kind == "byte level":
        return byte_level(LINES, 320, [END])
    if kind == "text":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        made.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=120, special_tokens=[END], show_progress=False))
        return made
    made = Tokenizer(models.BPE(byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    made.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=360, special_tokens=[END, *spelled], show_progress=False)
    )
    # the trainer can add byte tokens as special ones only, and those would be no bytes for the decoder
    state = json.loads(made.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] == END]
    made = Tokenizer.from_str(json.dumps(state))
    if kind == "metaspace":
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    return made


def ids_of(kind: str, text: str) -> list[int]:
    ids: list[int] = tokenizer(kind).encode(text, add_special_tokens=False).ids
    return ids
