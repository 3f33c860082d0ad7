"""The length ledger: what is generated is what is trained, in every mode that drops nothing; what drops is seen."""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from core_machine import CoreMachine, settings

from april.core import events as ev
from april.core import snapshot
from april.core.batch import Batch
from april.core.ledger import LONGEST, LengthLedger, Lengths, bucket_of, shortest_of
from april.core.settings import CoreSettings
from april.core.types import (
    DropReason,
    GenerationMode,
    OnFailedSample,
    OnStale,
    Prompt,
    Refill,
    SampleId,
    SampleState,
)
from april.core.versions import PolicyVersion
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.response_lengths import LognormalLengths
from april.simulate.simulation import Simulation

LENGTHS = LognormalLengths(12, 0.6, 0.5, seed=3)
N, SAMPLES, PROMPTS = 2, 8, 14
STEPWISE, CONTINUOUS = GenerationMode


def length(group: int, index: int) -> int:
    """Of a response; at most 200 tokens."""
    return min(LENGTHS.sample(group, index), 200)


def true_lengths(groups: int) -> Counter[int]:
    """Of all samples of so many groups."""
    return Counter(length(g, i) for g in range(groups) for i in range(SAMPLES))


class Run:
    """Trains until the data has ended; the lengths that were trained are counted here, apart from the core."""

    def __init__(self, seed: int = 0, *, prompts: int = PROMPTS, fails_from: int = 10**6, **changes: Any) -> None:
        self.rng = random.Random(seed)
        self.fails_from = fails_from
        values = {"max_in_flight": 2 * N * SAMPLES, "max_failed_groups": 10**6, "max_attempt_failures": 1} | changes
        self.settings = settings(n=N, samples=SAMPLES, **values)
        self.m = self.machine(prompts)
        self.out: list[Batch] = []
        self.trained: Counter[int] = Counter()
        self.batches = 0

    def machine(self, prompts: int) -> CoreMachine:
        m = CoreMachine(self.settings, length, prompts=prompts)
        m.core._check = False  # after every batch, not after every event
        return m

    def to_the_end(self) -> CoreMachine:
        """Until every prompt is settled and every batch trained."""
        while not self.m.ended or self.out:
            self.go_on()
        return self.m

    def go_on(self) -> None:
        """Something happens."""
        m = self.m
        if self.out and (len(self.out) > self.settings.max_staleness or self.rng.random() < 0.2 or m.ended):
            self.train()
        elif not m.core.wanted and not m.ended and not m.core.train_first:
            m.post(ev.StepRequested())
        elif m.in_flight:
            self.generate()
        self.out += m.batches
        if m.batches:
            m.core.validate()
        m.batches.clear()

    def generate(self) -> None:
        """A request gains some tokens; long responses may fail instead of ending."""
        m = self.m
        attempt_id = self.rng.choice(list(m.in_flight))
        if attempt_id in m.abort_asked:
            m.end(attempt_id, 1)
        elif m.tokens(attempt_id, 6):
            sample = m.in_flight[attempt_id].sample
            if length(*sample.id) < self.fails_from:
                m.end(attempt_id, 0)
            else:
                m.post(ev.SampleFailed(sample.id, "too long for the sandbox"))

    def restart(self) -> None:
        """The process ends; the batches that are out are not trained."""
        state = snapshot.take(self.m.core, None)
        self.m, self.out = self.machine(self.m.prompts_left or 0), []
        snapshot.restore(self.m.core, state)
        self.m.core.validate()
        self.m.post(ev.WeightsUpdated(self.m.core.clock.current))

    def train(self) -> None:
        """On the oldest batch that is out."""
        m, batch = self.m, self.out.pop(0)
        m.post(ev.PauseRequested())
        m.finish_aborts()
        self.trained.update(len(s.tokens) for s in batch.samples)
        self.batches += 1
        current = m.core.clock.current
        m.post(ev.WeightsUpdated(PolicyVersion(current.incarnation, current.n + 1), trained=batch.id))
        m.post(ev.Resumed())


def in_buckets(lengths: Counter[int]) -> Counter[int]:
    """Lengths as the ledger counts them."""
    out: Counter[int] = Counter()
    for tokens, count in lengths.items():
        out[bucket_of(tokens)] += count
    return out


