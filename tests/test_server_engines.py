"""Engines before fake servers of every kind: every token once, whatever a server does with its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from fake_servers.base import AT_ONCE, PlannedFault, RequestFault, uncut
from fake_servers.vllm import HARMLESS
from server_fixtures import BOTH, KINDS, PROMPT, Got, begun, beside, connected, read, request, served, until

from april.core.versions import PolicyVersion
from april.engines.openai.engine import OpenAIEngine
from april.engines.protocol import AbortMeans, EngineFinish
from april.errors import EngineBusy, EngineError, EngineUnreachable, RequestRefused, WireError

MODES: dict[str, list[dict[str, Any]]] = {
    "vllm": [
        {},
        {"config": {"max_token_loss": 0}},
        {"release": 33},
    ],
    "sglang": [
        {"incremental": True},
        {"incremental": False},
        {"incremental": False, "config": {"max_token_loss": 5}},
        {"incremental": True, "config": {"max_token_loss": 0}},
    ],
}
"""Servers with an abort that returns tokens."""
CLOSING: list[tuple[str, dict[str, Any]]] = [
    ("vllm", {"developer": False}), ("vllm", {"scale_out": False}), ("vllm", {"processes": 2}),
    ("openai", {}),
]  # fmt: skip
"""Servers whose requests end only with their connection."""
EVERY_MODE = [(kind, mode) for kind, modes in MODES.items() for mode in modes]
LONG = 10**6


@pytest.mark.parametrize(("kind", "mode"), [*EVERY_MODE, *CLOSING], ids=str)
async def test_every_token_comes_once_with_its_logprob(kind: str, mode: dict[str, Any]) -> None:
    """Whatever the route, streaming or not: 40 requests at a time are the server's own sequences, EOS included."""
    async with served(kind, **mode, max_running=16) as (server, engine):
        prompts = [[*PROMPT, i] for i in range(40)]
        got = await asyncio.gather(*(read(engine, request(p)) for p in prompts))
        for prompt, g in zip(prompts, got, strict=True):
            ids, logprobs = uncut(prompt)
            assert g.error is None
            assert g.tokens == ids
            assert g.logprobs == logprobs
            assert set(g.versions) == {PolicyVersion(0, 0)}
            assert g.finish is (EngineFinish.STOP if ids[-1] == 2 else EngineFinish.LENGTH)
        assert server.open_requests == 0


@pytest.mark.parametrize(("kind", "mode"), EVERY_MODE, ids=str)
@pytest.mark.parametrize("steps", [0, 1, 2, 17, 49])
async def test_cut_and_continued_equals_uncut(kind: str, mode: dict[str, Any], steps: int) -> None:
    """Aborted while running, and in the queue, and continued: the sequence of the uncut request, nothing lost."""
    async with served(kind, **mode, stepped=True, max_running=4, mean_length=LONG) as (server, engine):
        prompts = [[*PROMPT, i] for i in range(6)]
        asked = [request(p) for p in prompts]
        reading = [asyncio.create_task(read(engine, a)) for a in asked]
        await until(lambda: server.open_requests == 6)
        server.step(steps)
        await engine.abort([a.attempt_id for a in asked])
        cut = await asyncio.gather(*reading)
        # a running request of SGLang makes one token more
        made = steps + 1 if steps and kind == "sglang" else steps
        assert sorted(len(g.tokens) for g in cut) == [0, 0, *[made] * 4]
        assert {g.finish for g in cut} == {EngineFinish.ABORT}
        if kind == "vllm":
            assert all(len(body["request_ids"]) == 6 for _, body in server.aborts)
            assert len(server.aborts) + len(server.pauses) == 1
        else:
            assert all("abort_all" not in body for body in server.aborts)
        server.go_on()
        for prompt, g in zip(prompts, cut, strict=True):
            rest = await read(engine, request(prompt + g.tokens, 64 - len(g.tokens)))
            ids, logprobs = uncut(prompt, mean_length=LONG)
            assert g.tokens + rest.tokens == ids
            assert g.logprobs + rest.logprobs == logprobs


@pytest.mark.parametrize("kind", BOTH)
async def test_aborts_hit_nobody_else(kind: str) -> None:
    """Ids that nobody has are ignored; requests of another client go on when april aborts all of its own."""
    async with served(kind, stepped=True, mean_length=LONG) as (server, engine):
        other = await beside(kind, server)
        readings = [asyncio.create_task(read(e, request())) for e in (engine, other)]
        await until(lambda: server.open_requests == 2)
        await engine.abort(["f" * 32])
        assert server.aborts == []
        await engine.abort(None)
        assert (await readings[0]).finish is EngineFinish.ABORT
        assert server.open_requests == 1
        server.go_on()
        assert (await readings[1]).finish is EngineFinish.LENGTH
        await other.close()


