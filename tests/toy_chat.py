"""A chat model of single characters with Qwen3's marks, without any download: for tests of messages and tokens."""

from __future__ import annotations

from gateway_suite.script import Tokenizer


class ToyTokenizer(Tokenizer):
    """Marks are one token, other characters (ASCII) one each."""

    merged = ()
