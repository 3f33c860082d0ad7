"""One request at a fake vLLM or SGLang server: one token per step, the same for the same prefix.

Tokens depend on (weights, everything before them) only, so a request that is cut and continued says what the uncut one
says. There is no randomness and no clock.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from april.testing.servers.request_faults import PlannedFault, RequestFault


@dataclass(slots=True, eq=False)
class FakeRequest:
    """One request at the server. Subclasses say it in the words of their server."""

    MIN_TOKENS: ClassVar[str]
    MAX_TOKENS: ClassVar[str]
    """Names of these parameters."""

    name: str
    """As the engine knows it; an abort names exactly this."""
    prompt: list[int]
    params: dict[str, Any]
    stream: bool
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
    finish: Any = None
    """Why it ended, as the server says it."""
    frozen: bool = False
    dead: bool = False
    """The caller's connection is gone, or breaks now."""
    failed: bool = False
    """The engine died under it."""
    fault: PlannedFault | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def hit(self, *kinds: RequestFault) -> RequestFault | None:
        """The fault of the request, if it is one of these."""
        return self.fault.kind if self.fault is not None and self.fault.kind in kinds else None

    @property
    def over(self) -> bool:
        """Whether nothing more will be generated."""
        return self.dead or self.failed or (self.finish is not None and not self.running)

    @property
    def due(self) -> bool:
        """Whether the scheduler hands over what it has."""
        return True

    def flush(self) -> None:
        """From the scheduler to the part that talks to the client."""
        self.flushed = len(self.ids)
        self.news.set()

    def make_token(self, weights: str, label: str, vocab_size: int, eos: int, mean_length: int) -> None:
        """One token more; EOS and stop tokens are in the ids."""
        token, logprob = next_token(weights, self.prompt + self.ids, vocab_size, eos, mean_length)
        stops = {eos, *(self.params.get("stop_token_ids") or ())}
        count = len(self.ids) + 1
        if token in stops and (count <= self.params[self.MIN_TOKENS] or self.params.get("ignore_eos")):
            token = next(t for t in range(token + 1, token + vocab_size) if t % vocab_size not in stops) % vocab_size
        self.ids.append(token)
        self.logprobs.append(self.as_said(logprob))
        if self.spans and self.spans[-1][0] == label:
            self.spans[-1] = (label, self.spans[-1][1], count)
        else:
            self.spans.append((label, count - 1, count))
        if token in stops:
            self.finish = self.stopped()
        elif count >= self.params[self.MAX_TOKENS]:
            self.finish = self.used_up()

    def lose_unsent(self) -> None:
        """Drop the tokens that have not left the server."""
        del self.ids[self.sent :], self.logprobs[self.sent :]
        self.spans = [(name, a, min(b, self.sent)) for name, a, b in self.spans if a < self.sent]

    def whole(
        self, weights: str, label: str, vocab_size: int, eos: int, mean_length: int
    ) -> tuple[list[int], list[float]]:
        """Ids and log-probabilities when nobody cuts it."""
        while self.finish is None:
            self.make_token(weights, label, vocab_size, eos, mean_length)
        return self.ids, self.logprobs

    # ---------------------------------------------------------------- in the words of the server

    def as_said(self, logprob: float) -> float:
        """What is said of a log-probability at temperature 1."""
        raise NotImplementedError

    def stopped(self) -> Any:
        """The finish of a request that has stopped at its last token."""
        raise NotImplementedError

    def used_up(self) -> Any:
        """The finish of a request whose budget is used."""
        raise NotImplementedError

    def aborted(self) -> Any:
        """The finish of a request that was aborted."""
        raise NotImplementedError


def next_token(weights: str, prefix: list[int], vocab_size: int, eos: int, mean_length: int) -> tuple[int, float]:
    """(id, log-probability at temperature 1) of what follows ``prefix`` under ``weights``."""
    digest = hashlib.blake2b(np.array(prefix, np.int32).tobytes(), digest_size=24, key=weights.encode()[:64]).digest()
    if int.from_bytes(digest[:8], "big") / 2**64 < 1 / mean_length:
        token = eos
    else:
        token = int.from_bytes(digest[8:16], "big") % (vocab_size - 1)
        token += token >= eos
    return token, float(np.float32(-0.5 - 3 * int.from_bytes(digest[16:], "big") / 2**64))