TYPED: dict[RequestFault, type[EngineError]] = {
    RequestFault.SERVER_DIES: EngineUnreachable,
    RequestFault.BREAK_OFF: EngineUnreachable,
    RequestFault.EXTRA_LOGPROBS: WireError,
    RequestFault.WRONG_COUNT: WireError,
    RequestFault.NULL_LOGPROB: WireError,
    RequestFault.NAN_LOGPROB: WireError,
    RequestFault.OTHER_IDS: WireError,
    RequestFault.TRUNCATED: WireError,
    RequestFault.GAP_IN_SPANS: WireError,
    RequestFault.FOREIGN_LABEL: EngineError,
    RequestFault.DOUBLED_EVENT: WireError,
    RequestFault.ENDS_TWICE: WireError,
    RequestFault.OTHER_PROMPT: WireError,
    RequestFault.NO_FINISH: EngineUnreachable,
    RequestFault.BUSY: EngineBusy,
    RequestFault.FAILS: EngineError,
    RequestFault.REDIRECT: EngineError,
    RequestFault.LIMITED: EngineBusy,
    RequestFault.REFUSED: RequestRefused,
    RequestFault.GIANT: EngineError,
}
"""What servers of both kinds may do, and the error that it is."""
OF_VLLM: dict[RequestFault, type[EngineError]] = {
    RequestFault.ENGINE_DIES: EngineError,
    RequestFault.NO_DONE: EngineUnreachable,
}
OF_SGLANG: dict[RequestFault, type[EngineError]] = {
    RequestFault.TIMED_OUT: EngineBusy,
    RequestFault.OTHER_RID: WireError,
    RequestFault.SHRINKS: WireError,
}
KEPT = {
    RequestFault.BREAK_OFF: 6, RequestFault.ENGINE_DIES: 6, RequestFault.TRUNCATED: 5, RequestFault.NAN_LOGPROB: 5,
    RequestFault.NULL_LOGPROB: 5, RequestFault.EXTRA_LOGPROBS: 5, RequestFault.WRONG_COUNT: 64,
    RequestFault.ENDS_TWICE: 64, RequestFault.NO_FINISH: 64, RequestFault.NO_DONE: 64, RequestFault.OTHER_PROMPT: 0,
    RequestFault.REDIRECT: 0, RequestFault.BUSY: 0, RequestFault.LIMITED: 0, RequestFault.REFUSED: 0,
    RequestFault.FAILS: 0, RequestFault.GIANT: 0,
}  # fmt: skip
"""Tokens of an OpenAI-compatible server that are handed over before the error; it goes wrong at the sixth."""
STREAM_ONLY = (RequestFault.NO_DONE, RequestFault.ENDS_TWICE)


def faults() -> Iterator[tuple[str, RequestFault, bool, int, dict[str, Any]]]:
    """(kind, fault, streamed, tokens before it, options of the server)."""
    for stream in (True, False):
        for fault in TYPED | OF_VLLM:
            yield "vllm", fault, stream, 3, {}
        for fault in TYPED | OF_SGLANG:
            for after in (0, 20):
                yield "sglang", fault, stream, after, {"incremental": stream}
    for fault in KEPT:
        yield "openai", fault, True, 0 if fault is RequestFault.OTHER_PROMPT else 6, {}


