"""The SGLang client against a fake server: every token once, whatever the server does with its answers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from fake_servers.base import PlannedFault, RequestFault
from fake_servers.sglang import FakeSglangServer, fake_sglang_response
from sglang_fixtures import PROMPT, Got, connected, read, request, run, served, until

from april.core.versions import PolicyVersion
from april.engines.protocol import EngineFinish
from april.engines.sglang.engine import SglangEngine
from april.errors import EngineBusy, EngineError, EngineUnreachable, RequestRefused, WireError

MODES: list[dict[str, Any]] = [
    {"incremental": True},
    {"incremental": False},
    {"incremental": False, "config": {"max_token_loss": 5}},
    {"incremental": True, "config": {"max_token_loss": 0}},
    {"incremental": True, "intervals": False},
    {"incremental": True, "spans": False},
    {"incremental": True, "labels": False},
]
"""Ways in which a server may answer."""


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_token_comes_once_with_its_logprob(mode: dict[str, Any]) -> None:
    """Streaming or not, in pieces or repeated: 40 requests at a time are the server's own sequences."""

    async def program() -> None:
        async with served(**mode, max_running=16) as (server, engine):
            prompts = [[*PROMPT, i] for i in range(40)]
            got = await asyncio.gather(*(read(engine, request(p)) for p in prompts))
            for prompt, g in zip(prompts, got, strict=True):
                ids, logprobs = fake_sglang_response(prompt)
                assert g.error is None
                assert g.tokens == ids
                assert g.logprobs == logprobs
                assert set(g.versions) == {PolicyVersion(0, 0)}
                assert g.finish is (EngineFinish.STOP if ids[-1] == 2 else EngineFinish.LENGTH)
            assert server.open_requests == 0

    run(program)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("steps", [0, 1, 2, 17, 49])
def test_cut_and_continued_equals_uncut(mode: dict[str, Any], steps: int) -> None:
    """Aborted while running, and in the queue, and continued: the sequence of the uncut request."""

    async def program() -> None:
        async with served(**mode, stepped=True, max_running=4, mean_length=10**6) as (server, engine):
            prompts = [[*PROMPT, i] for i in range(6)]
            asked = [request(p) for p in prompts]
            reading = [asyncio.create_task(read(engine, a)) for a in asked]
            await until(lambda: server.open_requests == 6)
            server.step(steps)
            await engine.abort([a.attempt_id for a in asked])
            cut = await asyncio.gather(*reading)
            # a running request makes one token more
            assert sorted(len(g.tokens) for g in cut) == [0, 0, *[steps + 1 if steps else 0] * 4]
            assert {g.finish for g in cut} == {EngineFinish.ABORT}
            server.go_on()
            for prompt, g in zip(prompts, cut, strict=True):
                rest = await read(engine, request(prompt + g.tokens, 64 - len(g.tokens)))
                ids, logprobs = fake_sglang_response(prompt, mean_length=10**6)
                assert g.tokens + rest.tokens == ids
                assert g.logprobs + rest.logprobs == logprobs
            assert all("abort_all" not in body for body in server.aborts)

    run(program)


def test_a_retracted_request_loses_less_than_an_interval() -> None:
    """Put back for want of memory and aborted there: what the server still had is lost, and no token comes twice."""

    async def program() -> None:
        for loss, steps, expected in ((1, 40, 40), (8, 40, 33), (None, 40, 33)):
            fault = PlannedFault(RequestFault.RETRACTED, after_tokens=steps)
            async with served(fault, stepped=True, mean_length=10**6, config={"max_token_loss": loss}) as (s, engine):
                asked = request()
                reading = asyncio.create_task(read(engine, asked))
                await until(lambda s=s: s.waiting == 1)
                s.step(steps + 1)
                await engine.abort([asked.attempt_id])
                got = await reading
                assert got.error is None
                assert got.finish is EngineFinish.ABORT
                assert got.tokens == fake_sglang_response(PROMPT, mean_length=10**6)[0][:expected]

    run(program)


