"""The loop of own_loop.py on several ranks: FSDP2, a share of each batch per rank, checkpoints for any number of them.

Model, task and reward are those of own_loop.py. Run it on CPUs, and again with --resume and another number of ranks:
``python -m torch.distributed.run --standalone --nproc-per-node 2 examples/own_loop_ranks.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from own_loop import prompts, reward, tiny_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import april

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def sharded_model(ranks: int) -> Any:
    """Each layer, then the rest. With DDP: ``DistributedDataParallel(tiny_model())``; nothing else changes."""
    model = tiny_model()
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def grpo_loss(model: Any, batch: april.Batch) -> torch.Tensor:
    """This rank's part of the loss over the whole batch, times the number of ranks, whose gradients are averaged."""
    if not len(batch):  # a share may be empty at the end of the data; its rank is needed in the collectives
        nothing: torch.Tensor = 0.0 * model(torch.zeros(1, 1, dtype=torch.int64)).logits.sum()
        return nothing
    rows = batch.padded(left_pad_prompts=True) | {"advantages": batch.advantages("grpo")}
    arrays = april.to_torch(rows, device=model.device)
    ids = arrays["response_ids"]  # [B, T]
    logits = model(arrays["input_ids"], attention_mask=arrays["attention_mask"]).logits[:, -ids.shape[1] - 1 : -1]
    logprobs = logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    whole = batch.share.loss_tokens  # of all ranks
    loss = april.policy_loss(logprobs, arrays["logprobs"], arrays["loss_mask"], arrays["advantages"], tokens=whole)
    return loss * batch.share.ranks


def save(path: Path, model: Any, optimizer: Any, rollouts: april.RankScheduler) -> None:
    """All ranks gather, rank 0 writes: whole weights, whole optimizer, and what april has not delivered yet."""
    weights, moments = get_state_dict(model, optimizer, options=WHOLE)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": moments, "rollouts": rollouts.state_dict()}, path)


def load(path: Path, model: Any, optimizer: Any, rollouts: april.RankScheduler) -> None:
    """Every rank reads the file and takes its part."""
    saved = torch.load(path, weights_only=True)
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=WHOLE
    )
    rollouts.load_state_dict(saved["rollouts"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Train; rank 0 prints one line per step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/own_loop_ranks.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, on any number of ranks")
    options = parser.parse_args(arguments)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:  # the only process
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = sharded_model(dist.get_world_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = april.Config(
        rollout_batch_size=8,  # N groups per step, over all ranks
        n_samples_per_prompt=8,
        over_sampling_batch_size=16,  # N' groups in work
        max_response_len=200,
        max_in_flight=64,
    )
    ranks = april.Ranks.of_torch(rank_timeout_s=600)
    with april.RankScheduler(config, ranks=ranks, prompts=prompts(), reward=reward, model=model) as rollouts:
        if options.resume:
            load(options.checkpoint, model, optimizer, rollouts)
        while rollouts.version.n < options.steps:
            batch = rollouts.next_batch()  # this rank's share
            loss = grpo_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            rollouts.weight_update()
            if dist.get_rank() == 0:
                metrics = batch.metrics  # of the whole batch
                print(
                    f"step {batch.id}: reward {metrics['reward_mean']:.2f}, {batch.share.samples} responses on "
                    f"{batch.share.ranks} ranks, {metrics['off_policy_share']:.0%} from older weights"
                )
        options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        save(options.checkpoint, model, optimizer, rollouts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
