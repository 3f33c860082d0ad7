"""Replaces image placeholders by the tokens of images. Some processors, as Gemma's, write text around an image. Then
this is more than inserting tokens, because the tokenizer may merge that text with the tokens beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]
_MAX_MERGED_TOKENS = 4
"""Exclusive bound on the number of tokens beside an image that are searched for the text around the image."""


class Replacement(NamedTuple):
    """What replaces an image's placeholder: tokens, and the text before and after them (empty for most processors)."""

    tokens: Int32
    text_before: str = ""
    text_after: str = ""


class ReplacedSpan(NamedTuple):
    """The tokens [start, start + length) that stand for an image, and the original tokens that they replace."""

    start: int
    length: int
    replaced_ids: tuple[int, ...]


class _MergedTokens(NamedTuple):
    """The tokens of the text at one side of an image, and the conversation's tokens that were merged into them."""

    tokens: list[int]
    merged: list[int]


class ImageTextCodec:
    """Replaces placeholders by images with text around them, and turns such images back into placeholders.

    Args:
        encode: function from text to tokens.
        decode: function from tokens to text.
        special: ids of tokens that are never merged with text.
    """

    def __init__(self, encode: Encode, decode: Decode, special: frozenset[int]) -> None:
        self._encode, self._decode, self._special = encode, decode, special

    def split(self, tokens: Int32) -> Replacement:
        """Split the tokens that replace a single image into the image's own tokens and the text around them."""
        own = [i for i, token in enumerate(tokens.tolist()) if token in self._special]
        first, last = own[0], own[-1] + 1
        return Replacement(tokens[first:last], self._text(tokens[:first].tolist()), self._text(tokens[last:].tolist()))

    def _text(self, tokens: Sequence[int]) -> str:
        return self._decode(tokens) if tokens else ""

    def expand(
        self, ids: Int32, positions: Sequence[int], replacements: Sequence[Replacement]
    ) -> tuple[Int32, list[ReplacedSpan]]:
        """Replace the placeholders at ``positions``; returns all tokens, and the span of each image among them."""
        out: list[int] = []
        places: list[ReplacedSpan] = []
        starts = [0, *(i + 1 for i in positions)]
        ends = [*positions, len(ids)]
        begins, taken_before = 0, list[int]()
        for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
            gap = ids[start:end].tolist()
            tail = replacements[k - 1].text_after if k else ""
            head = replacements[k].text_before if k < len(positions) else ""
            between = k and k < len(positions) and (head or tail)
            if between and len(gap) < 2 and not self._special.intersection(gap):
                before, after = _MergedTokens(self._encode(tail + self._text(gap) + head), gap), _MergedTokens([], [])
                middle = list[int]()
            else:
                before = self._tokenize_side(gap[:1], tail, after=True)
                rest = gap[len(before.merged) :]
                after = self._tokenize_side(rest[-1:], head, after=False)
                middle = rest[: len(rest) - len(after.merged)]
            if k:
                out += before.tokens
                replaced = (*taken_before, int(ids[positions[k - 1]]), *before.merged)
                places.append(ReplacedSpan(begins, len(out) - begins, replaced))
            else:
                middle = before.tokens + middle
            out += middle
            begins, taken_before = len(out), after.merged
            out += after.tokens
            if k < len(positions):
                out += replacements[k].tokens.tolist()
        return np.array(out, np.int32), places

    def _tokenize_side(self, neighbour: list[int], text: str, *, after: bool) -> _MergedTokens:
        """Tokenise the text at one side of an image, merged with the token beside it if the tokenizer does so."""
        if not text:
            return _MergedTokens([], [])
        alone = self._encode(text)
        if not neighbour or neighbour[0] in self._special or self._encode(self._text(neighbour)) != neighbour:
            return _MergedTokens(alone, [])
        together = self._encode(text + self._text(neighbour)) if after else self._encode(self._text(neighbour) + text)
        apart = [*alone, *neighbour] if after else [*neighbour, *alone]
        return _MergedTokens(alone, []) if together == apart else _MergedTokens(together, neighbour)

    def collapse(self, ids: Int32, placeholder: int, replacements: Sequence[Replacement]) -> Int32 | None:
        """Return the conversation with a placeholder in place of each image; None if an image is not found."""
        spans, position = [], 0
        for replacement in replacements:
            places = np.flatnonzero(ids[position:] == replacement.tokens[0]) + position
            tokens = replacement.tokens
            start = next((int(i) for i in places if np.array_equal(ids[i : i + len(tokens)], tokens)), None)
            if start is None:
                return None
            position = start + len(replacement.tokens)
            spans.append((start, position))
        gaps = [ids[end:start] for (_, end), (start, _) in zip([(0, 0), *spans], [*spans, (len(ids), 0)], strict=True)]
        out: list[int] = []
        for k, gap in enumerate(gaps):
            tail = replacements[k - 1].text_after if k else ""
            head = replacements[k].text_before if k < len(spans) else ""
            found = self._strip_text(gap.tolist(), tail, head)
            if found is None:
                return None
            out += [*found, *([placeholder] if k < len(spans) else [])]
        collapsed, positions = np.array(out, np.int32), [i for i, t in enumerate(out) if t == placeholder]
        if len(positions) != len(spans):  # a placeholder of another image is left
            return None
        again, _ = self.expand(collapsed, positions, replacements)
        return collapsed if np.array_equal(again, ids) else None

    def _strip_text(self, gap: list[int], tail: str, head: str) -> list[int] | None:
        """Return the tokens between two images without the text that belongs to the images; None if it is missing."""
        if tail and head and (text := self._text(gap)) == tail + text[len(tail) : len(text) - len(head)] + head:
            middle = text[len(tail) : len(text) - len(head)]
            if len(self._encode(middle) if middle else []) < 2:
                return self._encode(middle) if middle else []
        if tail:
            n = next((n for n in range(1, _MAX_MERGED_TOKENS) if self._text(gap[:n]).startswith(tail)), 0)
            if not n:
                return None
            rest = self._text(gap[:n])[len(tail) :]
            gap = [*(self._encode(rest) if rest else []), *gap[n:]]
        if head:
            n = next((n for n in range(1, _MAX_MERGED_TOKENS) if self._text(gap[-n:]).endswith(head)), 0)
            if not n:
                return None
            rest = self._text(gap[-n:])[: -len(head)]
            gap = [*gap[:-n], *(self._encode(rest) if rest else [])]
        return gap