TYPED: dict[RequestFault, type[EngineError]] = {
    RequestFault.BREAK_OFF: EngineUnreachable,
    RequestFault.SERVER_DIES: EngineUnreachable,
    RequestFault.TIMED_OUT: EngineBusy,
    RequestFault.EXTRA_LOGPROBS: WireError,
    RequestFault.WRONG_COUNT: WireError,
    RequestFault.NULL_LOGPROB: WireError,
    RequestFault.NAN_LOGPROB: WireError,
    RequestFault.OTHER_IDS: WireError,
    RequestFault.TRUNCATED: WireError,
    RequestFault.OTHER_RID: WireError,
    RequestFault.GAP_IN_SPANS: WireError,
    RequestFault.FOREIGN_LABEL: EngineError,
    RequestFault.DOUBLED_EVENT: WireError,
    RequestFault.ENDS_TWICE: WireError,
    RequestFault.OTHER_PROMPT: WireError,
    RequestFault.SHRINKS: WireError,
    RequestFault.NO_FINISH: EngineUnreachable,
    RequestFault.BUSY: EngineBusy,
    RequestFault.FAILS: EngineError,
    RequestFault.REDIRECT: EngineError,
}


@pytest.mark.parametrize("incremental", [True, False], ids=["streamed", "plain"])
@pytest.mark.parametrize("after", [0, 20])
@pytest.mark.parametrize("fault", list(TYPED))
def test_faults_are_typed_and_no_wrong_token_comes(fault: RequestFault, after: int, incremental: bool) -> None:
    """The request fails with its kind of error, what came before it is right, and the next request works."""

    async def program() -> None:
        planned = PlannedFault(fault, after_tokens=after)
        async with served(planned, incremental=incremental, mean_length=10**6) as (server, engine):
            got = await read(engine, request())
            # some were handed over before: nobody knows which of them are of other weights
            too_late = fault is RequestFault.FOREIGN_LABEL and got.tokens
            if fault is RequestFault.ENDS_TWICE and not incremental:  # a plain answer ends once
                assert got.error is None
                return
            assert type(got.error) is (WireError if too_late else TYPED[fault])
            assert got.finish is None
            ids, logprobs = fake_sglang_response(PROMPT, mean_length=10**6)
            assert got.tokens == ids[: len(got.tokens)]
            assert got.logprobs == logprobs[: len(got.tokens)]
            if incremental and after and fault is not RequestFault.GAP_IN_SPANS:
                assert len(got.tokens) >= 16 or fault in (RequestFault.BUSY, RequestFault.FAILS, RequestFault.REDIRECT)
            if fault is RequestFault.SERVER_DIES:
                await server.restart()
            again = await read(engine, request())
            # the restarted server has weights that april did not name
            assert (again.tokens == ids) == (fault is not RequestFault.SERVER_DIES)
            await until(lambda: server.open_requests == 0)

    run(program)


@pytest.mark.parametrize(
    "fault", [RequestFault.REPEATED_LAST, RequestFault.UNCOUNTED_LAST, RequestFault.NO_DONE, RequestFault.UNASKED_ABORT]
)
@pytest.mark.parametrize("incremental", [True, False], ids=["streamed", "plain"])
def test_harmless_quirks_change_nothing(fault: RequestFault, incremental: bool) -> None:
    """A repeated or uncounted last token, a missing end mark, an abort of the server's own: right tokens, no error."""

    async def program() -> None:
        planned = PlannedFault(fault, after_tokens=20 if fault is RequestFault.UNASKED_ABORT else 0)
        async with served(planned, incremental=incremental, stepped=True, mean_length=10**6) as (server, engine):
            asked = request()
            reading = asyncio.create_task(read(engine, asked))
            await until(lambda: server.waiting == 1)
            server.step(20)
            if fault is RequestFault.UNASKED_ABORT:
                server.step()
            elif fault is not RequestFault.NO_DONE:
                await engine.abort([asked.attempt_id])
            else:
                server.go_on()
            got = await reading
            assert got.error is None
            assert got.finish is (EngineFinish.LENGTH if fault is RequestFault.NO_DONE else EngineFinish.ABORT)
            assert len(got.tokens) == {RequestFault.NO_DONE: 64, RequestFault.UNASKED_ABORT: 20}.get(fault, 21)
            assert got.tokens == fake_sglang_response(PROMPT, mean_length=10**6)[0][: len(got.tokens)]

    run(program)


def test_an_abort_that_was_not_seen_works_when_asked_again() -> None:
    async def program() -> None:
        async with served(RequestFault.ABORT_UNSEEN, stepped=True) as (server, engine):
            asked = request()
            reading = asyncio.create_task(read(engine, asked))
            await until(lambda: server.waiting == 1)
            await engine.abort([asked.attempt_id])
            assert server.open_requests == 1
            await engine.abort([asked.attempt_id])
            assert (await reading).finish is EngineFinish.ABORT

    run(program)


