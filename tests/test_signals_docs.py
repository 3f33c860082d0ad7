"""docs/restarts.md is true: its loop stops when it is told to, wherever it is, and what it saves loses nothing."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_schedulers import assert_nothing_is_left, check, scheduler

import april
from april.driver.rewards import Response

PAGE = (Path(__file__).parent.parent / "docs" / "restarts.md").read_text("utf-8")
(LOOP,) = (b for b in re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M) if "signal.signal" in b)
PROMPTS = [[i, 7] for i in range(1, 40)]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
    assert_nothing_is_left()


class Stopped:
    """A job that gets a signal ``where``, in its third step; what it has trained, and saved."""

    def __init__(self, where: str, number: signal.Signals) -> None:
        self.where, self.number = where, number
        self.trained: list[april.Batch] = []
        self.saved: dict[str, Any] = {}
        self.main = threading.main_thread().ident or 0
        self.sent = False

    def reward(self, prompt: april.Prompt, response: Response) -> float:
        """In a thread: the main thread waits."""
        if self.where == "waiting" and len(self.trained) == 2 and not self.sent:
            self.send()
        return float(len(response.tokens))

    def train(self, batch: april.Batch) -> None:
        if self.where == "training" and len(self.trained) == 2:
            self.send()
            for _ in range(100):
                pass  # the handler runs by now
        self.trained.append(batch)

    def send(self) -> None:
        self.sent = True
        signal.pthread_kill(self.main, self.number)

    def run(self) -> None:
        space = {
            "scheduler": lambda: scheduler(reward=self.reward, prompts=PROMPTS),
            "train": self.train,
            "save": self.saved.update,
        }
        exec(compile(LOOP, "docs/restarts.md", "exec"), space)  # noqa: S102


@pytest.mark.parametrize("where", ["waiting", "training"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_loop_of_the_docs(where: str, number: signal.Signals) -> None:
    """It breaks off a wait and finishes a step; restored, each prompt is trained once, with every token."""
    job = Stopped(where, number)
    job.run()
    assert len(job.trained) == (2 if where == "waiting" else 3)
    trained = list(job.trained)
    with scheduler(prompts=PROMPTS) as rollouts:
        rollouts.load_state_dict(job.saved)
        while True:
            try:
                trained.append(rollouts.next_batch())
            except april.DataExhausted:
                break
            rollouts.weight_update()
    for batch in trained:
        check(batch)
    positions = sorted(s.prompt.position for batch in trained for s in batch.samples)
    assert positions == sorted([*range(len(PROMPTS))] * 2)