@pytest.mark.parametrize(("kind", "fault", "stream", "after", "options"), list(faults()), ids=str)
async def test_faults_are_typed_and_bring_no_wrong_token(
    kind: str, fault: RequestFault, stream: bool, after: int, options: dict[str, Any]
) -> None:
    """What came before is a true beginning of the response; then the error of its kind; nothing is left open."""
    harmless = fault in STREAM_ONLY and not stream
    async with served(kind, PlannedFault(fault, after_tokens=after), **options, mean_length=LONG) as (
        server, engine
    ):  # fmt: skip
        got = await read(engine, request(max_tokens=64, stream=stream and kind == "vllm"))
        ids, logprobs = uncut(PROMPT, mean_length=LONG)
        if fault is RequestFault.DOUBLED_EVENT and kind == "vllm":  # that it was one shows at the end only
            assert type(got.error) is WireError
            return
        assert got.tokens == ids[: len(got.tokens)]
        assert got.logprobs == logprobs[: len(got.tokens)]
        if harmless:
            assert got.error is None
            assert got.tokens == ids
            return
        # some were handed over before: nobody knows which of them are of other weights
        too_late = fault is RequestFault.FOREIGN_LABEL and (got.tokens or (stream and kind == "vllm"))
        assert type(got.error) is (WireError if too_late else (TYPED | OF_VLLM | OF_SGLANG)[fault]), got.error
        assert got.finish is None
        assert engine._admission.inside == set()
        if fault is RequestFault.LIMITED:
            assert isinstance(got.error, EngineBusy)
            assert got.error.retry_after_s == 2.0
        if fault is RequestFault.NO_DONE:
            assert got.tokens == ids
        if stream and after == 20 and fault is not RequestFault.GAP_IN_SPANS:
            assert len(got.tokens) >= 16 or fault in AT_ONCE
        if kind == "openai":
            assert len(got.tokens) == KEPT[fault] or fault is RequestFault.BREAK_OFF  # which may overtake what was sent
            assert (await read(engine, request())).tokens == ids
        if kind == "sglang":
            if fault is RequestFault.SERVER_DIES:
                await server.restart()
            again = await read(engine, request())
            # the restarted server has weights that april did not name
            assert (again.tokens == ids) == (fault is not RequestFault.SERVER_DIES)
        await until(lambda: server.open_requests == 0)


def quirks() -> Iterator[tuple[str, RequestFault, bool, dict[str, Any]]]:
    """(kind, fault, streamed, options of the server)."""
    for stream in (True, False):
        for fault in (*HARMLESS, RequestFault.LOST_PARTIAL, RequestFault.REPEATED_LAST):
            yield "vllm", fault, stream, {}
        for fault in (RequestFault.REPEATED_LAST, RequestFault.UNCOUNTED_LAST, RequestFault.NO_DONE,
                      RequestFault.UNASKED_ABORT, RequestFault.ABORT_UNSEEN):  # fmt: skip
            yield "sglang", fault, stream, {"incremental": stream}


@pytest.mark.parametrize(("kind", "fault", "stream", "options"), list(quirks()), ids=str)
async def test_aborts_and_ends_that_go_wrong(
    kind: str, fault: RequestFault, stream: bool, options: dict[str, Any]
) -> None:
    """Asked again where the first abort was not seen; lost tokens are never invented, repeated ones never taken; an
    uncounted last token, a missing mark at SGLang's end and an abort of the server's own change nothing."""
    planned = PlannedFault(fault, after_tokens=6 if kind == "vllm" or fault is RequestFault.UNASKED_ABORT else 0)
    async with served(kind, planned, **options, mean_length=LONG, stepped=True) as (server, engine):
        asked = request(stream=stream and kind == "vllm")
        reading = await begun(server, read(engine, asked))
        server.step(6)
        if fault is RequestFault.NO_DONE:
            server.go_on()
        while server.open_requests:
            if fault is RequestFault.UNASKED_ABORT:
                server.step()
            elif fault is RequestFault.NO_DONE:
                await asyncio.sleep(0)
            else:
                await engine.abort([asked.attempt_id])
        got = await reading
        assert got.tokens == uncut(PROMPT, mean_length=LONG)[0][: len(got.tokens)]
        if (kind, fault) == ("vllm", RequestFault.REPEATED_LAST):
            assert isinstance(got.error, WireError)
            return
        assert got.error is None
        assert got.finish is (EngineFinish.LENGTH if fault is RequestFault.NO_DONE else EngineFinish.ABORT)
        # a running request of SGLang makes one token more when it is aborted
        more = kind == "sglang" and fault is not RequestFault.UNASKED_ABORT
        made = 64 if fault is RequestFault.NO_DONE else 6 + more
        assert len(got.tokens) == made or fault is RequestFault.LOST_PARTIAL


@pytest.mark.parametrize("kind", BOTH)
async def test_what_the_server_must_not_be_asked(kind: str) -> None:
    """Too long, outside the vocabulary, empty: refused here, for the server cuts or dies without a word."""
    async with served(kind, context=100) as (server, engine):
        room = engine.capabilities.max_context
        for prompt, words in (
            ([1] * (room - 10), f"room for {room}"), ([512], "vocabulary of 512"), ([5, -1], "vocabulary of 512"),
            ([], "no token ids"),
        ):  # fmt: skip
            got = await read(engine, request(prompt, 11))
            assert type(got.error) is RequestRefused
            assert words in str(got.error)
        assert not server.runs


