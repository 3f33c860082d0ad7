"""The server of the comparison with slime: every client gets the same lengths, however it cuts and continues."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.response_lengths import LognormalLengths
from benchmarks.slime_server import PER_UPDATE, TimedSglangServer

LENGTHS = LognormalLengths(40.0, 0.6, 0.5, seed=3)
CAP = 4000


def server_test(test: Callable[[Callable[..., Awaitable[Any]], TimedSglangServer], Awaitable[Any]]) -> Any:
    """Steps of a millisecond; ``test`` gets a POST and the server."""

    async def program() -> Any:
        server = TimedSglangServer(DecodeCost(1e-3, 0.0, 0.0), LENGTHS, max_running=64)
        url = await server.start()
        async with asyncio.timeout(30), aiohttp.ClientSession(url) as session:

            async def post(route: str, **body: Any) -> Any:
                async with session.post(route, json=body) as reply:
                    return await reply.json() if "json" in reply.content_type else None

            said = await test(post, server)
        assert not server.violations
        await server.close()
        return said

    return asyncio.run(program())


def asked(ids: list[int], done: int = 0) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": CAP - done, "temperature": 1.0}}


async def whole(post: Any, server: TimedSglangServer) -> list[int]:
    """Four responses to one prompt and one to another, uncut."""
    replies = await asyncio.gather(*(post("/generate", **asked(p)) for p in ([5, 6], [5, 6], [5, 6], [5, 6], [7])))
    assert all(reply["meta_info"]["finish_reason"]["type"] == "stop" for reply in replies)
    return sorted(reply["meta_info"]["completion_tokens"] for reply in replies)


async def in_pieces(post: Any, server: TimedSglangServer) -> list[int]:
    """The same five, all ended early again and again, and continued by their ids."""
    work = [[5, 6], [5, 6], [5, 6], [5, 6], [7]]
    prompts = [len(ids) for ids in work]
    lengths: list[int] = []
    cuts = 0
    while work:
        calls = [
            asyncio.create_task(post("/generate", **asked(ids, len(ids) - p)))
            for ids, p in zip(work, prompts, strict=True)
        ]
        while not server.engine.decoder.running:  # noqa: ASYNC110 - it is in this loop
            await asyncio.sleep(0)
        await post("/abort_request", abort_all=True)
        rest = []
        for ids, prompt, reply in zip(work, prompts, await asyncio.gather(*calls), strict=True):
            ids = [*ids, *reply["output_ids"]]
            if reply["meta_info"]["finish_reason"]["type"] == "abort":
                cuts += len(ids) > prompt
                rest.append((ids, prompt))
            else:
                lengths.append(len(ids) - prompt)
        work, prompts = [ids for ids, _ in rest], [prompt for _, prompt in rest]
    assert cuts
    return sorted(lengths)


def test_lengths_are_the_same_for_every_client() -> None:
    """Uncut, and cut at any token."""
    expected = server_test(whole)
    assert len(set(expected)) > 1
    assert server_test(in_pieces) == expected


def test_log_probabilities_tell_whose_weights_they_are() -> None:
    """One step of 1/1024 per update; labels are the trainer's until somebody writes another."""

    async def test(post: Any, server: TimedSglangServer) -> None:
        for updates in (0, 1, 7):
            await post("/trainer", label=str(updates + 1), updates=updates)
            meta = (await post("/generate", **asked([9])))["meta_info"]
            assert {logprob for logprob, *_ in meta["output_token_logprobs"]} == {-PER_UPDATE * (updates + 1)}
            assert meta["weight_version"] == str(updates + 1)

    server_test(test)
