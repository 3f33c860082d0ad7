"""What a fake SGLang server generates: requests in a queue and in places, one token each per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from april.core.versions import PolicyVersion
from april.testing.servers.fake_request import FakeRequest

FORCED_INTERVAL = 50
"""Tokens after which the scheduler hands over what a plain request has."""


@dataclass(slots=True, eq=False)
class FakeSglangRun(FakeRequest):
    """One request at the server."""

    MIN_TOKENS, MAX_TOKENS = "min_new_tokens", "max_new_tokens"

    queue_abort: bool = False
    """It was aborted in the queue: its last answer is put together in another way."""
    abort_seen: bool = False
    """The server passes one abort per request on and no more."""

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

    def as_said(self, logprob: float) -> float:
        """The log-probability as a server says it, which scales by the temperature before the softmax."""
        return logprob if self.params["temperature"] in (0.0, 1.0) else float(np.float32(logprob * 0.8))

    def stopped(self) -> dict[str, Any]:
        return {"type": "stop", "matched": self.ids[-1]}

    def used_up(self) -> dict[str, Any]:
        return {"type": "length", "length": len(self.ids)}

    def aborted(self) -> dict[str, Any]:
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def fake_sglang_response(
    prompt: list[int], *, weights: str = "w0", max_tokens: int = 64, min_tokens: int = 0, vocab_size: int = 512,
    eos: int = 2, mean_length: int = 24,
) -> tuple[list[int], list[float]]:  # fmt: skip
    """What the server says to a prompt when nobody cuts it: ids and log-probabilities at temperature 1."""
    params = {"max_new_tokens": max_tokens, "min_new_tokens": min_tokens, "temperature": 1.0}
    run = FakeSglangRun("", list(prompt), params, stream=False)
    return run.whole(weights, str(PolicyVersion(0, 0)), vocab_size, eos, mean_length)
