"""Sampling parameters, and what is left of their budgets after a cut."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

GAP = "\ufffd"
"""Stands in decoded text for bytes that are no character, or not yet."""


def stop_id_of(text: str) -> str:
    """Say what to do about a token that was given as text."""
    return f"a token is named by its id: tokenizer.convert_tokens_to_ids({text!r}); text that ends a response is stop"


class LogprobKind(StrEnum):
    """Distributions that log-probabilities may be of."""

    TEMPERATURE = "temperature"
    """log_softmax(logits / T), before top-p and friends."""
    PROCESSED = "processed"
    """The distribution that was really sampled from."""
    RAW = "raw"
    """log_softmax(logits), whatever the temperature."""
    UNKNOWN = "unknown"
    """The server does not say and could not be asked; right only where all kinds agree (temperature 1, no top-p)."""

    @property
    def follows_temperature(self) -> bool:
        """True for log_softmax(logits / T) at every T > 0, as long as nothing else shapes the distribution."""
        return self in (LogprobKind.TEMPERATURE, LogprobKind.PROCESSED)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one engine request.

    Attributes:
        max_tokens: most tokens that the request may still generate (EOS included).
        min_tokens: fewest tokens before EOS or a stop token may be sampled.
        temperature: softmax temperature; 0 means greedy.
        top_p: nucleus mass in (0, 1].
        stop_token_ids: ids that end the response, EOS included; the id itself is kept in the tokens.
        seed: seed of this request, or None for the engine's own stream.
        banned_ids: ids that are never sampled, as they stand in prompts for what is no token, such as an image. The
            log-probabilities of all others stay what they would be without a ban, where the engine can say those.
        stop: strings that end the response once its text has them; april's affair, engines never see them.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    banned_ids: tuple[int, ...] = ()

    def after(self, tokens_held: int, seed: int | None) -> SamplingParams:
        """Parameters for the rest of a response of which ``tokens_held`` tokens are there."""
        return SamplingParams(
            self.max_tokens - tokens_held,
            max(0, self.min_tokens - tokens_held),
            self.temperature,
            self.top_p,
            self.stop_token_ids,
            seed,
            self.stop,
            self.banned_ids,
        )

    def capped(self, max_tokens: int) -> SamplingParams:
        """Parameters with another token budget (min_tokens never exceeds it)."""
        if self.max_tokens == max_tokens >= self.min_tokens:
            return self
        return replace(self, max_tokens=max_tokens, min_tokens=min(self.min_tokens, max_tokens))


def attempt_seed(run_seed: int, group: int, index: int, token_offset: int, restarts: int = 0, chain: int = 0) -> int:
    """Seed of one attempt, in [0, 2**63).

    Another offset gives another stream, so a resume repeats nothing; so does another begin from nothing (``restarts``),
    or a response that failed would fail in the same way again; and so does another conversation of the sample.
    """
    text = f"{run_seed}/{group}/{index}/{token_offset}"
    if restarts:
        text += f"/{restarts}"
    if chain:
        text += f"/c{chain}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def wrong_stop_strings(stop: Sequence[str]) -> str | None:
    """Describe what cannot be a stop string; None means that all can."""
    for text in stop:
        if not isinstance(text, str):
            return f"stop strings must be strings, got {text!r}"
        if not text:
            return "an empty stop string would end every response at once; leave it out"
        if GAP in text:
            return f"the stop string {text!r} has U+FFFD in it, which also stands for unfinished characters"
    return None