@pytest.mark.parametrize("kind", BOTH)
async def test_closing_breaks_requests_off(kind: str) -> None:
    """Also one whose abort never ends: an EngineError behind a true beginning of its response."""
    fault = (RequestFault.ABORT_NEVER_ENDS,) if kind == "vllm" else ()
    async with served(kind, *fault, stepped=True, mean_length=LONG) as (server, engine):
        asked, got = request(stream=True), Got()
        reading = await begun(server, read(engine, asked, got))
        server.step(20)
        await until(lambda: len(got.tokens) > 0)
        if fault:
            await engine.abort([asked.attempt_id])
        await engine.close()
        await reading
        assert isinstance(got.error, EngineError)
        assert got.tokens == uncut(PROMPT, mean_length=LONG)[0][: len(got.tokens)]


@pytest.mark.parametrize(("kind", "mode"), CLOSING, ids=str)
async def test_closed_and_continued_equals_uncut(kind: str, mode: dict[str, Any]) -> None:
    """Without any abort a request ends with its stream: what was read is kept, and the server is rid of the rest."""
    async with served(kind, **mode, stepped=True, mean_length=LONG) as (server, engine):
        assert isinstance(engine, OpenAIEngine)
        assert engine.capabilities.abort_means is AbortMeans.CLOSE
        held: list[int] = []
        for steps in (1, 5, 2, 4, 3):
            asked = request(PROMPT + held, 64 - len(held))
            reading = await begun(server, read(engine, asked))
            server.step(steps)
            await until(lambda steps=steps: server.runs[-1].sent == steps)
            await engine.abort([asked.attempt_id])
            got = await reading
            assert (got.error, got.finish) == (None, EngineFinish.ABORT)
            held += got.tokens
            await until(lambda: server.open_requests == 0)
        server.go_on()
        held += (await read(engine, request(PROMPT + held, 64 - len(held)))).tokens
        assert held == uncut(PROMPT, mean_length=LONG)[0]


async def test_closing_streams_ends_those_that_were_named() -> None:
    """At once, though the server is silent; others go on, unknown ids are ignored, and unread tokens can be counted."""
    async with served("openai", tokens_ahead=3, stepped=True, mean_length=LONG) as (server, engine):
        asked = [request([*PROMPT, i]) for i in range(30)]
        readings = [asyncio.create_task(read(engine, a)) for a in asked]
        await until(lambda: server.open_requests == 30)
        server.step(8)
        await until(lambda: all(run.sent == 5 for run in server.runs))
        await engine.abort([asked[0].attempt_id, "unknown"])
        answers = [await readings[0]]
        assert not any(reading.done() for reading in readings[1:])
        await engine.abort()
        answers += await asyncio.gather(*readings[1:])
        for a, got in zip(asked, answers, strict=True):
            assert got.finish is EngineFinish.ABORT
            assert got.tokens == uncut(a.token_ids, mean_length=LONG)[0][: len(got.tokens)]
        await until(lambda: server.open_requests == 0)
        assert server.unread_tokens == 30 * 3


async def test_an_abort_skips_no_end_that_was_read() -> None:
    """The server's end had come before the abort closed the stream: it is handed over with all of its tokens."""
    async with served("openai", stepped=True) as (server, engine):
        chunks = engine.generate(request(max_tokens=20, min_tokens=20))
        asking = asyncio.ensure_future(anext(chunks))
        await until(lambda: server.open_requests == 1)
        server.step()
        tokens = (await asking).tokens.tolist()
        server.go_on()
        await until(lambda: server.open_requests == 0)
        (stream,) = engine._endpoint.open_streams.values()
        await until(stream._body._response.content.is_eof)
        await engine.abort()
        rest = [chunk async for chunk in chunks]
        assert tokens + [token for chunk in rest for token in chunk.tokens.tolist()] == server.runs[0].ids
        assert rest[-1].finish is EngineFinish.LENGTH


@pytest.mark.parametrize("kind", KINDS)
async def test_cancelled_requests_leave_nothing_open(kind: str) -> None:
    """Cancelling the reader at any time frees its place, so that pause can return, and the server is rid of it."""
    async with served(kind, mean_length=LONG) as (server, engine):
        server.limit(2)
        for turns in range(12):
            task = asyncio.create_task(read(engine, request()))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await engine.pause()
        server.limit()
        await until(lambda: server.open_requests == 0)


# ---------------------------------------------------------------- vLLM alone


