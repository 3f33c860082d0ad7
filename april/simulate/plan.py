"""Which settings are best for a workload: candidates simulated side by side, most of them briefly.

All candidates see the same responses. A coarse grid is run for a few steps, then the neighbours of the one that looks
best, then those that may be the best for longer. A speed is not tokens per second of these few steps, which depends on
the lengths that fell into them, but how near they came to their limit, times the limit for lengths without end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

from april.core.types import Refill, Work
from april.process_pool import process_pool, undisturbed
from april.simulate.run import measure
from april.simulate.workload import MOST_IN_FLIGHT, Schedule, Workload

RATIOS = (1.0, 1.25, 1.5, 2.0, 3.0)
"""N'/N of the candidates of the coarse grid without refill."""
PLACES = (0.5, 1.0, 1.5)
"""Samples in flight over N x n of the candidates with refill."""
QUORUMS = (1.0, 0.75, 0.5)
ROUNDS = 2
"""Rounds in which neighbours of the best candidate are tried, each time at half the distance."""
BRIEF, LONG = (14, 6), (40, 12)
"""Number of steps, and of first steps that are left out."""
NEAR = 0.04
"""Relative loss of speed in its brief run up to which a candidate is run for longer."""
ENOUGH = 256
"""Responses of a batch for which those steps suffice; smaller batches run more, up to MORE times as many."""
MORE = 8
SAME = 0.01
"""Relative difference up to which speeds count as equal; the younger tokens win then."""
FINALISTS = 4
"""Most candidates that are run for longer, beside the synchronous one."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The simulated figures of a candidate.

    Attributes:
        schedule: the candidate.
        tokens_per_s: trained tokens per second, all engines together.
        off_policy_share: off-policy share of the trained tokens.
        staleness_mean, staleness_max: staleness of the trained responses.
        step_s: seconds from one delivery to the next.
        held_tokens: tokens kept over the end of a step.
        long: whether it was run for longer.
    """

    schedule: Schedule
    tokens_per_s: float
    off_policy_share: float
    staleness_mean: float
    staleness_max: int
    step_s: float
    held_tokens: float
    long: bool = False

    @property
    def name(self) -> str:
        """The candidate in a few words."""
        s = self.schedule
        quorum = f", quorum {s.quorum:g}" if s.quorum != 1.0 else ""
        how = f"N' = {s.over}" if s.refill is Refill.NONE else f"refill, {s.in_flight} in flight"
        return f"{how}{quorum}{'' if s.continuous is None else ', continuous'}"


@dataclass(frozen=True)
class Plan:
    """All candidates with their figures.

    Attributes:
        rows: fastest first.
        best: the fastest within the limit of the off-policy share; of those as fast, the youngest.
        base: what it is compared with.
    """

    rows: list[Row]
    best: Row
    base: Row


@dataclass(frozen=True, kw_only=True)
class Space:
    """The candidates that may be chosen.

    Attributes:
        base: candidate that the others are compared with. If it is not possible any more, the first possible one takes
            its place.
        free: settings that may differ from the base.
        quorums: values of ``group_quorum``.
        places: most samples in flight.
        continuous: generation modes, as in :class:`.workload.Schedule`.
        below: number in flight from which on only the base may be chosen; None means no limit.
    """

    base: Schedule
    free: tuple[Work, ...] = tuple(Work)
    quorums: Sequence[float] = QUORUMS
    places: int = MOST_IN_FLIGHT
    continuous: tuple[int | None, ...] = (None,)
    below: int | None = None

    @classmethod
    def whole(cls, workload: Workload, quorums: Sequence[float] = QUORUMS) -> Space:
        """Return all candidates for a workload, with the synchronous one as the base."""
        if workload.whole_groups:
            quorums = (1.0,)
        modes = (None, workload.max_staleness) if workload.separate else (None,)
        places = MOST_IN_FLIGHT if workload.slots is None else workload.slots * workload.engines
        base = workload.one_shot(workload.groups)
        base = replace(base, in_flight=min(base.in_flight, places))
        return cls(base=base, quorums=quorums, places=places, continuous=modes)

    def quorums_beside(self, quorum: float) -> Sequence[float]:
        """Return the quorums that may be chosen; ``quorum`` alone where that is not free."""
        return self.quorums if Work.QUORUM in self.free else (quorum,)

    def may_be(self, refill: Refill) -> bool:
        """Return whether this way of filling places may be chosen, with its own number of groups or places."""
        size = Work.OVER_SAMPLING if refill is Refill.NONE else Work.IN_FLIGHT
        return size in self.free and (refill is self.base.refill or Work.REFILL in self.free)

    def within(self, schedule: Schedule) -> Schedule:
        """Return a candidate with no more in flight than places, and with refill no more than may be chosen."""
        most = self.places
        if self.below is not None and schedule.refill is Refill.SAMPLE:
            most = min(most, self.below - 1)
        return replace(schedule, in_flight=min(schedule.in_flight, most))


