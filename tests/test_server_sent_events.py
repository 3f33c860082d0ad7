"""Events out of bytes that are cut anywhere, and out of bytes that are no events."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from april.engines.http import response_stream
from april.engines.http.response_stream import EventSplitter
from april.errors import EngineError, WireError

STREAM = (
    "\ufeff: comment\r\nevent: token\r\nid: 1\r\ndata: {\"a\":\"\u20ac\"}\r\n\r\n"
    "data:first\ndata: second\n\nretry: 3\n\ndata: [DONE]\n\n"
).encode()
EVENTS = ['{"a":"\u20ac"}'.encode(), b"first\nsecond", b"[DONE]"]


def events_of(pieces: list[bytes]) -> list[bytes]:
    splitter = EventSplitter()
    return [event for piece in pieces for event in splitter.feed(piece)] + splitter.end()


def pieces_of(raw: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(cuts), len(raw)]
    return [raw[a:b] for a, b in pairwise(at)]


def test_byte_by_byte() -> None:
    """The smallest pieces, inside a character and between CR and LF included."""
    assert events_of([bytes([b]) for b in STREAM]) == EVENTS


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


def test_a_line_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: an event beyond the limit is refused while it comes."""
    monkeypatch.setattr(response_stream, "MAX_EVENT_BYTES", 1000)
    splitter = EventSplitter()
    for _ in range(100):
        splitter.feed(b"data: xxxx")
    with pytest.raises(WireError, match="more than 1000 bytes"):
        splitter.feed(b"x")


def test_lines_of_one_event_without_end() -> None:
    """Whole lines are counted as well, until a blank one ends their event."""
    splitter = EventSplitter(limit=1000)
    for _ in range(10):
        assert splitter.feed(b"data: " + b"x" * 90 + b"\n") == []
    assert len(splitter.feed(b"\n")[0]) == 909
    for _ in range(10):
        splitter.feed(b"data: " + b"x" * 90 + b"\n")
    with pytest.raises(WireError, match="more than 1000 bytes"):
        splitter.feed(b"data: " + b"x" * 90 + b"\n")


def test_a_stream_that_ends_inside_an_event() -> None:
    """Half a line is no event; the connection has broken, and what came before is as good as ever."""
    splitter = EventSplitter()
    splitter.feed(b"data: whole\n\ndata: hal")
    with pytest.raises(EngineError, match="ends inside an event") as caught:
        splitter.end()
    assert not isinstance(caught.value, WireError)
