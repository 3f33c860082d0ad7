"""Ranks that generate from one model under FSDP2, each as much as it likes, and train it together.

``python -m torch.distributed.run --standalone --nproc-per-node 2 tests/ranks/sharded_generation.py``: rank 0 prints the
largest difference in nats to a recomputation with a whole copy of the weights, and what else must hold fails the run.
``--bf16``: the forward pass is in bfloat16 by FSDP2's mixed precision, and so is that of the copy.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from rank_ends import end_rank
from tiny_models import VOCAB_SIZE, tiny_model

from april.core.sampling import SamplingParams
from april.core.versions import PolicyVersion
from april.engines.protocol import Request
from april.engines.transformers.engine import TransformersEngine
from april.engines.transformers.model_check import recompute

ROUNDS = 4


def _requests(rank: int, number: int) -> list[Request]:
    """Another number of another length on each rank; in one round rank 0 has none."""
    count = 0 if (rank, number) == (0, 1) else 2 + rank
    return [
        Request(
            attempt_id=f"{number}/{i}",
            token_ids=np.array([3 + i, 4, 5 + rank], np.int32),
            sampling=SamplingParams(max_tokens=20 + 30 * rank + 5 * i, seed=i),
        )
        for i in range(count)
    ]


async def _largest_error(engine: TransformersEngine, requests: list[Request], whole: Any) -> float:
    async def error(request: Request) -> float:
        (chunk,) = [chunk async for chunk in engine.generate(request)]
        tokens = torch.from_numpy(np.concatenate([request.token_ids, chunk.tokens]).astype(np.int64))
        start = len(request.token_ids)
        rows = recompute(whole, tokens)[start - 1 :]
        there = rows.gather(1, tokens[start:, None])[:, 0].numpy()
        assert len(chunk.tokens) == request.sampling.max_tokens
        return float(np.abs(there - chunk.logprobs).max())

    errors = await asyncio.gather(*map(error, requests))
    await engine.quiet()
    return max(errors, default=0.0)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    model, whole = tiny_model(), tiny_model().eval()
    policy, dtype = MixedPrecisionPolicy(), torch.float32
    if "--bf16" in sys.argv:
        dtype = torch.bfloat16
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for parameter in whole.parameters():  # buffers stay as they are, as FSDP2 leaves them
            parameter.data = parameter.data.to(dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model.lm_head, mesh=mesh, mp_policy=policy)  # the last that runs is no longer the root
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    engine = TransformersEngine(model, slots=4, max_len=256, eos_token_ids=())
    errors, loop = [], asyncio.new_event_loop()
    for number in range(ROUNDS):
        whole.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
        engine.gather()
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        errors.append(loop.run_until_complete(_largest_error(engine, _requests(rank, number), whole)))
        engine.release()
        assert all(isinstance(p, DTensor) and p.dtype is torch.float32 for p in model.parameters())
        ids = torch.randint(2, VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(10 * number + rank))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.run_until_complete(engine.update_weights(PolicyVersion(0, number + 1)))
    loop.run_until_complete(engine.close())
    loop.close()
    largest = torch.tensor(max(errors))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.barrier()
    if rank == 0:
        print(f"largest error: {float(largest):.2e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    end_rank()
