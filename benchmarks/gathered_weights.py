"""What FSDP2 costs the embedded engine: gathering, releasing, and each decode step beside a plain model.

``python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.gathered_weights MODEL_DIRECTORY``: all
ranks generate the same from a sharded and a plain copy, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from april.core.sampling import SamplingParams
from april.engines.protocol import Request
from april.engines.transformers.engine import TransformersEngine

ROUNDS, REQUESTS, NEW = 5, 8, 32


async def generate(engine: TransformersEngine, name: str) -> None:
    """The same requests in every round."""

    async def one(i: int) -> None:
        request = Request(
            attempt_id=f"{name}/{i}", token_ids=np.arange(10 + i, 20 + i, dtype=np.int32),
            sampling=SamplingParams(max_tokens=NEW, min_tokens=NEW, seed=i),
        )  # fmt: skip
        async for _ in engine.generate(request):
            pass

    await asyncio.gather(*map(one, range(REQUESTS)))
    await engine.quiet()


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gathered_weights", description=__doc__)
    parser.add_argument("model", help="directory of a Hugging Face causal model")
    model = parser.parse_args().model
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain, sharded = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    engines: dict[str, Any] = {"plain": TransformersEngine(plain), "sharded": TransformersEngine(sharded)}
    engines["sharded"].gather()
    engines["sharded"].release()
    seconds: dict[str, list[float]] = {"plain": [], "sharded": [], "gather": [], "release": []}
    loop = asyncio.new_event_loop()
    for number in range(ROUNDS):
        for kind, engine in engines.items():
            began = time.perf_counter()
            engine.gather()
            gathered = time.perf_counter()
            if kind == "sharded":
                seconds["gather"].append(gathered - began)
            cpu = time.process_time()
            loop.run_until_complete(generate(engine, f"{kind}{number}"))
            seconds[kind].append(time.process_time() - cpu)
            began = time.perf_counter()
            engine.release()
            if kind == "sharded":
                seconds["release"].append(time.perf_counter() - began)
            dist.barrier()
    ratios = [a / b for a, b in zip(seconds["sharded"], seconds["plain"], strict=True)]
    if dist.get_rank() == 0:
        weights = sum(p.numel() * p.element_size() for p in plain.parameters()) // 2**20
        print(
            f"{weights} MiB of weights, {dist.get_world_size()} ranks: "
            f"gather {statistics.median(seconds['gather']):.2f} s, "
            f"release {statistics.median(seconds['release']):.3f} s; CPU of generating, sharded to plain: "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
            f"{statistics.median(seconds['plain']):.1f} s for {REQUESTS * NEW} tokens"
        )
    for engine in engines.values():
        loop.run_until_complete(engine.close())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
