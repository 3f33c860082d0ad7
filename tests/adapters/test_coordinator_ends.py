"""The coordinator when april's books do not balance, and what it must not keep or let pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.stand_in_verl import Trainer
from april.errors import CheckpointError, InvariantError, RolloutError

Make = Callable[..., Trainer]


@pytest.fixture
def trainer() -> Iterator[Make]:
    made: list[Trainer] = []

    def make(length_of: Callable[[int, int], int] = lambda row, sample: 5, **more: Any) -> Trainer:
        made.append(Trainer(length_of, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_desk_whose_books_do_not_balance_stops_and_tells_everybody(trainer: Make, tmp_path: Path) -> None:
    """The trainer, rollouts that wait, those that ask later, and whoever would save: nothing goes on, nobody hangs."""
    run = trainer(lambda row, sample: 30 if row % 2 else 5, april__over_sampling_batch_size=12)
    run.step()
    run.update()
    ended: dict[int, list[BaseException | None]] = {}
    rollouts = list(run._tasks)
    assert rollouts
    for number, task in enumerate(rollouts):
        task.add_done_callback(lambda t, n=number: ended.setdefault(n, []).append(t.exception()))
    waited = len(run.coordinator.host.mailboxes)
    assert waited
    handled = run.coordinator.core.counters["steps"]

    def unbalanced(event: object) -> None:
        raise InvariantError("tokens: 5 observed, 4 accounted for")

    run.coordinator.core.handle = unbalanced  # type: ignore[method-assign, assignment]
    with pytest.raises(InvariantError, match="5 observed"):
        run.ask("begin", 1)
    run.validate(120.0)
    assert not len(run.coordinator.host.mailboxes)
    assert len(ended) == len(rollouts)
    for (error,) in ended.values():
        assert isinstance(error, RolloutError)
        assert "april has stopped: tokens: 5 observed" in str(error)
    for call in (("begin", 2), ("drawn", ["x"]), ("state",)):
        with pytest.raises(RolloutError, match="april has stopped"):
            run.ask(*call)
    with pytest.raises(InvariantError):
        run.ask("orders")
    with pytest.raises((RolloutError, CheckpointError), match="april has stopped"):
        run.save(tmp_path)
    assert run.coordinator.core.counters["steps"] == handled


def test_lives_of_dropped_groups_are_forgotten(trainer: Make) -> None:
    """A long run with a filter holds no more at its end than what is under way."""
    run = trainer(
        lambda row, sample: 3, reward_of=lambda row, sample, response: float(sample) if row % 2 else 0.0,
        algorithm__filter_groups__enable=True,
    )  # fmt: skip
    for _ in range(20):
        run.step()
        run.update()
    assert run.coordinator.core.counters["groups_dropped_filtered"] > 20
    held = sum(len(group.samples) for group in run.coordinator.core.buffer)
    assert len(run.coordinator.host.mailboxes._lives) <= held


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-9, 1e300, -0.7])
def test_equal_rewards_do_not_pass_the_filter(trainer: Make, reward: float) -> None:
    """Whatever number they are: the standard deviation of three times 0.1 does not come out as 0."""
    run = trainer(
        lambda row, sample: 3,
        reward_of=lambda row, sample, response: float(sample) if row % 2 else reward,
        actor_rollout_ref__rollout__n=3,
        algorithm__filter_groups__enable=True,
    )
    for _ in range(3):
        run.step()
        run.update()
    assert {row % 2 for row, _ in run.trained} == {1}


