"""Simulated engines as a host has them: they carry out commands for engines and report events.

In the core's process they post to the core; on a simulated host (:mod:`april.simulate.hosts`) to its mirror.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np

from april.core import commands as do
from april.core import events as ev
from april.core.types import Attempt, EngineFinish, SampleId
from april.core.versions import PolicyVersion
from april.engines.simulated.clockwork import SimulatedDecoder


@dataclass(frozen=True, slots=True)
class _Running:
    """An attempt in a decoder, with the tokens it will have if it is left alone."""

    attempt: Attempt
    count: int
    complete: bool


class SimulatedEngines:
    """Those of one process. An event of one costs the same however many there are.

    Args:
        decoders: by the names that the engines have in commands.
        length: of a sample's true response.
        longest: response, in tokens.
        now: virtual time, in seconds.
        version: that the engines have.
        post: told what happens.
    """

    def __init__(
        self,
        decoders: dict[str, SimulatedDecoder],
        *,
        length: Callable[[SampleId], int],
        longest: int,
        now: Callable[[], float],
        version: Callable[[], PolicyVersion],
        post: Callable[[ev.Event], None],
    ) -> None:
        self.decoders = decoders
        self._length, self._now, self._version, self._post = length, now, version, post
        self._blank = np.zeros(longest, np.int32)
        self._blank_logprobs = np.zeros(longest, np.float32)
        self._running: dict[str, _Running] = {}
        self._order = {name: place for place, name in enumerate(decoders)}
        self._touched: set[str] = set()
        """Engines whose next event may be at another time than the agenda has it."""
        self._agenda: list[tuple[float, int, str]] = []
        """Heap of next events, some of them out of date; ties go by the order of the engines."""
        self.executors: dict[type[do.Command], Callable[[Any], None]] = {
            do.Submit: self._submit,
            do.Abort: self._abort,
            do.PauseEngine: self._called,
            do.LoadEngine: self._called,
            do.ResumeEngine: self._called,
        }

    # ---------------------------------------------------------------- as the simulation sees them

    @property
    def next_s(self) -> float:
        """When the next event of an engine is; inf: there is none."""
        agenda = self._agenda
        for engine in self._touched:
            heappush(agenda, (self.decoders[engine].next_event_time(), self._order[engine], engine))
        self._touched.clear()
        while agenda and agenda[0][0] != self.decoders[agenda[0][2]].next_event_time():
            heappop(agenda)
        return agenda[0][0] if agenda else math.inf

    def go_on(self) -> None:
        """It is the time of the next event."""
        self._advance(self._agenda[0][2])

    def catch_up(self) -> None:
        """All clocks to now."""
        for engine in self.decoders:
            self._advance(engine)

    def flush(self) -> None:
        """The core's turn is over: there is nothing to send."""

    def delivered(self, samples: Iterable[SampleId]) -> None:
        """These are in a batch: there is nothing to forget."""

    def tokens_in_flight(self) -> list[tuple[SampleId, int]]:
        """What running requests have that no tape has yet."""
        return [
            (r.attempt.sample.id, self.decoders[r.attempt.engine].tokens_of(attempt_id))
            for attempt_id, r in self._running.items()
        ]

    # ---------------------------------------------------------------- commands

    def _advance(self, engine: str) -> None:
        """Bring one engine's clock to now; what ended meanwhile ended at the same instant."""
        self._touched.add(engine)
        for finished in self.decoders[engine].advance(self._now()):
            running = self._running.pop(finished.request_id)
            self._append(running.attempt, running.count)
            finish = EngineFinish.STOP if running.complete else EngineFinish.LENGTH
            self._post(ev.AttemptEnded.of(running.attempt, finish))

    def _submit(self, command: do.Submit) -> None:
        attempt = command.attempt
        self._advance(attempt.engine)
        left = self._length(attempt.sample.id) - len(attempt.sample.tape)
        count = min(left, attempt.sampling.max_tokens)
        self.decoders[attempt.engine].add(attempt.id, len(attempt.token_ids), count)
        self._running[attempt.id] = _Running(attempt, count, complete=count == left)

    def _abort(self, command: do.Abort) -> None:
        self._advance(command.engine)
        for attempt_id, count in self.decoders[command.engine].abort(command.attempt_ids).items():
            attempt = self._running.pop(attempt_id).attempt
            self._append(attempt, count)
            self._post(ev.AttemptEnded.of(attempt, EngineFinish.ABORT))

    def _called(self, command: do.PauseEngine | do.LoadEngine | do.ResumeEngine) -> None:
        self._post(ev.EngineCallEnded(command.engine, command.call, ev.CallResult.DONE))

    def _append(self, attempt: Attempt, count: int) -> None:
        attempt.tape.append(self._blank[:count], self._blank_logprobs[:count], self._version())
