"""Finds the best settings for a workload by simulating candidates, for ``april plan`` and for ``auto`` settings.

All candidates see the same responses. A coarse grid is run for a few steps, then the neighbours of its best candidate;
then the most promising candidates are run for longer. In a few steps, the tokens per second depend on which response
lengths happen to occur. A candidate's speed is therefore its fraction of the possible throughput for these lengths,
times the possible throughput for a large sample of lengths. N' stands for ``over_sampling_batch_size``, N for
``rollout_batch_size``, and n for ``n_samples_per_prompt``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from april.auto.question import SMALLEST_QUORUM
from april.core.types import Refill, Work
from april.simulate.run import measure
from april.simulate.workload import MOST_IN_FLIGHT, Schedule, Workload

RATIOS = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Ratios N'/N of the coarse grid's candidates without refill, which start all groups at the beginning of a step."""
TAIL_RATIOS = (1.125, 1.25, 1.5)
"""Ratios N'/N of the coarse grid's candidates with tail batching (unfinished prompts get rounds of their own)."""
PLACES = (0.5, 1.0, 1.5)
"""Samples in flight of the coarse grid's candidates with refill, as multiples of N x n."""
QUORUMS = (1.0, SMALLEST_QUORUM)
"""Values of ``group_quorum`` that are tried."""
ROUNDS = 2
"""Number of rounds in which neighbours of the best candidate are tried; each round halves the distance."""
BRIEF, LONG = (14, 6), (40, 12)
"""(steps to simulate, first steps to leave out) of brief and of long simulations."""
FINALISTS = 4
"""Largest number of candidates with a long simulation (finalists), besides the base."""
FINALIST_TOLERANCE = 0.04
"""Largest fraction by which a finalist may be slower than the best candidate, or exceed the off-policy limit."""
ENOUGH_RESPONSES = 256
"""Number of responses per batch for which the steps of BRIEF and LONG suffice; smaller batches get more steps."""
MAX_STEP_FACTOR = 8
"""Largest factor by which small batches get more steps."""
EQUAL_SPEED = 0.01
"""Speeds count as equal if they differ by at most this fraction; then the smaller off-policy share wins."""


@dataclass(frozen=True, kw_only=True)
class CandidateResult:
    """Simulated figures of a candidate.

    Attributes:
        schedule: schedule that was simulated.
        tokens_per_s: trained tokens per second, all engines together.
        off_policy_share: share of the trained tokens that come from older weights.
        staleness_mean, staleness_max: age of the trained responses, in weight updates.
        step_s: seconds from one delivery to the next.
        long: whether the figures are from a long simulation.
    """

    schedule: Schedule
    tokens_per_s: float
    off_policy_share: float
    staleness_mean: float
    staleness_max: int
    step_s: float
    long: bool = False

    @property
    def name(self) -> str:
        """A short description of the candidate."""
        s = self.schedule
        quorum = f", quorum {s.quorum:g}" if s.quorum != 1.0 else ""
        how = f"N' = {s.over}" if s.refill is Refill.NONE else f"refill, {s.in_flight} in flight"
        how += ", tail batching" if s.tail_batching else ""
        return f"{how}{quorum}{'' if s.continuous is None else ', continuous'}"


@dataclass(frozen=True)
class Plan:
    """The result of a search: all simulated candidates and the chosen one.

    Attributes:
        rows: candidates, the fastest first.
        best: fastest candidate within the off-policy limit; of equally fast ones, the one with the smallest share.
        base: candidate with which all others are compared.
        speculative_gains: factors by which speculative decoding speeds up ``best`` and ``base``; empty without it.
    """

    rows: list[CandidateResult]
    best: CandidateResult
    base: CandidateResult
    speculative_gains: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The space of candidates to search.

    Attributes:
        base: candidate with which all others are compared; if it is invalid, the first valid candidate takes its place.
        free: settings that may differ from the base.
        quorums: values of ``group_quorum`` to try.
        places: largest number of samples in flight.
        continuous: values of :attr:`.workload.Schedule.continuous` to try.
        below: exclusive bound of samples in flight, for all candidates except the base; None means no bound.
        tail_batching: whether to try tail batching, too.
    """

    base: Schedule
    free: tuple[Work, ...] = tuple(Work)
    quorums: Sequence[float] = QUORUMS
    places: int = MOST_IN_FLIGHT
    continuous: tuple[int | None, ...] = (None,)
    below: int | None = None
    tail_batching: bool = False

    @classmethod
    def full(cls, workload: Workload, quorums: Sequence[float] = QUORUMS) -> SearchSpace:
        """Return the space of all candidates for a workload, with the synchronous schedule as the base."""
        if workload.whole_groups:
            quorums = (1.0,)
        modes = (None, workload.max_staleness) if workload.separate else (None,)
        places = MOST_IN_FLIGHT if workload.slots is None else workload.slots * workload.engines
        base = workload.one_shot(workload.groups)
        base = replace(base, in_flight=min(base.in_flight, places))
        return cls(base=base, quorums=quorums, places=places, continuous=modes, tail_batching=True)

    def quorums_to_try(self, quorum: float) -> Sequence[float]:
        """Return the quorums to try; only ``quorum`` if ``group_quorum`` is not free."""
        return self.quorums if Work.QUORUM in self.free else (quorum,)

    def allows_refill(self, refill: Refill) -> bool:
        """Return True if candidates may have this refill policy, with another N' or number in flight than the base."""
        size = Work.OVER_SAMPLING if refill is Refill.NONE else Work.IN_FLIGHT
        return size in self.free and (refill is self.base.refill or Work.REFILL in self.free)

    def clipped(self, schedule: Schedule) -> Schedule:
        """Return the schedule with at most ``places`` samples in flight; with refill, also fewer than ``below``."""
        most = self.places
        if self.below is not None and schedule.refill is Refill.SAMPLE:
            most = min(most, self.below - 1)
        return replace(schedule, in_flight=min(schedule.in_flight, most))


