"""Text of tokens, by the user's tokenizer: for stop strings and rewards. Nothing else in april looks at text."""

from __future__ import annotations

from typing import Any, Protocol

from april.core.tape import Int32
from april.errors import ConfigError, RolloutError


class Tokenizer(Protocol):
    """What april needs of a tokenizer; those of Hugging Face fit. Called from several threads."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ``ids``."""
        ...


TRIES = 3
"""Those of Hugging Face, shared by threads, fail now and then (\"Already borrowed\") and work when asked again."""


class Detokenizer:
    """Calls the tokenizer and names it where it fails.

    Raises:
        ConfigError: it has no ``decode`` that fits.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Hugging Face's clean-up takes spaces away before punctuation: no stop string could rely on the text
        has_clean_up = hasattr(tokenizer, "clean_up_tokenization_spaces")
        self._options: dict[str, Any] = {"clean_up_tokenization_spaces": False} if has_clean_up else {}
        try:
            text = tokenizer.decode([0], skip_special_tokens=False, **self._options)
        except Exception as error:
            text = error
        if not isinstance(text, str):
            raise ConfigError(
                "tokenizer must have decode(ids, skip_special_tokens=False) -> str, as Hugging Face tokenizers have; "
                f"{type(tokenizer).__name__} answered {text!r}"
            )

    def text(self, ids: list[int], special_tokens: bool = True) -> str:
        """Text of ``ids``, with special tokens or without; raises RolloutError if the tokenizer fails."""
        cause: Exception | None = None
        for _ in range(TRIES):
            try:
                text = self._tokenizer.decode(ids, skip_special_tokens=not special_tokens, **self._options)
            except Exception as error:
                cause = error
                continue
            if isinstance(text, str):
                return text
            cause = TypeError(f"decode must return a str, and returned a {type(text).__name__}")
        what = f"{type(cause).__name__}: {cause} ({type(self._tokenizer).__name__}.decode of {len(ids)} tokens)"
        raise RolloutError(f"the tokenizer failed: {what}") from cause

    def text_of(self, tokens: Int32, special_tokens: bool) -> str:
        """:meth:`text` of an array [T]."""
        return self.text(tokens.tolist(), special_tokens)
