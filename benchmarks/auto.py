"""auto against the best of all fixed settings: ``python -m benchmarks.auto [--only NAME]... [--steps 40]``.

The same workload, seed by seed, with ``over_sampling_batch_size``, ``max_in_flight`` and ``group_quorum: auto`` (with
continuous generation, the latter two) and with every fixed setting of a grid, within the same ``max_staleness`` and
``max_off_policy_share``. Speeds are tokens per second of the steps after the first 20, or after a change of the
lengths; those of auto are held against the fastest fixed setting that stays within the limit over the same steps. Over
the whole run, from the first step on, they are held against N' = N (continuous: N x n in flight): what was trained,
and what was trained or is held at the end.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from april.auto.question import SMALLEST_QUORUM, TuningAnswer, TuningQuestion, WorkSettings
from april.core.types import Refill, Work
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.response_lengths import LognormalLengths, ResponseLengths
from april.simulate.choose import choose
from april.simulate.simulation import Simulation, StepRecord
from april.simulate.workload import Placement, Schedule, Workload

LIMIT = 0.6
"""max_off_policy_share, where generation is stepwise; continuous, nearly all tokens are older than their training."""
LEARNS = 20
"""Steps that auto has, from the beginning and after a change."""
QUORUMS = (1.0, SMALLEST_QUORUM)
"""Those that auto chooses from."""


class Doubling(ResponseLengths):
    """Responses of groups from ``since`` on are twice as long."""

    def __init__(self, lengths: ResponseLengths, since: int) -> None:
        self._lengths, self._since = lengths, since

    def group(self, group: int, n_samples: int) -> NDArray[np.int32]:
        """See the base class."""
        found = self._lengths.group(group, n_samples)
        return found if group < self._since else (2 * found).astype(np.int32)


class Dominant(ResponseLengths):
    """Every so many groups comes one prompt whose responses are far longer than all others."""

    def __init__(self, lengths: ResponseLengths, every: int, times: int) -> None:
        self._lengths, self._every, self._times = lengths, every, times

    def group(self, group: int, n_samples: int) -> NDArray[np.int32]:
        """See the base class."""
        found = self._lengths.group(group, n_samples)
        return found if group % self._every else (self._times * found).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Crowded(DecodeCost):
    """Beyond ``room`` sequences each one more slows down all: a cost that no sum of constants has."""

    room: int = 32

    def step_s(self, n: int, kv_tokens: int) -> float:
        """See the base class."""
        cost = self.base_s + self.per_sequence_s * n + self.per_kv_token_s * kv_tokens
        return cost * (max(1.0, n / self.room) ** 2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload, and what happens to it.

    Attributes:
        doubles: the number of the group from which on its lengths are twice as long.
        limit: max_off_policy_share; of a trainer that asks ahead nearly all tokens are older than their training.
        slows: the step from which on engines take twice the time for everything.
        reward_s, rewards_at_once: of a simulation.
        fine: all fixed settings are tried; else half as many.
    """

    workload: Workload
    doubles: int | None = None
    steps: int = 40
    limit: float = LIMIT
    slows: int | None = None
    reward_s: float = 0.0
    rewards_at_once: int | None = None
    fine: bool = True

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
    small = Workload(
        groups=8, engines=2, max_response_len=8192, max_staleness=4, measured_cost=DecodeCost(4e-3, 5e-5, 3e-8, 1e-5),
        measured_lengths=LognormalLengths(500.0, 0.6, 0.5, seed=0),
    )  # fmt: skip
    linear = DecodeCost(1e-6, 2e-4, 0.0, 1e-5)
    same, tail = LognormalLengths(500.0, 0.0, 0.0, seed=0), small.lengths
    even = LognormalLengths(500.0, 0.03, 0.05, seed=0)

    def other(lengths: ResponseLengths, cost: DecodeCost | None = None, **changes: Any) -> Case:
        trainer = {name: changes.pop(name) for name in ("train_time", "placement", "fetch_ahead") if name in changes}
        workload = replace(small, measured_lengths=lengths, measured_cost=cost or small.cost, **trainer)
        return Case(workload=workload, steps=steps, fine=False, **changes)

    return {
        "no tail": other(even),
        "no tail, linear cost": other(even, linear),
        "linear cost": other(tail, linear),
        "constant lengths": other(same),
        "constant lengths, linear cost": other(same, linear),
        "crowded": other(tail, Crowded(4e-3, 5e-5, 3e-8, 1e-5)),
        "constant lengths, crowded": other(same, Crowded(4e-3, 5e-5, 3e-8, 1e-5)),
        "one dominant prompt": other(Dominant(LognormalLengths(300.0, 0.2, 0.2, seed=0), 8, 8)),
        "slow rewards": other(tail, reward_s=3.0),
        "few rewards at once": other(tail, reward_s=1.0, rewards_at_once=4),
        "slow trainer": other(tail, train_time="4x", placement=Placement.COLOCATED),
        "slow trainer beside": other(tail, train_time="2x", fetch_ahead=1, limit=1.0),
        **{f"slows at {at}": other(tail, slows=at) for at in (4, 9, 20)},
        "no tail, slows at 4": other(even, slows=4),
        "reference": Case(workload=reference, steps=steps),
        "short tail": Case(workload=replace(reference, sigma_between=0.2, sigma_within=0.15), steps=steps),
        "100 to 50k": Case(workload=long, steps=steps),
        "doubles": Case(workload=reference, doubles=40 * 32, steps=80),
        "continuous": Case(workload=replace(reference, train_time="0.5x", max_staleness=4), steps=steps, limit=1.0),
    }


