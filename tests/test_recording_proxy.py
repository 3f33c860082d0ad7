"""The recording proxy before the real servers: what it writes down of the answers that pass through it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.real_engines.recording_proxy import RecordingProxy, tokens_in

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
VLLM = [event({"choices": [{"token_ids": ids}]}) for ids in ([4, 5], [6], [])]
STRINGS = [event({"choices": [{"logprobs": {"tokens": [f"token_id:{i}"]}}]}) for i in (4, 5, 6)]


def sglang(ids: list[int], total: int) -> bytes:
    return event({"output_ids": ids, "meta_info": {"completion_tokens": total}})


CUMULATIVE = [sglang([4], 1), sglang([4, 5], 2), sglang([4, 5, 6], 3)]
INCREMENTAL = [sglang([4], 1), sglang([5, 6], 3), sglang([], 3)]
ECHO = [sglang([4, 5], 2), sglang([6, 6], 3)]


@pytest.mark.parametrize("events", [VLLM, STRINGS, CUMULATIVE, INCREMENTAL], ids=["vllm", "strings", "all", "new"])
def test_every_wire_is_read(events: list[bytes]) -> None:
    """vLLM's and OpenAI's deltas, ids as strings, SGLang's repeated and its incremental events; half events not."""
    body = b"".join(events)
    assert tokens_in(body + DONE, streamed=True) == [4, 5, 6]
    assert tokens_in(body.replace(b"\n", b"\r\n"), streamed=True) == [4, 5, 6]
    assert tokens_in(events[0] + events[1][:-1], streamed=True) == tokens_in(events[0], streamed=True)


def test_what_a_server_sends_beyond_its_own_count_is_told_apart() -> None:
    """SGLang's echo of the last token at an abort is no token."""
    assert tokens_in(b"".join(ECHO), streamed=True) == [4, 5, 6]


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
        while not exchange.done:  # noqa: ASYNC110 - the proxy's own task
            await asyncio.sleep(0)
        assert exchange.closed_early
        assert exchange.tokens == [4, 5]
