"""verl with a group quorum, and samples that fail for good: full batches, right baselines, every sample once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seeds import seeds

from adapters.stand_in_verl import Trainer
from april.processes.coordinator.messages import Delivery

Make = Callable[..., Trainer]
N, SIZE = 3, 6
QUORUM: dict[str, Any] = {
    "april__group_quorum": 0.5, "algorithm__adv_estimator": "april_grpo", "actor_rollout_ref__rollout__n": SIZE,
}  # fmt: skip


def mixed(row: int, sample: int) -> int:
    """Lengths from 3 to 39."""
    return 3 + (7 * row + 11 * sample) % 37


def reward_of(row: int, sample: int, response: list[int]) -> float:
    """Names row and sample."""
    return row + sample / 100


@pytest.fixture
def trainer() -> Iterator[Make]:
    """A maker of trainers that are closed at the end."""
    made: list[Trainer] = []

    def make(**more: Any) -> Trainer:
        made.append(Trainer(mixed, **{"reward_of": reward_of, **more}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def check(run: Trainer, delivery: Delivery) -> None:
    """N * n rows; the baseline of each is of two rewards of its prompt, its own not among them."""
    assert len(set(delivery.rollouts)) == len(delivery.rollouts) == len(delivery.rewards) == N * SIZE
    rows = {uid: int(uid[1:]) for uid in delivery.uids}
    for (uid, rollout), reward, others in zip(
        delivery.rollouts, delivery.rewards, delivery.baseline_rewards, strict=True
    ):
        assert reward == pytest.approx(rows[uid] + rollout / 100)
        others = others[~np.isnan(others)]
        assert len(others) == 2
        assert {int(other) for other in others} == {rows[uid]}
        assert all(abs(other - reward) > 1e-3 for other in others)


def test_batches_are_full_and_stragglers_follow(trainer: Make) -> None:
    """Parts of groups; each sample once; one cohort makes the baselines of all of a group; the books balance."""
    run = trainer(**QUORUM)
    settled: list[str] = []
    seen: dict[str, set[float]] = {}
    split = 0
    for _ in range(14):
        delivery = run.step()
        check(run, delivery)
        settled += delivery.settled
        split += len(delivery.uids) > len(delivery.settled)
        for (uid, _), others in zip(delivery.rollouts, delivery.baseline_rewards, strict=True):
            seen.setdefault(uid, set()).update(others[~np.isnan(others)].tolist())
        run.update()
    assert split
    assert max(map(len, seen.values())) == 3  # the first three finishers, whoever is compared with them
    assert max(Counter(run.trained).values()) == 1
    by_prompt = Counter(row for row, _ in run.trained)
    assert all(by_prompt[int(uid[1:])] == SIZE for uid in settled)
    assert len(settled) == len(set(settled)) == run.ask("ledgers")["prompts"]["delivered"]
    tokens = run.ask("ledgers")["tokens"]
    assert tokens["observed"] == run.server.generated == tokens["delivered"] + tokens["held"]
    assert set(run.stored) == {key for key in run.stored if key.split("_")[0] in run.queue}


def fails_for_one(row: int, sample: int, response: list[int]) -> float:
    """The first three runs of the second rollout of every third row raise, which is as often as one is tried."""
    failures[row, sample] += 1
    if row % 3 == 0 and sample == 1 and failures[row, sample] <= 3:
        raise ValueError("the judge cannot read this")
    return reward_of(row, sample, response)


failures: Counter[tuple[int, int]] = Counter()


@pytest.mark.parametrize("quorum", [1.0, 0.5])
def test_a_fresh_sample_takes_the_place_of_one_that_fails(trainer: Make, quorum: float) -> None:
    """on_failed_sample: replace. Its rollout goes on with the fresh one; groups stay whole, no prompt is dropped."""
    failures.clear()
    run = trainer(
        **{**QUORUM, "april__group_quorum": quorum}, april__on_failed_sample="replace", reward_of=fails_for_one
    )
    for _ in range(12):
        delivery = run.step()
        assert len(delivery.rollouts) == N * SIZE
        if quorum < 1:
            check(run, delivery)
        run.update()
    assert run.ask("ledgers")["prompts"]["dropped"] == {}
    assert run.coordinator.core.counters["replaced_samples"] > 3
    assert max(Counter(run.trained).values()) == 1
    assert any(row % 3 == 0 and rollout == 1 for row, rollout in run.trained)


@pytest.mark.parametrize("quorum", [1.0, 0.5])
def test_a_group_goes_on_with_fewer(trainer: Make, quorum: float) -> None:
    """on_failed_sample: shrink. The rollout ends, what it has stored goes, its siblings are trained."""
    failures.clear()
    run = trainer(
        **{**QUORUM, "april__group_quorum": quorum}, april__on_failed_sample="shrink", reward_of=fails_for_one
    )
    for _ in range(12):
        delivery = run.step()
        if quorum < 1:
            assert len(delivery.rollouts) == N * SIZE
        run.update()
    assert run.ask("ledgers")["prompts"]["dropped"] == {}
    by_prompt = Counter(row for row, _ in run.trained)
    assert not any(row % 3 == 0 and rollout == 1 for row, rollout in run.trained)
    assert {by_prompt[row] for row in range(0, 18, 3)} == {SIZE - 1}
    assert all(key.split("_")[0] in run.queue for key in run.stored)


@pytest.mark.parametrize("seed", seeds(8))
def test_random_restarts(trainer: Make, tmp_path: Path, seed: int) -> None:
    """However often: each sample once in the history that the checkpoints kept, and no prompt is lost."""
    chance = random.Random(seed)
    failures.clear()
    changes = {
        **QUORUM, "april__refill": chance.choice(["none", "group", "sample"]),
        "april__on_failed_sample": chance.choice(["replace", "shrink"]),
        "algorithm__filter_groups__enable": chance.random() < 0.5, "rejects": chance.random() < 0.5,
        "reward_of": fails_for_one,
    }  # fmt: skip
    run = trainer(**changes)
    for life in range(4):
        for _ in range(chance.randint(1, 4)):
            run.step()
            folder = tmp_path / str(life)
            mine, kept = run.save(folder), list(run.trained)
            run.update()
        for _ in range(chance.randint(0, 2)):
            run.step()  # in vain: the process ends before the next checkpoint
            run.update()
        run = trainer(**changes)
        run.trained = kept
        held = run.load(folder, mine)
        assert all(held.values())
    for _ in range(4):
        assert len(run.step().rollouts) == N * SIZE
        run.update()
    assert max(Counter(run.trained).values()) == 1
    trained = Counter(row for row, _ in run.trained)
    waiting = set(run.queue.values())
    assert all(row in waiting or trained[row] >= SIZE - 1 for row in range(run.drawn))
    assert run.ask("ledgers")["prompts"]["dropped"] == {}
