"""How large the answer to a request may become; what is larger is no answer to it."""

from __future__ import annotations

from april.engines.protocol import Request

BYTES_PER_TOKEN = 1 << 12
"""Of JSON, beyond what any token takes: some 140 on vLLM, 2,000 for the longest with its text, bytes and all. Those of
the prompt count as well: a vLLM that returns routed experts sends up to 2,000 for each of them, and others its id."""
OTHER_BYTES = 1 << 20


def answer_bytes(request: Request) -> int:
    """Most bytes of the answer, or of one event of its stream, as some servers repeat everything in each event."""
    return OTHER_BYTES + BYTES_PER_TOKEN * (len(request.token_ids) + request.sampling.max_tokens)
