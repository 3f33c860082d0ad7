"""Settings that are auto: what a run asks, when, what it is answered, and what becomes of it.

A change is a trial: what it brings is measured, and it is taken back where it brings nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from auto_questions import BETTER, NOW, Watched, answer, question, stays

import april
from april.auto import run_tuning
from april.auto.batch_windows import BATCHES, LATEST_BATCHES, LengthWindow, Speeds
from april.auto.question import TuningAnswer, TuningQuestion, WorkSettings
from april.auto.run_tuning import ChooserProcess
from april.auto.tuner import LONGEST_WAIT, MAX_STEP, SETTLING_BATCHES
from april.core import events as ev
from april.core.types import Refill, Work
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.response_lengths import LognormalLengths, ResponseLengths
from april.errors import RolloutError
from april.record.file import RunRecord
from april.record.replay import replay
from april.simulate.choose import choose
from april.testing import FakeEngine, rollouts, run_virtual
from april.view.report import page
from april.view.run_data import read_run

# -------------------------------------------------------------------- lengths


@pytest.mark.parametrize("seed", range(20))
def test_other_lengths_are_noticed_and_the_same_are_not(seed: int) -> None:
    """Within two batches of twice the length; never in 16 batches of the same heavy-tailed distribution."""
    lengths = LognormalLengths(1000.0, 0.9, 0.7, seed=seed)
    window, seen = LengthWindow(), False
    for batch in range(BATCHES):
        window.add((g, int(n)) for g in range(16 * batch, 16 * batch + 16) for n in lengths.group(g, 4))
        seen |= window.changed(2)
    assert not seen
    for batch in range(BATCHES, BATCHES + 2):
        window.add((g, 4 * int(n)) for g in range(16 * batch, 16 * batch + 16) for n in lengths.group(g, 4))
    assert window.changed(2)


# -------------------------------------------------------------------- when it asks, and what


def test_a_question_is_about_the_run_as_it_is() -> None:
    """Lengths of its batches, the cost that its engines showed, the trainer's time, what is in work now."""
    run = Watched(stays)
    run.run(7)
    (_, first), (_, q) = run.asked
    assert (q.groups, q.samples, q.engines, q.places, q.prompt_len) == (4, 4, 2, 64, 128)
    assert q.now == replace(NOW, max_in_flight=16)
    assert [len(row) for row in q.lengths] == [4] * 24
    assert np.allclose((q.cost.base_s, q.cost.per_sequence_s), (1e-2, 1e-4), rtol=0.2)
    assert abs(q.train_s - 2.0) < 1e-6
    assert first.train_s == q.train_s
    assert msgspec.json.decode(msgspec.json.encode(q), type=TuningQuestion) == q


def test_longer_responses_are_asked_about_at_once() -> None:
    """What was seen before them is forgotten; the intervals begin anew."""

    class Longer(ResponseLengths):
        def group(self, group: int, n_samples: int) -> Any:
            found = LognormalLengths(100.0, 0.3, 0.3, seed=2).group(group, n_samples)
            return found if group < 80 else 5 * found

    run = Watched(stays, Longer())
    run.run(32)
    at = [at for at, _ in run.asked]
    assert at[:3] == [2, 6, 14]
    after = [a for a in at if a > 20]
    assert after[0] <= 20 + 4
    lengths = np.concatenate(run.asked[at.index(after[0])][1].lengths)
    assert lengths.mean() > 300


def test_an_answer_is_taken_over() -> None:
    """From the next batch on, and the metrics say so; the books are checked after every event."""
    run = Watched(lambda q: answer())
    steps = run.run(8).steps
    assert [s.metrics["auto_over_sampling_batch_size"] for s in steps] == [4, 4, 7, 7, 7, 7, 7, 7]
    last = steps[-1].metrics
    assert (last["auto_max_in_flight"], last["auto_group_quorum"], last["auto_changes"]) == (28, 0.75, 1)
    assert (last["auto_expected_tokens_per_s"], last["auto_expected_off_policy_share"]) == (100.0, 0.5)
    assert all(len(s.lengths) == 16 for s in steps)


def test_a_quorum_that_is_no_longer_chosen_is_left_for_good() -> None:
    """A checkpoint may hold 0.5: the change away from it is no trial, so that it stays though it is far slower."""
    slower = replace(NOW, max_in_flight=64, group_quorum=0.75)
    run = Watched(
        lambda q: answer(slower, speed_up=0.5), LognormalLengths(100.0, 0.5, 0.8, seed=1), n_samples_per_prompt=8,
        over_sampling_batch_size=8, max_in_flight=64, group_quorum=0.5,
    )  # fmt: skip
    steps = run.run(24).steps
    assert [s.metrics["auto_group_quorum"] for s in steps] == [0.5, 0.5] + [0.75] * 22
    speeds = [
        sum(s.trained_tokens for s in some) / (some[-1].end_s - some[0].start_s) for some in (steps[:2], steps[2:])
    ]
    assert speeds[1] < 0.8 * speeds[0]


