"""One rank of a small trainer on gloo, which torchrun starts; ``python -m tests.ranks`` starts them and compares.

Each rank keeps what it trained on and how far the log-probabilities of its rows are from a recomputation, in
``rank<r>.pt`` of ``--out``: also when it ends with an error, whose sentence is kept then.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import april

sys.path.insert(0, str(Path(__file__).parents[1]))

from rank_ends import end_rank
from tiny_models import VOCAB_SIZE, tiny_model

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
GROUPS, SAMPLES = 4, 2
RANK_TIMEOUT_S = 60.0
LR, MOMENTUM = 0.3, 0.5
Row = dict[str, Any]
"""Of one response: name, prompt, tokens, mask, advantage; and how many loss tokens its batch has."""


def prompts(count: int) -> Iterator[dict[str, Any]]:
    """Of one to four tokens."""
    for i in range(count):
        yield {"token_ids": [2 + (7 * i + k) % (VOCAB_SIZE - 2) for k in range(1 + i % 4)]}


def reward(prompt: april.Prompt, response: april.Response) -> float:
    """Share of even tokens."""
    return float((response.tokens % 2 == 0).mean())


def config(short: bool) -> april.Config:
    """With partials in every step; at the end of the data a short batch."""
    return april.Config(
        rollout_batch_size=GROUPS,
        n_samples_per_prompt=SAMPLES,
        over_sampling_batch_size=2 * GROUPS,
        max_response_len=24 if short else 48,
        max_in_flight=12,
        on_data_end="short",
        engine={"kind": "transformers", "stream_interval": 4},
    )


def rows_of(batch: april.Batch) -> list[Row]:
    """The share of this rank."""
    return [
        {
            "id": tuple(sample.id),
            "prompt": sample.prompt.token_ids.tolist(),
            "tokens": sample.tokens.tolist(),
            "logprobs": torch.from_numpy(sample.logprobs.copy()),
            "versions": [tuple(v) for v in sample.versions.tolist()],
            "mask": torch.from_numpy(sample.loss_mask.astype("float32")),
            "advantage": float(advantage),
            "loss_tokens": batch.share.loss_tokens,
        }
        for sample, advantage in zip(batch.samples, batch.advantages("dr_grpo") if len(batch) else [], strict=True)
    ]


def logprobs_of(model: Any, row: Row) -> torch.Tensor:
    """Of the response's tokens, [T]."""
    ids = torch.tensor([row["prompt"] + row["tokens"]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(row["prompt"]) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(row["tokens"])[:, None])[:, 0]


def loss_of(model: Any, rows: Sequence[Row], most: int) -> torch.Tensor:
    """Their part of a policy-gradient loss over the whole batch, by as many forward passes as any rank has rows."""
    loss = torch.zeros(())
    for _ in range(most - len(rows)):
        loss = loss + 0.0 * model(input_ids=torch.zeros(1, 1, dtype=torch.int64)).logits.sum()
    for row in rows:
        ratio = (logprobs_of(model, row) - row["logprobs"]).exp()
        loss = loss - (ratio * row["advantage"] * row["mask"]).sum() / row["loss_tokens"]
    return loss


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Whose steps are continuous in the gradient, so that the order of sums shows as what it is."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def error_of(rows: Sequence[Row], known: dict[tuple[int, int], Any]) -> float:
    """Largest difference in nats to a recomputation under the weights of each token's version."""
    probe, worst = tiny_model().eval(), 0.0
    for version in {v for row in rows for v in row["versions"]}:
        probe.load_state_dict(known[version])
        for row in rows:
            of_it = torch.tensor([v == version for v in row["versions"]])
            if of_it.any():
                with torch.no_grad():
                    apart = (logprobs_of(probe, row) - row["logprobs"]).abs()
                worst = max(worst, float(apart[of_it].max()))
    return worst


class Rank:
    """What one rank does and keeps."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self.model: Any = tiny_model()
        if options.kind == "fsdp2":
            mesh = init_device_mesh("cpu", (ranks,))
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model.lm_head, mesh=mesh)  # the last that runs is not the root
            fully_shard(self.model, mesh=mesh)
        else:
            self.model = DistributedDataParallel(self.model)
        self.optimizer = optimizer_of(self.model)
        self.kept: dict[str, Any] = {"steps": [], "error": 0.0, "end": "", "seconds": 0.0, "stale": 0, "transfers": []}
        self.known: dict[tuple[int, int], Any] = {}

    def weights(self) -> Any:
        """Whole, on every rank; all ranks call it."""
        state = getattr(self.model, "module", self.model).state_dict()
        return {
            name: (weight.full_tensor() if isinstance(weight, DTensor) else weight.clone())
            for name, weight in state.items()
        }

    def train(self) -> None:
        """Until the data or the steps end."""
        o = self.options
        ranks = april.Ranks.of_torch(rank_timeout_s=RANK_TIMEOUT_S)
        with april.RankScheduler(
            config(o.short), ranks=ranks, prompts=prompts(o.prompts), reward=reward, model=self.model
        ) as rollouts:
            if o.resume is not None:
                saved = torch.load(o.resume, weights_only=True)
                set_state_dict(
                    self.model, self.optimizer, model_state_dict=saved["model"], options=WHOLE,
                    optim_state_dict=saved["optimizer"],
                )  # fmt: skip
                rollouts.load_state_dict(saved["rollouts"])
                self.known = saved["known"]
            self.known[tuple(rollouts.version)] = self.weights()
            while len(self.kept["steps"]) < o.steps:
                self.fail_at("next_batch", len(self.kept["steps"]))
                try:
                    batch = rollouts.next_batch()
                except april.DataExhausted as end:
                    self.kept["end"] = str(end)
                    break
                self.step(batch, rollouts)
            if o.save is not None:
                model, optimizer = get_state_dict(self.model, self.optimizer, options=WHOLE)
                if self.rank == 0:
                    state = rollouts.state_dict()
                    known = self.known
                    torch.save({"model": model, "optimizer": optimizer, "rollouts": state, "known": known}, o.save)
            self.kept["reward"] = rollouts.evaluate([[7]] if self.rank == 0 else []).reward_mean
            self.kept["weights"] = self.weights()

    def step(self, batch: april.Batch, rollouts: april.RankScheduler) -> None:
        """Train this rank's share."""
        number, rows = len(self.kept["steps"]), rows_of(batch)
        self.kept["error"] = max(self.kept["error"], error_of(rows, self.known))
        now = tuple(batch.version)
        self.kept["stale"] += sum(v != now for row in rows for v in row["versions"])
        most = math.ceil(batch.share.samples / batch.share.ranks)
        (loss_of(self.model, rows, most) * batch.share.ranks).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

        def transfer() -> None:
            self.fail_at("transfer", number)
            if self.options.fail is None:  # nobody is missing: collectives work here, for all ranks are in it
                there = torch.tensor(1.0)
                dist.all_reduce(there)
                self.kept["transfers"].append(there.item())

        rollouts.weight_update(transfer=transfer)
        self.known[tuple(rollouts.version)] = self.weights()
        self.kept["steps"].append(rows)

    def fail_at(self, where: str, step: int) -> None:
        """As --fail says: ``how:where:rank:step``."""
        if self.options.fail is None or self.options.fail.split(":")[1:] != [where, str(self.rank), str(step)]:
            return
        (self.options.out / "failed").write_text(str(time.time()))
        if self.options.fail.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("planted")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["ddp", "fsdp2"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--fail", help="kill:next_batch:1:3, raise:transfer:0:2, ...")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = Rank(options)
    began = time.monotonic()
    try:
        rank.train()
        dist.destroy_process_group()
    except (Exception, KeyboardInterrupt) as error:
        rank.kept["end"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        rank.kept["ended"] = time.time()
        rank.kept["seconds"] = time.monotonic() - began
        torch.save(rank.kept, options.out / f"rank{rank.rank}.pt")


if __name__ == "__main__":
    main()
    end_rank()
