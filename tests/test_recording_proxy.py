"""The recording proxy: bytes pass unchanged as they come, and what they say is written down independently."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from april.core.sampling import SamplingParams
from april.engines.protocol import Request
from april.testing.recording_proxy import RecordingProxy, tokens_in

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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
    assert tokens_in(body + DONE, streamed=True) == ([4, 5, 6], 0)
    assert tokens_in(body.replace(b"\n", b"\r\n"), streamed=True) == ([4, 5, 6], 0)
    assert tokens_in(events[0] + events[1][:-1], streamed=True) == tokens_in(events[0], streamed=True)


def test_what_a_server_sends_beyond_its_own_count_is_told_apart() -> None:
    """SGLang's echo of the last token at an abort is no token."""
    assert tokens_in(b"".join(ECHO), streamed=True) == ([4, 5, 6], 1)


@asynccontextmanager
async def behind_a_proxy(handler: Handler) -> AsyncIterator[tuple[RecordingProxy, aiohttp.ClientSession]]:
    """A server with one handler, a proxy before it, and a client."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        async with RecordingProxy(f"http://{host}:{port}") as proxy, aiohttp.ClientSession() as session:
            yield proxy, session
    finally:
        await runner.cleanup()


async def streamed(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Kept": "yes"})
    await response.prepare(request)
    return response


async def test_bytes_pass_unchanged_and_as_they_come() -> None:
    """Each event arrives before the next one is made; headers, query and body pass; nothing is kept back."""
    turn: asyncio.Queue[None] = asyncio.Queue()

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.path_qs == "/generate?x=%20y"
        assert request.headers["Authorization"] == "Bearer k"
        assert await request.json() == {"rid": "a", "input_ids": [1]}
        response = await streamed(request)
        for piece in [*CUMULATIVE, DONE]:
            await turn.get()
            await response.write(piece)
        return response

    async with behind_a_proxy(handler) as (proxy, session):
        body = {"rid": "a", "input_ids": [1]}
        headers = {"Authorization": "Bearer k"}
        async with session.post(f"{proxy.url}/generate?x=%20y", json=body, headers=headers) as response:
            assert response.headers["X-Kept"] == "yes"
            for count, piece in enumerate([*CUMULATIVE, DONE], 1):
                turn.put_nowait(None)
                assert await response.content.readexactly(len(piece)) == piece
                assert proxy.tokens("a") == [4, 5, 6][:count]
            assert await response.content.read() == b""
        assert "1 requests" in repr(proxy)
        assert not proxy.exchanges[0].closed_early


async def test_a_client_that_hangs_up_is_seen_by_the_server_and_noted() -> None:
    """The server's request ends at once; the tokens before the hang-up stay on record as sent."""
    gone = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = await streamed(request)
        await response.write(VLLM[0])
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        return response

    async with behind_a_proxy(handler) as (proxy, session):
        url = f"{proxy.url}/inference/v1/generate"
        async with session.post(url, json={"request_id": "a", "token_ids": [1]}) as response:
            await response.content.readexactly(len(VLLM[0]))
        response.close()
        await asyncio.wait_for(gone.wait(), 30)
        (exchange,) = proxy.exchanges
        await proxy.quiet()
        assert exchange.closed_early
        assert exchange.tokens == [4, 5]


async def test_a_server_that_dies_breaks_the_client_too() -> None:
    """No clean end is made up: the client sees a broken connection, the record says who broke it."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = await streamed(request)
        await response.write(VLLM[0])
        assert request.transport is not None
        request.transport.abort()
        return response

    async with behind_a_proxy(handler) as (proxy, session):
        with pytest.raises(aiohttp.ClientError):
            async with session.post(f"{proxy.url}/v1/completions", json={"prompt": [1], "seed": 3}) as response:
                await response.content.read()
        assert proxy.exchanges[0].broken
        assert not proxy.exchanges[0].closed_early


async def test_requests_without_a_name_are_known_by_prompt_and_seed() -> None:
    """The OpenAI wire has no request id that every server takes."""

    async def handler(request: web.Request) -> web.StreamResponse:
        seed = (await request.json())["seed"]
        return web.json_response({"choices": [{"token_ids": [seed]}]}, status=200 if seed < 9 else 500)

    def asked(attempt_id: str, seed: int) -> Request:
        return Request(
            attempt_id=attempt_id, token_ids=np.array([1, 2], np.int32), sampling=SamplingParams(4, seed=seed)
        )

    async with behind_a_proxy(handler) as (proxy, session):
        url = f"{proxy.url}/v1/completions"
        for seed in (3, 4, 4, 9):
            async with session.post(url, json={"prompt": [1, 2], "seed": seed}) as response:
                await response.read()
        assert [a.tokens for a in proxy.answers(asked("a", 3))] == [[3]]
        assert [a.tokens for a in proxy.answers(asked("b", 4))] == [[4], [4]]
        assert [a.tokens for a in proxy.answers(asked("c", 9))] == [[]]  # an error has no token
        assert not proxy.answers(asked("d", 5))
        async with session.get(f"{proxy.url}/metrics") as response:
            assert response.status == 500  # of the handler, which reads a body: passed on, not recorded
        assert len(proxy.exchanges) == 4
