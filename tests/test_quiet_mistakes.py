"""What runs and is probably not meant: a warning in the log, once, and not for those who mean it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from real_schedulers import config, engine

import april
from april.core.types import Prompt
from april.driver import prompt_source


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({}, True),
        ({"reward": None}, False),
        ({"reward": lambda prompt, response: 1.0}, False),
        ({"group_reward": lambda prompt, responses: [1.0, 1.0]}, False),
    ],
    ids=["nothing", "reward=None", "reward", "group_reward"],
)
def test_no_reward_function(given: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    """All rewards are 0 then; reward=None says that the trainer has its own."""
    with april.RolloutScheduler(config(), prompts=[[1], [2], [3]], engines=[engine()], **given) as rollouts:
        batch = rollouts.next_batch()
    assert ("no reward function is given" in caplog.text) is warned
    assert not warned or not batch.rewards.any()


class Store:
    """What the ranks of torch.distributed meet at."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, key: str, count: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + count
        return self.counts[key]


def as_rank(monkeypatch: pytest.MonkeyPatch, store: Store | None, world_size: int = 2, *, ready: bool = True) -> None:
    """From here on this process is a rank of its own."""

    def default_store() -> Store:
        if store is None:
            raise ValueError("no default group")
        return store

    distributed = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: ready, get_world_size=lambda: world_size,
        distributed_c10d=SimpleNamespace(_get_default_store=default_store),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    monkeypatch.setattr(prompt_source, "_said", set())


def look(seed: int, *token_ids: int) -> bool:
    """Whether there was something to look up; it has been when this returns."""
    thread = prompt_source.warn_of_equal_rollouts(seed, Prompt(np.array(token_ids, np.int32)))
    if thread is not None:
        thread.join(30)
    return thread is not None


def test_ranks_with_one_seed_and_the_same_prompts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second one that comes is warned; other seeds, other prompts and a second scheduler of one rank are not."""
    store = Store()
    for seed, prompt in ((0, 5), (0, 6), (1, 5)):
        as_rank(monkeypatch, store)
        assert look(seed, prompt, 7)
        assert not look(seed, prompt, 7)  # the same rank's next scheduler
    assert not caplog.text
    as_rank(monkeypatch, store)
    assert look(1, 5, 7)
    assert "another rank of this trainer began with the same prompt and seed=1" in caplog.text


@pytest.mark.parametrize("why", ["alone", "not initialised", "no torch"])
def test_a_rank_of_nobody(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    as_rank(monkeypatch, Store(), 1 if why == "alone" else 2, ready=why != "not initialised")
    if why == "no torch":
        monkeypatch.delitem(sys.modules, "torch.distributed")
    assert not look(0, 1)


def test_a_store_that_cannot_be_asked_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    as_rank(monkeypatch, None)
    assert look(0, 1)
    assert not caplog.records


def test_the_first_batch_of_a_scheduler_looks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks, each with a scheduler: once per scheduler, with the first prompt and the seed."""
    looked: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(
        "april.driver.rollout_driver.warn_of_equal_rollouts",
        lambda seed, first: looked.append((seed, first.token_ids.tolist())),
    )
    prompts = iter([[4], [2], [3], [5], [6], [7]])
    with april.RolloutScheduler(config(seed=3), prompts=prompts, reward=None, engines=[engine()]) as rollouts:
        for _ in range(2):
            rollouts.next_batch()
            rollouts.weight_update()
    assert looked == [(3, [4])]
