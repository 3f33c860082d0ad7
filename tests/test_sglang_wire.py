"""Answers of SGLang, cut and repeated in every way: each token once, and nothing but typed errors for nonsense."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_servers.base import uncut
from fake_servers.sglang import FakeSglangRun, answer
from hypothesis import given, settings
from hypothesis import strategies as st
from responses import chunks_of, openai_reader, sglang_reader

from april.core.versions import PolicyVersion
from april.engines.http.response_reader import ResponseReader
from april.engines.http.weight_labels import WeightLabels
from april.engines.protocol import Chunk, EngineFinish
from april.engines.sglang.wire import rid_of
from april.errors import EngineBusy, EngineError, RequestRefused, WireError

RID = "0" * 32
V0 = PolicyVersion(0, 0)
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
QUEUED = {"type": "abort", "message": "Abort in waiting queue"}


LABELS = WeightLabels()
LABELS.present = PolicyVersion(0, 1)
OLD, NEW = LABELS.of(V0), LABELS.of(PolicyVersion(0, 1))


def reader(incremental: bool = True, labels: WeightLabels | None = LABELS) -> ResponseReader:
    return sglang_reader(RID, V0, incremental=incremental, labels=labels)


def a_run(count: int, spans: list[tuple[str, int, int]] | None = None) -> FakeSglangRun:
    ids, logprobs = uncut([5], max_tokens=count, mean_length=10**6) if count else ([], [])
    params = {"max_new_tokens": count, "min_new_tokens": 0, "temperature": 1.0}
    run = FakeSglangRun(rid_of(RID), [5], params, stream=True, ids=ids, logprobs=logprobs)
    run.spans = spans if spans is not None else [(OLD, 0, count)]
    return run


def said(run: FakeSglangRun, upto: int, incremental: bool, label: str = OLD) -> bytes:
    run.flushed = upto
    value = answer(run, label=label, incremental=incremental, spans=True)
    run.sent = upto
    return json.dumps(value).encode()


def together(chunks: list[Chunk]) -> tuple[list[int], list[float]]:
    return [t for c in chunks for t in c.tokens.tolist()], [p for c in chunks for p in c.logprobs.tolist()]


@given(
    count=st.integers(0, 60), cuts=st.sets(st.integers(1, 59)), incremental=st.booleans(), queued=st.booleans(),
    late=st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_any_cut_of_any_answer_gives_every_token_once(
    count: int, cuts: set[int], incremental: bool, queued: bool, late: int
) -> None:
    """Events at any points, an abort while running or in the queue, the last events joined to one or not."""
    run = a_run(count)
    read, chunks = reader(incremental), []
    for upto in sorted(c for c in cuts if c <= count - late):
        chunks += chunks_of(read, said(run, upto, incremental))
    run.finish, run.queue_abort = (QUEUED, True) if queued else (ABORTED, False)
    chunks += chunks_of(read, said(run, count, incremental))
    assert together(chunks) == (run.ids, run.logprobs)
    assert chunks[-1].finish is EngineFinish.ABORT
    assert all(chunk.finish is None for chunk in chunks[:-1])


@given(st.integers(1, 29), st.sets(st.integers(1, 29)), st.integers(1, 29))
@settings(max_examples=100, deadline=None)
def test_versions_are_those_of_the_spans(switch: int, cuts: set[int], seen_from: int) -> None:
    """Weights change at one token, the label in the events at a later one or the same: every token has its version."""
    run = a_run(30, [(OLD, 0, switch), (NEW, switch, 30)])
    read, chunks = reader(), []
    for upto in sorted(cuts):
        # an event says the label at the time when it was sent
        label = NEW if upto > switch or upto >= seen_from else OLD
        chunks += chunks_of(read, said(run, upto, True, label))
    run.finish = {"type": "length", "length": 30}
    chunks += chunks_of(read, said(run, 30, True, NEW))
    assert together(chunks)[0] == run.ids
    assert [c.version.n for c in chunks for _ in c.tokens] == [0] * switch + [1] * (30 - switch)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_answers_raise_nothing_but_engine_errors(data: st.DataObject) -> None:
    """Any byte changed, any end cut off: right tokens or an EngineError."""
    run = a_run(12)
    run.finish = {"type": "length", "length": 12}
    payload = bytearray(said(run, 12, True))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.sampled_from([len(payload), at]))
    try:
        chunks = chunks_of(reader(), bytes(payload[:end]))
    except EngineError:
        return
    assert sum(len(chunk.tokens) for chunk in chunks) in (0, 12)


SAID_SO = {"message": "said so"}


@pytest.mark.parametrize(
    ("event", "error"),
    [
        *(({"error": SAID_SO | {"code": code}}, RequestRefused) for code in (400, 413, 422)),
        *(({"error": SAID_SO | {"code": code}}, EngineBusy) for code in (429, 503)),
        *(({"error": SAID_SO | {"code": code}}, EngineError) for code in (401, 404, 500)),
        ({"error": SAID_SO}, EngineError),
        ({"error": "Unexpected keyword"}, EngineError),
        ({"object": "error", "message": "bad json"}, EngineError),
        ({}, WireError),
        ([], WireError),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["sglang", "openai"])
def test_errors_come_as_events_too(kind: str, event: Any, error: type[EngineError]) -> None:
    """By their code, as a status has one; only 400, 413 and 422 are the request's own fault."""
    read = reader() if kind == "sglang" else openai_reader()
    with pytest.raises(EngineError) as raised:
        chunks_of(read, json.dumps(event).encode())
    assert type(raised.value) is error
    assert event == [] or "error" not in event or event["error"] != SAID_SO or "said so" in str(raised.value)


def test_only_the_engines_own_labels_are_versions() -> None:
    """Nothing else: no other engine's, none older than the request, none that the server has not confirmed."""
    ours, theirs = WeightLabels(), WeightLabels()
    ours.present = PolicyVersion(3, 17)
    label = ours.of(PolicyVersion(3, 17))
    assert label.startswith("v3.17-")
    assert ours.version_of(label, V0) == ours.version_of(label, PolicyVersion(3, 17)) == PolicyVersion(3, 17)
    end = label.removeprefix("v3.17")
    for other in (
        theirs.of(PolicyVersion(3, 17)), "3.17", "default", "", "v3.17", label[1:], f"v03.17{end}", f"v3.17.1{end}",
        f"v-3.17{end}", f"v3.x{end}", f"v\u0663.17{end}", f"v3{end}", end, f"v{end}", f"{label} ",
        ours.of(PolicyVersion(3, 18)),
    ):  # fmt: skip
        assert ours.version_of(other, V0) is None
    assert ours.version_of(label, PolicyVersion(4, 0)) is None
    # the label that a request was sent under is its own, whatever was confirmed since
    assert ours.version_of(ours.of(PolicyVersion(4, 0)), PolicyVersion(4, 0)) == PolicyVersion(4, 0)


def test_tokens_under_other_labels_are_refused() -> None:
    """Those before them, of the weights that the request was sent to, are kept."""
    labels, other = WeightLabels(), WeightLabels().of(PolicyVersion(0, 2))
    labels.present, sent = PolicyVersion(0, 2), PolicyVersion(0, 1)
    run = a_run(30, [(labels.of(sent), 0, 12), (other, 12, 30)])
    run.finish = {"type": "length", "length": 30}
    read = sglang_reader(RID, sent, labels=labels)
    read.read([said(run, 30, True, other)])
    chunks = read.take()
    assert together(chunks)[0] == run.ids[:12]
    assert {chunk.version for chunk in chunks} == {sent}
    assert other in str(read.failure)
