"""Runs ``april simulate``: simulates every schedule once, leaves out the first steps (the ramp) and reports figures.

Invariant: the same workload gives the same report, to the last bit, except for ``cpu_s``.

The fraction of the limit is computed from the tokens kept after the ramp: the tokens generated, less the tokens dropped
for age (equal to tokens trained, plus those held at the end, less those held at the start). The least time for these
tokens is the time that the same engines need for them, each at its position in its response, if the same number of
samples is in flight all the time: no step ends, and nothing is prefilled twice. The fraction of the limit is this time
divided by the time taken. So it does not depend on which responses happened to be long, and dropped tokens never count.
If training takes time, the least time is the larger of the engines' and the trainer's times if each has its own GPUs,
and their sum if they share GPUs.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from april.core.partial_buffer import IdleCause
from april.core.run_times import TrainerTime, bottleneck, whole
from april.core.settings import CoreSettings
from april.core.types import OnStale
from april.simulate.simulation import Simulation
from april.simulate.workload import Placement, Schedule, Workload
from april.view.bars import Begin

Progress = Callable[[int], None]
"""Function that is called with the number of steps done."""


@dataclass(frozen=True)
class ScheduleMeasurement:
    """Figures of one simulated schedule, and the curves for its picture.

    All times are seconds of virtual time; the times of the curves start at 0 after the ramp.

    Attributes:
        figures: figures for simulate.json.
        busy: (time, busy slots) after every event.
        step_ends: times at which a batch was delivered.
        trainings: (start, end) of the training of each batch.
    """

    figures: dict[str, Any]
    busy: list[tuple[float, int]] = field(repr=False)
    step_ends: list[float] = field(repr=False)
    trainings: list[tuple[float, float]] = field(repr=False)


_Totals = tuple[int, int, list[int]]
"""(tokens dropped so far, preemptions so far, lengths of the held responses) at one moment of a simulation."""


def _totals(simulation: Simulation) -> _Totals:
    preemptions = sum(d.counters().preemptions for d in simulation.decoders.values())
    return sum(simulation.core.tokens.dropped.values()), preemptions, simulation.held_lengths()


def measure(workload: Workload, schedule: Schedule, progress: Progress = lambda done: None) -> ScheduleMeasurement:
    """Simulate ``workload.steps`` steps with one schedule, and measure the steps after the ramp.

    Raises:
        RolloutError: the core gave up.
    """
    busy: list[tuple[float, int]] = []
    simulation = Simulation(
        workload.core_settings(schedule), workload.cost, workload.lengths, engines=workload.engines,
        prompt_len=workload.prompt_len, train_s=workload.train_s, fetch_ahead=workload.fetch_ahead,
        watch=lambda at, running: busy.append((at, running)), shares_prompts=workload.keep,
    )  # fmt: skip
    before = _totals(simulation)
    for step in range(workload.steps):
        if step == workload.ramp:
            before = _totals(simulation)
            busy.clear()
        simulation.run(1)
        progress(step + 1)
    after = _totals(simulation)
    steps = simulation.result.steps[workload.ramp :]
    start, end = steps[0].start_s, steps[-1].end_s
    trainings = [
        (max(began, start) - start, min(ended, end) - start)
        for began, ended in _trainings([step.end_s for step in simulation.result.steps], workload.train_s)
        if began < end and ended > start
    ]
    return ScheduleMeasurement(
        _figures(workload, schedule, simulation, before, after, math.fsum(ended - began for began, ended in trainings)),
        [(at - start, running) for at, running in busy],
        [step.end_s - start for step in steps],
        trainings,
    )


def _idle_times(settings: CoreSettings, steps: list[dict[str, float]]) -> dict[str, Any]:
    """Return how long trainer and engines were idle and why; computed in the same way as the metrics of real runs."""
    times = whole(steps)
    return {
        "trainer_idle_share": times[TrainerTime.WAITS] / times["step_s"],
        "idle_shares": {str(cause): share for cause in IdleCause if (share := times[f"idle_{cause}"])},
        "bottleneck": bottleneck(times, settings),
    }


def _trainings(deliveries: list[float], train_s: float) -> Iterator[tuple[float, float]]:
    """Yield (start, end) of the training of each batch, in order."""
    ended = 0.0
    for delivered in deliveries:
        began = max(delivered, ended)
        ended = began + train_s
        yield began, ended


def _figures(
    workload: Workload, schedule: Schedule, simulation: Simulation, before: _Totals, after: _Totals, trained_s: float
) -> dict[str, Any]:
    (dropped_before, preemptions_before, held_before), (dropped, preemptions, held) = before, after
    totals = simulation.result.summary(skip=workload.ramp)
    steps = simulation.result.steps[workload.ramp :]
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
    ages: Counter[int] = Counter()
    for step in steps:
        ages.update(step.token_ages)
    return {
        "over_sampling_batch_size": schedule.over,
        "on_weight_update": "keep" if schedule.keeps_requests else "resubmit",
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
        "trained_token_age_shares": [ages[age] / ages.total() for age in range(max(ages) + 1)],
        "reprefill_tokens": int(reprefill),
        "reprefill_per_generated_token": reprefill / generated,
        "reprefill_time_share": workload.cost.prefill_s(int(reprefill)) / (workload.engines * seconds),
        "held_tokens_mean": float(np.mean([step.metrics["held_tokens"] for step in steps])),
        "held_groups_mean": float(np.mean([step.metrics["carried_groups"] for step in steps])),
        "held_groups_max": int(max(step.metrics["carried_groups"] for step in steps)),
        "decode_steps": int(totals["decode_steps"]),
        "preemptions": preemptions - preemptions_before,
        **_idle_times(simulation.core.settings, [step.metrics for step in steps]),
        "digest": simulation.result.digest,
    }


# ---------------------------------------------------------------- all schedules, side by side

BINS = 64
PERCENTILES = (10, 25, 50, 75, 90, 95, 99, 99.9)


def length_statistics(workload: Workload) -> dict[str, Any]:
    """Return figures and a histogram of the workload's response lengths in tokens, cut at max_response_len."""
    rows = workload.length_sample
    flat = rows.ravel()
    steps = len(rows) // workload.groups
    longest = rows[: steps * workload.groups].reshape(steps, -1).max(axis=1)
    median, mean = float(np.median(flat)), float(flat.mean())
    log = np.log(rows)
    between = float(np.var(log.mean(axis=1))) if workload.samples > 1 else 0.0
    within = float(log.var(axis=1, ddof=1).mean()) if workload.samples > 1 else 0.0
    # the variance of the group means includes 1/n of the variance within groups
    between = max(0.0, between - within / workload.samples)
    slowest = np.sort(flat)[-max(1, flat.size // 20) :]
    counts, edges = np.histogram(flat, bins=BINS, range=(0, int(flat.max())))
    return {
        "samples": int(flat.size),
        "mean": mean,
        "median": median,
        "longest": int(flat.max()),
        "longest_over_median": float(flat.max()) / median,
        "longest_of_a_step_mean": float(longest.mean()),
        "longest_of_a_step_over_median": float(longest.mean()) / median,
        "percentiles": {f"p{p:g}": float(np.percentile(flat, p)) for p in PERCENTILES},
        "share_at_the_cap": float((flat == workload.max_response_len).mean()),
        "token_share_of_the_longest_5_percent": float(slowest.sum() / flat.sum()),
        "share_of_log_variance_between_prompts": between / (between + within) if between + within > 0 else 0.0,
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }


RATIOS = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Ratios N'/N (``over_sampling_batch_size`` to ``rollout_batch_size``) of the sweep."""
IDLE_WORTH_A_WORD = 0.01
DEFINITIONS = {
    "tokens_per_s": "response tokens per second of all engines together, over the steps after the ramp; with a train "
    "time of the whole loop, without one of rollout: training takes no time there",
    "rollout_s": "seconds from the delivery before the first of these steps to that of the last",
    "kept_tokens": "generated, less those dropped for their age; trained, plus held at the end, less held at first",
    "limit_tokens_per_s": "exactly the kept tokens, on the same engines with in_flight samples in flight all the time",
    "fraction_of_limit": "least time for the kept tokens / time they took; least: at limit_tokens_per_s, or what the "
    "trainer takes for the batches if that is more; the sum of both where engines and trainer share GPUs",
    "long_run_limit_tokens_per_s": "the same for ever, with a large sample of the lengths",
    "bubble": "1 - busy slots integrated over time / (samples in flight x time), each mode against its own in_flight",
    "trainer_idle_share": "share of the time in which the trainer waits for a batch",
    "idle_shares": "share of samples in flight x time that is empty, by cause, as the metrics idle_... of a run",
    "bottleneck": "the sentence that a run says of its steps, here of all after the ramp",
    "off_policy_share": "share of the trained tokens that are older than the weights which are trained with them",
    "staleness": "weight updates between a trained response's oldest token and its training",
    "trained_token_age_shares": "share of the trained tokens by age in weight updates: 0, 1, 2, ...",
    "reprefill_per_generated_token": "prompt and response tokens prefilled again to resume, per generated token",
    "reprefill_time_share": "share of the engines' time that this prefill takes",
    "held_tokens_mean": "tokens kept over the end of a step: partials, finished siblings, surplus",
}


def simulate(workload: Workload, sweep: bool, begin: Begin) -> tuple[dict[str, Any], dict[str, ScheduleMeasurement]]:
    """Simulate all modes and return (report, measurements by mode).

    With ``sweep``, also simulate several ratios N'/N, unless the trainer has its own GPUs.

    Raises:
        RolloutError: the core gave up.
    """
    began = time.process_time()
    cpu_s: dict[str, float] = {}
    done: dict[Schedule, ScheduleMeasurement] = {}

    def run(name: str, schedule: Schedule) -> ScheduleMeasurement:
        if schedule not in done:
            started = time.process_time()
            done[schedule] = measure(workload, schedule, begin(name, workload.steps))
            cpu_s[name] = time.process_time() - started
        return done[schedule]

    lengths = length_statistics(workload)
    runs = {name: run(name, schedule) for name, schedule in workload.modes.items()}
    notes: list[str] = []
    rows = _sweep(workload, run, notes) if sweep and not workload.separate else []
    base = runs["sync"].figures["trained_tokens_per_s"]
    gains: dict[str, float] = {}
    if workload.cost.speed_up:
        plain = workload.without_speculation
        for name, schedule in workload.modes.items():
            slow = measure(plain, schedule, begin(f"{name}, not speculative", workload.steps)).figures
            gains[name] = runs[name].figures["trained_tokens_per_s"] / slow["trained_tokens_per_s"]
    modes = {name: _relative_figures(measured, base) for name, measured in runs.items()}
    report = {
        "workload": _settings(workload),
        "engine": asdict(workload.cost) | {"in_flight_that_fits_all_engines": workload.fits},
        "lengths": lengths,
        "loop": None if workload.train_time is None else _loop_times(workload),
        "modes": modes,
        "speculative_gains": gains,
        "sweep": [{"ratio": ratio} | _relative_figures(measured, base) for ratio, measured in rows],
        "notes": notes + _notes(workload, modes),
        "definitions": DEFINITIONS,
        "cpu_s": cpu_s | {"total": time.process_time() - began},
    }
    return report, runs


def _sweep(
    workload: Workload, run: Callable[[str, Schedule], ScheduleMeasurement], notes: list[str]
) -> list[tuple[float, ScheduleMeasurement]]:
    rows = []
    shots = dict.fromkeys(workload.one_shot(round(ratio * workload.groups)) for ratio in RATIOS)
    for schedule in (replace(shot, quorum=workload.group_quorum) for shot in shots):
        ratio = schedule.over / workload.groups
        try:
            workload.core_settings(schedule)
        except ValueError as error:
            notes.append(f"N'/N = {ratio:g} is left out: {error}")
            continue
        rows.append((ratio, run(f"N'/N = {ratio:g}", schedule)))
    return rows


def _relative_figures(measured: ScheduleMeasurement, base: float) -> dict[str, Any]:
    return measured.figures | {"speed_up": measured.figures["trained_tokens_per_s"] / base}


def _loop_times(workload: Workload) -> dict[str, Any]:
    """Return the time that a batch takes on the engines alone and on the trainer alone, and which of them is slower."""
    return {
        "placement": str(Placement.SEPARATE if workload.separate else Placement.COLOCATED),
        "batch_s": workload.batch_s,
        "train_s": workload.train_s,
        "train_time_in_batch_times": workload.train_s / workload.batch_s,
        "slower": "trainer" if workload.train_s > workload.batch_s else "engines",
    }


def _settings(workload: Workload) -> dict[str, Any]:
    values = asdict(workload) | {"on_stale": str(workload.on_stale)}
    values["placement"] = None if workload.placement is None else str(workload.placement)
    if workload.lengths_file is not None:
        values["lengths_file"] = str(workload.lengths_file)
    else:
        shape = workload.lengths
        values |= {name: getattr(shape, name.replace("_len", "")) for name in LOGNORMAL}
    schedules = workload.modes
    return values | {"over": schedules["april"].over, "in_flight": schedules["refill"].in_flight}


LOGNORMAL = ("median_len", "sigma_between", "sigma_within")


def _notes(workload: Workload, modes: dict[str, dict[str, Any]]) -> list[str]:
    """Return sentences that warn about figures which could be misread."""
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
        bound = m["max_staleness"] * workload.groups
        of_them = "" if m["group_quorum"] == 1.0 else " (responses not delivered, divided by n)"
        if (
            workload.train_time is None
            and m["refill"] != "none"
            and workload.on_stale is not OnStale.DROP
            and m["idle_shares"].get(str(IdleCause.BOUND), 0.0) >= IDLE_WORTH_A_WORD
            and m["in_flight"] <= workload.fits  # otherwise slots are also empty because the KV cache is full
        ):
            notes.append(
                f"{name}: max_staleness={workload.max_staleness} limits the run: at most {bound + workload.groups} "
                f"groups may be held{of_them}, or some could not be delivered in time, so {m['bubble']:.0%} of the "
                f"slots stay empty; raise max_staleness or lower the {m['in_flight']} samples in flight"
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
