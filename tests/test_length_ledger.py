"""The length ledger: what is generated is what is trained, in every mode that drops nothing; what drops is seen.

The random lives of trainers count the lengths of every delivered sample over restarts, too (trainer_books.py).
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from core_machine import asked

from april.core import events as ev
from april.core.ledger import LengthLedger, Lengths
from april.core.settings import CoreSettings
from april.core.types import DropReason, GenerationMode, OnStale, Refill, SampleId
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.response_lengths import LognormalLengths
from april.simulate.simulation import Simulation

LENGTHS = LognormalLengths(12, 0.6, 0.5, seed=3)
N, SAMPLES = 4, 8


def true_lengths(groups: int) -> Counter[int]:
    """Of all samples of so many groups."""
    return Counter(min(LENGTHS.sample(g, i), 400) for g in range(groups) for i in range(SAMPLES))


def simulation(train_s: float = 0.0, **changes: Any) -> Simulation:
    """N groups of 8 on two engines, N' = 2 N."""
    values = {
        "rollout_batch_size": N, "n_samples_per_prompt": SAMPLES, "over_sampling_batch_size": 2 * N,
        "max_response_len": 400, "max_in_flight": 64, "has_reward": False,
    } | changes  # fmt: skip
    cost = DecodeCost(0.02, 1e-4, 1e-7)
    return Simulation(CoreSettings(**values), cost, LENGTHS, engines=2, train_s=train_s)


