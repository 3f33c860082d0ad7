"""The suite on vLLM in this process; run by the interpreter of vLLM's environment, with april on its path.

``python -m tests.real_engines.in_process MODEL OTHER_MODEL REPORT ABORTS``
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec

from april.engines.protocol import Engine
from april.engines.vllm.in_process import VllmInProcessEngine
from april.testing.conformance import Report, Subject, Weights, run
from april.testing.conformance.reference import hugging_face


def make_llm(model: str) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=model, dtype="float32", max_model_len=4096, max_num_seqs=256, enable_prefix_caching=True,
        enforce_eager=True, enable_chunked_prefill=False, max_num_batched_tokens=16384,
    )  # fmt: skip
    return AsyncLLM.from_engine_args(arguments)


async def suite(model: str, other: str, aborts: int) -> Report:
    """All checks but those that need a server."""
    import vllm

    llm = make_llm(model)

    async def opened() -> Engine:
        return VllmInProcessEngine(llm, stream=True)

    subject = Subject(
        open=opened, name="vllm in process", version=f"vllm {vllm.__version__}", long_tokens=1000, aborts=aborts,
        now=Weights(model, hugging_face(model)), other=Weights(other, hugging_face(other)),
        gives_up={"server_killed": "the engine is in april's own process, and dies with it"},
    )  # fmt: skip
    try:
        return await run(subject, watch=lambda verdict: print(verdict, flush=True))
    finally:
        llm.shutdown()


if __name__ == "__main__":
    found = asyncio.run(suite(sys.argv[1], sys.argv[2], int(sys.argv[4])))
    Path(sys.argv[3]).write_bytes(msgspec.json.encode(found))
