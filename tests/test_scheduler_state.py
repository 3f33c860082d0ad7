"""state_dict and load_state_dict as a trainer calls them: real loops, two processes' worth of schedulers."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from gate_engine import GateEngine
from real_schedulers import check, config, scheduler
from saved_rollouts import by_torch, plain

import april
from april.errors import CheckpointError, ConfigError, DataExhausted, SchedulerClosed

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

PROMPTS: list[Any] = [{"token_ids": [i, 7], "answer": i, "tags": ["a", None, 0.5, b"x"]} for i in range(1, 41)]


def answers(batch: april.Batch) -> list[int]:
    return [s.prompt.data["answer"] for s in batch.samples[::2]]


@pytest.mark.parametrize("kept", [plain, by_torch])
@pytest.mark.parametrize("through", ["weight update", "batch"])
def test_a_run_in_two_processes(through: str, kept: Any) -> None:
    """Saved after the weight update, or before it with the number of the batch: every prompt is trained on once."""
    trained: list[int] = []
    with scheduler(prompts=PROMPTS) as rollouts:
        for step in range(4):
            batch = rollouts.next_batch()
            check(batch)
            trained += answers(batch)
            if through == "batch" and step == 3:
                state = kept(rollouts.state_dict(trained_through=batch.id))
            rollouts.weight_update()
        if through == "weight update":
            state = kept(rollouts.state_dict())
        books = rollouts.ledger()
        check(rollouts.next_batch())  # forgotten: the checkpoint does not have it
    with scheduler(prompts=PROMPTS) as rollouts:
        assert rollouts.load_state_dict(state) == rollouts.version == (1, 4)
        if through == "weight update":
            assert rollouts.ledger() == books
        with pytest.raises(DataExhausted):  # noqa: PT012
            while True:
                batch = rollouts.next_batch()
                check(batch)
                trained += answers(batch)
                rollouts.weight_update()
        assert batch.samples[0].prompt.data["tags"] == ["a", None, 0.5, b"x"]
        prompts = rollouts.ledger()["prompts"]
        assert prompts.as_dict() == {"observed": 40, "delivered": 40, "held": 0, "dropped": {}}
    assert sorted(trained) == list(range(1, 41))


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


def test_no_state_is_taken_while_one_is_loaded() -> None:
    """Prompts already stand where the state says and groups are not there yet: such a checkpoint would lose them."""
    inside, release = threading.Event(), threading.Event()

    class Slow(GateEngine):
        async def update_weights(self, version: april.PolicyVersion, path: str | None = None) -> None:
            inside.set()
            await asyncio.to_thread(release.wait)
            await super().update_weights(version, path)

    with scheduler(prompts=PROMPTS, engines=[GateEngine()], reward=lambda p, r: 1.0) as rollouts:
        rollouts.next_batch()
        state = plain(rollouts.state_dict(trained_through=-1))
    with scheduler(prompts=PROMPTS, engines=[Slow()], reward=lambda p, r: 1.0) as rollouts:
        loader = threading.Thread(target=rollouts.load_state_dict, args=(state,))
        loader.start()
        inside.wait()
        with pytest.raises(CheckpointError, match="being loaded"):
            rollouts.state_dict()
        release.set()
        loader.join()
        assert len(rollouts.state_dict()["core"]["ready"]) == len(state["core"]["ready"]) > 0
