"""What a stream has brought when its connection breaks is kept, and an end that nothing can follow is the end."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from responses import route_of, sglang_reader

from april.core.sampling import SamplingParams
from april.engines.http.response_stream import EventSplitter, ResponseStream
from april.engines.protocol import EngineFinish, Request
from april.engines.sglang.wire import rid_of
from april.errors import EngineError, EngineUnreachable, RequestRefused, WireError

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

    async def post(self, route: str, body: bytes, headers: object = None) -> _Breaks:
        return self

    async def read(self) -> bytes:
        if not self._pieces:
            raise EngineUnreachable("it broke")
        return self._pieces.pop(0)

    def close(self) -> None:
        pass


async def read(client: Any, *, needs_done: bool) -> tuple[list[int], EngineFinish | None, bool]:
    """Tokens, finish, and whether the break was raised."""
    endpoint = route_of(client, lambda *_: (sglang_reader(REQUEST.attempt_id), b"{}"), marks_end=needs_done)
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


STREAM = (
    ": comment\r\nevent: token\r\nid: 1\r\ndata: {\"a\":\"\u20ac\"}\r\n\r\n"
    "data:first\ndata: second\n\nretry: 3\n\ndata: [DONE]\n\n"
).encode()
EVENTS = ['{"a":"\u20ac"}'.encode(), b"first\nsecond", b"[DONE]"]


def events_of(pieces: list[bytes]) -> list[bytes]:
    splitter = EventSplitter(1 << 20)
    return [event for piece in pieces for event in splitter.feed(piece)] + splitter.end()


def pieces_of(raw: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(cuts), len(raw)]
    return [raw[a:b] for a, b in pairwise(at)]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_split_gives_the_same_events(cuts: list[int]) -> None:
    """Where the network cuts the stream changes nothing."""
    assert events_of(pieces_of(STREAM, cuts)) == EVENTS


@settings(derandomize=True, deadline=None)
@given(
    st.integers(0, len(STREAM)), st.integers(0, 20), st.binary(max_size=20), st.lists(st.integers(0, 150), max_size=6)
)
def test_mutations_raise_nothing_but_engine_errors(at: int, cut: int, put: bytes, cuts: list[int]) -> None:
    """And what they give does not depend on the split."""
    raw = STREAM[:at] + put + STREAM[at + cut :]

    def outcome(pieces: list[bytes]) -> list[bytes] | None:
        try:
            return events_of(pieces)
        except EngineError:
            return None

    assert outcome(pieces_of(raw, [min(c, len(raw)) for c in cuts])) == outcome([raw])


@pytest.mark.parametrize("nothing", [b"data:\n\n", b"data: \n\n", b"data\n\n", b"event: ping\r\ndata:\r\n\r\n"])
def test_an_event_without_data_is_none(nothing: bytes) -> None:
    """Servers and proxies keep connections open with it; at the end of the stream too."""
    plain = b"data: {}\n\n"
    assert events_of([nothing + plain + nothing + plain]) == [b"{}", b"{}"]
    assert events_of([plain, nothing, plain]) == [b"{}", b"{}"]
    assert events_of([plain, nothing.rstrip() + b"\n"]) == [b"{}"]


async def test_a_request_with_text_that_cannot_be_encoded_is_refused() -> None:
    """It is the request's own fault, so that the engine gets the next one."""
    endpoint = route_of(None, lambda *_: (sglang_reader(REQUEST.attempt_id), "\ud83d".encode()))
    stream = ResponseStream(endpoint, REQUEST, streamed=True)
    with pytest.raises(RequestRefused, match="surrogates not allowed"):
        await anext(stream)
    await stream.aclose()


def test_a_line_that_never_ends() -> None:
    """Memory is bounded: an event beyond the limit is refused while it comes."""
    splitter = EventSplitter(1000)
    for _ in range(100):
        splitter.feed(b"data: xxxx")
    with pytest.raises(WireError, match="more than 1000 bytes"):
        splitter.feed(b"x")


def test_lines_of_one_event_without_end() -> None:
    """Whole lines are counted as well, until a blank one ends their event."""
    splitter = EventSplitter(1000)
    for _ in range(10):
        assert splitter.feed(b"data: " + b"x" * 90 + b"\n") == []
    assert len(splitter.feed(b"\n")[0]) == 909
    for _ in range(10):
        splitter.feed(b"data: " + b"x" * 90 + b"\n")
    with pytest.raises(WireError, match="more than 1000 bytes"):
        splitter.feed(b"data: " + b"x" * 90 + b"\n")


def test_a_stream_that_ends_inside_an_event() -> None:
    """Half a line is no event; the connection has broken, and what came before is as good as ever."""
    splitter = EventSplitter(1000)
    splitter.feed(b"data: whole\n\ndata: hal")
    with pytest.raises(EngineError, match="ends inside an event") as caught:
        splitter.end()
    assert not isinstance(caught.value, WireError)