def coarse_grid(workload: Workload, space: SearchSpace) -> list[Schedule]:
    """Return the base (if it is valid), then the coarse grid, with the largest and the smallest quorum."""
    n, full = workload.groups, workload.groups * workload.samples
    found = [space.base]
    if space.allows_refill(Refill.NONE) and None in space.continuous:
        found += [workload.one_shot(round(n * ratio)) for ratio in RATIOS]
    if space.allows_refill(Refill.SAMPLE):
        refills = [Schedule(n, Refill.SAMPLE, round(full * share)) for share in PLACES]
        found += [replace(schedule, continuous=mode) for mode in space.continuous for schedule in refills]
    if space.tail_batching:
        found += [replace(workload.one_shot(round(n * ratio)), tail_batching=True) for ratio in TAIL_RATIOS]
    quorums = space.quorums_to_try(space.base.quorum)
    ends = dict.fromkeys((max(quorums), min(quorums)))
    return _possible(workload, [replace(space.clipped(s), quorum=quorum) for quorum in ends for s in found], space)


def neighbours(workload: Workload, best: Schedule, tried: Iterable[Schedule], space: SearchSpace) -> list[Schedule]:
    """Return ``best`` with sizes half way to the next smaller and larger tried sizes, and with other quorums."""
    tried, out = list(tried), []
    one_shot = best.refill is Refill.NONE
    sizes = sorted({_size(s) for s in tried if _kind(s) == _kind(best)})
    at, least = sizes.index(_size(best)), 1 if one_shot else workload.samples
    for other in (*sizes[max(0, at - 1) : at], *sizes[at + 1 : at + 2]):
        middle = (other + _size(best)) // 2
        if abs(middle - _size(best)) >= least and abs(middle - other) >= least:
            if one_shot:
                out.append(replace(workload.one_shot(middle), tail_batching=best.tail_batching))
            else:
                out.append(replace(best, in_flight=middle))
    out = [replace(space.clipped(schedule), quorum=best.quorum) for schedule in out]
    out += [replace(best, quorum=quorum) for quorum in space.quorums_to_try(best.quorum)]
    return [schedule for schedule in _possible(workload, out, space) if schedule not in tried]


def _size(schedule: Schedule) -> int:
    return schedule.over if schedule.refill is Refill.NONE else schedule.in_flight


def _kind(schedule: Schedule) -> tuple[object, ...]:
    return schedule.refill, schedule.continuous, schedule.tail_batching


def _possible(workload: Workload, schedules: Iterable[Schedule], space: SearchSpace) -> list[Schedule]:
    """Return the base, then the schedules that are worth trying, each once; leaves out invalid schedules."""
    out: dict[Schedule, None] = {}
    base, below = space.base, math.inf if space.below is None else space.below
    for schedule in (base, *schedules):
        try:
            workload.core_settings(schedule)
        except ValueError:  # for example N' above (max_staleness + 1) N
            continue
        one_shot = schedule.refill is Refill.NONE
        # with no more groups than a batch needs, a step waits for all responses, so nothing is left for later
        leaves_rest = schedule.quorum != 1.0 or schedule.tail_batching
        needless = one_shot and leaves_rest and schedule.over <= workload.groups
        # Config may allow more groups than this, but they could not be trained within max_staleness updates
        most = (workload.max_staleness + 1) * workload.groups
        too_many = one_shot and schedule.over > most and not schedule.tail_batching
        some = workload.engines <= schedule.in_flight < below
        if schedule == base or (some and not needless and not too_many):
            out[schedule] = None
    return list(out)


def pareto_front(rows: Sequence[CandidateResult]) -> list[CandidateResult]:
    """Return the Pareto front, fastest first: each row has a smaller off-policy share than all faster rows."""
    out: list[CandidateResult] = []
    for row in sorted(rows, key=lambda r: -r.tokens_per_s):
        if not out or row.off_policy_share < out[-1].off_policy_share:
            out.append(row)
    return out


