"""The cost of a weight update for the requests in flight: until each has a further token, and tokens per second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import april
from april.core.events import StepRequested

FEW = 10
"""Tokens that each response has before the first update."""


class NothingMoves(Exception):
    """The responses get no further tokens; the message says how the run stands."""


class Tokens:
    """Tokens of each response by sample, those of running requests included."""

    def __init__(self, rollouts: april.RolloutScheduler) -> None:
        self._rollouts = rollouts

    def now(self) -> dict[Any, int]:
        """Return them as they are at this moment."""
        return self._rollouts._thread.call(self._count)

    def _count(self) -> dict[Any, int]:
        driver = self._rollouts._driver
        driver.executor.streams.catch_up()
        came = {s.id: s.tokens for s in driver.core.buffer.samples()}
        for attempt in driver.core.attempts.values():
            came[attempt.sample.id] += attempt.tape.parsed
        return came

    def wait(self, done: Callable[[Mapping[Any, int]], bool], longest_s: float = 300.0) -> None:
        """Wait until it is so; raises NothingMoves after ``longest_s``."""
        began = time.monotonic()
        while not done(self.now()):
            if time.monotonic() - began > longest_s:
                raise NothingMoves(f"nothing moves any more: {self._rollouts}")
            time.sleep(0.005)


def going_on(
    rollouts: april.RolloutScheduler, samples: int, update: Callable[[int], Any], times: int,
    cpu_s: Callable[[], float] = lambda: 0.0, rest_s: float = 2.0,
) -> dict[str, float]:  # fmt: skip
    """Update in mid-generation and return means over the updates.

    Args:
        rollouts: generates continuously, and no batch is waited for.
        samples: count of responses in flight.
        update: makes the update of this number, from 0.
        times: count of updates.
        cpu_s: CPU seconds of whoever is measured.
        rest_s: seconds between the moment at which all go on and the next update.
    """
    tokens = Tokens(rollouts)
    rollouts._thread.call(lambda: rollouts._driver.post(StepRequested()))
    tokens.wait(lambda now: len(now) == samples and min(now.values()) > FEW)
    first, began = sum(tokens.now().values()), time.monotonic()
    back, cpu = [], []
    for number in range(times):
        cpu_before, at = cpu_s(), time.monotonic()
        update(number)
        before = tokens.now()  # the engines have just been resumed
        tokens.wait(lambda now, before=before: all(now.get(s, 0) > count for s, count in before.items()))  # type: ignore[misc]
        back.append(time.monotonic() - at)
        cpu.append(cpu_s() - cpu_before)
        time.sleep(rest_s)
    rate = (sum(tokens.now().values()) - first) / (time.monotonic() - began)
    return {
        "seconds until all go on": statistics.mean(back), "CPU seconds": statistics.mean(cpu),
        "tokens per second": rate,
    }  # fmt: skip
