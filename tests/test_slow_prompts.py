"""Prompts that take long to read: april's loop goes on meanwhile, and no prompt is lost or drawn twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import april
from april.testing import FakeEngine


class Gated:
    """Prompts 0 to 19; ``held`` is reached once the one at ``at`` is wanted, which comes when ``gate`` opens."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.held, self.gate = threading.Event(), threading.Event()
        self.threads: set[str] = set()

    def __iter__(self) -> Iterator[list[int]]:
        for i in range(20):
            self.threads.add(threading.current_thread().name)
            if i == self.at:
                self.held.set()
                self.gate.wait()
            yield [i + 1, 3]


def scheduler(prompts: Any) -> april.RolloutScheduler:
    """Two groups a step, one sample each."""
    config = april.Config(rollout_batch_size=2, n_samples_per_prompt=1, max_response_len=20)
    engines = [FakeEngine(lengths=3, seconds_per_token=1e-3)]
    return april.RolloutScheduler(config, engines=engines, prompts=prompts, reward=lambda p, r: 1.0)


def numbers(batch: april.Batch) -> list[int]:
    return sorted(int(s.prompt.token_ids[0]) - 1 for s in batch.samples)


WAITS = ThreadPoolExecutor(1, "waits")


def hanging(rollouts: april.RolloutScheduler, prompts: Gated) -> Future[april.Batch]:
    """A call for the next batch in another thread, once the draw that it needs hangs."""
    batch = WAITS.submit(rollouts.next_batch)
    assert prompts.held.wait(20)
    return batch


def test_the_loop_goes_on_and_the_position_is_that_of_what_was_handed_over() -> None:
    """While a draw hangs a state can be taken: nothing of the draw is in it, and another scheduler draws it again."""
    prompts = Gated(3)
    with scheduler(prompts) as rollouts:
        assert numbers(rollouts.next_batch()) == [0, 1]
        rollouts.weight_update()
        waiting = hanging(rollouts, prompts)
        state = rollouts.state_dict()
        assert state["prompts"]["position"] == 2
        rollouts.extend([[100, 3]])
        prompts.gate.set()
        assert numbers(waiting.result()) == [2, 3]
        rollouts.validate()
    assert all(name.startswith("april-worker") for name in prompts.threads)
    again = Gated(99)
    with scheduler(again) as rollouts:
        rollouts.load_state_dict(state)
        assert numbers(rollouts.next_batch()) == [2, 3]


def test_close_does_not_wait_for_a_draw() -> None:
    """The caller is told; the thread ends when the prompts let it."""
    prompts = Gated(1)
    rollouts = scheduler(prompts)
    waiting = hanging(rollouts, prompts)
    rollouts.close()
    assert isinstance(waiting.exception(), april.SchedulerClosed)
    prompts.gate.set()


def test_quick_draws_that_end_late_are_handed_over_once() -> None:
    """A thread tells of its end after its prompts were taken, perhaps in the middle of a slow draw: it is not heard."""
    prompts = Gated(6)
    with scheduler(prompts) as rollouts:
        seen = []
        for _ in range(3):
            seen += numbers(rollouts.next_batch())
            rollouts.weight_update()
        waiting = hanging(rollouts, prompts)
        rollouts.validate()
        prompts.gate.set()
        assert [*seen, *numbers(waiting.result())] == list(range(8))
        rollouts.validate()
