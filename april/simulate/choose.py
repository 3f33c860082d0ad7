"""Finds the best settings for a run with ``auto`` settings, by simulation, in a separate process.

``python -m april.simulate.choose`` reads a question on stdin and writes the answer to stdout. The simulation takes
seconds of CPU time, which would block the event loop in the process of the run.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace

import msgspec

from april.auto.question import GAIN, TuningAnswer, TuningQuestion, WorkSettings
from april.core.types import Refill, Work
from april.engines.simulated.response_lengths import TraceLengths
from april.simulate.plan import EQUAL_SPEED, QUORUMS, CandidateResult, SearchSpace, plan
from april.simulate.workload import MOST_IN_FLIGHT, Placement, Schedule, Workload

MIN_SHARE_REDUCTION = 0.5
"""A change that brings no speed must bring the off-policy share below this fraction of the current share."""
MARGIN = 0.97
"""New settings may use this fraction of the allowed off-policy share; the rest is a margin for noise."""
NICE = 10
"""Niceness of this process, so that the processes of the run have priority."""


def choose(question: TuningQuestion) -> TuningAnswer:
    """Return the best settings within the limits of the question.

    Raises:
        ValueError: no settings can be simulated.
        RolloutError: a simulation failed.
    """
    q = question
    workload = workload_of(q)
    share = MARGIN if q.max_off_policy_share < 1.0 else 1.0
    space = space_of(q)
    found = plan(workload, space, max_off_policy_share=share * q.max_off_policy_share)
    best, base = found.best, found.base
    # if the current settings could not be simulated, the base is another candidate, and the best one replaces them
    is_now = base.schedule == space.base and space.base.quorum == q.now.group_quorum
    within = base.off_policy_share <= q.max_off_policy_share
    if is_now and within and best.tokens_per_s < (1.0 + GAIN) * base.tokens_per_s:
        least = (1.0 - EQUAL_SPEED) * base.tokens_per_s
        as_fast = [row for row in found.rows if row.long and row.tokens_per_s >= least]
        youngest = min(as_fast, key=lambda row: row.off_policy_share)
        best = youngest if youngest.off_policy_share < MIN_SHARE_REDUCTION * base.off_policy_share else base
    return TuningAnswer(
        best=q.now if is_now and best is base else _work_settings(q, best),
        tokens_per_s=best.tokens_per_s, off_policy_share=best.off_policy_share,
        speed_up=best.tokens_per_s / base.tokens_per_s, share_now=base.off_policy_share,
    )  # fmt: skip


def workload_of(q: TuningQuestion) -> Workload:
    """Return the workload that a question describes. Raises ValueError if it cannot be simulated."""
    placement = Placement.SEPARATE if q.continuous or q.fetch_ahead else Placement.COLOCATED
    return Workload(
        model="", gpu="", engines=q.engines, groups=q.groups, samples=q.samples, prompt_len=q.prompt_len,
        over=q.groups,
        max_response_len=q.max_response_len, max_staleness=q.max_staleness, on_stale=q.on_stale,
        train_time=f"{q.train_s:.6f}" if q.train_s else None, placement=placement if q.train_s else None,
        fetch_ahead=q.fetch_ahead,
        measured_cost=q.cost, measured_lengths=TraceLengths(q.lengths),
    )  # fmt: skip


def space_of(q: TuningQuestion) -> SearchSpace:
    """Return the space of settings to search; settings that are not free keep their current values."""
    mode = q.max_staleness if q.continuous else None
    places = min(q.places, MOST_IN_FLIGHT)
    if Work.IN_FLIGHT not in q.free:
        places = min(places, q.now.max_in_flight)
    now = q.now
    # Config requires at least three finished samples per group, which rules out small quorums of small groups
    quorums = [quorum for quorum in QUORUMS if quorum * q.samples >= 3.0] or [1.0]
    base = Schedule(
        over=now.over_sampling_batch_size, refill=now.refill, in_flight=min(now.max_in_flight, places),
        continuous=mode, quorum=max(now.group_quorum, min(quorums)) if Work.QUORUM in q.free else now.group_quorum,
    )  # fmt: skip
    return SearchSpace(base=base, free=q.free, quorums=quorums, places=places, continuous=(mode,), below=q.below)


def _work_settings(q: TuningQuestion, row: CandidateResult) -> WorkSettings:
    s = row.schedule
    chosen = WorkSettings(
        over_sampling_batch_size=s.over if s.refill is Refill.NONE else q.groups,
        refill=s.refill, max_in_flight=s.in_flight, group_quorum=s.quorum,
    )  # fmt: skip
    fixed = {str(name): getattr(q.now, name) for name in Work if name not in q.free}
    return replace(chosen, **fixed)


def main() -> None:
    """Read a question from stdin and write the answer to stdout."""
    with suppress(OSError):
        os.nice(NICE)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=TuningQuestion)
    sys.stdout.buffer.write(msgspec.json.encode(choose(question)))


if __name__ == "__main__":
    main()
