"""What an update costs by each route, on a real vLLM server with a real model, on a machine without a GPU.

``python -m tests.real_engines.weight_routes_cost [MODEL]`` sends ten updates over gloo and loads ten from a directory,
in turns. After each of them the server's log-probabilities must be those of the trainer's model, and updates must
differ by so much that a wrong one is seen. Seconds are those of ``weight_update``; a directory's have the saving apart.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import april
from tests.real_engines.commands import vllm_server
from tests.real_engines.pretrained import smollm2
from tests.real_engines.sent_weights import CLOSE, NotKept, Trainer
from tests.real_engines.servers import free_ports, running, until_ready

UPDATES = 10
STEP = 0.01
"""Noise of an update, in standard deviations of each tensor."""
TICKS = 100.0
MB = 1 << 20


@dataclass
class Cost:
    save_s: float
    update_s: float
    sender_cpu_s: float
    server_cpu_s: float
    grown_mb: float
    """Growth of the sender's peak memory."""


def main(given: str = "") -> int:
    """Print the medians of both routes; 1 if a log-probability is wrong."""
    model = Path(given) if given else smollm2()
    with tempfile.TemporaryDirectory() as folder:
        port = free_ports(1)[0]
        server = vllm_server("vllm", model, port, Path(folder) / "log", open_routes=True, context=1024, in_flight=32)
        with running([server]):
            until_ready([server])
            config = april.Config(
                rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=24, max_staleness=0,
                sampling={"min_tokens": 23}, allow_mismatch=True, engine={"kind": "vllm", "urls": [server.url]},
            )  # fmt: skip
            prompts = [[300 + i, 20, 500, 40 + i] for i in range(64)]
            loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            trainer = Trainer(loaded.eval(), keeps=2)
            costs: dict[str, list[Cost]] = {"collective": [], "disk": []}
            with april.RolloutScheduler(config, prompts=prompts, reward=None, progress=False) as rollouts:
                for number in range(2 * UPDATES):
                    route = list(costs)[number % 2]
                    trainer.change(number, STEP)
                    cost = _update(rollouts, trainer, route, Path(folder) / f"w{number}", server.group)
                    batch = rollouts.next_batch()
                    trainer.check(batch)
                    rollouts.commit(batch.id)
                    costs[route].append(cost)
                    print(f"  {route} {number}: {cost}", flush=True)
    size = sum(p.numel() * p.element_size() for p in trainer.model.parameters()) / MB
    print(f"{size:.0f} MB of weights; every log-probability within {CLOSE:g} nats")
    for route, each in costs.items():
        rows = {name: round(statistics.median(getattr(c, name) for c in each), 2) for name in Cost.__annotations__}
        print(route, json.dumps(rows))
    return 0


def _update(
    rollouts: april.RolloutScheduler, trainer: Trainer, route: str, where: Path, group: int
) -> Cost:
    _forget_peak()
    before, cpu, theirs = _memory("VmRSS"), time.process_time(), _server_cpu_s(group)
    began = saved = time.monotonic()
    if route == "disk":
        trainer.model.save_pretrained(where)
        saved = time.monotonic()
        version = rollouts.weight_update(str(where))
        shutil.rmtree(where)
    else:
        version = rollouts.weight_update(weights=trainer.model)
    ended = time.monotonic()
    cost = Cost(
        round(saved - began, 3), round(ended - saved, 3), round(time.process_time() - cpu, 3),
        round(_server_cpu_s(group) - theirs, 3), round(_memory("VmHWM") - before, 1),
    )  # fmt: skip
    trainer.now_is(version)
    return cost


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", "ascii")


def _memory(kind: str) -> float:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{kind}:"))


def _server_cpu_s(group: int) -> float:
    """Of all processes of this group, those that have ended left out."""
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text("ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:2]))
    except NotKept as error:
        sys.exit(f"BROKEN: {error}")
