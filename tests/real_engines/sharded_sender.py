"""One of several ranks under FSDP2 that send their weights to a real server; ``weight_routes`` starts them.

``torchrun --nproc-per-node 2 -m tests.real_engines.sharded_sender sglang URL MODEL BUCKET``: every rank may grow by two
buckets while it sends, the server must have the weights of all ranks, and a rank that fails ends the others with its
message.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import april
from april.weights.source import WeightSource
from tests.real_engines.memory import peak_growth
from tests.real_engines.pretrained import questions
from tests.real_engines.servers import NotKept
from tests.real_engines.weight_routes import RESPONSE, check

UPDATES = 3
BUCKETS = 2.0
"""Most buckets by which a rank may grow."""
FAILS = "the exporter of rank 1 broke"


def step(model: Any, optimizer: Any, seed: int) -> None:
    """One of an optimizer, on tokens of this rank."""
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 1000, (1, 32), generator=numbers)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def breaking(model: Any) -> Iterator[tuple[str, Any]]:
    """An iterable of the user's that breaks in the middle."""
    for number, (name, tensor) in enumerate(model.state_dict(keep_vars=True).items()):
        if number == 40:
            raise RuntimeError(FAILS)
        yield name, tensor


def main(kind: str, url: str, folder: str, bucket: int) -> None:
    """Train, send, compare; raises NotKept."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = april.Config(
        rollout_batch_size=4, n_samples_per_prompt=1, max_response_len=RESPONSE, max_staleness=0, on_data_end="wrap",
        partial_rollout=False, engine={"kind": kind, "urls": [url]},
    )  # fmt: skip
    whole: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) if rank == 0 else None
    prompts = questions(folder)  # type: ignore[arg-type]
    worst = grown_most = 0.0
    broken = ""
    with april.RankScheduler(
        config, ranks=april.Ranks.of_torch(), prompts=() if rank else prompts, reward=None, progress=False
    ) as rollouts:
        for number in range(UPDATES):
            step(model, optimizer, 10 * number + rank)
            with peak_growth() as grown:
                version = rollouts.weight_update(weights=WeightSource(model, bucket_bytes=bucket))
            grown_most = max(grown_most, grown.bytes / bucket)
            batch = rollouts.next_batch()
            rollouts.commit(batch.id)
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if whole is not None:
                whole.eval().load_state_dict(state)
                worst = max(worst, check(whole, batch, version))
            del state
        try:
            rollouts.weight_update(weights=breaking(model) if rank == 1 else model)
        except (april.AprilError, RuntimeError) as error:
            broken = str(error)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (grown_most, broken))
    if rank == 0:
        size = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
        print(
            f"{kind}: {len(told)} ranks under FSDP2 send {size:.0f} MB, {UPDATES} times; the server is at most "
            f"{worst:.1e} nats off; each grows by {' and '.join(f'{g:.2f}' for g, _ in told)} buckets of "
            f"{bucket / 1e6:.0f} MB; rank 1 breaks, and the others say: {told[0][1][:200]}"
        )
        if any(g > BUCKETS for g, _ in told):
            raise NotKept(f"a rank grows by more than {BUCKETS:g} buckets")
        if any(FAILS not in said for _, said in told):
            raise NotKept("a rank that breaks does not end all of them with its message")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)  # what the trainer's own group would wait for
