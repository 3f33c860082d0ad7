"""A change that auto makes is a trial: what it brings is measured, and it is taken back where it brings nothing."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from auto_questions import BETTER, COST, Watched, answer, stays

import april
from april.auto import auto_run as process
from april.auto.auto_work import ENOUGH, STEP
from april.auto.batches import LATEST, Speeds
from april.auto.question import Answer, Question
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.response_lengths import LognormalLengths
from april.testing import FakeEngine, rollouts, run_virtual

SAME = LognormalLengths(100.0, 0.0, 0.0, seed=1)
"""All responses have the same length."""
LINEAR = DecodeCost(1e-6, 1e-3, 0.0, 1e-6)
"""More in flight brings nothing."""


def insists(q: Question) -> Answer:
    """It is better, whatever is seen."""
    return answer(BETTER if q.now != BETTER else q.now, speed_up=1.4 if q.now != BETTER else 1.0)


# -------------------------------------------------------------------- what was seen


def batch(tokens: float, seconds: float, held: float = 0.0) -> dict[str, float]:
    """Metrics of one."""
    return {
        "trained_tokens": tokens, "masked_tokens": 0.0, "held_tokens": held, "step_s": seconds, "evaluation_s": 0.0,
        "other_s": 0.0,
    }  # fmt: skip


def test_what_is_held_counts() -> None:
    """A batch that leaves more behind than there was is as fast as one that delivers it."""
    speeds = Speeds()
    speeds.add(batch(100.0, 2.0, held=50.0), 0.0)
    speeds.add(batch(100.0, 1.0, held=0.0) | {"evaluation_s": 0.25, "other_s": 0.25}, 50.0)
    assert speeds.tokens_per_s == pytest.approx(200.0 / 2.5)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_another_speed_is_noticed_and_the_same_is_not(factor: float) -> None:
    """Half or twice the speed within a few batches; chance in none of 40 runs of 60 batches that differ by 15 %."""
    for seed in range(40):
        rng = random.Random(seed)
        speeds = Speeds()
        for _ in range(60):
            speeds.add(batch(1000.0, rng.lognormvariate(0.0, 0.15)), 0.0)
            assert not speeds.changed
        noticed = False
        for _ in range(LATEST + 2):
            speeds.add(batch(1000.0, rng.lognormvariate(0.0, 0.15) / factor), 0.0)
            noticed |= speeds.changed
        assert noticed


def fitted(**run: Any) -> list[Any]:
    """What a run that stays as it is finds out about its engines' cost, question by question."""
    found: list[Any] = []
    watched = Watched(stays, **run)
    auto = watched._auto
    assert auto is not None
    asked = auto.question
    auto.question = lambda costs: asked(found.append(f) or f for f in costs)  # type: ignore[method-assign,func-returns-value]
    watched.run(7)
    return found


def test_one_number_in_flight_does_not_tell_what_more_cost() -> None:
    """Then the most is expected that may be; a tail tells."""
    for cost in (COST, LINEAR):
        found = fitted(lengths=SAME, cost=cost)
        assert not any(f.told for f in found)
        assert all(f.at_best.per_sequence_s == f.at_best.per_kv_token_s == 0.0 for f in found)
        assert all(f.at_best.base_s == pytest.approx(cost.step_s(8, 8 * 180), rel=0.05) for f in found)
        assert all(f.told for f in fitted(cost=cost))


class Crowded(DecodeCost):
    """Each one more slows down all: no sum of costs that are not negative has that."""

    def step_s(self, n: int, kv_tokens: int) -> float:
        """See the base class."""
        return self.per_sequence_s * n * n


def test_a_cost_of_sequences_alone_is_found() -> None:
    """Where nothing is paid per step it is not taken for one that is, which would make more in flight free."""
    for found in fitted(cost=LINEAR):
        assert found.cost.step_s(16, 0) == pytest.approx(2.0 * found.cost.step_s(8, 0), rel=0.03)
    for found in fitted(cost=Crowded(1e-6, 1e-4, 0.0)):
        assert found.cost.step_s(16, 16 * 180) > 1.9 * found.cost.step_s(8, 8 * 180)


def test_what_nobody_can_tell_is_tried_in_a_small_step() -> None:
    """At most a quarter more in flight, or one group; once it is told, as far as is best."""
    run = Watched(stays, SAME)
    run.run(3)
    assert [(q.told, q.below) for _, q in run.asked] == [(False, int(STEP * 16) + 1)]
    told = Watched(stays)
    told.run(3)
    assert [(q.told, q.below) for _, q in told.asked] == [(True, None)]


# -------------------------------------------------------------------- what came


def in_work(run: Watched) -> list[float]:
    """N' of each batch."""
    return [step.metrics["auto_over_sampling_batch_size"] for step in run.result.steps]


