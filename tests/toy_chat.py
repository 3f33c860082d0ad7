"""A chat model of single characters with Qwen3's marks, without any download: for tests of messages and tokens."""

from __future__ import annotations

from typing import Any

MARKS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>",
]  # fmt: skip
EOS = MARKS.index("<|im_end|>")


class ToyTokenizer:
    name_or_path = "toy"
    unk_token_id = None
    pad_token_id = 0
    eos_token_id = EOS
    all_special_ids = tuple(range(len(MARKS)))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, list):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        return MARKS.index(tokens) if tokens in MARKS else None

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Marks are one token, other characters (ASCII) one each."""
        ids, at = [], 0
        while at < len(text):
            mark = next((m for m in MARKS if text.startswith(m, at)), None)
            ids.append(MARKS.index(mark) if mark else len(MARKS) + ord(text[at]))
            at += len(mark) if mark else 1
        return ids

    def decode(self, ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [ids] if isinstance(ids, int) else list(ids)
        marks = [""] * len(MARKS) if skip_special_tokens else MARKS
        return "".join(marks[i] if i < len(MARKS) else chr(i - len(MARKS)) for i in ids)
