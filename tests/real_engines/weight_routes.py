"""``python -m tests.real_engines.weight_routes sglang``: new weights to a real server by each route, in one run.

SmolLM2-135M in float32 is changed and handed to the server (sglang or vllm) by a directory and by april's own sending,
in turns. After every update the log-probabilities of the server's tokens are compared with those of the model, and all
tokens must have the new version. Then two ranks under FSDP2 send to the same server, each of which may grow by two
buckets at most.

A change that moved no log-probability would prove nothing: each moves one of fixed tokens by ``APART`` nats or more.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

import april
from april.weights.source import WeightSource
from tests.real_engines.commands import server_of
from tests.real_engines.environments import ROOT
from tests.real_engines.memory import peak_growth
from tests.real_engines.pretrained import questions, smollm2
from tests.real_engines.servers import NotKept, Server, program, ready

APART = 0.1
"""Fewest nats by which an update moves some log-probability of fixed tokens."""
CLOSE = 5e-4
"""Most nats between the server's log-probability of a token and the model's own."""
CHANGE = 0.03
"""Of the spread of each weight: what an update adds, at random."""
CONTEXT = 1024
RESPONSE = 24
BUCKET = 128 << 20
"""Bytes; the largest tensor has 113 MB."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one update took."""

    seconds: float
    """From the trainer's call to its return; a directory is written in it."""
    here_s: float
    """CPU of this process."""
    server_s: float
    """CPU of the server's processes."""
    grown_mb: float
    """What this process had more in memory at its peak than at the beginning."""


def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Those of all tokens but the first."""
    with torch.no_grad():
        scored: torch.Tensor = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return scored.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def change(model: Any, seed: int, step: float = CHANGE) -> None:
    """Change all weights by this share of their spread."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise) * weight.std() * step)


def check(model: Any, batch: Any, version: Any) -> float:
    """Return the largest distance of the batch's log-probabilities to the model's own.

    Raises NotKept for a distance that is too large, and for a token of another version.
    """
    worst = 0.0
    for sample in batch.samples:
        if {segment.version for segment in sample.segments} != {version}:
            raise NotKept(f"after the update to {version} there are tokens of {sample.segments}")
        own = logprobs(model, [*sample.prompt.token_ids.tolist(), *sample.tokens.tolist()])[-len(sample.tokens) :]
        worst = max(worst, float((own - torch.from_numpy(sample.logprobs.copy())).abs().max()))
    if worst > CLOSE:
        raise NotKept(f"the server is {worst:.3g} nats off the weights {version} that it was given")
    return worst


def own_cpu() -> float:
    """Seconds of CPU of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def one_update(rollouts: Any, route: str, model: Any, folder: Path, server: Server) -> tuple[Any, Cost]:
    """Hand the model over; returns the version and what it took."""
    began, here, there = time.monotonic(), own_cpu(), server.cpu_s()
    with peak_growth() as grown:
        if route == "disk":
            model.save_pretrained(folder)
            version = rollouts.weight_update(path=str(folder))
        else:
            version = rollouts.weight_update(weights=WeightSource(model, bucket_bytes=BUCKET))
    took = time.monotonic() - began
    return version, Cost(took, own_cpu() - here, server.cpu_s() - there, grown.bytes / 1e6)


def measured(kind: str, server: Server, model_folder: Path, updates: int, work: Path) -> None:
    """Both routes in turns; prints what they took. Raises NotKept."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.eval()
    prompts = questions(model_folder)
    fixed = [*prompts[0], *prompts[1]]
    config = april.Config(
        rollout_batch_size=4, n_samples_per_prompt=1, max_response_len=RESPONSE, max_staleness=0, on_data_end="wrap",
        partial_rollout=False, engine={"kind": kind, "urls": [server.url]},
    )  # fmt: skip
    costs: dict[str, list[Cost]] = {"disk": [], "collective": []}
    worst = 0.0
    least = float("inf")
    with april.RolloutScheduler(config, prompts=prompts, reward=None, progress=False) as rollouts:
        for number in range(2 * updates):
            route = ("disk", "collective")[number % 2]
            before = logprobs(model, fixed)
            change(model, number)
            moved = float((logprobs(model, fixed) - before).abs().max())
            least = min(least, moved)
            if moved < APART:
                raise NotKept(f"update {number} moves no log-probability by more than {moved:.3g} nats")
            version, cost = one_update(rollouts, route, model, work / f"{number}", server)
            shutil.rmtree(work / f"{number}", ignore_errors=True)
            costs[route].append(cost)
            batch = rollouts.next_batch()
            rollouts.commit(batch.id)
            worst = max(worst, check(model, batch, version))
    size = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
    print(
        f"{kind}: {updates} updates by each route, {size:.0f} MB; each moves a log-probability by {least:.2f} nats or "
        f"more, and the server's are at most {worst:.1e} nats off the model's afterwards"
    )
    for route, found in costs.items():
        print(
            f"  {route:10} {_spread([c.seconds for c in found])} s; CPU here {_spread([c.here_s for c in found])} s, "
            f"server {_spread([c.server_s for c in found])} s; memory here + {max(c.grown_mb for c in found):.0f} MB"
        )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def sharded(kind: str, server: Server, model: Path) -> bool:
    """Two ranks under FSDP2 send to the server; False: one of them failed."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
        "tests.real_engines.sharded_sender", kind, server.url, str(model), str(BUCKET),
    ]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode == 0


def main(
    kind: Annotated[str, typer.Argument(help="vllm or sglang")],
    updates: Annotated[int, typer.Option(min=0, help="By each route; 0: only the ranks.")] = 10,
    model: Annotated[Path | None, typer.Option(help="A directory in place of SmolLM2's.")] = None,
) -> None:
    """Start a server, hand weights over, stop it."""
    with program(april.AprilError), tempfile.TemporaryDirectory() as folder:
        where = model or smollm2()
        server = server_of(kind, where, Path(folder), context=CONTEXT, in_flight=16)
        with ready(server):
            if updates:
                measured(kind, server, where, updates, Path(folder))
            right = sharded(kind, server, where)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    typer.run(main)
