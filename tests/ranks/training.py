"""Ranks that train one model under FSDP2 with april.RankScheduler, beside one process that is fed the same batches.

``python -m torch.distributed.run --standalone --nproc-per-node 2 tests/ranks/training.py DIRECTORY``: what each rank
saw goes to ``DIRECTORY/<rank>.json``. In the end rank 1 fails.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1]))

from rank_ends import end_rank
from tiny_models import tiny_model

import april

CONFIG = april.Config(
    rollout_batch_size=2, n_samples_per_prompt=3, max_response_len=8,
    engine={"kind": "transformers", "slots": 8, "max_len": 64},
)  # fmt: skip


def rewarded(prompt: april.Prompt, response: april.Response) -> float:
    """Differs inside of groups."""
    return float(response.tokens.sum() % 7)


def logprobs_of(model: Any, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """[B, T] of the response tokens; the prompts are equally long."""
    length = rows["response_ids"].shape[1]
    if not length:  # nobody's share: the forward pass is a collective all the same
        rows = {"input_ids": torch.zeros(1, 2, dtype=torch.int64), "attention_mask": torch.ones(1, 2).bool()}
        return 0.0 * model(**rows).logits.sum(-1)
    logits = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"].long()).logits
    start = int(rows["prompt_mask"].sum(1)[0]) - 1
    found = logits[:, start : start + length].log_softmax(-1)
    return found.gather(2, rows["response_ids"][..., None])[..., 0]


def loss_of(model: Any, batch: april.Batch, errors: list[float]) -> torch.Tensor:
    """The whole batch's policy gradient, as far as it is of these rows."""
    rows = april.to_torch(batch.padded())
    logprobs = logprobs_of(model, rows)
    if not len(batch):
        return logprobs.sum()
    errors.append(float(((logprobs - rows["logprobs"]).abs() * rows["loss_mask"]).max().detach()))
    weights = april.loss_weights(rows["loss_mask"], "dapo", share=batch.share)
    return -(weights * torch.from_numpy(batch.advantages("dr_grpo"))[:, None] * logprobs).sum()


def main() -> None:
    """One rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    model, alone = tiny_model(), tiny_model()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone)]
    seen: dict[str, Any] = {"samples": [], "sums": []}
    errors: list[float] = []
    options = {"prompts": [[3 + i, 4] for i in range(7)], "reward": rewarded} if rank == 0 else {}

    def transfer() -> None:
        """Collectives work here, for all ranks are in it."""
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        seen["sums"].append(value.item())

    try:
        with april.RankScheduler(CONFIG, ranks=april.Ranks.of_torch(), model=model, **options) as rollouts:
            while True:
                try:
                    batch = rollouts.next_batch()
                except april.DataExhausted:
                    break
                shares: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(shares, batch)
                seen["samples"] += [[*s.id] for s in batch.samples]
                (loss_of(model, batch, errors) * batch.share.ranks).backward()
                sum(loss_of(alone, share, []) for share in shares).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                rollouts.weight_update(transfer=transfer, trained=batch.id)
            seen["version"] = rollouts.version
            seen["reward"] = rollouts.evaluate([[7]] if rank == 0 else [], n_samples=2).reward_mean
            whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            seen["apart"] = max(float((whole[n] - p).abs().max()) for n, p in alone.state_dict().items())
            seen["moved"] = max(float((whole[n] - p).abs().max()) for n, p in tiny_model().state_dict().items())
            if rank == 1:
                raise ZeroDivisionError("at the end")
            rollouts.next_batch()
    except (april.RankError, ZeroDivisionError) as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    seen["logprob_error"] = max(errors)
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(seen), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    end_rank()
