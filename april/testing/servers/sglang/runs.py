"""What a fake SGLang server generates: requests in a queue and in places, one token each per step.

Tokens depend on (weights, everything before them) only, so a request that is cut and continued says what the uncut one
says. There is no randomness and no clock.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from april.core.versions import PolicyVersion
from april.testing.servers.sglang.faults import PlannedFault, SglangFault

FORCED_INTERVAL = 50
"""Tokens after which the scheduler hands over what a plain request has."""


@dataclass(slots=True, eq=False)
class FakeRun:
    """One request at the server."""

    rid: str
    prompt: list[int]
    params: dict[str, Any]
    stream: bool
    weights_seed: bytes = b""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """(label, start, end) of the tokens."""
    flushed: int = 0
    """Tokens that have left the scheduler."""
    sent: int = 0
    """Tokens that have left the server."""
    running: bool = False
    started: bool = False
    """It was given a place at least once."""
    finish: dict[str, Any] | None = None
    queue_abort: bool = False
    """It was aborted in the queue: its last answer is put together in another way."""
    frozen: bool = False
    dead: bool = False
    """The caller's connection is gone, or breaks now."""
    abort_seen: bool = False
    """The server passes one abort per request on and no more."""
    fault: PlannedFault | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def hit(self, *kinds: SglangFault) -> SglangFault | None:
        """The fault of the request, if it is one of these."""
        return self.fault.kind if self.fault is not None and self.fault.kind in kinds else None

    @property
    def interval(self) -> int:
        return int(self.params.get("stream_interval") or 1) if self.stream else FORCED_INTERVAL

    @property
    def due(self) -> bool:
        """Whether the scheduler hands over what it has."""
        if self.finish is not None:
            return True
        fresh = len(self.ids) - self.flushed
        if not self.stream:
            return fresh > 0 and len(self.ids) % FORCED_INTERVAL == 0
        return fresh >= self.interval or (self.flushed == 0 and fresh > 0)

    def make_token(self, weights: str, label: str, vocab_size: int, eos: int, mean_length: int) -> None:
        """One token more."""
        token, logprob = next_token(weights, self.prompt + self.ids, vocab_size, eos, mean_length)
        stops = {eos, *(self.params.get("stop_token_ids") or ())}
        count = len(self.ids) + 1
        if token in stops and (count <= self.params["min_new_tokens"] or self.params.get("ignore_eos")):
            token = next(t for t in range(token + 1, token + vocab_size) if t % vocab_size not in stops) % vocab_size
        self.ids.append(token)
        self.logprobs.append(as_said(logprob, self.params))
        if self.spans and self.spans[-1][0] == label:
            self.spans[-1] = (label, self.spans[-1][1], count)
        else:
            self.spans.append((label, count - 1, count))
        if token in stops:
            self.finish = {"type": "stop", "matched": token}
        elif count == self.params["max_new_tokens"]:
            self.finish = {"type": "length", "length": count}


def next_token(weights: str, prefix: list[int], vocab_size: int, eos: int, mean_length: int) -> tuple[int, float]:
    """(id, log-probability at temperature 1) of what follows ``prefix`` under ``weights``."""
    digest = hashlib.blake2b(np.array(prefix, np.int32).tobytes(), digest_size=24, key=weights.encode()[:64]).digest()
    if int.from_bytes(digest[:8], "big") / 2**64 < 1 / mean_length:
        token = eos
    else:
        token = int.from_bytes(digest[8:16], "big") % (vocab_size - 1)
        token += token >= eos
    return token, float(np.float32(-0.5 - 3 * int.from_bytes(digest[16:], "big") / 2**64))


def as_said(logprob: float, params: dict[str, Any]) -> float:
    """The log-probability as a server says it, which scales by the temperature before the softmax."""
    temperature = params["temperature"]
    return logprob if temperature in (0.0, 1.0) else float(np.float32(logprob * 0.8))


def fake_sglang_response(
    prompt: list[int], *, weights: str = "w0", max_tokens: int = 64, min_tokens: int = 0, vocab_size: int = 512,
    eos: int = 2, mean_length: int = 24,
) -> tuple[list[int], list[float]]:  # fmt: skip
    """What the server says to a prompt when nobody cuts it: ids and log-probabilities at temperature 1."""
    params = {"max_new_tokens": max_tokens, "min_new_tokens": min_tokens, "temperature": 1.0}
    run = FakeRun("", list(prompt), params, stream=False)
    while run.finish is None:
        run.make_token(weights, str(PolicyVersion(0, 0)), vocab_size, eos, mean_length)
    return run.ids, run.logprobs
