"""Replaces placeholders for processors that write text around an image, as Gemma's does: the tokenizer may merge that
text with the tokens beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]
_FARTHEST = 4
"""Number of tokens beside an image in which the text around it is searched."""


class StandIn(NamedTuple):
    """The replacement of an image: its tokens, and the text before and behind them (empty for most processors)."""

    core: Int32
    head: str = ""
    tail: str = ""


class Place(NamedTuple):
    """The tokens [at, at + length) that replace an image, and the tokens of the conversation that they replace."""

    at: int
    length: int
    stands: tuple[int, ...]


class _Border(NamedTuple):
    """The tokens at one side of an image, and the tokens of the conversation that were merged into them."""

    tokens: list[int]
    taken: list[int]


class Borders:
    """Replaces placeholders by images with text around them, and finds such images again.

    Args:
        encode: function from text to tokens.
        decode: function from tokens to text.
        special: ids of tokens that are never merged with text.
    """

    def __init__(self, encode: Encode, decode: Decode, special: frozenset[int]) -> None:
        self._encode, self._decode, self._special = encode, decode, special

    def split(self, tokens: Int32) -> StandIn:
        """Split the tokens of an image that stands alone into its own tokens and the text around them."""
        own = [i for i, token in enumerate(tokens.tolist()) if token in self._special]
        first, last = own[0], own[-1] + 1
        return StandIn(tokens[first:last], self._text(tokens[:first].tolist()), self._text(tokens[last:].tolist()))

    def _text(self, tokens: Sequence[int]) -> str:
        return self._decode(tokens) if tokens else ""

    def expand(self, ids: Int32, at: Sequence[int], stand_in: Sequence[StandIn]) -> tuple[Int32, list[Place]]:
        """Replace the placeholders at the positions ``at``; return all tokens, and the place of each image."""
        out: list[int] = []
        places: list[Place] = []
        starts = [0, *(i + 1 for i in at)]
        ends = [*at, len(ids)]
        begins, taken_before = 0, list[int]()
        for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
            gap = ids[start:end].tolist()
            tail = stand_in[k - 1].tail if k else ""
            head = stand_in[k].head if k < len(at) else ""
            if k and k < len(at) and len(gap) < 2 and not self._special.intersection(gap):
                before, middle, after = _Border(self._encode(tail + self._text(gap) + head), gap), [], _Border([], [])
            else:
                before = self._border(gap[:1], tail, behind=True)
                rest = gap[len(before.taken) :]
                after = self._border(rest[-1:], head, behind=False)
                middle = rest[: len(rest) - len(after.taken)]
            if k:
                out += before.tokens
                stands = (*taken_before, int(ids[at[k - 1]]), *before.taken)
                places.append(Place(begins, len(out) - begins, stands))
            else:
                middle = before.tokens + middle
            out += middle
            begins, taken_before = len(out), after.taken
            out += after.tokens
            if k < len(at):
                out += stand_in[k].core.tolist()
        return np.array(out, np.int32), places

    def _border(self, beside: list[int], text: str, *, behind: bool) -> _Border:
        """Tokenise the text at one side of an image together with the token beside it, if there is one."""
        if not text:
            return _Border([], [])
        alone = self._encode(text)
        if not beside or beside[0] in self._special or self._encode(self._text(beside)) != beside:
            return _Border(alone, [])
        both = self._encode(text + self._text(beside)) if behind else self._encode(self._text(beside) + text)
        apart = [*alone, *beside] if behind else [*beside, *alone]
        return _Border(alone, []) if both == apart else _Border(both, beside)

    def collapse(self, ids: Int32, placeholder: int, stand_in: Sequence[StandIn]) -> Int32 | None:
        """Return the conversation with a placeholder in place of each image; None if one of the images is not found."""
        spans, done = [], 0
        for one in stand_in:
            places = np.flatnonzero(ids[done:] == one.core[0]) + done
            start = next((int(i) for i in places if np.array_equal(ids[i : i + len(one.core)], one.core)), None)
            if start is None:
                return None
            done = start + len(one.core)
            spans.append((start, done))
        gaps = [ids[end:start] for (_, end), (start, _) in zip([(0, 0), *spans], [*spans, (len(ids), 0)], strict=True)]
        out: list[int] = []
        for k, gap in enumerate(gaps):
            tail = stand_in[k - 1].tail if k else ""
            head = stand_in[k].head if k < len(spans) else ""
            found = self._without(gap.tolist(), tail, head)
            if found is None:
                return None
            out += [*found, *([placeholder] if k < len(spans) else [])]
        again, _ = self.expand(np.array(out, np.int32), [i for i, t in enumerate(out) if t == placeholder], stand_in)
        return np.array(out, np.int32) if np.array_equal(again, ids) else None

    def _without(self, gap: list[int], tail: str, head: str) -> list[int] | None:
        """Return the tokens between two images without the images' own text; None if that text is missing."""
        if tail and head and (text := self._text(gap)) == tail + text[len(tail) : len(text) - len(head)] + head:
            middle = text[len(tail) : len(text) - len(head)]
            if len(self._encode(middle) if middle else []) < 2:
                return self._encode(middle) if middle else []
        if tail:
            n = next((n for n in range(1, _FARTHEST) if self._text(gap[:n]).startswith(tail)), 0)
            if not n:
                return None
            rest = self._text(gap[:n])[len(tail) :]
            gap = [*(self._encode(rest) if rest else []), *gap[n:]]
        if head:
            n = next((n for n in range(1, _FARTHEST) if self._text(gap[-n:]).endswith(head)), 0)
            if not n:
                return None
            rest = self._text(gap[-n:])[: -len(head)]
            gap = [*gap[:-n], *(self._encode(rest) if rest else [])]
        return gap