def coarse(workload: Workload, space: Space) -> list[Schedule]:
    """Return the first candidates, with the largest and the smallest quorum; the base first, if it is possible."""
    n, full = workload.groups, workload.groups * workload.samples
    found = [space.base]
    if space.may_be(Refill.NONE) and None in space.continuous:
        found += [workload.one_shot(round(n * ratio)) for ratio in RATIOS]
    if space.may_be(Refill.SAMPLE):
        refills = [Schedule(n, Refill.SAMPLE, round(full * share)) for share in PLACES]
        found += [replace(schedule, continuous=mode) for mode in space.continuous for schedule in refills]
    quorums = space.quorums_beside(space.base.quorum)
    ends = dict.fromkeys((max(quorums), min(quorums)))
    beside = [replace(space.within(s), quorum=quorum) for quorum in ends for s in found]
    return _possible(workload, beside, space)


def neighbours(workload: Workload, best: Schedule, tried: Iterable[Schedule], space: Space) -> list[Schedule]:
    """Return candidates half way between ``best`` and its neighbours, and the same with other quorums."""
    tried, out = list(tried), []
    one_shot = best.refill is Refill.NONE
    sizes = sorted({_size(s) for s in tried if _kind(s) == _kind(best)})
    at, least = sizes.index(_size(best)), 1 if one_shot else workload.samples
    for other in (*sizes[max(0, at - 1) : at], *sizes[at + 1 : at + 2]):
        middle = (other + _size(best)) // 2
        if abs(middle - _size(best)) >= least and abs(middle - other) >= least:
            out.append(workload.one_shot(middle) if one_shot else replace(best, in_flight=middle))
    out = [replace(space.within(schedule), quorum=best.quorum) for schedule in out]
    out += [replace(best, quorum=quorum) for quorum in space.quorums_beside(best.quorum)]
    return [schedule for schedule in _possible(workload, out, space) if schedule not in tried]


def _size(schedule: Schedule) -> int:
    return schedule.over if schedule.refill is Refill.NONE else schedule.in_flight


def _kind(schedule: Schedule) -> tuple[object, ...]:
    return schedule.refill, schedule.continuous


def _possible(workload: Workload, schedules: Iterable[Schedule], space: Space) -> list[Schedule]:
    """Return the base and those worth a try that the configuration allows, each once."""
    out: dict[Schedule, None] = {}
    base, below = space.base, math.inf if space.below is None else space.below
    for schedule in (base, *schedules):
        try:
            workload.core_settings(schedule)
        except ValueError:  # as N' above (max_staleness + 1) N
            continue
        one_shot = schedule.refill is Refill.NONE
        # without more in work than a batch needs a quorum would wait for all the same
        needless = one_shot and schedule.quorum != 1.0 and schedule.over <= workload.groups
        # where that is no mistake, it is all the same too much to be trained in time
        too_many = one_shot and schedule.over > (workload.max_staleness + 1) * workload.groups
        some = workload.engines <= schedule.in_flight < below
        if schedule == base or (some and not needless and not too_many):
            out[schedule] = None
    return list(out)


