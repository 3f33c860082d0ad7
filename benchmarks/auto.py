"""auto against the best of all fixed settings: ``python -m benchmarks.auto [--only NAME]... [--steps 40]``.

The same workload, seed by seed, with ``over_sampling_batch_size``, ``max_in_flight`` and ``group_quorum: auto`` (with
continuous generation, the latter two) and with every fixed setting of a grid, within the same ``max_staleness`` and
``max_off_policy_share``. Speeds are tokens per second of the steps after the first 20, or after a change of the
lengths; those of auto are held against the fastest fixed setting that stays within the limit over the same steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from april.auto.question import Answer, InWork, Question
from april.core.types import Refill, Work
from april.engines.simulated.response_lengths import LognormalLengths, ResponseLengths
from april.simulate.choose import choose
from april.simulate.simulation import Simulation, StepRecord
from april.simulate.workload import Schedule, Workload

LIMIT = 0.6
"""max_off_policy_share, where generation is stepwise; continuous, nearly all tokens are older than their training."""
LEARNS = 20
"""Steps that auto has, from the beginning and after a change."""
QUORUMS = (1.0, 0.75, 0.5)


class Doubling(ResponseLengths):
    """Responses of groups from ``since`` on are twice as long."""

    def __init__(self, lengths: ResponseLengths, since: int) -> None:
        self._lengths, self._since = lengths, since

    def group(self, group: int, n_samples: int) -> NDArray[np.int32]:
        """See the base class."""
        found = self._lengths.group(group, n_samples)
        return found if group < self._since else (2 * found).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload; ``doubles``: the number of the group from which on its lengths are twice as long."""

    workload: Workload
    doubles: int | None = None
    steps: int = 40
    limit: float = LIMIT
    """max_off_policy_share."""

    @property
    def lengths(self) -> ResponseLengths:
        """Of its responses."""
        if self.doubles is None:
            return self.workload.lengths
        return Doubling(self.workload.lengths, self.doubles)

    @property
    def windows(self) -> list[range]:
        """Steps whose speed counts."""
        return [range(LEARNS, self.steps)] if self.doubles is None else [
            range(LEARNS, self.doubles // self.workload.groups - 2), range(self.steps - LEARNS, self.steps)
        ]  # fmt: skip


def cases(steps: int) -> dict[str, Case]:
    """By name."""
    reference = Workload(median_len=3000.0 / float(np.exp(0.305)), sigma_between=0.6, sigma_within=0.5)
    long = Workload(
        measured_lengths=LognormalLengths(2500.0, 1.2, 0.8, seed=0, cap=50_000), max_response_len=50_000, groups=16,
        engines=8,
    )  # fmt: skip
    return {
        "reference": Case(workload=reference, steps=steps),
        "short tail": Case(workload=replace(reference, sigma_between=0.2, sigma_within=0.15), steps=steps),
        "100 to 50k": Case(workload=long, steps=steps),
        "doubles": Case(workload=reference, doubles=40 * 32, steps=80),
        "continuous": Case(workload=replace(reference, train_time="0.5x", max_staleness=4), steps=steps, limit=1.0),
    }


def simulation(
    case: Case, schedule: Schedule, chooser: Callable[[Question], Answer] | None = None, most: int | None = None
) -> Simulation:
    """One run."""
    w = case.workload
    settings = w.core_settings(schedule)
    if chooser is not None:
        auto = tuple(Work) if schedule.continuous is None else (Work.IN_FLIGHT, Work.QUORUM)
        settings = replace(settings, auto=auto, max_off_policy_share=case.limit)
    return Simulation(
        settings, w.cost, case.lengths, engines=w.engines, prompt_len=w.prompt_len, train_s=w.train_s, choose=chooser,
        most_in_flight=most,
    )  # fmt: skip


def of(steps: Sequence[StepRecord], window: range) -> tuple[float, float]:
    """Tokens per second and off-policy share of these steps."""
    found = [steps[i] for i in window]
    trained = sum(step.trained_tokens for step in found)
    old = sum(step.metrics["off_policy_share"] * step.trained_tokens for step in found)
    return trained / (found[-1].end_s - found[0].start_s), old / trained


def fixed(case: Case) -> list[Schedule]:
    """All that is tried, finer than what auto looks at."""
    w = case.workload
    n, full = w.groups, w.groups * w.samples
    mode = w.max_staleness if w.separate else None
    out = [] if w.separate else [w.one_shot(round(n * (1.0 + i / 8))) for i in range(17)]
    out += [Schedule(n, Refill.SAMPLE, round(full * share), mode) for share in np.arange(0.375, 2.01, 0.125)]
    found = [replace(s, quorum=quorum) for s in out for quorum in QUORUMS]
    return [s for s in found if not (s.refill is Refill.NONE and s.over <= n and s.quorum < 1.0)]


def name_of(s: Schedule) -> str:
    """In a few words."""
    work = InWork(
        over_sampling_batch_size=s.over, refill=s.refill, max_in_flight=s.in_flight, group_quorum=s.quorum
    )  # fmt: skip
    return str(work)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
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

    def timed(question: Question) -> Answer:
        began = time.process_time()
        answer = choose(question)
        asked.append(time.process_time() - began)
        told.append(f"{answer.best}")
        return answer

    auto = simulation(case, start, timed, most=3 * full)
    steps = auto.run(case.steps).steps
    rows: dict[str, list[tuple[float, float]]] = {}
    for schedule in fixed(case):
        found = simulation(case, schedule).run(case.steps).steps
        rows[name_of(schedule)] = [of(found, window) for window in case.windows]
    changes = int(steps[-1].metrics["auto_changes"])
    print(f"\n{name}: {len(asked)} questions, {np.mean(asked):.1f} s CPU each, {changes} changes: {' | '.join(told)}")
    for i, window in enumerate(case.windows):
        speed, share = of(steps, window)
        within = {key: row[i] for key, row in rows.items() if row[i][1] <= case.limit}
        best = max(within, key=lambda key: within[key][0])
        paper = rows.get(f"N' = {2 * w.groups}")
        print(
            f"  steps {window.start}-{window.stop - 1}: auto {speed:,.0f} tokens/s, off-policy {share:.3f}; best of "
            f"{len(within)} fixed within {case.limit}: {best}, {within[best][0]:,.0f}, {within[best][1]:.3f}: "
            f"{speed / within[best][0]:.3f}" + (f"; N' = 2N: {paper[i][0]:,.0f}, {paper[i][1]:.3f}" if paper else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
