"""Several answers that are looked at in one go are read like one after the other, broken ones too."""

from __future__ import annotations

import pytest
from responses import chunks_of, openai_reader, sglang_reader, vllm_reader

from april.engines.protocol import Chunk
from april.engines.sglang import wire as sglang_wire
from april.errors import WireError


def vllm_event(token: int, count: int) -> bytes:
    return b'{"choices":[{"token_ids":[%d],"logprobs":{"content":[{"token_id":%d,"logprob":-1.0}]}}]}' % (token, token)


def sglang_event(token: int, count: int) -> bytes:
    rid = sglang_wire.rid_of("a").encode()
    meta = b'{"id":"%b","completion_tokens":%d,"output_token_logprobs":[[-1.0,%d,null]]}' % (rid, count, token)
    return b'{"output_ids":[%d],"meta_info":%b}' % (token, meta)


def openai_event(token: int, count: int) -> bytes:
    return b'{"choices":[{"token_ids":[%d],"logprobs":{"token_logprobs":[-1.0]}}]}' % token


SERVERS = [
    (vllm_reader, vllm_event), (sglang_reader, sglang_event), (openai_reader, openai_event),
]  # fmt: skip
EACH = pytest.mark.parametrize(("reader", "event"), SERVERS, ids=["vllm", "sglang", "openai"])


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens.tolist()]


@EACH
def test_together_as_one_by_one(reader, event) -> None:  # type: ignore[no-untyped-def]
    """The same tokens, in one chunk."""
    events = [event(token, token - 6) for token in (7, 8, 9)]
    together, alone = chunks_of(reader(), *events), reader()
    assert len(together) == 1
    assert tokens_of(together) == [7, 8, 9] == tokens_of([chunk for e in events for chunk in chunks_of(alone, e)])


def two_in_one(event):  # type: ignore[no-untyped-def]
    return [event(2, 2) + b"," + event(3, 3), event(4, 4)]


def one_in_two(event):  # type: ignore[no-untyped-def]
    """Halves that make one answer when put together."""
    first, second = event(2, 2).split(b":", 1)
    return [first[:1] + b'"x":[1', b"2]," + first[1:] + b":" + second]


@pytest.mark.parametrize("broken", [two_in_one, one_in_two])
@EACH
def test_events_that_are_no_answers_are_errors(reader, event, broken) -> None:  # type: ignore[no-untyped-def]
    """No token is passed over without a word: what came before counts, and the broken event is an error."""
    read = reader()
    read.read([event(1, 1), *broken(event)])
    assert tokens_of(read.take()) == [1]
    assert isinstance(read.failure, WireError)
