"""The recording proxy before the real servers: what it writes down of the answers that pass through it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from fake_servers.openai import FakeOpenAIServer
from server_fixtures import Got, begun, connected, listening, read, request, until

from april.engines.protocol import AbortMeans, EngineFinish
from april.testing.conformance import Broken
from tests.real_engines.recording_proxy import RecordingProxy, tokens_in


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


async def test_a_client_that_hangs_up_is_told_from_one_that_reads_to_the_end() -> None:
    """What comes after the first has gone is no loss, and its server hears of it; any token of the second is one."""
    server = FakeOpenAIServer(mean_length=10**6)
    async with listening(server), RecordingProxy(server.url) as proxy:
        engine = await connected("openai", proxy)
        whole, cut, of_cut = request(max_tokens=9, seed=1), request(max_tokens=99, seed=2), Got()
        tokens = np.array((await read(engine, whole)).tokens, np.int32)
        server.stepped = True
        reading = await begun(server, read(engine, cut, of_cut))
        server.step(3)
        await until(lambda: len(of_cut.tokens) > 0)
        await engine.abort([cut.attempt_id])
        await reading
        await until(lambda: server.open_requests == 0 and proxy.answers(cut)[0].done)
        aborted = cut, np.array(of_cut.tokens, np.int32), EngineFinish.ABORT
        assert [answer.closed_early for asked in (whole, cut) for answer in proxy.answers(asked)] == [False, True]
        assert proxy.compare([(whole, tokens, EngineFinish.LENGTH), aborted], AbortMeans.BY_ID)["lost"] == 0
        with pytest.raises(Broken, match="1 of 12 tokens are lost"):
            proxy.compare([(whole, tokens[:-1], EngineFinish.LENGTH), aborted], AbortMeans.BY_ID)
        await engine.close()