def test_only_what_is_auto_changes() -> None:
    """An answer that says more is not believed."""
    run = Watched(lambda q: answer(), auto=(Work.IN_FLIGHT,), refill=Refill.SAMPLE)
    run.run(4)
    s = run.core.settings
    assert (s.over_sampling_batch_size, s.max_in_flight, s.group_quorum, s.refill) == (4, 28, 1.0, Refill.SAMPLE)


def test_too_many_old_tokens_are_asked_about_early() -> None:
    """More than the simulation had said: then what it is asked for is lower by as much."""
    run = Watched(lambda q: answer(replace(BETTER, group_quorum=1.0), share_now=1.0), max_off_policy_share=0.3)
    run.run(16)
    early = [(at, q) for at, q in run.asked if at > 2]
    assert early[0][0] == 6  # its turn, before anything could be known
    at, q = early[1]
    assert at < 14
    seen = [s.metrics["off_policy_share"] for s in run.result.steps[2 + SETTLING_BATCHES : at]]
    assert min(seen) > 0.3
    assert q.max_off_policy_share < 0.3


def test_where_nothing_is_better_old_tokens_are_asked_about_in_turn() -> None:
    """Each question costs a simulation: what was answered a moment ago is not asked again."""
    better = replace(BETTER, group_quorum=1.0)
    run = Watched(lambda q: answer(better, share_now=1.0), max_off_policy_share=0.3)
    run.run(60)
    early = [at for at, _ in run.asked][2]
    assert [at for at, _ in run.asked] == [2, 6, early, early + 16, early + 16 + LONGEST_WAIT]


def test_a_few_old_batches_are_chance() -> None:
    """Small batches differ: a share that keeps the limit on average is not lowered for one window that does not."""
    run = Watched(lambda q: answer(replace(BETTER, group_quorum=1.0), share_now=1.0), max_off_policy_share=0.6)
    shares = [s.metrics["off_policy_share"] for s in run.run(60).steps]
    assert np.mean(shares[2 + SETTLING_BATCHES :]) < 0.6
    assert max(np.mean(shares[i : i + SETTLING_BATCHES]) for i in range(2 + SETTLING_BATCHES, 30)) > 0.6
    assert [at for at, _ in run.asked] == [2, 6, 14, 30]


def test_where_any_share_will_do_none_is_too_old() -> None:
    """More old tokens than were expected make no limit where the configuration has none."""
    run = Watched(lambda q: answer(off_policy_share=0.1))
    run.run(20)
    assert min(s.metrics["off_policy_share"] for s in run.result.steps[2 + SETTLING_BATCHES :]) > 0.1
    assert len(run.asked) > 2
    assert {q.max_off_policy_share for _, q in run.asked} == {1.0}


# -------------------------------------------------------------------- trials

SAME = LognormalLengths(100.0, 0.0, 0.0, seed=1)
"""All responses have the same length."""
LINEAR = DecodeCost(1e-6, 1e-3, 0.0, 1e-6)
"""More in flight brings nothing."""


def insists(q: TuningQuestion) -> TuningAnswer:
    """It is better, whatever is seen."""
    return answer(BETTER if q.now != BETTER else q.now, speed_up=1.4 if q.now != BETTER else 1.0)


# -------------------------------------------------------------------- what was seen


def batch(tokens: float, seconds: float, held: float = 0.0) -> dict[str, float]:
    return {
        "trained_tokens": tokens, "masked_tokens": 0.0, "held_tokens": held, "step_s": seconds, "evaluation_s": 0.0,
        "other_s": 0.0,
    }  # fmt: skip


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
        for _ in range(LATEST_BATCHES + 2):
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


class Crowded(DecodeCost):
    """Each one more slows down all: no sum of costs that are not negative has that."""

    def step_s(self, n: int, kv_tokens: int) -> float:
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
    assert [(q.slope_known, q.below) for _, q in run.asked] == [(False, int(MAX_STEP * 16) + 1)]
    told = Watched(stays)
    told.run(3)
    assert [(q.slope_known, q.below) for _, q in told.asked] == [(True, None)]


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
    assert said[1].startswith("back to N' = 4 from N' = 7, group_quorum 0.75: ")
    assert said[1].endswith(", and 1.40 was expected")
    assert len(said) == 2


def test_what_brings_something_stays() -> None:
    """Of a cost per step and a tail, more in flight makes use; then it is asked how to go on."""
    run = Watched(insists)
    run.run(30)
    assert set(in_work(run)[2:]) == {7.0}
    assert run.result.steps[-1].metrics["auto_taken_back"] == 0.0
    assert len(run.asked) > 2