def distance(a: Counter[int], b: Counter[int]) -> float:
    """Largest difference of the two distribution functions (Kolmogorov-Smirnov)."""
    last = max(*a, *b) + 1
    shares = [np.array([x[i] for i in range(last)]).cumsum() / x.total() for x in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


# -------------------------------------------------------------------- the ledger itself


def test_a_response_counts_once() -> None:
    """When it is finished; a batch's bias is against all that were so far."""
    ledger = LengthLedger()
    for tokens in (4, 8, 12):
        ledger.generated.add(tokens)
    ledger.drop(12, DropReason.STALE, counted=True)
    ledger.drop(16, DropReason.FAILED, counted=False)
    ledger.unfinished[DropReason.FAILED] += 1
    ledger.trained.add(4)
    assert ledger.accounted([8]) == ledger.generated
    assert ledger.accounted([]) != ledger.generated != ledger.accounted([9])
    metrics = ledger.metrics([4])
    assert metrics == {
        "length_mean_generated": 10.0, "length_mean_trained": 4.0, "length_bias": 0.4, "length_unknown": 0.2
    }  # fmt: skip
    again = LengthLedger()
    again.restore(ledger, [8])
    assert again == ledger
    other = deepcopy(ledger)
    other.generated.add(1)
    other.unfinished.clear()
    assert ledger.metrics([4]) == metrics


@pytest.mark.parametrize("refill", list(Refill))
@pytest.mark.parametrize("quorum", [1.0, 0.5])
@pytest.mark.parametrize("train_s", [0.0, 40.0])
def test_over_a_long_run_both_distributions_are_one(train_s: float, quorum: float, refill: Refill) -> None:
    """150 steps at N' = 2 N, data without end: what is trained differs from all that was drawn by what is held only."""
    generation = GenerationMode.CONTINUOUS if train_s else GenerationMode.STEPWISE
    run = simulation(train_s, refill=refill, group_quorum=quorum, generation=generation)
    steps, core = run.run(150).steps, run.core
    core.validate()
    lengths = core.context.lengths
    trained = Counter(int(tokens) for step in steps for tokens in step.lengths)
    drawn = true_lengths(core.context.groups_drawn)
    assert lengths.trained == Lengths(trained.total(), sum(trained.elements()))
    held = drawn.total() - trained.total()
    assert 0 <= held == sum(group.held for group in core.buffer)
    assert distance(trained, drawn) <= held / drawn.total() < 0.05
    assert lengths.trained.mean == pytest.approx(sum(drawn.elements()) / drawn.total(), rel=0.04)
    assert steps[-1].metrics["length_mean_trained"] == lengths.trained.mean


def test_the_first_batches_of_a_run_are_short_and_later_ones_make_up_for_it() -> None:
    """N' = 2 N: the first N groups are those that are short; without over-sampling there is no such choice."""
    means = {}
    for over in (N, 2 * N):
        run = simulation(over_sampling_batch_size=over, refill=Refill.NONE)
        (first,) = run.run(1).steps
        assert first.metrics["length_mean_trained"] == np.mean(first.lengths)
        assert first.metrics["length_bias"] == pytest.approx(
            np.mean(first.lengths) / first.metrics["length_mean_generated"]
        )
        means[over] = np.mean(first.lengths), first.metrics["length_bias"]
    assert means[N][1] == 1.0
    assert means[2 * N][1] < 0.95
    assert means[2 * N][0] < 0.8 * means[N][0]


@pytest.mark.parametrize(("quorum", "share"), [(1.0, 0.9), (0.5, 0.95)])
def test_dropping_what_is_too_old_drops_what_is_long(quorum: float, share: float) -> None:
    """on_stale: drop; the long ones are dropped unfinished, and finished siblings with them."""
    run = simulation(on_stale=OnStale.DROP, max_staleness=0, group_quorum=quorum)
    run.run(30)
    lengths = run.core.context.lengths
    assert set(lengths.dropped) == set(lengths.unfinished) == {DropReason.STALE}
    assert lengths.trained.mean < share * lengths.generated.mean
    assert lengths.metrics([1])["length_unknown"] > 0.15
    everything = true_lengths(run.core.context.groups_drawn)
    assert lengths.trained.mean < 0.6 * sum(x * c for x, c in everything.items()) / everything.total()


def test_a_response_that_fails_before_its_end_has_no_length() -> None:
    """It is counted, by the reason; a finished sibling that it takes along has one."""
    m = asked(lambda g, i: 5 + 90 * g, samples=2, over=2, max_attempt_failures=1)
    m.end(list(m.in_flight)[2])
    m.tokens(list(m.in_flight)[2], 40)
    m.post(ev.SampleFailed(SampleId(1, 1), "too long for the sandbox"))
    m.finish_aborts()
    m.core.validate()
    lengths = m.core.context.lengths
    assert lengths.unfinished == {DropReason.FAILED: 1}
    assert (lengths.generated.samples, lengths.dropped[DropReason.FAILED].mean) == (1, 95.0)
    assert lengths.metrics([1])["length_unknown"] == 0.5


def test_a_response_whose_reward_fails_has_a_length() -> None:
    """It was complete; what failed was the judge."""
    m = asked(lambda g, i: 5 + 90 * g, samples=2, over=2, max_attempt_failures=1, auto_score=False)
    for attempt_id in list(m.in_flight)[2:]:
        m.end(attempt_id)
    m.post(ev.SampleFailed(SampleId(1, 0), "the judge was away"))
    m.core.validate()
    lengths = m.core.context.lengths
    assert (lengths.generated.samples, lengths.dropped[DropReason.FAILED].mean) == (2, 95.0)
    assert lengths.unfinished == {}


def test_a_filter_is_seen_by_its_name() -> None:
    """Groups that a filter rejects are dropped after they have finished."""
    m = asked(lambda g, i: 5 + 90 * g, samples=2, over=2, has_filter=True)
    for attempt_id in list(m.in_flight):
        m.end(attempt_id)
    for judge in [c for c in m.commands if type(c).__name__ == "JudgeGroup"]:
        m.post(ev.GroupJudged(group=judge.group.id, judgement=judge.judgement, keep=judge.group.id == 0))
    m.finish_aborts()
    lengths = m.core.context.lengths
    assert (lengths.trained.mean, lengths.dropped[DropReason.FILTERED].mean) == (5.0, 95.0)
    assert m.batches[0].metrics["length_bias"] == 0.1
