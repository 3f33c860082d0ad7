"""Defines the sampling parameters of engine requests, and adjusts them to continue interrupted responses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

GAP = "\ufffd"
"""Replacement character, which decoders write for bytes that are not (or not yet) a complete character."""


def stop_id_of(text: str) -> str:
    """Return advice for a user who named a stop token by its text instead of its id."""
    return (
        f"write the id of the token: tokenizer.convert_tokens_to_ids({text!r}); for text that ends a response, set stop"
    )


class LogprobKind(StrEnum):
    """Distributions from which an engine may take its log-probabilities."""

    TEMPERATURE = "temperature"
    """log_softmax(logits / temperature), before top-p and similar filters."""
    PROCESSED = "processed"
    """The distribution that was really sampled from."""
    RAW = "raw"
    """log_softmax(logits) at every temperature."""
    UNKNOWN = "unknown"
    """The server does not tell the kind. Usable only at temperature 1 without top-p, where all kinds are equal."""

    @property
    def follows_temperature(self) -> bool:
        """True if these log-probabilities equal log_softmax(logits / temperature) at every temperature above 0.

        This assumes a request without top-p and other parameters that shape the distribution.
        """
        return self in (LogprobKind.TEMPERATURE, LogprobKind.PROCESSED)


class SamplingParams(msgspec.Struct, frozen=True):
    """Sampling parameters of one engine request.

    Attributes:
        max_tokens: maximum number of tokens that the request may still generate, EOS included.
        min_tokens: minimum number of tokens before EOS or a stop token may be sampled.
        temperature: softmax temperature; 0 means greedy.
        top_p: nucleus mass in (0, 1].
        stop_token_ids: ids that end the response, EOS included; the last token of the response is then this id.
        seed: seed of this request; None for the engine's own random numbers.
        banned_ids: ids that must not be sampled, because they are placeholders in prompts, such as those of images. The
            ban should leave the log-probabilities of all other ids unchanged, if the engine can do so.
        stop: strings that end the response once its text contains one of them; empty in a request whose text april
            searches, because the engine cannot.
        grammar: form that the response must have, as JSON text of {"json_schema": schema} or {"structural_tag": tag};
            empty if there is none. The log-probabilities are those of the tokens that the grammar allows. An engine
            begins the grammar at the first token of a request, so an interrupted request cannot be continued.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    banned_ids: tuple[int, ...] = ()
    grammar: str = ""

    @property
    def demanded_form(self) -> tuple[str, Any]:
        """The kind and the content of ``grammar``, such as ("json_schema", schema)."""
        ((name, value),) = json.loads(self.grammar).items()
        return name, value

    def after(self, tokens_held: int, seed: int | None) -> SamplingParams:
        """Return the parameters for the rest of a response that already has ``tokens_held`` tokens."""
        return SamplingParams(
            self.max_tokens - tokens_held,
            max(0, self.min_tokens - tokens_held),
            self.temperature,
            self.top_p,
            self.stop_token_ids,
            seed,
            self.stop,
            self.banned_ids,
            self.grammar,
        )

    def capped(self, max_tokens: int) -> SamplingParams:
        """Return the parameters with another token budget; min_tokens is lowered if it exceeds the budget."""
        if self.max_tokens == max_tokens >= self.min_tokens:
            return self
        return replace(self, max_tokens=max_tokens, min_tokens=min(self.min_tokens, max_tokens))


def attempt_seed(run_seed: int, group: int, index: int, token_offset: int, restarts: int = 0, chain: int = 0) -> int:
    """Return the seed of one attempt, in [0, 2**63).

    The seed depends on the token offset, so that a resumed response does not repeat random numbers; on ``restarts``, so
    that a failed response does not fail in the same way again; and on the sample's conversation (``chain``).
    """
    text = f"{run_seed}/{group}/{index}/{token_offset}"
    if restarts:
        text += f"/{restarts}"
    if chain:
        text += f"/c{chain}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def wrong_stop_strings(stop: Sequence[str]) -> str | None:
    """Describe the first invalid stop string; None if all are valid."""
    for text in stop:
        if not isinstance(text, str):
            return f"stop strings must be strings, got {text!r}"
        if not text:
            return "an empty stop string would end every response at once; leave it out"
        if GAP in text:
            return f"the stop string {text!r} contains U+FFFD, which also stands for incomplete characters"
        if any("\ud800" <= character <= "\udfff" for character in text):
            return f"the stop string {text!r} contains half of a surrogate pair, which no server can be sent"
    return None
