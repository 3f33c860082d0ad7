"""OpenRLHF's asynchronous trainer, by itself and with april: trained tokens per second of the whole loop.

    .venv/openrlhf/bin/python tests/adapters/real_openrlhf/side_by_side.py DIRECTORY [--arms own stepwise ...]

The real packages and the real vLLM on a CPU, one process per arm and round, the arms one after the other in each round:
N = 4 groups of 4, responses of at most 400 tokens whose lengths a random model decides (about geometric, mean 60), and
a learning rate that leaves them so. A forward pass of vLLM takes ``--decode-s`` and an update ``--train-s`` in all
arms: what they do not need they sleep, as they would on processors of their own. Prints a line of JSON per arm and
round, of the steps after the first ``--skip``; the trainer is killed after ``--steps``, long before the data end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from short_runs import Seen, flags, prepare, run

N, SAMPLES, LONGEST = 4, 4, 400
APRIL = {"april.over_sampling_batch_size": 2 * N, "april.max_staleness": 2}
NONE: dict[str, Any] = {"april.over_sampling_batch_size": None}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "own": ("openrlhf.cli.train_ppo_ray", NONE),
    "own-2n": ("openrlhf.cli.train_ppo_ray", {**NONE, "rollout.vllm_generate_batch_size": 2 * N}),
    "own-partial": ("openrlhf.cli.train_ppo_ray", {**NONE, "train.partial_rollout_enable": True}),
    "stepwise": ("april.adapters.openrlhf", APRIL),
    "continuous": ("april.adapters.openrlhf", {**APRIL, "april.generation": "continuous"}),
    "stepwise-4": ("april.adapters.openrlhf", {**APRIL, "april.max_staleness": 4}),
    "continuous-4": ("april.adapters.openrlhf", {**APRIL, "april.generation": "continuous", "april.max_staleness": 4}),
}


def summary(seen: Seen, skip: int) -> dict[str, Any]:
    """From the end of the first ``skip`` steps to the end of the last one."""
    begin, end = seen.steps[skip - 1], seen.steps[-1]
    wall_s = end["ended"] - begin["ended"]
    rows = [(row, number) for number, rows in enumerate(seen.trained) if number >= skip for row in rows]
    ages = [number - oldest for oldest, number in oldest_versions(seen, rows)]
    tokens = sum(sum(row["mask"]) for row, _ in rows)
    idle_s, in_flight = load(seen, begin["ended"], end["ended"])
    return {
        "steps": len(seen.steps) - skip,
        "trained_tokens": tokens,
        "wall_s": round(wall_s, 2),
        "tokens_per_s": round(tokens / wall_s, 1),
        "processors_busy": round((end["cpu_s"] - begin["cpu_s"]) / wall_s, 2),
        "step_s": round(sum(s["ended"] - s["began"] for s in seen.steps[skip:]) / (len(seen.steps) - skip), 2),
        "engine_idle_share": round(idle_s / wall_s, 3),
        "in_flight_mean": round(in_flight, 1),
        "staleness_mean": round(sum(ages) / len(ages), 2),
        "staleness_max": max(ages),
        "mean_length": round(tokens / len(rows), 1),
    }


def oldest_versions(seen: Seen, rows: list[tuple[dict[str, Any], int]]) -> list[tuple[int, int]]:
    """(version of a trained response's oldest token, number of the update that trained it).

    By april's books where it generated; OpenRLHF has none, and each of its responses is one request, which began under
    the weights that vLLM had then.
    """
    by_april = {
        (s["label"], tuple(s["prompt"] + s["tokens"])): min(v[1] for v in s["versions"])
        for b in seen.batches
        for s in b["samples"]
    }
    if by_april:
        return [(by_april[row["label"], tuple(row["sequence"])], n) for row, n in rows]
    whole = {tuple(r["ids"]): r["under"] for r in seen.requests if r["change"] < 0}
    return [(whole[tuple(row["sequence"])], n) for row, n in rows]


def load(seen: Seen, begin: float, end: float) -> tuple[float, float]:
    """Seconds without any request at the engine, and requests in flight on average."""
    idle_s = area = 0.0
    running, since = 0, begin
    for request in sorted(seen.requests, key=lambda r: r["time"]):
        now = min(max(request["time"], begin), end)
        idle_s += (now - since) * (running == 0)
        area += (now - since) * running
        running, since = running + request["change"], now
    return idle_s + (end - since) * (running == 0), (area + (end - since) * running) / (end - begin)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--skip", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--train-s", type=float, default=3.5)
    parser.add_argument("--decode-s", type=float, default=0.02)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["own", "stepwise", "continuous"])
    given = parser.parse_args(arguments)
    for number in range(given.rounds):
        for arm in given.arms:
            where = (given.directory / f"{number}-{arm}").resolve()
            shutil.rmtree(where, ignore_errors=True)
            where.mkdir(parents=True)
            command, changes = ARMS[arm]
            files = prepare(where, rows=(given.steps + 10) * N)
            words = flags(files, where, **{
                "train.async_enable": True, "rollout.batch_size": N, "rollout.n_samples_per_prompt": SAMPLES,
                "train.batch_size": N * SAMPLES, "rollout.max_new_tokens": LONGEST, "data.max_len": LONGEST + 50,
                "actor.adam.lr": 1e-7, **changes,
            })  # fmt: skip
            seen = run(
                where, words, killed_after=given.steps, command=command, OBSERVED_TRAIN_S=str(given.train_s),
                OBSERVED_DECODE_S=str(given.decode_s),
            )
            if len(seen.steps) < given.steps:
                raise RuntimeError(seen.output[-3000:])
            print(json.dumps({"arm": arm, "round": number, **summary(seen, given.skip)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
