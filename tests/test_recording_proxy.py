"""The recording proxy before the real servers: what it writes down of the answers that pass through it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.real_engines.recording_proxy import tokens_in


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
VLLM = [event({"choices": [{"token_ids": ids}]}) for ids in ([4, 5], [6], [])]


def sglang(ids: list[int], total: int) -> bytes:
    return event({"output_ids": ids, "meta_info": {"completion_tokens": total}})


CUMULATIVE = [sglang([4], 1), sglang([4, 5], 2), sglang([4, 5, 6], 3)]
INCREMENTAL = [sglang([4], 1), sglang([5, 6], 3), sglang([], 3)]
ECHO = [sglang([4, 5], 2), sglang([6, 6], 3)]


@pytest.mark.parametrize("events", [VLLM, CUMULATIVE, INCREMENTAL], ids=["vllm", "all", "new"])
def test_every_wire_is_read(events: list[bytes]) -> None:
    """vLLM's and OpenAI's deltas, SGLang's repeated and its incremental events; half events not."""
    body = b"".join(events)
    assert tokens_in(body + DONE, streamed=True) == [4, 5, 6]
    assert tokens_in(body.replace(b"\n", b"\r\n"), streamed=True) == [4, 5, 6]
    assert tokens_in(events[0] + events[1][:-1], streamed=True) == tokens_in(events[0], streamed=True)


def test_what_a_server_sends_beyond_its_own_count_is_told_apart() -> None:
    """SGLang's echo of the last token at an abort is no token."""
    assert tokens_in(b"".join(ECHO), streamed=True) == [4, 5, 6]