@pytest.mark.parametrize("options", [{}, {"scale_out": False}, {"processes": 2}], ids=str)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_a_server_that_somebody_else_has_paused_is_busy(stream: bool, options: dict[str, Any]) -> None:
    """vLLM 0.33 says so with a status, or inside a stream that has begun: no failure, nothing refused for good."""
    config = {"max_token_loss": 0} if stream else {}
    async with served("vllm", release=33, config=config, **options) as (server, engine):
        server.pause_mode = "abort"
        for _ in range(4):
            got = await read(engine, request())
            assert type(got.error) is EngineBusy
            assert "Generation is paused" in str(got.error)
        server.pause_mode = None
        assert (await read(engine, request())).tokens == uncut(PROMPT)[0]


async def test_as_an_openai_server_one_response_has_one_label() -> None:
    """Where april names no weights it still sees that they have changed under a request."""
    async with served("vllm", release=33, stepped=True, mean_length=LONG) as (server, _):
        server.stepped = False
        engine = await connected("openai", server, logprobs="processed")
        server.stepped = True
        reading = await begun(server, read(engine, request()))
        server.step(3)
        server.label = "somebody's"
        server.go_on()
        got = await reading
        assert type(got.error) is WireError
        assert "somebody's" in str(got.error)
        assert server.runs[-1].params["return_weight_versions"] is True
        await engine.close()


async def test_what_a_request_says() -> None:
    """The route's own id, the whole range of seeds, only the sampled token's log-probability, all limits explicit."""
    async with served("vllm") as (server, engine):
        asked = request(max_tokens=9, min_tokens=3, stop_token_ids=(5, 7), seed=2**63 - 1, top_p=0.5)
        await read(engine, asked)
        (seen,) = server.runs
        assert seen.token_route
        assert seen.name == f"generate-tokens-{asked.attempt_id}"
        wanted = {"max_tokens": 9, "min_tokens": 3, "stop_token_ids": [5, 7], "seed": 2**63 - 1, "top_p": 0.5,
                  "logprobs": 0, "temperature": 1.0, "ignore_eos": False}  # fmt: skip
        assert {key: seen.params[key] for key in wanted} == wanted


async def test_an_answer_with_the_experts_of_the_prompt_is_read() -> None:
    """A server that is told to return routed experts sends those of the prompt's tokens too, a kilobyte for each."""
    prompt, layers, experts = 3_000, 94, 8

    async with served("vllm") as (server, engine):
        server.routed_experts = "A" * (prompt * layers * experts * 4 // 3)  # base64 of one byte each
        got = await read(engine, request([11] * prompt, max_tokens=16))
        assert got.error is None
        assert got.tokens


# ---------------------------------------------------------------- SGLang alone


async def test_a_retracted_request_loses_less_than_an_interval() -> None:
    """Put back for want of memory and aborted there: what the server still had is lost, and no token comes twice."""
    for loss, steps, expected in ((1, 40, 40), (8, 40, 33), (None, 40, 33)):
        fault = PlannedFault(RequestFault.RETRACTED, after_tokens=steps)
        config = {"max_token_loss": loss}
        async with served("sglang", fault, stepped=True, mean_length=LONG, config=config) as (s, engine):
            asked = request()
            reading = asyncio.create_task(read(engine, asked))
            await until(lambda s=s: s.waiting == 1)
            s.step(steps + 1)
            await engine.abort([asked.attempt_id])
            got = await reading
            assert got.error is None
            assert got.finish is EngineFinish.ABORT
            assert got.tokens == uncut(PROMPT, mean_length=LONG)[0][:expected]


async def test_sampling_is_explicit_and_eos_is_kept() -> None:
    """Nothing is left to the server's defaults; min_tokens and stop ids are honoured; EOS is in the tokens."""
    async with served("sglang", mean_length=3) as (server, engine):
        got = await read(engine, request(max_tokens=40, min_tokens=10, temperature=0.7, top_p=0.8))
        sent = server.runs[0].params
        assert len(got.tokens) >= 10
        assert got.tokens[-1] == 2 or len(got.tokens) == 40
        assert {"temperature": 0.7, "top_p": 0.8, "top_k": -1, "ignore_eos": False}.items() <= sent.items()
        assert "sampling_seed" not in sent
        stop = uncut(PROMPT, mean_length=LONG)[0][4]
        server.mean_length = LONG
        got = await read(engine, request(stop_token_ids=(stop,)))
        assert got.finish is EngineFinish.STOP
        assert got.tokens[-1] == stop


async def test_a_request_that_is_watched_comes_in_small_pieces() -> None:
    async with served("sglang", mean_length=LONG, incremental=False) as (server, engine):
        got = await read(engine, request(stream=True))
        assert len(got.chunks) > 4
        assert server.runs[0].params["stream_interval"] == 2
