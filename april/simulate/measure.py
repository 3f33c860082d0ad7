"""Run one schedule on virtual time, leave out the ramp, measure the rest.

The fraction of the limit: of the steps after the ramp take the tokens that were kept: generated, less those
dropped for their age (which is the same as trained, plus held at the end, less held at the beginning). The limit is the
time that exactly these tokens, each at its place in its response, take on the same engines when the same number of
samples is in flight all the time: no step ends, nothing is prefilled twice. The fraction is that time over the time it
took. So it does not depend on which responses happened to be long, and dropped work never counts. Where training takes
time, the least time is that of the slower, engines or trainer, if each has GPUs of its own, and the sum of both if not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from april.core.partial_buffer import Idle
from april.core.run_times import TrainerTime, bottleneck, whole
from april.core.settings import CoreSettings
from april.simulate.simulation import Simulation
from april.simulate.workload import Schedule, Workload

Progress = Callable[[int], None]
"""Told how many steps are done."""


@dataclass(frozen=True)
class Measured:
    """The figures of one schedule, and what the picture shows of it.

    Attributes:
        figures: for simulate.json; times in seconds of virtual time.
        busy: (time, busy slots) at every change after the ramp; time starts at 0.
        step_ends: times at which a batch was delivered.
        trainings: (beginning, end) of the training of each batch, from 0 on.
    """

    figures: dict[str, Any]
    busy: list[tuple[float, int]] = field(repr=False)
    step_ends: list[float] = field(repr=False)
    trainings: list[tuple[float, float]] = field(repr=False)


@dataclass(frozen=True)
class _Totals:
    """Totals; a window's figures are their differences."""

    dropped: int
    preemptions: int
    held: list[int]
    """Tokens of every held response that has some."""

    @classmethod
    def of(cls, simulation: Simulation) -> _Totals:
        """As they stand now."""
        core = simulation.core
        preemptions = sum(d.counters().preemptions for d in simulation.decoders.values())
        return cls(sum(core.tokens.dropped.values()), preemptions, simulation.held_lengths())


def measure(workload: Workload, schedule: Schedule, progress: Progress = lambda done: None) -> Measured:
    """Simulate ``workload.steps`` steps; the figures are of those after the ramp.

    Raises:
        RolloutError: the core gave up.
    """
    busy: list[tuple[float, int]] = []
    simulation = Simulation(
        workload.core_settings(schedule),
        workload.cost,
        workload.lengths,
        engines=workload.engines,
        prompt_len=workload.prompt_len,
        train_s=workload.train_s,
        fetch_ahead=workload.fetch_ahead,
        watch=lambda at, running: busy.append((at, running)),
    )
    before = _Totals.of(simulation)
    for step in range(workload.steps):
        if step == workload.ramp:
            before = _Totals.of(simulation)
            busy.clear()
        simulation.run(1)
        progress(step + 1)
    after = _Totals.of(simulation)
    steps = simulation.result.steps[workload.ramp :]
    start, end = steps[0].start_s, steps[-1].end_s
    trainings = [
        (max(began, start) - start, min(ended, end) - start)
        for began, ended in _trainings([step.end_s for step in simulation.result.steps], workload.train_s)
        if began < end and ended > start
    ]
    return Measured(
        _figures(workload, schedule, simulation, before, after, math.fsum(ended - began for began, ended in trainings)),
        [(at - start, running) for at, running in busy],
        [step.end_s - start for step in steps],
        trainings,
    )


def _waited(settings: CoreSettings, steps: list[dict[str, float]]) -> dict[str, Any]:
    """Return who waited, for how long and why: the account that real runs have among their metrics."""
    times = whole(steps)
    return {
        "trainer_idle_share": times[TrainerTime.WAITS] / times["step_s"],
        "idle_shares": {str(cause): share for cause in Idle if (share := times[f"idle_{cause}"])},
        "bottleneck": bottleneck(times, settings, lambda **_: True),
    }


def _trainings(deliveries: list[float], train_s: float) -> Iterator[tuple[float, float]]:
    """Beginning and end of the training of each batch, one after the other."""
    ended = 0.0
    for delivered in deliveries:
        began = max(delivered, ended)
        ended = began + train_s
        yield began, ended


def _figures(
    workload: Workload,
    schedule: Schedule,
    simulation: Simulation,
    before: _Totals,
    after: _Totals,
    trained_s: float,
) -> dict[str, Any]:
    totals = simulation.result.summary(skip=workload.ramp)
    steps = simulation.result.steps[workload.ramp :]
    seconds, generated = totals["rollout_s"], int(totals["generated_tokens"])
    dropped = after.dropped - before.dropped
    masked = int(sum(step.metrics["masked_tokens"] for step in steps))
    trained = int(totals["trained_tokens"]) - masked
    delivered = [length for step in steps for length in step.lengths]
    kept = sum(delivered) + sum(after.held) - sum(before.held)
    at_limit_s = workload.limit_s(delivered + after.held, schedule.in_flight)
    at_limit_s -= workload.limit_s(before.held, schedule.in_flight)
    least_s = max(at_limit_s, trained_s) if workload.separate else at_limit_s + trained_s
    busy_slot_s = math.fsum(step.busy_slot_s for step in steps)
    reprefill = totals["reprefill_tokens"]
    ages: dict[int, int] = {}
    for step in steps:
        for age, count in step.token_ages.items():
            ages[age] = ages.get(age, 0) + count
    all_ages = sum(ages.values())
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
        "generated_tokens_per_s": generated / seconds,
        "dropped_tokens": dropped,
        "masked_tokens": masked,
        "kept_tokens": kept,
        "limit_tokens_per_s": kept / at_limit_s,
        "fraction_of_limit": least_s / seconds,
        "long_run_limit_tokens_per_s": workload.long_run_limit(schedule.in_flight),
        "bubble": 1.0 - busy_slot_s / (schedule.in_flight * seconds),
        "off_policy_share": totals["off_policy_share"],
        "staleness_mean": totals["staleness_mean"],
        "staleness_max": int(totals["staleness_max"]),
        "trained_token_age_shares": [ages.get(age, 0) / all_ages for age in range(max(ages) + 1)],
        "reprefill_tokens": int(reprefill),
        "reprefill_per_generated_token": reprefill / generated,
        "reprefill_time_share": workload.cost.prefill_s(int(reprefill)) / (workload.engines * seconds),
        "held_tokens_mean": float(np.mean([step.metrics["held_tokens"] for step in steps])),
        "held_groups_mean": float(np.mean([step.metrics["carried_groups"] for step in steps])),
        "held_groups_max": int(max(step.metrics["carried_groups"] for step in steps)),
        "decode_steps": int(totals["decode_steps"]),
        "preemptions": after.preemptions - before.preemptions,
        **_waited(simulation.core.settings, [step.metrics for step in steps]),
        "digest": simulation.result.digest,
    }
