"""The model behind a gateway under test: what it says is written here, word by word and token by token.

It answers the last ``#word`` of its conversation that is in REPLIES. Characters are tokens, and so are the marks of
Qwen3's template; "th" is one token, too, but the model writes it as two, as models do: text does not tell the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

MARKS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>",
]  # fmt: skip
MERGED = "th"
EOS = MARKS.index("<|im_end|>")
VOCAB = len(MARKS) + 1 + 128


class Tokenizer:
    name_or_path = "toy"
    unk_token_id = None
    pad_token_id = 0
    eos_token_id = EOS
    all_special_ids = tuple(range(len(MARKS)))
    merged: tuple[str, ...] = (MERGED,)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, list):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        return MARKS.index(tokens) if tokens in MARKS else None

    def get_added_vocab(self) -> dict[str, int]:
        return {mark: token for token, mark in enumerate(MARKS)}

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Marks and "th" are one token, other characters (ASCII) one each."""
        words, ids, at = [*MARKS, *self.merged], [], 0
        while at < len(text):
            word = next((w for w in words if text.startswith(w, at)), None)
            ids.append(words.index(word) if word else len(words) + ord(text[at]) % 128)
            at += len(word) if word else 1
        return ids

    def decode(self, ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [ids] if isinstance(ids, int) else list(ids)
        words = [*([""] * len(MARKS) if skip_special_tokens else MARKS), *self.merged]
        return "".join(words[i] if i < len(words) else chr(i - len(words)) for i in ids)


TOKENIZER = Tokenizer()
TOOL = {
    "name": "add",
    "description": "adds two numbers",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
LONG = "hm " * 20 + "done"
"""The answer to ``#long``, during which a subject's engine can be held."""
CALL = '<tool_call>\n{"name":  "add", "arguments": {"b": 2,"a": 1}}\n</tool_call>'
"""JSON that no template writes so."""
REPLIES: dict[str, Sequence[str]] = {
    "hello": ["hi"],
    "long": [LONG],
    "add": ["let me see\n", CALL],
    "longadd": [LONG, "\n", CALL],
    "split": ["t", "h", "is and t", "h", "at"],
}
"""What the model says, in pieces of which each becomes tokens by itself; the end of the turn comes behind."""


LONG_WORDS = frozenset({"long", "longadd"})
"""Words whose answers an engine can be held in."""


def says(word: str) -> str:
    """The text of a reply, without the mark of its end."""
    return "".join(REPLIES[word])


def word_of(conversation: Sequence[int]) -> str:
    """The word that the model answers."""
    found = [word for word in re.findall(r"#(\w+)", TOKENIZER.decode(conversation)) if word in REPLIES]
    return found[-1] if found else "hello"


def reply(conversation: Sequence[int]) -> list[int]:
    """The tokens of the model's answer to a conversation, as far as it was given."""
    pieces = [*REPLIES[word_of(conversation)], MARKS[EOS]]
    return [token for piece in pieces for token in TOKENIZER.encode(piece)]
