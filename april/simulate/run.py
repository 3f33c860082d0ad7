"""Runs ``april simulate``: simulates every schedule once, leaves out the first steps (the ramp) and reports figures.

Invariant: the same workload gives the same report, to the last bit.

The report says how close each schedule comes to the limit: the least possible time for the kept tokens, divided by the
time taken. Kept tokens are the tokens generated after the ramp that were not dropped for their age. The least time is
the time that the same engines need for these tokens if the same number of samples is always in flight, without ends of
steps and without a second prefill. It therefore does not depend on which responses happened to be long. If training
takes time, the least time is the larger of the engines' and the trainer's times if each has its own GPUs, and their sum
if they share GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from april.core.partial_buffer import IdleCause
from april.core.run_times import TrainerTime, bottleneck, whole
from april.simulate.simulation import Simulation
from april.simulate.workload import Placement, Schedule, Workload
from april.view.bars import Begin

Progress = Callable[[int], None]
"""Function that is called with the number of steps done."""


_Totals = tuple[int, int, list[int]]
"""(tokens dropped so far, preemptions so far, lengths of the held responses) at one moment of a simulation."""


def _totals(simulation: Simulation) -> _Totals:
    preemptions = sum(d.counters().preemptions for d in simulation.decoders.values())
    return sum(simulation.core.tokens.dropped.values()), preemptions, simulation.held_lengths()


def measure(workload: Workload, schedule: Schedule, progress: Progress = lambda done: None) -> dict[str, Any]:
    """Simulate ``workload.steps`` steps with one schedule, and return figures of the steps after the ramp.

    Raises:
        RolloutError: the simulation failed.
    """
    simulation = Simulation(
        workload.core_settings(schedule), workload.cost, workload.lengths, engines=workload.engines,
        prompt_len=workload.prompt_len, train_s=workload.train_s, fetch_ahead=workload.fetch_ahead,
    )  # fmt: skip
    before = _totals(simulation)
    for step in range(workload.steps):
        if step == workload.ramp:
            before = _totals(simulation)
        simulation.run(1)
        progress(step + 1)
    return _figures(workload, schedule, simulation, before, _totals(simulation))


def _training_s(deliveries: Iterable[float], train_s: float, start: float, end: float) -> float:
    """Return the trainer's busy seconds between ``start`` and ``end``; it trains batches in the order of delivery."""
    seconds, ended = [0.0], 0.0
    for delivered in deliveries:
        began = max(delivered, ended)
        ended = began + train_s
        seconds.append(max(0.0, min(ended, end) - max(began, start)))
    return math.fsum(seconds)


def _figures(
    workload: Workload, schedule: Schedule, simulation: Simulation, before: _Totals, after: _Totals
) -> dict[str, Any]:
    (dropped_before, preemptions_before, held_before), (dropped, preemptions, held) = before, after
    totals, deliveries = simulation.result.summary(skip=workload.ramp), [s.end_s for s in simulation.result.steps]
    steps = simulation.result.steps[workload.ramp :]
    trained_s = _training_s(deliveries, workload.train_s, steps[0].start_s, steps[-1].end_s)
    seconds, generated = totals["rollout_s"], int(totals["generated_tokens"])
    masked = int(sum(step.metrics["masked_tokens"] for step in steps))
    trained = int(totals["trained_tokens"]) - masked
    delivered = [length for step in steps for length in step.lengths]
    kept = sum(delivered) + sum(held) - sum(held_before)
    at_limit_s = workload.limit_s(delivered + held, schedule.in_flight)
    at_limit_s -= workload.limit_s(held_before, schedule.in_flight)
    least_s = max(at_limit_s, trained_s) if workload.separate else at_limit_s + trained_s
    busy_slot_s = math.fsum(step.busy_slot_s for step in steps)
    reprefill = totals["reprefill_tokens"]
    times = whole(step.metrics for step in steps)  # computed as for real runs
    return {
        "over_sampling_batch_size": schedule.over,
        "generation": "stepwise" if schedule.continuous is None else "continuous",
        "refill": str(schedule.refill),
        "group_quorum": schedule.quorum,
        "max_staleness": workload.max_staleness_of(schedule),
        "in_flight": schedule.in_flight,
        "steps": len(steps),
        "rollout_s": seconds,
        "step_s_mean": seconds / len(steps),
        "trained_tokens": trained,
        "trained_tokens_per_s": trained / seconds,
        "generated_tokens": generated,
        "dropped_tokens": dropped - dropped_before,
        "masked_tokens": masked,
        "kept_tokens": kept,
        "limit_tokens_per_s": kept / at_limit_s,
        "fraction_of_limit": least_s / seconds,
        "long_run_limit_tokens_per_s": workload.long_run_limit(schedule.in_flight),
        "bubble": 1.0 - busy_slot_s / (schedule.in_flight * seconds),
        "off_policy_share": totals["off_policy_share"],
        "staleness_mean": totals["staleness_mean"],
        "staleness_max": int(totals["staleness_max"]),
        "reprefill_per_generated_token": reprefill / generated,
        "reprefill_time_share": workload.cost.prefill_s(int(reprefill)) / (workload.engines * seconds),
        "held_tokens_mean": float(np.mean([step.metrics["held_tokens"] for step in steps])),
        "preemptions": preemptions - preemptions_before,
        "trainer_idle_share": times[TrainerTime.WAITS] / times["step_s"],
        "idle_shares": {str(cause): share for cause in IdleCause if (share := times[f"idle_{cause}"])},
        "bottleneck": bottleneck(times, simulation.core.settings),
        "digest": simulation.result.digest,
    }