# -------------------------------------------------------------------- in a process of its own


async def test_a_question_is_answered_by_a_process() -> None:
    """The same as here; one that it cannot answer is an error with its last line."""
    few = question(free=(Work.QUORUM,), samples=4, lengths=[[2, 3, 4, 5]])
    process = ChooserProcess()
    assert await process.ask(few) == choose(few)
    with pytest.raises(RolloutError, match=r"ended with 1: ValueError: the trace is empty"):
        await process.ask(question(lengths=[]))
    process.close()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_nobody_waits_for_an_answer_at_the_end(cancelled: bool) -> None:
    """A process that still works is killed; a cancelled question ends once its process has, and no pipe is left."""
    process = ChooserProcess()
    task = asyncio.create_task(process.ask(question(groups=64, samples=16)))
    while process._process is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    running = process._process
    if cancelled:
        task.cancel()
    else:
        process.close()
    with pytest.raises(asyncio.CancelledError if cancelled else RolloutError):
        await task
    assert running.returncode == -9


# -------------------------------------------------------------------- in the scheduler


class Oracle:
    """A chooser that answers after a second, or fails."""

    def __init__(self, best: WorkSettings | None) -> None:
        self.best, self.asked, self.closed = best, 0, False

    async def ask(self, question: TuningQuestion) -> TuningAnswer:
        self.asked += 1
        await asyncio.sleep(1.0)
        if self.best is None:
            raise RolloutError("nobody knows")
        return answer(self.best)

    def close(self) -> None:
        self.closed = True


def scheduled(batches: int, **options: Any) -> list[dict[str, float]]:
    config = april.Config(
        rollout_batch_size=4, n_samples_per_prompt=4, max_response_len=60, over_sampling_batch_size="auto",
        group_quorum="auto",
    )  # fmt: skip

    async def run() -> list[dict[str, float]]:
        engine = FakeEngine("e", chunk_tokens=1)
        async with rollouts(
            config, engines=[engine], prompts=[[i + 1, 2] for i in range(400)], reward=lambda p, r: 1.0, **options
        ) as scheduler:
            found = []
            for _ in range(batches):
                found.append(dict((await scheduler.next_batch()).metrics))
                await scheduler.weight_update(transfer=write)
            return found

    return run_virtual(run())


def asking(
    monkeypatch: pytest.MonkeyPatch, best: WorkSettings | None, batches: int, **options: Any
) -> tuple[list[dict[str, float]], Oracle]:
    oracle = Oracle(best)
    monkeypatch.setattr(run_tuning, "ChooserProcess", lambda: oracle)
    return scheduled(batches, **options), oracle


async def write() -> None:
    """A transfer by the trainer."""


def test_the_run_goes_on_while_it_is_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The change is in the log and in the metrics of every batch."""
    with caplog.at_level(logging.INFO, "april"):
        found, oracle = asking(monkeypatch, BETTER, 8)
    over = [m["auto_over_sampling_batch_size"] for m in found]
    assert over[0] == 4.0
    assert over[-1] == 7.0
    assert found[-1]["auto_changes"] == 1.0
    assert oracle.closed
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("auto")]
    assert said == [
        "auto: N' = 7, group_quorum 0.75 from now on, after N' = 4: 1.40 times the speed is expected, with 50% of the "
        "trained tokens from older weights, because the data do not show what more samples in flight cost"
    ]


@pytest.mark.parametrize(
    ("best", "patience_s", "why"), [(None, 9.0, "nobody knows"), (BETTER, 0.5, "better setting failed: TimeoutError")]
)
def test_no_answer_leaves_everything_as_it_is(
    best: WorkSettings | None, patience_s: float, why: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A chooser that fails or hangs is a warning, and another question later."""
    monkeypatch.setattr(run_tuning, "ANSWER_TIMEOUT_S", patience_s)
    found, oracle = asking(monkeypatch, best, 10)
    assert {m["auto_over_sampling_batch_size"] for m in found} == {4.0}
    assert oracle.asked >= 2
    assert why in caplog.text


def test_a_record_has_every_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A replay decides the same with them."""
    path = tmp_path / "run.jsonl"
    asking(monkeypatch, BETTER, 8, record=RunRecord(path))
    assert ev.WorkChanged.__name__ in path.read_text()
    run = replay(path)
    assert run.core.settings.over_sampling_batch_size == 7
    assert run.core.context.batches == 8
    shown = page([read_run(path)])
    for row in ("<td>0</td><td>N&#x27; = 4</td>", "<td>N&#x27; = 7, group_quorum 0.75</td>"):
        assert row in shown
    assert read_run(path).places == 28
