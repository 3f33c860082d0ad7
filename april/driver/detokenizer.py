"""The text of tokens, by the user's tokenizer, for rewards and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from april.core.sampling import GAP
from april.core.tape import Int32
from april.core.types import Attempt
from april.errors import ConfigError, RolloutError

TRIES = 3
"""Tries to decode: tokenizers of Hugging Face that threads share fail now and then (\"Already borrowed\")."""


class Detokenizer:
    """Calls the tokenizer, in several threads, and names it where it fails.

    Args:
        tokenizer: has ``decode(ids, *, skip_special_tokens=False) -> str``, as those of Hugging Face have.

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


BLOCK_TOKENS = 32
"""Tokens looked at in one go. Those of a block with a match, or with broken characters, are looked at one by one."""
UNFINISHED_TOKENS = 3
"""Most tokens of a character that is not complete yet: UTF-8 has at most 4 bytes."""


def matcher_of(attempt: Attempt, decode: Callable[[list[int]], str], came: Int32) -> StopMatcher:
    """Make the matcher for the tokens of an attempt after those that ``came`` [k]."""
    sampling, before = attempt.sampling, attempt.token_ids
    if len(came):
        before = np.concatenate((before, came))
    return StopMatcher(
        decode, sampling.stop, before, attempt.in_call + len(came), max(0, sampling.min_tokens - len(came))
    )


def completes_a_stop(attempt: Attempt, came: Int32, detokenizer: Detokenizer | None) -> bool:
    """Return whether the last of an attempt's tokens [k] may complete a stop string, and does in the text.

    Without a ``detokenizer`` nobody can look at the text. Raises RolloutError if the tokenizer fails.
    """
    sampling = attempt.sampling
    if not sampling.stop or len(came) <= sampling.min_tokens:
        return False
    return detokenizer is None or matcher_of(attempt, detokenizer.text, came[:-1]).feed(came[-1:]) is not None


class StopMatcher:
    """Looks for stop strings in what one attempt generates.

    A match counts if it begins in the call's own tokens and is completed by a token of this attempt after the first
    ``min_tokens`` ones. The match completed first wins.

    Args:
        decode: text of a list of token ids, special tokens included. May strip a leading space, may show incomplete
            characters as U+FFFD, and must otherwise only append text for further tokens.
        stops: at least one; see :func:`april.core.sampling.wrong_stop_strings`.
        before: all tokens before this attempt, int32 [P + T]: the prompt and the response so far.
        in_call: how many of the last of them this call generated, in earlier attempts.
        min_tokens: tokens of this attempt that may not complete a stop string.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stops: Sequence[str], before: Int32, in_call: int, min_tokens: int = 0
    ) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        # one token a character is usual; byte tokens can be four, and tokens without text are possible
        self._stride = self._longest + 8
        self._most = 8 * self._stride
        self._ids: list[int] = before[-self._most :].tolist()
        self._foreign = max(0, len(self._ids) - in_call)
        """Tokens at the window's start that are not the call's."""
        self._begin = 0
        """The position in the window's text from which a match may begin."""
        self._seen = 0
        """The length of the window's text that was looked at."""
        self._silent = min_tokens
        self._slide()

    def feed(self, tokens: Int32) -> int | None:
        """Take the next tokens [k]; returns how many to keep if one of them completes a stop string.

        That token is the last of those kept. Nothing may be fed after it.
        """
        for start in range(0, len(tokens), BLOCK_TOKENS):
            kept = self._look_at(tokens[start : start + BLOCK_TOKENS].tolist())
            if kept is not None:
                return start + kept
        return None

    def _look_at(self, block: list[int]) -> int | None:
        old = len(self._ids)
        self._ids += block
        silent = min(self._silent, len(block))
        if silent:
            self._silent -= silent
            self._seen = max(self._seen, self._readable(self._ids[: old + silent])[1])
        if silent < len(block):
            found, readable = self._suspicious()
            if found:
                for count in range(silent + 1, len(block) + 1):
                    if self._completed(self._decode(self._ids[: old + count])):
                        return count
            self._seen = max(self._seen, readable)
        if len(self._ids) > 2 * self._stride + 2 * BLOCK_TOKENS:
            self._slide()
        return None

    def _suspicious(self) -> tuple[bool, int]:
        """Return whether any of the new tokens may have completed a stop string, and how much text is readable.

        Text that is readable now was so token by token. Byte tokens of which one is wrong can make those before it
        unreadable again: then only each token's own turn tells.
        """
        text = self._decode(self._ids)
        finished, readable = self._readable(self._ids, text)
        return self._completed(text) or self._completed(finished) or GAP in finished[self._seen :], readable

    def _readable(self, ids: list[int], text: str | None = None) -> tuple[str, int]:
        """Text without the tokens of an unfinished last character, and the readable length with and without them."""
        finished = text = self._decode(ids) if text is None else text
        for count in range(1, min(UNFINISHED_TOKENS, len(ids)) + 1):
            if not finished.endswith(GAP):
                break
            finished = self._decode(ids[:-count])
        return finished, max(len(text.rstrip(GAP)), len(finished.rstrip(GAP)))

    def _completed(self, text: str) -> bool:
        """Return whether a stop string begins where it may and ends in what was not looked at yet."""
        return any(text.find(s, max(self._begin, self._seen - len(s) + 1)) >= 0 for s in self._stops)

    def _slide(self) -> None:
        """Keep the last tokens only: a match that is still to come must lie in their text, whole.

        The text of a window's first token can differ (a leading space stripped, half a character). So the window has
        a character more than a match could need, and does not begin inside a character.
        """
        ids, keep = self._ids, self._stride
        while keep < min(len(ids), self._most):
            text = self._decode(ids[-keep:]).rstrip(GAP)
            if len(text) > self._longest and not text.startswith(GAP):
                break
            keep += self._stride
        dropped = max(0, len(ids) - keep)
        self._ids = ids[dropped:]
        self._foreign = max(0, self._foreign - dropped)
        self._seen = self._readable(self._ids)[1]
        self._begin = 0
        if self._foreign:
            text = self._decode(self._ids[: self._foreign])
            whole = text.rstrip(GAP)
            # a character that began before the call is none of the call's
            self._begin = len(whole) + (whole != text)
