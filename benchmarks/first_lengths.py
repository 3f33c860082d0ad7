"""Which lengths the first batches of a run have, and which the later ones: the bias of the first N within a step.

The reference workload of :mod:`benchmarks.simulated_reference`, the real core on virtual time. A row per schedule:
mean length in a batch / mean of the distribution, mean over seeds. Run: ``python -m benchmarks.first_lengths``.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from april.core.settings import CoreSettings
from april.core.types import OnStale, Refill
from april.engines.simulated.response_lengths import LognormalLengths
from april.simulate.simulation import Simulation
from benchmarks.simulated_reference import COST

SCHEDULES: dict[str, dict[str, Any]] = {
    "N' = N": {},
    "N' = 1.5 N": {"over_sampling_batch_size": 48},
    "N' = 2 N": {"over_sampling_batch_size": 64},
    "refill: sample": {"refill": Refill.SAMPLE},
    "N' = 2 N, group_quorum 0.5": {"over_sampling_batch_size": 64, "group_quorum": 0.5},
    "N' = 2 N, on_stale: drop, max_staleness 1": {
        "over_sampling_batch_size": 64, "on_stale": OnStale.DROP, "max_staleness": 1,
    },
}  # fmt: skip
PERIODS = ((0, 1), (1, 2), (2, 3), (3, 5), (5, 10), (10, 50))
"""Batches, counted from 0, the last one left out."""
CAP = 16_384


def run(schedule: dict[str, Any], seed: int, steps: int) -> tuple[list[float], dict[str, float]]:
    """Mean length of each batch / mean of the distribution; the metrics of the last batch."""
    lengths = LognormalLengths.split(median=2500, sigma=0.8, between_share=0.6, seed=seed)
    values: dict[str, Any] = {"over_sampling_batch_size": 32} | schedule
    in_flight = max(32, values["over_sampling_batch_size"]) * 8
    settings = CoreSettings(
        rollout_batch_size=32, n_samples_per_prompt=8, max_response_len=CAP, max_in_flight=in_flight, has_reward=False,
        **values,
    )  # fmt: skip
    result = Simulation(settings, COST, lengths, engines=4, prompt_len=128).run(steps)
    sample = np.concatenate([lengths.group(group, 8) for group in range(20_000)])
    mean = float(np.minimum(sample, CAP).mean())
    return [float(np.mean(step.lengths)) / mean for step in result.steps], result.steps[-1].metrics


def main() -> None:
    """Print one row per schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    periods = [(first, min(end, given.steps)) for first, end in PERIODS if first < given.steps]
    names = [f"{first + 1}-{end}" if end > first + 1 else str(end) for first, end in periods]
    print(f"| batch | {' | '.join(names)} | trained / generated | length_unknown |")
    for name, schedule in SCHEDULES.items():
        runs = [run(schedule, seed, given.steps) for seed in range(given.seeds)]
        ratios = np.mean([ratios for ratios, _ in runs], axis=0)
        cells = [f"{np.mean(ratios[first:end]):.2f}" for first, end in periods]
        trained = np.mean([m["length_mean_trained"] / m["length_mean_generated"] for _, m in runs])
        unknown = np.mean([m["length_unknown"] for _, m in runs])
        print(f"| {name} | {' | '.join(cells)} | {trained:.2f} | {unknown:.2f} |", flush=True)


if __name__ == "__main__":
    main()
