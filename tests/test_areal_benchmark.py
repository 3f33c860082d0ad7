"""The timed server of ``benchmarks.areal_rollouts``: what the comparison with AReaL rests on."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from benchmarks.areal_server import EOS, PER_WEIGHTS, TimedServer

PROMPT = [100, 11, 12, 13]


async def post(session: aiohttp.ClientSession, address: str, route: str, **body: Any) -> Any:
    async with session.post(f"http://{address}{route}", json=body) as answer:
        return await answer.json()


async def generate(session: aiohttp.ClientSession, address: str, ids: list[int]) -> tuple[list[int], list[float], str]:
    """Tokens, log-probabilities and the reason of a request."""
    answer = await post(
        session, address, "/generate", input_ids=ids, sampling_params={"max_new_tokens": 500, "stop_token_ids": [EOS]}
    )
    meta = answer["meta_info"]
    pairs = meta["output_token_logprobs"]
    return [token for _, token, _ in pairs], [logprob for logprob, _, _ in pairs], meta["finish_reason"]["type"]


def test_a_cut_response_goes_on_to_its_own_length_and_says_whose_its_tokens_are() -> None:
    """The length is that of the uncut response, over all requests; a log-probability names the weights."""

    async def run() -> None:
        server = TimedServer(places=4, token_s=0.0, mean=200.0)
        other = TimedServer(places=4, token_s=0.0, mean=200.0)
        address, whole = await server.start(), await other.start()
        async with aiohttp.ClientSession() as session:
            uncut, _, reason = await generate(session, whole, PROMPT)
            assert reason == "stop"
            assert len(uncut) > 1
            first = asyncio.create_task(generate(session, address, PROMPT))
            while server.made == 0:  # noqa: ASYNC110 - the server is in this loop
                await asyncio.sleep(0)
            await post(session, address, "/pause_generation")
            tokens, logprobs, reason = await first
            assert (reason, logprobs) == ("abort", [-PER_WEIGHTS] * len(tokens))
            await post(session, address, "/update_weights_from_disk", model_path="-")
            late = asyncio.create_task(generate(session, address, PROMPT + tokens))
            await asyncio.sleep(0)
            await post(session, address, "/continue_generation")
            rest, logprobs, reason = await late
            assert (reason, logprobs) == ("stop", [-2 * PER_WEIGHTS] * len(rest))
            assert len(tokens) + len(rest) == len(uncut)
            assert (tokens + rest)[-1] == EOS
            assert server.violations == []
        await server.close()
        await other.close()

    asyncio.run(run())


def test_weights_that_come_while_requests_run_are_a_violation() -> None:
    """And so is taking the memory away: the benchmark fails then, whoever it was."""

    async def run() -> None:
        server = TimedServer(places=1, token_s=0.5, mean=1e6)
        address = await server.start()
        async with aiohttp.ClientSession() as session:
            request = asyncio.create_task(generate(session, address, PROMPT))
            while not server.begun:  # noqa: ASYNC110 - the server is in this loop
                await asyncio.sleep(0)
            await post(session, address, "/update_weights_from_disk", model_path="-")
            await post(session, address, "/release_memory_occupation")
            await post(session, address, "/pause_generation")
            await request
        assert len(server.violations) == 2
        await server.close()

    asyncio.run(run())
