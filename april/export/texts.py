"""Sample texts: a few responses of a batch, for people who look at what a policy writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from april.core.batch import Batch, DeliveredSample
from april.core.tape import Int32
from april.driver.detokenizer import Detokenizer

LONGEST = 1200
"""Characters that are shown of a prompt or a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleText:
    """One response as text.

    Attributes:
        group, index: its name.
        prompt, response: what stands there, special tokens included; the middle of what is long is left out.
        reward: its own.
        tokens: of the response.
        age: weight updates between its oldest token and its training.
        cuts: how often it was cut and continued.
        finish: why it ended.
    """

    group: int
    index: int
    prompt: str
    response: str
    reward: float
    tokens: int
    age: int
    cuts: int
    finish: str


COLUMNS = ("group", "index", "reward", "tokens", "age", "cuts", "finish", "prompt", "response")
"""Of tables of them."""


def row_of(text: SampleText) -> list[Any]:
    """As :data:`COLUMNS` name them."""
    return [getattr(text, name) for name in COLUMNS]


def sample_texts(batch: Batch, tokenizer: Any, k: int = 4, *, longest: int = LONGEST) -> list[SampleText]:
    """``k`` responses of a batch as text, from the lowest reward to the highest; the same batch always gives the same.

    Args:
        batch: whole, or a share.
        tokenizer: with ``decode(ids, skip_special_tokens=False) -> str``.
        k: how many, of as many as there are.
        longest: characters of a prompt or response; of a longer one, its beginning and its end.

    Raises:
        ConfigError: the tokenizer has no ``decode`` that fits.
        RolloutError: it fails.
    """
    return texts_of(chosen(batch, k), Detokenizer(tokenizer), longest)


def chosen(batch: Batch, k: int) -> list[DeliveredSample]:
    """``k`` of its samples, evenly spread over those in the order of their rewards."""
    ordered = sorted(batch.samples, key=lambda s: (s.reward, s.id))
    k = min(k, len(ordered))
    if k <= 0:
        return []
    rows = np.linspace(0, len(ordered) - 1, k).round() if k > 1 else [len(ordered) // 2]
    return [ordered[int(row)] for row in rows]


def texts_of(samples: Sequence[DeliveredSample], detokenizer: Detokenizer, longest: int = LONGEST) -> list[SampleText]:
    """Their texts."""
    return [
        SampleText(
            group=s.id.group, index=s.id.index, prompt=_text(s.prompt.token_ids, detokenizer, longest),
            response=_text(s.tokens, detokenizer, longest), reward=s.reward, tokens=len(s.tokens), age=s.staleness,
            cuts=s.resumes, finish=s.finish.value,
        )
        for s in samples
    ]  # fmt: skip


def _text(tokens: Int32, detokenizer: Detokenizer, longest: int) -> str:
    """Only what may be shown is decoded: a token has a character at least, as a rule."""
    tail = longest // 3
    head = longest - tail
    first = last = tokens
    if len(tokens) > 2 * longest:
        first, last = tokens[:longest], tokens[len(tokens) - longest :]
    text = detokenizer.text_of(first, True)
    if first is tokens and len(text) <= longest:
        return text
    end = text if last is first else detokenizer.text_of(last, True)
    return f"{text[:head]} [... shortened, {len(tokens):,} tokens in all ...] {end[len(end) - tail :]}"
