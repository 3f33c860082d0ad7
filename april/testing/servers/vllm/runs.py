"""What a fake vLLM server generates and answers: one token per running request and step, the same for the same prefix.

A request that is cut and continued says what the uncut one says. There is no randomness and no clock.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from april.testing.servers.sglang.runs import next_token
from april.testing.servers.vllm.faults import PlannedVllmFault, VllmFault


@dataclass(slots=True, eq=False)
class FakeVllmRun:
    """One request at the server."""

    engine_id: str
    """As the engine knows it; an abort must name exactly this."""
    prompt: list[int]
    params: dict[str, Any]
    stream: bool
    token_route: bool
    process: int = 0
    """API process that took it; an abort by id reaches process 0 only."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """(label, start, end) of the tokens."""
    sent: int = 0
    """Tokens that have left the server."""
    running: bool = False
    finish: str | None = None
    frozen: bool = False
    failed: bool = False
    """The engine died under it."""
    dead: bool = False
    """Its connection breaks now."""
    fault: PlannedVllmFault | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def hit(self, *kinds: VllmFault) -> VllmFault | None:
        """The fault of the request, if it is one of these."""
        return self.fault.kind if self.fault is not None and self.fault.kind in kinds else None

    def make_token(
        self, weights: str, label: str, vocab_size: int, eos: int, mean_length: int, kind: str = "processed"
    ) -> None:
        """One token more; EOS and stop tokens are in the ids."""
        token, logprob = next_token(weights, self.prompt + self.ids, vocab_size, eos, mean_length)
        stops = {eos, *(self.params.get("stop_token_ids") or ())}
        count = len(self.ids) + 1
        if token in stops and (count <= self.params["min_tokens"] or self.params.get("ignore_eos")):
            token = next(t for t in range(token + 1, token + vocab_size) if t % vocab_size not in stops) % vocab_size
        self.ids.append(token)
        self.logprobs.append(as_vllm_says(logprob, self.params, kind))
        if self.spans and self.spans[-1][0] == label:
            self.spans[-1] = (label, self.spans[-1][1], count)
        else:
            self.spans.append((label, count - 1, count))
        if token in stops:
            self.finish = "stop"
        elif count >= self.params["max_tokens"]:
            self.finish = "length"

    def answer(self, model: str, *, spans: bool) -> dict[str, Any]:
        """What has not been sent, in the shape of the request's route."""
        ids, logprobs = self.ids[self.sent :], self.logprobs[self.sent :]
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish, "stop_reason": None, "token_ids": ids}
        if self.token_route:
            choice["weight_versions"] = (
                [{"version": v, "start": a, "end": b} for v, a, b in self.spans] if spans and self.finish else None
            )
            scored = [{"token_id": i, "logprob": p, "rank": 1} for i, p in zip(ids, logprobs, strict=True)]
            choice["logprobs"] = {"content": [s | {"top_logprobs": [dict(s)]} for s in scored]}
            said = {"request_id": self.engine_id, "model": model, "output_mode": "tokens"}
        else:
            texts = [f"<{i}>" for i in ids]
            choice |= {"text": "".join(texts), "logprobs": {
                "text_offset": [0] * len(ids), "token_logprobs": logprobs, "tokens": texts,
                "top_logprobs": [{t: p} for t, p in zip(texts, logprobs, strict=True)],
            }}  # fmt: skip
            said = {"id": self.engine_id.rsplit("-", 1)[0], "object": "text_completion", "model": model}
        return said | {"choices": [choice], "usage": None if self.stream else self.usage()}

    def usage(self) -> dict[str, int]:
        """The server's own count of the tokens."""
        made = len(self.ids)
        return {"prompt_tokens": len(self.prompt), "total_tokens": len(self.prompt) + made, "completion_tokens": made}


def as_vllm_says(logprob: float, params: dict[str, Any], kind: str) -> float:
    """The log-probability under ``--logprobs-mode``; "temperature" is what no vLLM says, and others do."""
    temperature = params["temperature"]
    if kind == "raw" or temperature in (0.0, 1.0):
        return logprob
    if kind == "processed" and params.get("top_p", 1.0) < 0.01:
        return 0.0
    return logprob * 0.8


def fake_vllm_response(
    prompt: list[int], *, weights: str = "w0", max_tokens: int = 64, min_tokens: int = 0, vocab_size: int = 512,
    eos: int = 2, mean_length: int = 24,
) -> tuple[list[int], list[float]]:  # fmt: skip
    """What the server says to a prompt when nobody cuts it: ids and log-probabilities at temperature 1."""
    params = {"max_tokens": max_tokens, "min_tokens": min_tokens, "temperature": 1.0}
    run = FakeVllmRun("", list(prompt), params, stream=False, token_route=True)
    while run.finish is None:
        run.make_token(weights, "", vocab_size, eos, mean_length)
    return run.ids, run.logprobs
