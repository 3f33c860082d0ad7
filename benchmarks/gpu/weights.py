"""Measure the ways of new weights to servers that run: sent from this process (NCCL on GPUs), and by a directory.

    python -m benchmarks.gpu.weights --kind vllm --urls http://127.0.0.1:8000 --model MODEL --shared-dir /shared/run

Start the servers on other GPUs than this process has, vLLM with ``--weight-transfer-config '{"backend": "nccl"}'``,
SGLang as it is; ``--device cpu`` and servers without a GPU go over gloo. The model is changed before each update, in
turns by both routes, and requests are in flight when it comes. The JSON has, for each update, the seconds from the call
to its return (a directory is written in them), those of writing, CPU seconds, and the peak of this process's memory on
the device above the model's. Nothing is compared with anything: ``tests.real_engines.weight_routes`` holds both routes
to the log-probabilities of the new weights.

With ``--modes`` it measures as well what an update costs the requests in flight by each ``on_weight_update`` (keep and
recompute need vLLM): seconds until all have a further token, and tokens per second.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import april
from april.weights.source import BUCKET_BYTES, WeightSource
from benchmarks.gpu.device import chosen, facts, synchronize
from benchmarks.gpu.going_on import NothingMoves, going_on

ROUTES = ("collective", "disk")
MODES = ("resubmit", "keep", "recompute")
SIBLINGS = 4
LONGER = 8
"""Times as long are responses that do not end while updates are measured with ``--modes``."""
CHANGE = 0.01
"""Of the spread of each weight: what is added before each update."""


def prompts(vocab_size: int, length: int = 64) -> Iterator[list[int]]:
    """Token ids that no two prompts share."""
    numbers = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(vocab_size // 2, (length,), generator=numbers).tolist()


def change(model: Any, seed: int) -> None:
    """Change all weights a little."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * CHANGE)


def one_update(rollouts: Any, route: str, model: Any, folder: Path, bucket: int) -> dict[str, float]:
    """Hand the model over by a route; returns what it took."""
    device = model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    synchronize(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    began, cpu = time.monotonic(), time.process_time()
    written = began
    if route == "disk":
        model.save_pretrained(folder)
        written = time.monotonic()
        rollouts.weight_update(path=str(folder))
    else:
        rollouts.weight_update(weights=WeightSource(model, bucket_bytes=bucket))
    took = time.monotonic() - began
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    return {
        "seconds": took, "writing_s": written - began, "cpu_s": time.process_time() - cpu, "peak_bytes": float(peak),
    }  # fmt: skip


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """All updates, of which the first of each route is not counted."""
    from transformers import AutoModelForCausalLM

    device = chosen(options.device, miniature=False)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    model.to(device)
    config = april.Config(
        rollout_batch_size=options.in_flight // 2, n_samples_per_prompt=1, over_sampling_batch_size=options.in_flight,
        max_response_len=options.response, max_staleness=1000, outage_deadline_s=options.limit,
        engine={"kind": options.kind, "urls": options.urls},
    )  # fmt: skip
    updates: dict[str, list[dict[str, float]]] = {route: [] for route in options.routes}
    with april.RolloutScheduler(
        config, prompts=prompts(model.config.vocab_size), reward=None, progress=False
    ) as rollouts:
        for number in range((options.updates + 1) * len(updates)):
            route = options.routes[number % len(updates)]
            rollouts.next_batch()
            change(model, number)
            folder = options.shared_dir / f"update_{number}"
            updates[route].append(one_update(rollouts, route, model, folder, options.bucket_mb << 20))
            shutil.rmtree(options.shared_dir / f"update_{number - 1}", ignore_errors=True)
            print(f"update {number} ({route}): {updates[route][-1]['seconds']:.2f} s", flush=True)
        backends = sorted({name for engine in rollouts.engines for name in engine.capabilities.collective[:1]})
    in_flight = {mode: of_requests(mode, model, options) for mode in options.modes}
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "facts": facts(device), "kind": options.kind, "servers": len(options.urls), "model_bytes": size,
        "back-ends": backends, "bucket_bytes": options.bucket_mb << 20,
        "updates": {route: found[1:] for route, found in updates.items()}, "in_flight": in_flight,
    }  # fmt: skip


def of_requests(mode: str, model: Any, options: argparse.Namespace) -> dict[str, float]:
    """The cost of updates for the requests in flight, groups of four with long prompts, by the first of the routes."""
    groups, long = max(1, options.in_flight // SIBLINGS), LONGER * options.response
    config = april.Config(
        rollout_batch_size=groups, n_samples_per_prompt=SIBLINGS, max_in_flight=groups * SIBLINGS,
        generation="continuous", on_weight_update=mode, max_response_len=long, max_staleness=1000,
        sampling={"min_tokens": long - 1}, allow_mismatch=True,  # none ends meanwhile
        outage_deadline_s=options.limit, engine={"kind": options.kind, "urls": options.urls, "max_token_loss": 64},
    )  # fmt: skip

    def update(number: int) -> None:
        change(model, number)
        folder = options.shared_dir / f"{mode}_{number}"
        one_update(rollouts, options.routes[0], model, folder, options.bucket_mb << 20)
        shutil.rmtree(options.shared_dir / f"{mode}_{number - 1}", ignore_errors=True)

    drawn = islice(prompts(model.config.vocab_size, options.context), groups)
    with april.RolloutScheduler(config, prompts=drawn, reward=None, progress=False) as rollouts:
        found = going_on(rollouts, groups * SIBLINGS, update, options.updates, rest_s=1.0)
    print(f"{mode}: {json.dumps(found)}", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the JSON, print the medians."""
    said = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.weights", description=said)
    parser.add_argument("--kind", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--urls", nargs="+", required=True, help="one per server")
    parser.add_argument("--model", required=True, help="that the servers serve: a directory, or a name")
    parser.add_argument("--shared-dir", type=Path, required=True, help="for weights, seen by every server as here")
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=ROUTES)
    parser.add_argument("--updates", type=int, default=10, help="by each route, after one that is not counted")
    parser.add_argument("--in-flight", type=int, default=64, help="requests")
    parser.add_argument("--response", type=int, default=512, help="most tokens of a response")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=(), help="of on_weight_update, to compare")
    parser.add_argument("--context", type=int, default=8192, help="tokens of a prompt with --modes")
    parser.add_argument("--bucket-mb", type=int, default=BUCKET_BYTES >> 20, help="that are on their way at a time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a call of a server may take")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", help="as torch calls it; default: the GPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-benchmark"), help="directory of weights.json")
    options = parser.parse_args(argv)
    try:
        report = measured(options)
    except (april.AprilError, NothingMoves) as error:
        print(error, file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "weights.json").write_text(json.dumps(report, indent=1), "utf-8")
    for route, found in report["updates"].items():
        middle = {name: statistics.median(update[name] for update in found) for name in found[0]} if found else {}
        print(f"{route}: {', '.join(f'{name} {value:.3g}' for name, value in middle.items())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
