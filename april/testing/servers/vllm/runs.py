"""What a fake vLLM server generates and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from april.testing.servers.fake_request import FakeRequest


@dataclass(slots=True, eq=False)
class FakeVllmRun(FakeRequest):
    """One request at the server."""

    MIN_TOKENS, MAX_TOKENS = "min_tokens", "max_tokens"

    token_route: bool = True
    usage_asked: bool = False
    """Its stream ends with the usage."""
    logprobs_mode: str = "processed"
    process: int = 0
    """API process that took it; an abort by id reaches process 0 only."""

    def as_said(self, logprob: float) -> float:
        """The log-probability under ``--logprobs-mode``; "temperature" is what no vLLM says, and others do."""
        temperature = self.params["temperature"]
        if self.logprobs_mode == "raw" or temperature in (0.0, 1.0):
            return logprob
        if self.logprobs_mode == "processed" and self.params.get("top_p", 1.0) < 0.01:
            return 0.0
        return logprob * 0.8

    def stopped(self) -> str:
        return "stop"

    def used_up(self) -> str:
        return "length"

    def aborted(self) -> str:
        return "abort"

    def answer(self, model: str, *, spans: bool) -> dict[str, Any]:
        """What has not been sent, in the shape of the request's route."""
        ids, logprobs = self.ids[self.sent :], self.logprobs[self.sent :]
        versions = [{"version": v, "start": a, "end": b} for v, a, b in self.spans] if spans and self.finish else None
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish, "stop_reason": None, "token_ids": ids}
        if self.token_route:
            choice["weight_versions"] = versions
            scored = [{"token_id": i, "logprob": p, "rank": 1} for i, p in zip(ids, logprobs, strict=True)]
            choice["logprobs"] = {"content": [s | {"top_logprobs": [dict(s)]} for s in scored]}
            said = {"request_id": self.name, "model": model, "output_mode": "tokens"}
        else:
            texts = [f"<{i}>" for i in ids]
            choice |= {"text": "".join(texts), "logprobs": {
                "text_offset": [0] * len(ids), "token_logprobs": logprobs, "tokens": texts,
                "top_logprobs": [{t: p} for t, p in zip(texts, logprobs, strict=True)],
            }}  # fmt: skip
            if self.params.get("return_weight_versions"):
                choice["weight_versions"] = versions
            said = {"id": self.name.rsplit("-", 1)[0], "object": "text_completion", "model": model}
        return said | {"choices": [choice], "usage": None if self.stream else self.usage()}

    def usage(self) -> dict[str, int]:
        """The server's own count of the tokens."""
        made = len(self.ids)
        return {"prompt_tokens": len(self.prompt), "total_tokens": len(self.prompt) + made, "completion_tokens": made}


def fake_vllm_response(
    prompt: list[int], *, weights: str = "w0", max_tokens: int = 64, min_tokens: int = 0, vocab_size: int = 512,
    eos: int = 2, mean_length: int = 24,
) -> tuple[list[int], list[float]]:  # fmt: skip
    """What the server says to a prompt when nobody cuts it: ids and log-probabilities at temperature 1."""
    params = {"max_tokens": max_tokens, "min_tokens": min_tokens, "temperature": 1.0}
    return FakeVllmRun("", list(prompt), params, stream=False).whole(weights, "", vocab_size, eos, mean_length)