def distance(a: Lengths, b: Lengths) -> float:
    """Largest difference of the two distribution functions (Kolmogorov-Smirnov)."""
    last = max(*a.buckets, *b.buckets) + 1
    shares = [np.array([x.buckets[i] for i in range(last)]).cumsum() / x.samples for x in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


# -------------------------------------------------------------------- the ledger itself


def test_buckets_follow_on_each_other() -> None:
    """Each length is in one bucket, in order and without gaps; a bucket is at most a quarter of its lengths wide."""
    for tokens in [*range(5000), *(3**k for k in range(8, 25)), LONGEST]:
        bucket = bucket_of(tokens)
        assert shortest_of(bucket) <= tokens < shortest_of(bucket + 1)
        assert shortest_of(bucket + 1) - shortest_of(bucket) <= max(1, tokens / 4)
    assert [bucket_of(shortest_of(b)) for b in range(150)] == list(range(150))


def test_a_response_counts_once() -> None:
    """When it is finished; a batch's bias is against all that were so far."""
    ledger = LengthLedger()
    for tokens in (4, 8, 12):
        ledger.generated.add(tokens)
    ledger.drop(12, DropReason.STALE, counted=True)
    ledger.drop(16, DropReason.FAILED, counted=False)
    ledger.unfinished[DropReason.FAILED] += 1
    ledger.trained.add(4)
    assert ledger.wrong([8]) is None
    assert "lengths generated" in str(ledger.wrong([]))
    assert "lengths generated" in str(ledger.wrong([9]))
    metrics = ledger.metrics([4])
    assert metrics == {
        "length_mean_generated": 10.0, "length_mean_trained": 4.0, "length_bias": 0.4, "length_unknown": 0.2
    }  # fmt: skip
    again = LengthLedger()
    again.restore(ledger.as_dict(), [8])
    assert again.as_dict() == ledger.as_dict()
    assert again.generated.as_dict() == ledger.generated.as_dict()
    other = deepcopy(ledger)
    other.generated.add(1)
    other.unfinished.clear()
    assert ledger.metrics([4]) == metrics


@pytest.mark.parametrize(
    "state",
    [
        {"tokens": 7, "buckets": {"8": 1}},
        {"tokens": 10, "buckets": {"8": 1}},
        {"tokens": 9, "buckets": {"8": -1}},
        {"tokens": 0, "buckets": {"-1": 0}},
        {"tokens": 0, "buckets": {"100000000": 0}},
        {"tokens": 1.0, "buckets": {"1": 1}},
    ],
)
def test_lengths_that_cannot_be(state: dict[str, Any]) -> None:
    """A state is looked at before it is believed."""
    assert Lengths.from_dict({"tokens": 8, "buckets": {"8": 1}}).mean == 8.0
    with pytest.raises(ValueError, match=r"."):
        Lengths.from_dict(state)


# -------------------------------------------------------------------- nothing is dropped


@pytest.mark.parametrize("on_stale", [OnStale.FINISH, OnStale.RESTART, OnStale.MASK])
@pytest.mark.parametrize("quorum", [1.0, 0.75, 0.5])
@pytest.mark.parametrize("refill", list(Refill))
@pytest.mark.parametrize("generation", list(GenerationMode))
def test_all_lengths_are_trained(
    generation: GenerationMode, refill: Refill, quorum: float, on_stale: OnStale
) -> None:
    """N' = N, 1.5 N and 2 N: at the end of the data the lengths trained are those of all samples, one by one."""
    for over in (N, 3 * N // 2, 2 * N):
        run = Run(
            over, generation=generation, refill=refill, group_quorum=quorum, on_stale=on_stale,
            over_sampling_batch_size=over, max_staleness=2,
        )  # fmt: skip
        core = run.to_the_end().core
        assert run.trained == true_lengths(PROMPTS)
        assert core.context.lengths.trained.buckets == in_buckets(run.trained)
        assert core.context.lengths.trained.as_dict() == core.context.lengths.generated.as_dict()
        assert core.context.lengths.dropped == {}
        assert run.batches == PROMPTS // N


@pytest.mark.parametrize("refill", list(Refill))
@pytest.mark.parametrize("quorum", [1.0, 0.5])
@pytest.mark.parametrize("train_s", [0.0, 40.0])
def test_over_a_long_run_both_distributions_are_one(train_s: float, quorum: float, refill: Refill) -> None:
    """150 steps at N' = 2 N, data without end: what is trained differs from all that was drawn by what is held only."""
    core_settings = CoreSettings(
        rollout_batch_size=4, n_samples_per_prompt=SAMPLES, over_sampling_batch_size=8, max_response_len=400,
        max_in_flight=64, has_reward=False, refill=refill, group_quorum=quorum,
        generation=CONTINUOUS if train_s else STEPWISE,
    )  # fmt: skip
    simulation = Simulation(core_settings, DecodeCost(0.02, 1e-4, 1e-7), LENGTHS, engines=2, train_s=train_s)
    steps, core = simulation.run(150).steps, simulation.core
    core.validate()
    lengths = core.context.lengths
    assert lengths.trained.buckets == in_buckets(Counter(tokens for step in steps for tokens in step.lengths))
    drawn = Lengths()
    for tokens, count in true_lengths(core.context.groups_drawn).items():
        drawn.add(tokens, count)
    held = drawn.samples - lengths.trained.samples
    assert 0 <= held == sum(group.held for group in core.buffer)
    assert distance(lengths.trained, drawn) <= held / drawn.samples < 0.05
    assert distance(lengths.trained, lengths.generated) <= held / drawn.samples
    assert lengths.trained.mean == pytest.approx(drawn.mean, rel=0.04)
    assert steps[-1].metrics["length_mean_trained"] == lengths.trained.mean


# -------------------------------------------------------------------- the bias of the first N


def test_the_first_batches_of_a_run_are_short_and_later_ones_make_up_for_it() -> None:
    """N' = 2 N: the first N groups are those that are short; without over-sampling there is no such choice."""
    means = {}
    for over in (N, 2 * N):
        run = Run(5, over_sampling_batch_size=over, max_staleness=3)
        run.m.post(ev.StepRequested())
        while not run.out:
            run.go_on()
        first = run.out[0].metrics
        tokens = np.array([len(s.tokens) for s in run.out[0].samples])
        assert first["length_mean_trained"] == tokens.mean()
        assert first["length_bias"] == pytest.approx(tokens.mean() / first["length_mean_generated"])
        means[over] = tokens.mean(), first["length_bias"]
        assert run.to_the_end().core.context.lengths.dropped == {}
    assert means[N][1] == 1.0
    assert means[2 * N][1] < 0.95
    assert means[2 * N][0] < 0.8 * means[N][0]


# -------------------------------------------------------------------- what drops is seen


@pytest.mark.parametrize("quorum", [1.0, 0.5])
def test_dropping_what_is_too_old_drops_what_is_long(quorum: float) -> None:
    """on_stale: drop; the long ones are dropped unfinished, and finished siblings with them."""
    run = Run(
        1, prompts=60, over_sampling_batch_size=2 * N, on_stale=OnStale.DROP, max_staleness=0, group_quorum=quorum
    )
    lengths = run.to_the_end().core.context.lengths
    assert set(lengths.dropped) == set(lengths.unfinished) == {DropReason.STALE}
    assert lengths.trained.buckets == in_buckets(run.trained)
    assert lengths.trained.mean < 0.9 * lengths.generated.mean
    assert lengths.metrics([1])["length_unknown"] > 0.15
    everything = true_lengths(60)
    assert lengths.trained.mean < 0.6 * sum(x * c for x, c in everything.items()) / everything.total()


@pytest.mark.parametrize("policy", list(OnFailedSample))
def test_failures_of_long_responses_are_seen(policy: OnFailedSample) -> None:
    """They have no length, and are counted; finished siblings that they take along are seen in the mean."""
    run = Run(2, prompts=60, fails_from=40, on_failed_sample=policy, on_stale=OnStale.MASK)
    core = run.to_the_end().core
    lengths, failed = core.context.lengths, core.counters["failed_samples"]
    assert max(run.trained) < 40
    assert lengths.trained.buckets == in_buckets(run.trained)
    if policy is OnFailedSample.SHRINK:
        assert lengths.dropped == {}
        assert lengths.unfinished == {DropReason.FAILED: failed}
        return
    assert lengths.unfinished[DropReason.FAILED] >= failed
    assert lengths.trained.mean < lengths.generated.mean * (0.95 if policy is OnFailedSample.DROP_GROUP else 1.0)


def test_a_response_whose_reward_fails_has_a_length() -> None:
    """It was complete; what failed was the judge."""
    m = CoreMachine(settings(n=1, samples=2, over=2, max_attempt_failures=1), lambda g, i: 5 + 90 * g, auto_score=False)
    m.post(ev.StepRequested())
    for attempt_id in list(m.in_flight)[2:]:
        m.end(attempt_id)
    m.post(ev.SampleFailed(SampleId(1, 0), "the judge was away"))
    m.core.validate()
    lengths = m.core.context.lengths
    assert (lengths.generated.samples, lengths.dropped[DropReason.FAILED].mean) == (2, 95.0)
    assert lengths.unfinished == {}


def test_a_filter_is_seen_by_its_name() -> None:
    """Groups that a filter rejects are dropped after they have finished."""
    m = CoreMachine(settings(n=1, samples=2, over=2, has_filter=True), lambda g, i: 5 + 90 * g)
    m.post(ev.StepRequested())
    for attempt_id in list(m.in_flight):
        m.end(attempt_id)
    for judge in [c for c in m.commands if type(c).__name__ == "JudgeGroup"]:
        m.post(ev.GroupJudged(group=judge.group.id, judgement=judge.judgement, keep=judge.group.id == 0))
    m.finish_aborts()
    lengths = m.core.context.lengths
    assert (lengths.trained.mean, lengths.dropped[DropReason.FILTERED].mean) == (5.0, 95.0)
    assert m.batches[0].metrics["length_bias"] == 0.1


# -------------------------------------------------------------------- restarts


def test_lengths_count_once_over_restarts() -> None:
    """From any moment, with batches that are out and come again: at the end as if there had been no restart."""
    restarts = again = 0
    for seed in range(10):
        rng = random.Random(seed)
        run = Run(
            seed, group_quorum=rng.choice([1.0, 0.5]), generation=rng.choice(list(GenerationMode)),
            refill=rng.choice(list(Refill)), over_sampling_batch_size=2 * N, max_staleness=2,
        )  # fmt: skip
        while not run.m.ended or run.out:
            run.go_on()
            if rng.random() < (0.2 if run.out else 0.02) and not run.m.ended:
                restarts, again = restarts + 1, again + len(run.out)
                run.restart()
        assert run.trained == true_lengths(PROMPTS)
        lengths = run.m.core.context.lengths
        assert lengths.trained.buckets == in_buckets(run.trained)
        assert lengths.trained.as_dict() == lengths.generated.as_dict()
    assert restarts > 100
    assert again > 40


def test_evaluations_have_no_part_in_it() -> None:
    """Their responses are finished too, and trained by nobody."""
    m = CoreMachine(settings(n=1, samples=2), lambda g, i: 5)
    prompts = (Prompt(np.array([5, 6], np.int32)),)
    m.post(ev.EvaluationRequested(evaluation=1, prompts=prompts, n_samples=2, sampling=m.sampling, seed=3))
    for attempt_id in list(m.in_flight):
        m.end(attempt_id)
    assert [type(c).__name__ for c in m.commands].count("EvaluationDone") == 1
    assert m.core.context.lengths.generated.samples == 0


def test_a_state_of_before_there_were_lengths() -> None:
    """They are counted from then on."""
    m = CoreMachine(settings(n=1, samples=2, over=2), lambda g, i: 5)
    m.post(ev.StepRequested())
    for attempt_id in list(m.in_flight):
        m.end(attempt_id)
    m.update()
    state = snapshot.take(m.core, None)
    del state["lengths"]
    again = CoreMachine(m.core.settings, lambda g, i: 5)
    snapshot.restore(again.core, state)
    again.core.validate()
    finished = sum(s.state is SampleState.FINISHED for s in again.core.buffer.samples())
    assert again.core.context.lengths.generated.samples == finished
    assert again.core.context.lengths.trained.samples == 0
