"""The cost of the engine protocol alone: ``HttpGenerateEngine`` driven by one bare task per request."""

from __future__ import annotations

import asyncio
import gc

from april.core.sampling import SamplingParams, attempt_seed
from april.engines.protocol import Float32, Int32, Request
from april.errors import EngineError
from benchmarks.arm_result import ArmResult, Round, measured
from benchmarks.bare_client import Kept, check_kept
from benchmarks.generate_wire import make_prompts
from benchmarks.http_engine import HttpGenerateEngine


def run_engine(
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
    engine = HttpGenerateEngine(url)
    try:
        for number in range(rounds):
            gc.collect()
            with measured(costs):
                kept = await _one_round(engine, prompts, response_tokens, number)
            total += check_kept(prompts, kept, response_tokens)
            del kept
    finally:
        await engine.close()
    return ArmResult("engine", n_requests, response_tokens, prompt_len, costs, total)


async def _one_round(engine: HttpGenerateEngine, prompts: list[Int32], response_tokens: int, number: int) -> Kept:
    async def one(index: int) -> tuple[Int32, Float32]:
        sampling = SamplingParams(response_tokens, seed=attempt_seed(number, index, 0, 0))
        async for chunk in engine.generate(
            Request(attempt_id=f"{number:08x}{index:08x}", token_ids=prompts[index], sampling=sampling)
        ):
            if chunk.finish is not None:
                return chunk.tokens, chunk.logprobs
        raise EngineError(f"request {index}: the stream ended without a finish")

    return await asyncio.gather(*(one(index) for index in range(len(prompts))))
