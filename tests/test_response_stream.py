"""What a stream has brought when its connection breaks is kept, and an end that nothing can follow is the end."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from responses import sglang_reader

from april.core.sampling import SamplingParams
from april.engines.http.response_stream import Endpoint, ResponseStream
from april.engines.http.server_engine import Admission
from april.engines.http.weight_labels import WeightLabels
from april.engines.protocol import AbortMeans, EngineFinish, Request
from april.engines.sglang.wire import rid_of
from april.errors import EngineUnreachable

REQUEST = Request(attempt_id="0" * 32, token_ids=np.array([1, 2], np.int32), sampling=SamplingParams(8))


def event(ids: list[int], total: int, finish: str | None) -> bytes:
    meta = {
        "id": rid_of(REQUEST.attempt_id), "finish_reason": finish and {"type": finish}, "completion_tokens": total,
        "output_token_logprobs": [[-1.0, i, None] for i in ids],
    }  # fmt: skip
    return b"data: " + msgspec.json.encode({"output_ids": ids, "meta_info": meta}) + b"\n\n"


class _Breaks:
    """The client and its answer: the pieces, then a broken connection."""

    url = "http://127.0.0.1:1"
    broken = False

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    async def post(self, route: str, body: bytes) -> _Breaks:
        return self

    async def read(self) -> bytes:
        if not self._pieces:
            raise EngineUnreachable("it broke")
        return self._pieces.pop(0)

    def close(self) -> None:
        pass


async def read(client: Any, *, needs_done: bool) -> tuple[list[int], EngineFinish | None, bool]:
    """Tokens, finish, and whether the break was raised."""
    endpoint = Endpoint(
        client=client, route="/generate", admission=Admission(), labels=WeightLabels(),
        prepare=lambda *_: (sglang_reader(REQUEST.attempt_id), b"{}"), abort_means=AbortMeans.BY_ID,
        marks_end=needs_done,
    )  # fmt: skip
    stream = ResponseStream(endpoint, REQUEST, streamed=True)
    tokens: list[int] = []
    finish = None
    try:
        async for chunk in stream:
            tokens += chunk.tokens.tolist()
            finish = chunk.finish
    except EngineUnreachable:
        return tokens, finish, True
    finally:
        await stream.aclose()
    return tokens, finish, False


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("needs_done", [False, True])
def test_a_connection_that_breaks(ended: bool, needs_done: bool) -> None:
    """All tokens are kept; only where no mark is awaited after the finish is the request over, and nothing raised."""
    pieces = (event([5, 6], 2, None), event([7], 3, "stop" if ended else None))
    sure = ended and not needs_done

    found = asyncio.run(read(_Breaks(*pieces), needs_done=needs_done))

    assert found == ([5, 6, 7], EngineFinish.STOP if sure else None, not sure)


def test_the_mark_at_the_end_makes_a_finish_sure() -> None:
    """What breaks after it breaks nothing."""
    pieces = (event([5], 1, "length"), b"data: [DONE]\n\n")

    assert asyncio.run(read(_Breaks(*pieces), needs_done=True)) == ([5], EngineFinish.LENGTH, False)