def front(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest first; each other one has a smaller off-policy share than all that are faster."""
    out: list[Row] = []
    for row in sorted(rows, key=lambda r: -r.tokens_per_s):
        if not out or row.off_policy_share < out[-1].off_policy_share:
            out.append(row)
    return out


def choose(rows: Sequence[Row], max_off_policy_share: float) -> Row:
    """Return the fastest within the limit, of those as fast the youngest; if none is within, the youngest of all."""
    within = [row for row in rows if row.off_policy_share <= max_off_policy_share]
    if not within:
        return min(rows, key=lambda row: row.off_policy_share)
    fastest = max(row.tokens_per_s for row in within)
    as_fast = [row for row in within if row.tokens_per_s >= (1.0 - SAME) * fastest]
    return min(as_fast, key=lambda row: (row.off_policy_share, -row.tokens_per_s))


def _row(workload: Workload, schedule: Schedule) -> Row:
    f = measure(workload, schedule).figures
    batch = workload.groups * workload.samples * float(workload.length_sample.mean())
    trained = batch * f["trained_tokens"] / (f["trained_tokens"] + f["masked_tokens"])
    at_limit_s = f["kept_tokens"] / f["limit_tokens_per_s"]
    stands_still_s = 0.0 if workload.separate else f["steps"] * workload.train_s
    near = at_limit_s / (f["rollout_s"] - stands_still_s)
    rollout_s = batch / (near * f["long_run_limit_tokens_per_s"])
    step_s = max(rollout_s, workload.train_s) if workload.separate else rollout_s + workload.train_s
    return Row(
        schedule=schedule, tokens_per_s=trained / step_s, step_s=step_s,
        off_policy_share=f["off_policy_share"], staleness_mean=f["staleness_mean"], staleness_max=f["staleness_max"],
        held_tokens=f["held_tokens_mean"],
    )  # fmt: skip


def plan(
    workload: Workload,
    space: Space | None = None,
    *,
    max_off_policy_share: float = 1.0,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Simulate all candidates and choose.

    Args:
        workload: its ``over``, ``in_flight``, ``group_quorum``, ``steps`` and ``ramp`` do not matter.
        space: settings that may be chosen; None means all.
        max_off_policy_share: of the trained tokens, at most.
        processes: that simulate at the same time.
        progress: told how many simulations of how many are done.

    Raises:
        ValueError: a share out of range, or there is nothing to choose from.
        RolloutError: the core gave up.
    """
    if not 0.0 <= max_off_policy_share <= 1.0:
        raise ValueError(f"max_off_policy_share={max_off_policy_share:g} is a share, from 0 to 1")
    space = space or Space.whole(workload)
    rows: dict[Schedule, Row] = {}
    share = max_off_policy_share
    times = max(1, min(MORE, ENOUGH // (workload.groups * workload.samples)))

    # the lengths are read once and drawn once, not for each candidate
    seen = replace(workload, lengths_file=None, measured_lengths=workload.lengths)
    brief, long = (replace(seen, steps=times * steps, ramp=times * ramp) for steps, ramp in (BRIEF, LONG))
    assert brief.length_sample.size
    assert long.length_sample.size

    def run_all(schedules: Sequence[Schedule], at: Workload, more: int) -> None:
        total = len(done) + len(schedules) + more
        for row in run(_row, repeat(at), schedules):
            rows[row.schedule] = replace(row, long=at is long)
            done.append(row)
            progress(len(done), total)

    done: list[Row] = []
    with ExitStack() as stack:
        run: Callable[..., Iterator[Row]] = map
        if processes > 1:
            submit = stack.enter_context(process_pool(processes))

            def beside(row: Callable[..., Row], *arguments: Iterable[Any]) -> Iterator[Row]:
                with undisturbed():
                    began = [submit(row, *each) for each in zip(*arguments, strict=False)]
                return (future.result() for future in began)

            run = beside
        schedules = coarse(workload, space)
        if not schedules:
            raise ValueError(f"no setting can be simulated with max_staleness={workload.max_staleness}")
        run_all(schedules, brief, FINALISTS + 1 + ROUNDS * 4)
        for left in range(ROUNDS - 1, -1, -1):
            best = choose(list(rows.values()), share)
            run_all(neighbours(workload, best.schedule, rows, space), brief, FINALISTS + 1 + left * 4)
        run_all(_finalists(schedules[0], list(rows.values()), share), long, 0)
    best = choose([row for row in rows.values() if row.long], share)
    return Plan(sorted(rows.values(), key=lambda r: -r.tokens_per_s), best, rows[schedules[0]])


def _finalists(base: Schedule, rows: list[Row], share: float) -> list[Schedule]:
    """Return the base, and those that may be the best, the most promising first."""
    likely = choose(rows, share)
    near = [r for r in rows if r.off_policy_share <= share * (1.0 + NEAR)]
    near = [r for r in near if r.tokens_per_s >= (1.0 - NEAR) * likely.tokens_per_s]
    ordered = [likely, *front(near), *sorted(near, key=lambda r: -r.tokens_per_s)]
    return list(dict.fromkeys([base, *(row.schedule for row in ordered)]))[: FINALISTS + 1]
