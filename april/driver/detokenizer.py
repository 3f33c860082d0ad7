"""Decodes tokens with the user's tokenizer, and finds stop strings in the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from april.core.sampling import GAP
from april.core.tape import Int32
from april.core.types import Attempt
from april.errors import ConfigError, RolloutError

TRIES = 3
"""Number of tries to decode; a Hugging Face tokenizer that threads share sometimes fails with 'Already borrowed'."""


class Detokenizer:
    """Decodes tokens with the user's tokenizer; may be used by several threads.

    Args:
        tokenizer: Object with ``decode(ids, *, skip_special_tokens=False) -> str``, such as one of Hugging Face.

    Raises:
        ConfigError: the tokenizer has no suitable ``decode``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Hugging Face's clean-up removes spaces before punctuation, so stop strings would not match the text
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
        """Return the text of ``ids``, with or without special tokens; raises RolloutError if the tokenizer fails."""
        cause: Exception | None = None
        for _ in range(TRIES):
            try:
                text = self._tokenizer.decode(ids, skip_special_tokens=not special_tokens, **self._options)
            except Exception as error:
                cause = error
                continue
            if isinstance(text, str):
                return text
            cause = TypeError(f"decode must return a str, but returned a {type(text).__name__}")
        what = f"{type(cause).__name__}: {cause} ({type(self._tokenizer).__name__}.decode of {len(ids)} tokens)"
        raise RolloutError(f"the tokenizer failed: {what}") from cause


BLOCK_TOKENS = 32
"""Number of tokens decoded at once. Blocks with a match or incomplete characters are then decoded token by token."""
UNFINISHED_TOKENS = 3
"""Maximum number of tokens of an incomplete character, as UTF-8 has at most 4 bytes per character."""


def matcher_of(attempt: Attempt, decode: Callable[[list[int]], str], came: Int32) -> StopMatcher:
    """Make a matcher for the tokens of an attempt (engine request) that follow its first tokens ``came``."""
    request, stop = attempt.request, attempt.call.sampling.stop
    before = np.concatenate((request.token_ids, came)) if len(came) else request.token_ids
    after = max(0, request.sampling.min_tokens - len(came))
    return StopMatcher(decode, stop, before, request.response_offset + len(came), after)


class StopMatcher:
    """Finds stop strings in the tokens of one attempt (engine request); an ``llm.generate`` call may need several.

    A match may begin in an earlier attempt of the call. It must be completed by a token of this attempt, after the
    first ``min_tokens`` tokens. Of several matches, the one that is completed first counts.

    Args:
        decode: Function that returns the text of token ids, special tokens included. It may strip a leading space and
            show incomplete characters as U+FFFD; apart from that, further tokens must only append text.
        stops: Stop strings, at least one; see :func:`april.core.sampling.wrong_stop_strings`.
        before: All tokens before this attempt, int32 [P + T]: the prompt and the response so far.
        in_call: Number of tokens at the end of ``before`` that this call generated in earlier attempts.
        min_tokens: Number of this attempt's first tokens that may not complete a stop string.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stops: Sequence[str], before: Int32, in_call: int, min_tokens: int = 0
    ) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        # a character usually needs at most one token, but up to four byte tokens, and some tokens have no text
        self._stride = self._longest + 8
        self._most = 8 * self._stride
        self._ids: list[int] = before[-self._most :].tolist()
        self._foreign = max(0, len(self._ids) - in_call)
        """Number of tokens at the start of the window (``_ids``) that this call did not generate."""
        self._begin = 0
        """Position in the window's text from which a match may begin."""
        self._seen = 0
        """Length of the window's text that was searched already."""
        self._silent = min_tokens
        self._slide()

    def feed(self, tokens: Int32) -> int | None:
        """Search the next tokens; if one of them completes a stop string, return how many to keep, else None.

        The last token to keep is the one that completes the stop string. Nothing may be fed after that.
        """
        for start in range(0, len(tokens), BLOCK_TOKENS):
            kept = self._feed_block(tokens[start : start + BLOCK_TOKENS].tolist())
            if kept is not None:
                return start + kept
        return None

    def _feed_block(self, block: list[int]) -> int | None:
        old = len(self._ids)
        self._ids += block
        silent = min(self._silent, len(block))
        if silent:
            self._silent -= silent
            self._seen = max(self._seen, self._readable(self._ids[: old + silent])[1])
        if silent < len(block):
            found, readable = self._may_have_match()
            if found:
                for count in range(silent + 1, len(block) + 1):
                    if self._completed(self._decode(self._ids[: old + count])):
                        return count
            self._seen = max(self._seen, readable)
        if len(self._ids) > 2 * self._stride + 2 * BLOCK_TOKENS:
            self._slide()
        return None

    def _may_have_match(self) -> tuple[bool, int]:
        """Return whether any new token may have completed a stop string, and the length of the readable text.

        Text is readable up to an incomplete character at its end. What is readable now was so after each token, with
        one exception: an invalid byte token can make the tokens before it unreadable again. Then this returns True, and
        the caller decodes token by token.
        """
        text = self._decode(self._ids)
        finished, readable = self._readable(self._ids, text)
        return self._completed(text) or self._completed(finished) or GAP in finished[self._seen :], readable

    def _readable(self, ids: list[int], text: str | None = None) -> tuple[str, int]:
        """Return the text without the tokens of an incomplete last character, and the length of the readable text."""
        finished = text = self._decode(ids) if text is None else text
        for count in range(1, min(UNFINISHED_TOKENS, len(ids)) + 1):
            if not finished.endswith(GAP):
                break
            finished = self._decode(ids[:-count])
        return finished, max(len(text.rstrip(GAP)), len(finished.rstrip(GAP)))

    def _completed(self, text: str) -> bool:
        """Return whether a stop string begins at an allowed position and ends in text that was not searched yet."""
        return any(text.find(s, max(self._begin, self._seen - len(s) + 1)) >= 0 for s in self._stops)

    def _slide(self) -> None:
        """Shorten the window to its last tokens, so that their text is still long enough for any future match.

        The first token of a window may be decoded differently (a leading space stripped, half a character). So the
        window has one character more than a match could need, and does not begin inside a character.
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
            # a character that began before the call's tokens does not belong to the call
            self._begin = len(whole) + (whole != text)