def test_what_brings_nothing_is_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    """After a few batches, with what came and what was expected; and it is not tried again, whoever insists."""
    run = Watched(insists, SAME, cost=LINEAR)
    with caplog.at_level(logging.INFO, "april"):
        run.run(40)
    assert in_work(run)[1:8] == [4, 7, 7, 7, 7, 4, 4]
    assert set(in_work(run)[8:]) == {4.0}
    last = run.result.steps[-1].metrics
    assert (last["auto_changes"], last["auto_taken_back"]) == (2.0, 1.0)
    assert len(run.asked) > 3
    said = [r.getMessage().partition(": ")[2] for r in caplog.records]
    assert said[1].startswith("N' = 4 again, N' = 7, group_quorum 0.75 is taken back: ")
    assert said[1].endswith("times the speed came, and 1.40 times was expected")
    assert len(said) == 2


def test_a_tail_does_not_hide_that_nothing_came() -> None:
    """Batches that differ are looked at for longer; in the end the younger tokens stay."""
    run = Watched(insists, LognormalLengths(100.0, 0.5, 0.5, seed=1), cost=LINEAR)
    run.run(40)
    assert in_work(run)[-1] == 4.0
    assert in_work(run).count(7.0) <= 1 + ENOUGH


def test_what_brings_something_stays() -> None:
    """Of a cost per step and a tail, more in flight makes use; then it is asked how to go on."""
    run = Watched(insists)
    run.run(30)
    assert set(in_work(run)[2:]) == {7.0}
    assert run.result.steps[-1].metrics["auto_taken_back"] == 0.0
    assert len(run.asked) > 2


def test_more_than_halfway_to_what_brought_nothing_is_not_asked_for() -> None:
    """As many in flight or more would bring nothing either."""
    run = Watched(insists, SAME, cost=LINEAR)
    run.run(40)
    assert run.asked[0][1].below == 21
    assert {q.below for _, q in run.asked[1:]} == {(28 + 16) // 2 + 1}


def test_another_speed_makes_what_was_found_out_void() -> None:
    """A machine that slows down while something is tried has nothing to do with it: it is tried again."""
    run = Watched(insists, SAME, train_s=0.1)
    run.run(2)
    for _ in range(2):  # once the trial has begun, and before its end
        slower(run)
    run.run(5)
    assert run.result.steps[-1].metrics["auto_taken_back"] == 1.0
    assert in_work(run)[-1] == 4.0
    run.run(10)
    assert in_work(run)[-1] == 7.0


def slower(run: Watched) -> None:
    """Everything costs its engines 1.5 times as much from now on."""
    run.engines.catch_up()
    for decoder in run.decoders.values():
        c = decoder._cost
        decoder._cost = DecodeCost(1.5 * c.base_s, 1.5 * c.per_sequence_s, 1.5 * c.per_kv_token_s)


def test_too_little_to_be_seen_is_not_tried() -> None:
    """A gain that a trial could not tell from chance waits until more batches have been seen."""
    run = Watched(lambda q: answer(speed_up=1.05), LognormalLengths(100.0, 0.8, 0.8, seed=1))
    run.run(6)
    assert set(in_work(run)) == {4.0}


# -------------------------------------------------------------------- on virtual time


TELLS = f"import sys; sys.stdin.read(); sys.stdout.buffer.write({answer().encode()!r})"
FAILS = "import sys; sys.exit('there is no memory')"


def virtual(monkeypatch: pytest.MonkeyPatch, program: str) -> list[float]:
    """N' of each batch of a run whose questions are answered by a program."""
    monkeypatch.setattr(process, "COMMAND", ("-c", program))
    config = april.Config(
        rollout_batch_size=4, n_samples_per_prompt=4, max_response_len=60, over_sampling_batch_size="auto",
        group_quorum="auto",
    )  # fmt: skip

    async def run() -> list[float]:
        prompts = [[i + 1, 2] for i in range(400)]
        async with rollouts(config, engines=[FakeEngine("e")], prompts=prompts, reward=lambda p, r: 1.0) as scheduler:
            found = []
            for _ in range(5):
                found.append((await scheduler.next_batch()).metrics["auto_over_sampling_batch_size"])
                await scheduler.weight_update(path="/weights")
            return found

    return run_virtual(run())


def test_a_run_on_virtual_time_is_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its clock stands still meanwhile, so it is the same every time; what goes wrong is a warning, as elsewhere."""
    assert virtual(monkeypatch, TELLS)[1:] == [4.0, 7.0, 7.0, 7.0]
    assert set(virtual(monkeypatch, FAILS)) == {4.0}
    assert "the simulation has ended with 1: there is no memory" in caplog.text
