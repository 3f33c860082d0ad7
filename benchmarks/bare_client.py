"""The floor: the same calls with plain asyncio and aiohttp, decoded by msgspec, arrays kept, nothing else.

One task per request, as a user without a library would write it. No check of lengths or of finiteness, no
record of a version: what april does on top of this is what the benchmark measures.
"""

from __future__ import annotations

import asyncio
import gc

import aiohttp
import numpy as np

from april.core.sampling import SamplingParams, attempt_seed
from april.engines.protocol import Float32, Int32
from benchmarks.arm_result import ArmResult, Round, measured
from benchmarks.generate_wire import (
    JSON_HEADERS,
    answer_logprobs,
    answer_tokens,
    decode_reply,
    encode_generate,
    make_prompts,
    open_session,
)

Kept = list[tuple[Int32, Float32]]


def run_bare(
    url: str, n_requests: int, prompt_len: int, response_tokens: int, rounds: int, samples_per_prompt: int = 1
) -> ArmResult:
    """Send ``n_requests`` at once, ``rounds`` times; raises RuntimeError when an array differs from what was sent."""
    return asyncio.run(_run(url, n_requests, prompt_len, response_tokens, rounds, samples_per_prompt))


async def _run(
    url: str, n_requests: int, prompt_len: int, response_tokens: int, rounds: int, samples_per_prompt: int
) -> ArmResult:
    prompts = make_prompts(n_requests, prompt_len, samples_per_prompt)
    costs: list[Round] = []
    total = 0
    async with open_session(url) as session:
        for number in range(rounds):
            gc.collect()
            with measured(costs):
                kept = await _one_round(session, prompts, response_tokens, number)
            total += check_kept(prompts, kept, response_tokens)
            del kept
    return ArmResult("bare", n_requests, response_tokens, prompt_len, costs, total)


async def _one_round(session: aiohttp.ClientSession, prompts: list[Int32], response_tokens: int, number: int) -> Kept:
    async def one(index: int) -> tuple[Int32, Float32]:
        sampling = SamplingParams(response_tokens, seed=attempt_seed(number, index, 0, 0))
        body = encode_generate(f"{number:08x}{index:08x}", prompts[index], sampling)
        async with session.post("/generate", data=body, headers=JSON_HEADERS, allow_redirects=False) as response:
            raw = await response.read()
            if response.status != 200:
                raise RuntimeError(f"request {index} was answered {response.status}: {raw[:200]!r}")
        reply = decode_reply(raw)
        return np.array(reply.output_ids, dtype=np.int32), np.array(reply.output_logprobs, dtype=np.float32)

    return await asyncio.gather(*(one(index) for index in range(len(prompts))))


def check_kept(prompts: list[Int32], kept: Kept, response_tokens: int) -> int:
    """Tokens kept; raises RuntimeError when one request's arrays are not what the server sends for its prompt."""
    if len(kept) != len(prompts):
        raise RuntimeError(f"{len(kept)} answers are kept for {len(prompts)} requests")
    for index, (prompt, (tokens, logprobs)) in enumerate(zip(prompts, kept, strict=True)):
        first = int(prompt[0])
        if tokens.dtype != np.int32 or logprobs.dtype != np.float32:
            raise RuntimeError(f"request {index}: kept as {tokens.dtype} and {logprobs.dtype}, not int32 and float32")
        if not np.array_equal(tokens, answer_tokens(first, response_tokens)):
            raise RuntimeError(f"request {index}: the tokens kept are not those sent")
        if not np.array_equal(logprobs, answer_logprobs(first, response_tokens)):
            raise RuntimeError(f"request {index}: the log-probabilities kept are not those sent")
    return sum(len(tokens) for tokens, _ in kept)
