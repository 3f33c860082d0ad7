"""auto against the best of all fixed settings: ``python -m benchmarks.auto [--only NAME]... [--steps 40]``.

The same workload with ``over_sampling_batch_size``, ``max_in_flight`` and ``group_quorum: auto`` (with continuous
generation, the latter two) and with every fixed setting of a grid, within the same ``max_staleness`` and
``max_off_policy_share``. Speeds are tokens per second of the steps after the first 20; those of auto are held against
the fastest fixed setting that stays within the limit over the same steps. Over the whole run, from the first step on,
they are held against N' = N (continuous: N x n in flight): what was trained, and what was trained or is held at the
end.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from april.auto.question import SMALLEST_QUORUM, TuningAnswer, TuningQuestion, WorkSettings
from april.core.types import Refill, Work
from april.simulate.choose import choose
from april.simulate.simulation import Simulation, StepRecord
from april.simulate.workload import Schedule, Workload

LIMIT = 0.6
"""max_off_policy_share, where generation is stepwise; continuous, nearly all tokens are older than their training."""
LEARNS = 20
"""Steps that auto has before its speed counts."""
QUORUMS = (1.0, SMALLEST_QUORUM)
"""Those that auto chooses from."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload, with the number of steps and max_off_policy_share."""

    workload: Workload
    steps: int
    limit: float = LIMIT


def cases(steps: int) -> dict[str, Case]:
    """By name."""
    base = Workload(median_len=3000.0 / float(np.exp(0.305)), sigma_between=0.6, sigma_within=0.5)
    return {
        "base": Case(workload=base, steps=steps),
        "continuous": Case(workload=replace(base, train_time="0.5x", max_staleness=4), steps=steps, limit=1.0),
    }


def run(
    case: Case, schedule: Schedule, chooser: Callable[[TuningQuestion], TuningAnswer] | None = None,
    most: int | None = None,
) -> list[StepRecord]:  # fmt: skip
    """All steps of one run."""
    w = case.workload
    settings = w.core_settings(schedule)
    if chooser is not None:
        auto = tuple(Work) if schedule.continuous is None else (Work.IN_FLIGHT, Work.QUORUM)
        settings = replace(settings, auto=auto, max_off_policy_share=case.limit)
    simulation = Simulation(
        settings, w.cost, w.lengths, engines=w.engines, prompt_len=w.prompt_len, train_s=w.train_s, choose=chooser,
        most_in_flight=most,
    )  # fmt: skip
    return simulation.run(case.steps).steps


def of(steps: Sequence[StepRecord]) -> tuple[float, float]:
    """Tokens per second and off-policy share of the steps that count."""
    found = steps[LEARNS:]
    trained = sum(step.trained_tokens for step in found)
    old = sum(step.metrics["off_policy_share"] * step.trained_tokens for step in found)
    return trained / (found[-1].end_s - found[0].start_s), old / trained


def from_the_start(steps: Sequence[StepRecord]) -> tuple[float, float]:
    """Tokens per second of all steps: trained, and trained or held at the end."""
    trained = sum(step.trained_tokens for step in steps)
    return trained / steps[-1].end_s, (trained + steps[-1].metrics["held_tokens"]) / steps[-1].end_s


def fixed(case: Case) -> list[Schedule]:
    """All that is tried, finer than what auto looks at."""
    w = case.workload
    n, full = w.groups, w.groups * w.samples
    mode = w.max_staleness if w.separate else None
    out = [] if mode else [w.one_shot(round(n * (1.0 + i / 8))) for i in range(17)]
    out += [Schedule(n, Refill.SAMPLE, round(full * share), mode) for share in np.arange(0.375, 2.01, 0.125)]
    found = [replace(s, quorum=quorum) for s in out for quorum in QUORUMS]
    return [s for s in found if not (s.refill is Refill.NONE and s.over <= n and s.quorum < 1.0)]


def name_of(s: Schedule) -> str:
    """In a few words."""
    work = WorkSettings(
        over_sampling_batch_size=s.over, refill=s.refill, max_in_flight=s.in_flight, group_quorum=s.quorum
    )  # fmt: skip
    return str(work)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--log", action="store_true", help="what auto decides, and why")
    options = parser.parse_args()
    if options.log:
        logging.basicConfig(format="  %(message)s", level=logging.INFO)
    for name, case in cases(options.steps).items():
        if options.only is None or name in options.only:
            one(name, case)


def one(name: str, case: Case) -> None:
    """A workload."""
    w = case.workload
    full = w.groups * w.samples
    start = Schedule(w.groups, Refill.SAMPLE, full, w.max_staleness) if w.separate else w.one_shot(w.groups)
    asked: list[float] = []
    told: list[str] = []

    def timed(question: TuningQuestion) -> TuningAnswer:
        began = time.process_time()
        answer = choose(question)
        asked.append(time.process_time() - began)
        told.append(f"{answer.best}")
        return answer

    steps = run(case, start, timed, most=3 * full)
    rows: dict[str, tuple[float, float]] = {}
    whole: tuple[float, float] = (0.0, 0.0)
    for schedule in fixed(case):
        found = run(case, schedule)
        rows[name_of(schedule)] = of(found)
        if schedule == start:
            mine, its = from_the_start(steps), from_the_start(found)
            whole = (mine[0] / its[0], mine[1] / its[1])
    changes, back = (int(steps[-1].metrics[f"auto_{what}"]) for what in ("changes", "taken_back"))
    speed, share = of(steps)
    within = {key: row for key, row in rows.items() if row[1] <= case.limit}
    best = max(within, key=lambda key: within[key][0])
    paper = rows.get(f"N' = {2 * w.groups}")
    print(
        f"\n{name}: {len(asked)} questions, {np.mean(asked):.1f} s CPU each, {changes} changes, {back} taken back: "
        f"{' | '.join(told)}\n  the whole run against {name_of(start)}: {whole[0]:.3f} trained, {whole[1]:.3f} with "
        f"what is held\n  from step {LEARNS} on: auto {speed:,.0f} tokens/s, off-policy {share:.3f}; best of "
        f"{len(within)} fixed within {case.limit}: {best}, {within[best][0]:,.0f}, {within[best][1]:.3f}: "
        f"{speed / within[best][0]:.3f}" + (f"; N' = 2N: {paper[0]:,.0f}, {paper[1]:.3f}" if paper else ""),
        flush=True,
    )


if __name__ == "__main__":
    main()
