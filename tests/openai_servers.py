"""A fake OpenAI-compatible server with an engine in front of it, and what both say of one response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from fake_servers.openai import FakeOpenAIServer, serving_openai

from april.config.engines import OpenAIEngineConfig
from april.core.sampling import SamplingParams
from april.core.versions import PolicyVersion
from april.driver.wire_checks import check_end
from april.engines.openai.engine import OpenAIEngine, connect_openai
from april.engines.protocol import EngineFinish, Request

PATIENCE_S = 60.0
"""Only reached when a test fails: turns a hang into an error."""
PROMPT = [10, 20, 30]


def config_for(url: str, **changes: Any) -> OpenAIEngineConfig:
    """Everything told that some server does not say itself."""
    values = {"urls": url, "vocab_size": 512, "max_len": 4096, "eos_token_ids": (2,)}
    return OpenAIEngineConfig(**(values | changes))


@asynccontextmanager
async def connected(server: FakeOpenAIServer, **changes: Any) -> AsyncIterator[OpenAIEngine]:
    """The engine of a server that has been probed; requests of the probe are forgotten, and no task may be left."""
    before = asyncio.all_tasks()
    async with asyncio.timeout(PATIENCE_S), serving_openai(server) as url:
        (engine,) = await connect_openai(config_for(url, **changes))
        server.records.clear()
        try:
            yield engine
        finally:
            await engine.close()
            await server.until_closed()
            for task in asyncio.all_tasks() - before - {asyncio.current_task()}:
                assert "april" not in repr(task.get_coro()), f"a task was left: {task}"


@dataclass(slots=True)
class Answer:
    """What one generate call has brought."""

    tokens: list[int]
    logprobs: list[float]
    finish: EngineFinish | None = None
    versions: set[PolicyVersion] | None = None
    error: Exception | None = None


async def ask(
    engine: OpenAIEngine, attempt_id: str = "a1", prompt: list[int] | None = None, max_tokens: int = 50, **sampling: Any
) -> Answer:
    """One request to its end, greedy unless told otherwise; an error is kept beside the tokens that came before it.

    The end is looked at as the driver does.
    """
    params = SamplingParams(max_tokens, **({"temperature": 0.0} | sampling))
    request = Request(attempt_id=attempt_id, token_ids=np.array(prompt or PROMPT, np.int32), sampling=params)
    answer = Answer([], [], versions=set())
    assert answer.versions is not None
    try:
        async for chunk in engine.generate(request):
            assert answer.finish is None
            answer.tokens += chunk.tokens.tolist()
            answer.logprobs += chunk.logprobs.tolist()
            answer.finish = chunk.finish
            answer.versions.add(chunk.version)
        if answer.tokens:
            limits = engine.capabilities
            check_end(chunk, request, len(answer.tokens), answer.tokens[-1], limits.max_context, limits.eos_token_ids)
    except Exception as error:
        answer.error, answer.finish = error, None
    return answer


def greedy(server: FakeOpenAIServer, prompt: list[int], max_tokens: int) -> list[int]:
    """The uncut response of a fake server."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        ids.append(server.token(ids))
        if ids[-1] == server.eos:
            break
    return ids[len(prompt) :]


def logprobs_of(server: FakeOpenAIServer, tokens: list[int], weights: int = 0) -> list[float]:
    """Of these tokens under these weights, float32."""
    return [float(np.float32(server.logprob(token, weights, {}))) for token in tokens]
