"""What the log-probabilities of a response should be, computed by transformers from the story that its segments tell.

A request writes keys and values under the weights that it was sent with. Through an update it keeps them (its segments
say over which version they stand) or has them written anew; a server that puts it back for want of memory writes them
anew later, behind the blocks that its cache still has, and says so nowhere: that is found out from the numbers.

Invariant: the weights that sample a token are never found out, always those of its stamp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from april.core.batch import DeliveredSample
from april.core.tape import Segment

BLOCK = 128
"""Tokens that vLLM's cache keeps or forgets together on a CPU."""
SEEN = 6
"""Tokens that must be right for a guess about keys that were written anew."""
Keys = list[tuple[int, int]]
"""Who wrote the keys of a conversation, run-length: (number of the weights, tokens)."""


@dataclass(frozen=True, slots=True)
class Replayed:
    errors: NDArray[np.float64]
    """Absolute differences to what was delivered, nats, per token."""
    kept: NDArray[np.bool_]
    """Tokens that were sampled over keys of older weights."""
    anew: int
    """Times that the server must have written its keys anew by itself."""


class Replay:
    """Replays responses; ``load`` gives the model of a version's number, in float32."""

    def __init__(self, load: Callable[[int], Any], bound: float) -> None:
        self._load, self._bound = load, bound
        self._models: dict[int, Any] = {}

    def of(self, sample: DeliveredSample) -> Replayed:
        """Replay a response without tokens of an environment."""
        ids = torch.from_numpy(np.concatenate((sample.prompt.token_ids, sample.tokens)).astype(np.int64))
        errors, anew = np.zeros(len(sample.tokens)), 0
        for _, parts in groupby(sample.segments, key=lambda segment: segment.attempt_id):
            for part, found, again in self._attempt(ids, len(sample.prompt.token_ids), list(parts), sample.logprobs):
                errors[part.start : part.start + part.count] = found
                anew += again
        kept = np.concatenate([np.full(s.count, s.over is not None) for s in sample.segments])
        return Replayed(errors, kept, anew)

    def _attempt(
        self, ids: torch.Tensor, prompt: int, parts: Sequence[Segment], logprobs: NDArray[np.float32]
    ) -> Iterator[tuple[Segment, NDArray[np.float64], int]]:
        """Yield each segment of one request with its errors, and how often its keys were written anew."""
        first = parts[0]
        keys: Keys = [((first.over or first.version).n, prompt + first.start - 1)]
        for part in parts:
            start, end = prompt + part.start, prompt + part.start + part.count
            said = logprobs[part.start : part.start + part.count].astype(np.float64)
            own = part.version.n
            if part.over is None and part is not first:
                keys = [(own, start - 1)]
            found = np.abs(self._logprobs(ids, keys, own, start, end) - said)
            anew = 0
            while (wrong := np.flatnonzero(found > self._bound)).size and (
                guess := self._written_anew(ids, keys, own, start, start + int(wrong[0]), end, said)
            ) is not None:
                anew += 1
                at = int(wrong[0])
                keys = guess
                found[at:] = np.abs(self._logprobs(ids, keys, own, start + at, end) - said[at:])
                if anew > len(found):
                    break
            keys = _longer(keys, own, end - 1)
            yield part, found, anew

    def _written_anew(
        self, ids: torch.Tensor, keys: Keys, own: int, start: int, at: int, end: int, said: NDArray[np.float64],
    ) -> Keys | None:  # fmt: skip
        """The keys before token ``at``, if those behind some whole blocks were written anew there by its weights."""
        until = min(at + SEEN, end)
        before = _longer(keys, own, at - 1)
        for blocks in range((at - 1) // BLOCK, -1, -1):
            guess = _longer(_first(before, blocks * BLOCK), own, at - 1)
            if guess == before:
                continue
            found = self._logprobs(ids, guess, own, at, until)
            if np.abs(found - said[at - start : until - start]).max() <= self._bound:
                return guess
        return None

    @torch.no_grad()
    def _logprobs(self, ids: torch.Tensor, keys: Keys, own: int, start: int, end: int) -> NDArray[np.float64]:
        """Log-probabilities of tokens [start, end) under the weights ``own``, over ``keys`` of those before."""
        past, at = None, 0
        for number, count in _first(keys, start - 1):
            past = self._model(number)(ids[None, at : at + count], past_key_values=past, use_cache=True).past_key_values
            at += count
        logits = self._model(own)(ids[None, at : end - 1], past_key_values=past, use_cache=True).logits[0]
        taken = logits[start - 1 - at :].log_softmax(-1).gather(1, ids[start:end, None])[:, 0]
        return np.asarray(taken.double().numpy())

    def _model(self, number: int) -> Any:
        if number not in self._models:
            self._models[number] = self._load(number)
        return self._models[number]


def _first(keys: Keys, count: int) -> Keys:
    kept = []
    for number, tokens in keys:
        if count > 0:
            kept.append((number, min(tokens, count)))
        count -= tokens
    return kept


def _longer(keys: Keys, own: int, length: int) -> Keys:
    """Keys of ``length`` tokens: what is missing was written under the weights ``own``."""
    had = sum(tokens for _, tokens in keys)
    if had >= length:
        return _first(keys, length)
    if keys and keys[-1][0] == own:
        return [*keys[:-1], (own, keys[-1][1] + length - had)]
    return [*keys, (own, length - had)]
