"""How many events per CPU second does the core handle, and does that depend on the number in flight?

The core alone: no engine, no asyncio. A constant number of samples is in flight (refill: sample); attempts end
in random order, batches are delivered and weights updated as usual. Run: ``python -m benchmarks.core_events``, with
``--in-flight 1024 65536`` and ``--engines 8 1000`` for other numbers of requests and engines; with ``--times`` each arm
also with what a driver has around the core at every event, in turns: the account of where the time goes, and the log of
requests. ``--relax-gc``: garbage is collected as while a scheduler is open.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import deque
from contextlib import nullcontext

import numpy as np

from april.concurrency.garbage import collect_garbage, collecting_less
from april.core import commands as do
from april.core import events as ev
from april.core.event_pump import ObservedCore, RequestLog
from april.core.rollout_core import RolloutCore
from april.core.run_times import RunTimes
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings, EngineLimits
from april.core.types import Attempt, EngineFinish, Prompt, Refill
from april.driver.rollout_driver import HANDLED_PER_COLLECTION

TOKENS = np.zeros(64, np.int32)
LOGPROBS = np.zeros(64, np.float32)
EVENTS_PER_COLLECTION = HANDLED_PER_COLLECTION // 2
"""An event leads to about one command."""
PROMPT = Prompt(np.zeros(16, np.int32))
SAMPLING = SamplingParams(max_tokens=4096)


class Pump:
    """Plays everything around the core, at no cost worth mentioning."""

    def __init__(self, in_flight: int, samples: int, *, engines: int = 8, times: bool = False) -> None:
        settings = CoreSettings(
            rollout_batch_size=max(1, in_flight // samples // 4),
            n_samples_per_prompt=samples,
            over_sampling_batch_size=max(1, in_flight // samples // 4),
            max_response_len=4096,
            max_in_flight=in_flight,
            refill=Refill.SAMPLE,
            max_staleness=8,
            has_reward=False,
        )
        self.core = RolloutCore(settings, [EngineLimits(f"e{i}", 8192) for i in range(engines)])
        self._times = RunTimes(self.core) if times else None
        observers = [RequestLog(self.core, lambda: self._events_s)]
        self._handle = ObservedCore(self.core, observers).handle if times else self.core.handle
        self.attempts: list[Attempt] = []
        self.delivered = False
        self.updates = 0
        self._collect_at = EVENTS_PER_COLLECTION
        self._events: deque[ev.Event] = deque()

    def post(self, event: ev.Event) -> None:
        """One event and what follows from it."""
        self._events.append(event)
        while self._events:
            for command in self._handle(self._events.popleft()):
                match command:
                    case do.Submit(attempt):
                        self.attempts.append(attempt)
                    case do.StartSample(sample):
                        self._events.append(ev.CallMade(sample.id, SAMPLING))
                    case do.CallCompleted(call):
                        self._events.append(ev.SampleReturned(call.sample.id))
                    case do.Continue():
                        self._events.append(ev.Continued())
                    case do.DrawPrompts(count):
                        self._events.append(ev.PromptsDrawn([PROMPT] * count, False))
                    case do.Abort(_, attempt_ids, _):
                        stopped = set(attempt_ids)
                        self._events.extend(ev.AttemptEnded(i, EngineFinish.ABORT) for i in attempt_ids)
                        self.attempts = [a for a in self.attempts if a.id not in stopped]
                    case do.PauseEngine() | do.LoadEngine() | do.ResumeEngine():
                        self._events.append(ev.EngineCallEnded(command.engine, command.call, ev.CallResult.DONE))
                    case do.Deliver(batch):
                        self.delivered = True
                        self._events.append(ev.BatchCommitted(batch.id))
            if self._times is not None:
                self._times.update(self._events_s)
            if self.core.context.event_number >= self._collect_at:
                self._collect_at += EVENTS_PER_COLLECTION
                collect_garbage()

    @property
    def _events_s(self) -> float:
        """A clock: each event takes a millisecond."""
        return self.core.context.event_number * 1e-3

    def run(self, events: int, rng: random.Random) -> tuple[int, float]:
        """At least ``events`` events; returns how many there were and the CPU seconds they took."""
        self._step()
        gc.collect()
        before, cpu = self.core.context.event_number, time.process_time()
        while self.core.context.event_number - before < events:
            i = rng.randrange(len(self.attempts))
            attempt, self.attempts[i] = self.attempts[i], self.attempts[-1]
            self.attempts.pop()
            attempt.tape.append(TOKENS, LOGPROBS, self.core.clock.current)
            self.post(ev.AttemptEnded.of(attempt, EngineFinish.STOP))
            while self.delivered:  # surplus may fill the next batch at once
                self._step()
        return self.core.context.event_number - before, time.process_time() - cpu

    def _step(self) -> None:
        if self.delivered:
            self.delivered = False
            self.updates += 1
            self.post(ev.UpdateRequested(update=self.updates))
        self.post(ev.StepRequested())


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--engines", type=int, nargs="+", default=[8])
    parser.add_argument("--relax-gc", action="store_true")
    parser.add_argument("--times", action="store_true")
    options = parser.parse_args()
    looks = (False, True)[: 1 + options.times]
    arms = [(n, e, times) for n in options.in_flight for e in options.engines for times in looks]
    rates: dict[str, list[float]] = {}
    for repeat in range(options.repeats):
        for in_flight, engines, times in arms:
            with collecting_less() if options.relax_gc else nullcontext():
                pump = Pump(in_flight, 8, engines=engines, times=times)
                count, cpu = pump.run(options.events, random.Random(repeat))
            name = f"{in_flight}{f'_at_{engines}_engines' * (engines != 8)}{'_with_times' * times}"
            rates.setdefault(name, []).append(count / cpu)
    print(json.dumps({
        f"events_per_cpu_s_{n}": {"median": float(np.median(r)), "min": min(r), "max": max(r)} for n, r in rates.items()
    }, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()