def choose(rows: Sequence[CandidateResult], max_off_policy_share: float) -> CandidateResult:
    """Return the fastest row within the limit, or the least off-policy row if several are fastest or none is within."""
    within = [row for row in rows if row.off_policy_share <= max_off_policy_share]
    if not within:
        return min(rows, key=lambda row: row.off_policy_share)
    fastest = max(row.tokens_per_s for row in within)
    as_fast = [row for row in within if row.tokens_per_s >= (1.0 - EQUAL_SPEED) * fastest]
    return min(as_fast, key=lambda row: (row.off_policy_share, -row.tokens_per_s))


def _row(workload: Workload, schedule: Schedule) -> CandidateResult:
    """Simulate a schedule, and return its speed for typical response lengths, as described at the top of the module."""
    f = measure(workload, schedule)
    batch = workload.groups * workload.samples * float(workload.length_sample.mean())
    trained = batch * f["trained_tokens"] / (f["trained_tokens"] + f["masked_tokens"])
    at_limit_s = f["kept_tokens"] / f["limit_tokens_per_s"]
    paused_s = 0.0 if workload.separate else f["steps"] * workload.train_s
    fraction = at_limit_s / (f["rollout_s"] - paused_s)
    rollout_s = batch / (fraction * f["long_run_limit_tokens_per_s"])
    step_s = max(rollout_s, workload.train_s) if workload.separate else rollout_s + workload.train_s
    return CandidateResult(
        schedule=schedule, tokens_per_s=trained / step_s, step_s=step_s,
        off_policy_share=f["off_policy_share"], staleness_mean=f["staleness_mean"], staleness_max=f["staleness_max"],
    )  # fmt: skip


def plan(
    workload: Workload,
    space: SearchSpace | None = None,
    *,
    max_off_policy_share: float = 1.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Simulate candidates for a workload and choose the best one.

    Args:
        workload: workload for which the best settings are searched; its ``over``, ``in_flight``, ``group_quorum``,
            ``steps`` and ``ramp`` are not used.
        space: candidates that may be chosen; None means all candidates.
        max_off_policy_share: largest allowed off-policy share of the trained tokens.
        progress: function that is called with the number of finished simulations and the number of all simulations.

    Raises:
        ValueError: ``max_off_policy_share`` is out of range, or no candidate can be simulated.
        RolloutError: a simulation failed.
    """
    if not 0.0 <= max_off_policy_share <= 1.0:
        raise ValueError(f"max_off_policy_share must be from 0 to 1, got {max_off_policy_share:g}")
    space = space or SearchSpace.full(workload)
    rows: dict[Schedule, CandidateResult] = {}
    share = max_off_policy_share
    times = max(1, min(MAX_STEP_FACTOR, ENOUGH_RESPONSES // (workload.groups * workload.samples)))

    # read the file and draw the lengths once, not for each candidate
    seen = replace(workload, lengths_file=None, measured_lengths=workload.lengths)
    brief, long = (replace(seen, steps=times * steps, ramp=times * ramp) for steps, ramp in (BRIEF, LONG))
    assert brief.length_sample.size
    assert long.length_sample.size

    done = 0

    def run_all(schedules: Sequence[Schedule], at: Workload, more: int) -> None:
        nonlocal done
        total = done + len(schedules) + more
        for schedule in schedules:
            rows[schedule] = replace(_row(at, schedule), long=at is long)
            done += 1
            progress(done, total)

    schedules = coarse_grid(workload, space)
    if not schedules:
        raise ValueError(f"no setting can be simulated with max_staleness={workload.max_staleness}")
    run_all(schedules, brief, FINALISTS + 1 + ROUNDS * 4)
    for left in range(ROUNDS - 1, -1, -1):
        best = choose(list(rows.values()), share)
        run_all(neighbours(workload, best.schedule, rows, space), brief, FINALISTS + 1 + left * 4)
    run_all(_finalists(schedules[0], list(rows.values()), share), long, 0)
    base, best = rows[schedules[0]], choose([row for row in rows.values() if row.long], share)
    gains: tuple[float, ...] = ()
    if workload.cost.speed_up:
        plain = long.without_speculation
        gains = tuple(row.tokens_per_s / _row(plain, row.schedule).tokens_per_s for row in (best, base))
    return Plan(sorted(rows.values(), key=lambda r: -r.tokens_per_s), best, base, gains)


def _finalists(base: Schedule, rows: list[CandidateResult], share: float) -> list[Schedule]:
    """Return the base, then the candidates that may turn out to be the best, the most promising first."""
    likely = choose(rows, share)
    near = [r for r in rows if r.off_policy_share <= share * (1.0 + FINALIST_TOLERANCE)]
    near = [r for r in near if r.tokens_per_s >= (1.0 - FINALIST_TOLERANCE) * likely.tokens_per_s]
    ordered = [likely, *pareto_front(near), *sorted(near, key=lambda r: -r.tokens_per_s)]
    return list(dict.fromkeys([base, *(row.schedule for row in ordered)]))[: FINALISTS + 1]