PERCENTILES = (90, 99)


def length_statistics(workload: Workload) -> dict[str, Any]:
    """Return figures of the workload's response lengths in tokens, cut at max_response_len."""
    rows = workload.length_sample
    flat, steps = rows.ravel(), len(rows) // workload.groups
    longest = rows[: steps * workload.groups].reshape(steps, -1).max(axis=1)
    median = float(np.median(flat))
    return {
        "mean": float(flat.mean()),
        "median": median,
        "percentiles": {f"p{p:g}": float(np.percentile(flat, p)) for p in PERCENTILES},
        "longest": int(flat.max()),
        "longest_of_a_step_over_median": float(longest.mean()) / median,
        "share_at_the_cap": float((flat == workload.max_response_len).mean()),
    }


def simulate(workload: Workload, begin: Begin) -> dict[str, Any]:
    """Simulate all modes and return the report.

    Raises:
        RolloutError: a simulation failed.
    """
    modes = {name: measure(workload, s, begin(name, workload.steps)) for name, s in workload.modes.items()}
    for figures in modes.values():
        figures["speed_up"] = figures["trained_tokens_per_s"] / modes["sync"]["trained_tokens_per_s"]
    gains: dict[str, float] = {}
    if workload.cost.speed_up:
        plain = workload.without_speculation
        for name, schedule in workload.modes.items():
            slow = measure(plain, schedule, begin(f"{name}, not speculative", workload.steps))
            gains[name] = modes[name]["trained_tokens_per_s"] / slow["trained_tokens_per_s"]
    return {
        "workload": _settings(workload),
        "engine": asdict(workload.cost) | {"in_flight_that_fits_all_engines": workload.fits},
        "lengths": length_statistics(workload),
        "loop": None if workload.train_time is None else _loop_times(workload),
        "modes": modes,
        "speculative_gains": gains,
        "notes": _notes(workload, modes),
    }


def _loop_times(workload: Workload) -> dict[str, Any]:
    """Return the seconds that a batch takes on the engines and on the trainer, and which of the two is slower."""
    return {
        "placement": str(Placement.SEPARATE if workload.separate else Placement.COLOCATED),
        "batch_s": workload.batch_s,
        "train_s": workload.train_s,
        "train_time_in_batch_times": workload.train_s / workload.batch_s,
        "slower": "trainer" if workload.train_s > workload.batch_s else "engines",
    }


def _settings(workload: Workload) -> dict[str, Any]:
    values = asdict(workload)
    if workload.lengths_file is None:
        shape = workload.lengths
        values |= {name: getattr(shape, name.replace("_len", "")) for name in LOGNORMAL}
    schedules = workload.modes
    return values | {"over": schedules["april"].over, "in_flight": schedules["refill"].in_flight}


LOGNORMAL = ("median_len", "sigma_between", "sigma_within")


def _notes(workload: Workload, modes: dict[str, dict[str, Any]]) -> list[str]:
    """Return sentences that warn about figures that are easily misunderstood."""
    notes = []
    for name, m in modes.items():
        if m["in_flight"] > workload.fits:
            notes.append(
                f"{name}: the KV cache holds about {workload.fits:.0f} samples on average, not {m['in_flight']}, so "
                f"the limit at {m['in_flight']} in flight cannot be reached; use more GPUs or fewer samples in flight"
            )
        if m["preemptions"]:
            notes.append(
                f"{name}: the KV cache was full, and {m['preemptions']:,} times a sample had to leave it and wait"
            )
        if m["dropped_tokens"]:
            why = f"because they were too old (on_stale={workload.on_stale})"
            why = "with prompts that begin again in a later round" if name == "tail" else why
            notes.append(
                f"{name}: {m['dropped_tokens'] / m['generated_tokens']:.1%} of the generated tokens were dropped "
                f"{why}; they do not count as throughput"
            )
        if m["masked_tokens"]:
            share = m["masked_tokens"] / (m["masked_tokens"] + m["trained_tokens"])
            notes.append(f"{name}: {share:.1%} of the delivered tokens are too old and carry no loss (on_stale=mask)")
    return notes