def simulation(
    case: Case, schedule: Schedule, chooser: Callable[[TuningQuestion], TuningAnswer] | None = None,
    most: int | None = None,
) -> Simulation:  # fmt: skip
    """One run."""
    w = case.workload
    settings = w.core_settings(schedule)
    if chooser is not None:
        auto = tuple(Work) if schedule.continuous is None else (Work.IN_FLIGHT, Work.QUORUM)
        settings = replace(settings, auto=auto, max_off_policy_share=case.limit)
    return Simulation(
        settings, w.cost, case.lengths, engines=w.engines, prompt_len=w.prompt_len, train_s=w.train_s,
        fetch_ahead=w.fetch_ahead, choose=chooser, most_in_flight=most, reward_s=case.reward_s,
        rewards_at_once=case.rewards_at_once,
    )  # fmt: skip


def run(case: Case, simulated: Simulation) -> list[StepRecord]:
    """All steps."""
    if case.slows is not None:
        simulated.run(case.slows)
        simulated.engines.catch_up()
        for decoder in simulated.decoders.values():
            decoder._cost = twice(decoder._cost)
    return simulated.run(case.steps - (case.slows or 0)).steps


def twice(cost: DecodeCost) -> DecodeCost:
    """As slow."""
    return replace(
        cost, base_s=2 * cost.base_s, per_sequence_s=2 * cost.per_sequence_s, per_kv_token_s=2 * cost.per_kv_token_s,
        per_prefill_token_s=2 * cost.per_prefill_token_s,
    )  # fmt: skip


def of(steps: Sequence[StepRecord], window: range) -> tuple[float, float]:
    """Tokens per second and off-policy share of these steps."""
    found = [steps[i] for i in window]
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
    mode = w.max_staleness if continuous(case) else None
    eighths = 1 if case.fine else 2
    out = [] if mode else [w.one_shot(round(n * (1.0 + i / 8))) for i in range(0, 17 // eighths, eighths)]
    shares = np.arange(0.375, 2.01, 0.125) if case.fine else np.arange(0.5, 2.01, 0.25)
    out += [Schedule(n, Refill.SAMPLE, round(full * share), mode) for share in shares]
    found = [replace(s, quorum=quorum) for s in out for quorum in QUORUMS]
    return [s for s in found if not (s.refill is Refill.NONE and s.over <= n and s.quorum < 1.0)]


def continuous(case: Case) -> bool:
    """Generation goes on while the trainer trains; one that asks ahead has it stepwise."""
    return case.workload.separate and not case.workload.fetch_ahead


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
    start = Schedule(w.groups, Refill.SAMPLE, full, w.max_staleness) if continuous(case) else w.one_shot(w.groups)
    asked: list[float] = []
    told: list[str] = []

    def timed(question: TuningQuestion) -> TuningAnswer:
        began = time.process_time()
        answer = choose(question)
        asked.append(time.process_time() - began)
        told.append(f"{answer.best}")
        return answer

    auto = simulation(case, start, timed, most=3 * full)
    steps = run(case, auto)
    rows: dict[str, list[tuple[float, float]]] = {}
    whole: tuple[float, float] = (0.0, 0.0)
    for schedule in fixed(case):
        found = run(case, simulation(case, schedule))
        rows[name_of(schedule)] = [of(found, window) for window in case.windows]
        if schedule == start:
            mine, its = from_the_start(steps), from_the_start(found)
            whole = (mine[0] / its[0], mine[1] / its[1])
    changes, back = (int(steps[-1].metrics[f"auto_{what}"]) for what in ("changes", "taken_back"))
    print(
        f"\n{name}: {len(asked)} questions, {np.mean(asked):.1f} s CPU each, {changes} changes, {back} taken back: "
        f"{' | '.join(told)}\n  the whole run against {name_of(start)}: {whole[0]:.3f} trained, {whole[1]:.3f} with "
        "what is held"
    )
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