def test_aborts_hit_nobody_else() -> None:
    """Ids that nobody has are ignored; requests of another client go on when april aborts all of its own."""

    async def program() -> None:
        async with served(stepped=True, mean_length=10**6) as (server, engine):
            other = await second_client(server)
            ours, theirs = request(), request()
            reading = [asyncio.create_task(read(e, r)) for e, r in ((engine, ours), (other, theirs))]
            await until(lambda: server.waiting == 2)
            await engine.abort(["f" * 32])
            assert server.aborts == []
            await engine.abort(None)
            assert (await reading[0]).finish is EngineFinish.ABORT
            server.go_on()
            assert (await reading[1]).finish is EngineFinish.LENGTH
            await other.close()

    run(program)


async def second_client(server: FakeSglangServer) -> SglangEngine:
    """Of a server that moves by steps: it moves by itself while the client connects."""
    server.go_on()
    engine = await connected(server)
    server.stepped = True
    server.runs.clear()
    return engine


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        (request([5, 512]), "vocabulary"),
        (request([5, -1]), "vocabulary"),
        (request([5] * 4080, 64), "room for 4090"),
        (request([]), "no token ids"),
    ],
    ids=["too high", "negative", "too long", "empty"],
)
def test_what_would_hurt_the_server_is_not_sent(asked: Any, word: str) -> None:
    async def program() -> None:
        async with served() as (server, engine):
            got = await read(engine, asked)
            assert type(got.error) is RequestRefused
            assert word in str(got.error)
            assert server.runs == []

    run(program)


def test_what_the_server_refuses_is_refused() -> None:
    """In all three shapes of its errors, streamed or not, the sentence of the server is in ours."""

    async def program() -> None:
        for incremental in (True, False):
            async with served(incremental=incremental, stepped=True) as (server, engine):
                asked = request()
                first = asyncio.create_task(read(engine, asked))
                await until(lambda server=server: server.waiting == 1)
                # the same id again, behind the back of april's own books
                engine._admission._inside.discard(asked.attempt_id)
                got = await read(engine, asked)
                assert type(got.error) is RequestRefused
                assert "Duplicate request ID" in str(got.error)
                server.params = frozenset()
                got = await read(engine, request())
                assert type(got.error) is RequestRefused
                assert "Unexpected keyword argument" in str(got.error)
                server.go_on()
                await first

    run(program)


def test_sampling_is_explicit_and_eos_is_kept() -> None:
    """Nothing is left to the server's defaults; min_tokens and stop ids are honoured; EOS is in the tokens."""

    async def program() -> None:
        async with served(mean_length=3) as (server, engine):
            got = await read(engine, request(max_tokens=40, min_tokens=10, temperature=0.7, top_p=0.8))
            sent = server.runs[0].params
            assert len(got.tokens) >= 10
            assert got.tokens[-1] == 2 or len(got.tokens) == 40
            assert {"temperature": 0.7, "top_p": 0.8, "top_k": -1, "ignore_eos": False}.items() <= sent.items()
            assert "sampling_seed" not in sent
            stop = fake_sglang_response(PROMPT, mean_length=10**6)[0][4]
            server.mean_length = 10**6
            got = await read(engine, request(stop_token_ids=(stop,)))
            assert got.finish is EngineFinish.STOP
            assert got.tokens[-1] == stop

    run(program)


def test_a_request_that_is_watched_comes_in_small_pieces() -> None:
    async def program() -> None:
        async with served(mean_length=10**6, incremental=False) as (server, engine):
            got = await read(engine, request(stream=True))
            assert got.chunks > 4
            assert server.runs[0].params["stream_interval"] == 2

    run(program)


def test_closing_breaks_requests_off_and_leaves_nothing() -> None:
    async def program() -> None:
        async with served(stepped=True, mean_length=10**6) as (server, engine):
            got = Got()
            reading = asyncio.create_task(read(engine, request(), got))
            await until(lambda: server.waiting == 1)
            server.step(20)
            await until(lambda: len(got.tokens) > 0)
            await engine.close()
            await reading
            assert isinstance(got.error, EngineError)
            assert got.tokens == fake_sglang_response(PROMPT, mean_length=10**6)[0][: len(got.tokens)]
            assert np.all(np.array(got.logprobs) <= 0)

    run(program)
