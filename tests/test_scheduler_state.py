"""state_dict and load_state_dict as a trainer calls them: real loops, two processes' worth of schedulers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from real_schedulers import assert_nothing_is_left, config, scheduler
from saved_rollouts import plain

from april.errors import ConfigError, DataExhausted, SchedulerClosed

PROMPTS: list[Any] = [{"token_ids": [i, 7], "answer": i, "tags": ["a", None, 0.5, b"x"]} for i in range(1, 41)]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    assert_nothing_is_left()


def test_epochs_and_set_epoch() -> None:
    """Each pass is announced; after a restart the pass goes on in its own order."""

    class Data:
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self) -> Iterator[Any]:
            return iter(PROMPTS[::-1] if self.epochs[-1] % 2 else PROMPTS)

    first, second = Data(), Data()
    trained: list[tuple[int, int]] = []
    with scheduler(prompts=first, config=config(epochs=3)) as rollouts:
        for _ in range(20):
            batch = rollouts.next_batch()
            trained += [(s.prompt.epoch, s.prompt.data["answer"]) for s in batch.samples[::2]]
            rollouts.weight_update()
        state = plain(rollouts.state_dict())
    assert first.epochs == [0, 1]
    with scheduler(prompts=second, config=config(epochs=3)) as rollouts:
        rollouts.load_state_dict(state)
        with pytest.raises(DataExhausted):  # noqa: PT012
            while True:
                batch = rollouts.next_batch()
                trained += [(s.prompt.epoch, s.prompt.data["answer"]) for s in batch.samples[::2]]
                rollouts.weight_update()
    assert second.epochs == [0, 1, 2]
    assert sorted(trained) == [(e, i) for e in range(3) for i in range(1, 41)]


def test_extend() -> None:
    """More prompts after the end; before the last pass it is refused with a sentence."""
    settings = config(over_sampling_batch_size=3, on_data_end="wait")
    with scheduler(prompts=[[1], [2], [3], [4]], config=settings) as rollouts:
        rollouts.next_batch()
        for _ in range(2):
            with pytest.raises(DataExhausted, match="wait for more prompts: 1; add prompts with extend"):
                rollouts.next_batch()
        with pytest.raises(ConfigError, match="prompts must be an iterable of prompts, got str"):
            rollouts.extend("text")
        rollouts.extend([[5], [6]])
        assert [int(s.prompt.token_ids[0]) for s in rollouts.next_batch().samples[::2]] == [4, 5, 6]
    with (
        scheduler(prompts=PROMPTS, config=config(epochs=2)) as rollouts,
        pytest.raises(ConfigError, match="extend: epoch 0 of 2 is not the last one, and the prompts must be the same"),
    ):
        rollouts.extend([[5]])
    for call in (rollouts.state_dict, lambda: rollouts.load_state_dict({})):
        with pytest.raises(SchedulerClosed, match="closed"):
            call()
