"""The best settings for a run as it is: ``python -m april.simulate.choose`` answers a question from stdin on stdout.

A process of its own, as simulating takes seconds of CPU that the run's own process does not have.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace

import msgspec

from april.auto.question import GAIN, Answer, InWork, Question
from april.core.types import Refill, Work
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.response_lengths import TraceLengths
from april.simulate.plan import QUORUMS, SAME, Row, Space, plan
from april.simulate.workload import MOST_IN_FLIGHT, Placement, Schedule, Workload

YOUNGER = 0.5
"""Times the off-policy share of what is in work is worth a change that costs no speed."""
MARGIN = 0.97
"""Factor of the limit of the off-policy share that a new choice keeps to, so that noise does not undo it."""
NICE = 10
"""Priority behind the run's own processes."""


def choose(question: Question) -> Answer:
    """Return the best settings within the limits of the question.

    Raises:
        ValueError: there is nothing to simulate.
        RolloutError: the core gave up.
    """
    q = question
    workload = workload_of(q)
    share = MARGIN if q.max_off_policy_share < 1.0 else 1.0
    space = space_of(q)
    found = plan(workload, space, max_off_policy_share=share * q.max_off_policy_share)
    best, base = found.best, found.base
    is_now = base.schedule == space.base  # what cannot be simulated is no choice
    within = base.off_policy_share <= q.max_off_policy_share
    if is_now and within and best.tokens_per_s < (1.0 + GAIN) * base.tokens_per_s:
        as_fast = [row for row in found.rows if row.long and row.tokens_per_s >= (1.0 - SAME) * base.tokens_per_s]
        youngest = min(as_fast, key=lambda row: row.off_policy_share)
        best = youngest if youngest.off_policy_share < YOUNGER * base.off_policy_share else base
    return Answer(
        best=q.now if is_now and best is base else _in_work(q, best),
        tokens_per_s=best.tokens_per_s, off_policy_share=best.off_policy_share,
        speed_up=best.tokens_per_s / base.tokens_per_s, share_now=base.off_policy_share,
    )  # fmt: skip


def workload_of(q: Question) -> Workload:
    """Return the workload of the question; raises ValueError."""
    placement = Placement.SEPARATE if q.continuous or q.fetch_ahead else Placement.COLOCATED
    return Workload(
        model="", gpu="", engines=q.engines, groups=q.groups, samples=q.samples, prompt_len=q.prompt_len,
        over=q.groups,
        max_response_len=q.max_response_len, max_staleness=q.max_staleness, on_stale=q.on_stale,
        train_time=f"{q.train_s:.6f}" if q.train_s else None, placement=placement if q.train_s else None,
        fetch_ahead=q.fetch_ahead,
        measured_cost=DecodeCost(*q.cost), measured_lengths=TraceLengths(q.lengths),
    )  # fmt: skip


def space_of(q: Question) -> Space:
    """Return the settings that may be chosen."""
    mode = q.max_staleness if q.continuous else None
    places = min(q.places, MOST_IN_FLIGHT)
    if Work.IN_FLIGHT not in q.free:
        places = min(places, q.now.max_in_flight)
    now = q.now
    base = Schedule(
        over=now.over_sampling_batch_size, refill=now.refill, in_flight=min(now.max_in_flight, places),
        continuous=mode, quorum=now.group_quorum,
    )  # fmt: skip
    # a group of few samples has few quorums, as three must be finished
    quorums = [quorum for quorum in QUORUMS if quorum * q.samples >= 3.0] or [1.0]
    return Space(base=base, free=q.free, quorums=quorums, places=places, continuous=(mode,), below=q.below)


def _in_work(q: Question, row: Row) -> InWork:
    s = row.schedule
    chosen = InWork(
        over_sampling_batch_size=s.over if s.refill is Refill.NONE else q.groups,
        refill=s.refill, max_in_flight=s.in_flight, group_quorum=s.quorum,
    )  # fmt: skip
    fixed = {str(name): getattr(q.now, name) for name in Work if name not in q.free}
    return replace(chosen, **fixed)


def main() -> None:
    """Answer the question on stdin."""
    with suppress(OSError):
        os.nice(NICE)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    sys.stdout.buffer.write(msgspec.json.encode(choose(question)))


if __name__ == "__main__":
    main()
