"""A core and one host of it in one process, their frames carried by the test: who is where, and what each is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from core_machine import EOS, settings

from april.core import commands as do
from april.core import events as ev
from april.core.attachments import Placed
from april.core.event_pump import EventPump
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings, EngineLimits
from april.core.state import RolloutCore
from april.core.types import Attempt, EngineFinish, Prompt, Sample
from april.processes import messages as wire
from april.processes.desk import HostDesk
from april.processes.mirror import Forgotten, Mirror

SAMPLING = SamplingParams(1000)
ENGINES = (EngineLimits("h/e0", 4096, None, (EOS,), attachments=("image",), extras=("experts", "states")),)


def welcome(core: RolloutCore, name: str = "h") -> wire.Welcome:
    """What a host is told first."""
    s, table = core.settings, core.engines
    return wire.Welcome(
        name=name, version=core.clock.current, eos_token_ids=tuple(table.eos_token_ids),
        vocab_size=table.vocab_size, max_context=table.max_context, max_response_len=s.max_response_len,
        abort_resend_s=s.abort_resend_s, abort_deadline_s=s.abort_deadline_s, deadline_s=9.0,
        sampling=SAMPLING, any_temperature=True, allow_mismatch=False, function_timeout_s=None,
        stall_timeout_s=None,
    )  # fmt: skip


class HostSides:
    """The core with its desk, and the mirror; the host's work is the test's: ``done`` has its commands, in order.

    With ``functions`` rollout functions run on the host, else each sample makes its one call at the core's side.
    """

    def __init__(
        self, core_settings: CoreSettings | None = None, *, functions: bool = False, prompts: int = 99
    ) -> None:
        self.core = RolloutCore(core_settings or settings(), ENGINES, check=True)
        self.errors: dict[int, BaseException] = {}
        self.desk = HostDesk(
            self.core, "h", ENGINES, functions=functions, failed=lambda c, e: self.errors.update({c: e})
        )
        self.mirror = Mirror(welcome(self.core))
        self.done: list[do.Command] = []
        self.asked: list[object] = []
        self.batches: list[Any] = []
        self.others: list[do.Command] = []
        self.drawn, self.prompts = 0, prompts
        self.data: dict[str, Any] = {}
        self.attached: tuple[Placed, ...] = ()
        """What is attached to all prompts."""
        here: dict[type[do.Command], Callable[[Any], None]] = {}
        here |= dict.fromkeys(do.Command.__subclasses__(), self.others.append)
        there = dict.fromkeys(self.desk._executors, self.desk.execute)
        here |= there
        here[do.DrawPrompts] = self._draw
        here[do.Deliver] = self._deliver
        if not functions:
            here[do.StartSample] = lambda c: self.pump.post(ev.CallMade(c.sample.id, SAMPLING))
            here[do.CallCompleted] = lambda c: self.pump.post(ev.SampleReturned(c.call.sample.id))
        self.pump = EventPump(self.core, here)

    def _draw(self, command: do.DrawPrompts) -> None:
        count = min(command.count, self.prompts - self.drawn)
        first, self.drawn = self.drawn, self.drawn + count
        numbers = range(first, first + count)
        prompts = [
            Prompt(np.array([1, 2, i], np.int32), self.data or {"i": i}, 0, i, self.attached) for i in numbers
        ]
        self.pump.post(ev.PromptsDrawn(prompts, exhausted=count < command.count))

    def _deliver(self, command: do.Deliver) -> None:
        self.batches.append(command.batch)
        self.desk.forget(s.id for s in command.batch.samples)

    # ---------------------------------------------------------------- frames

    def down(self) -> list[do.Command]:
        """What the core's side says reaches the host; its new commands."""
        before = len(self.done)
        if (frame := self.desk.take()) is not None:
            for item in self.mirror.receive(frame):
                for_host = isinstance(item, (Forgotten, wire.AskTapes, wire.AskQuiet, wire.Goodbye))
                (self.asked if for_host else self.done).append(item)  # type: ignore[arg-type]
        return self.done[before:]

    def up(self, times: int = 1) -> bytes:
        """What the host says reaches the core, perhaps more than once; returns the frame."""
        frame = self.mirror.take() or wire.encode([])
        for _ in range(times):
            self.hear(self.desk.receive(frame))
        return frame

    def hear(self, events: Iterator[ev.Event]) -> None:
        """Events of the desk reach the core, one after the other."""
        for event in events:
            self.pump.post(event)

    # ---------------------------------------------------------------- the host's work

    def running(self) -> list[Attempt]:
        """The host's own attempts."""
        return list(self.mirror._attempts.values())

    def brings(self, attempt: Attempt, count: int, first: int = 10) -> None:
        """Tokens first, first + 1, ... come on the host, after those that it has."""
        at = first + len(attempt.token_ids) - 3 + attempt.tape.count
        tokens = np.arange(at, at + count, dtype=np.int32)
        attempt.tape.append(tokens, np.full(count, -0.5, np.float32), self.mirror.current)

    def ends(self, attempt: Attempt, count: int = 2, finish: EngineFinish = EngineFinish.STOP) -> None:
        """It brings so many more tokens, with STOP the last one EOS, and ends."""
        if finish is EngineFinish.STOP:
            self.brings(attempt, count - 1)
            attempt.tape.append(np.array([EOS], np.int32), np.array([-0.1], np.float32), self.mirror.current)
        else:
            self.brings(attempt, count)
        self.mirror.post(ev.AttemptEnded.of(attempt, finish))

    def abort_all(self) -> None:
        """All that runs ends with nothing more."""
        for attempt in self.running():
            self.mirror.post(ev.AttemptEnded.of(attempt, EngineFinish.ABORT))

    def sample(self, attempt: Attempt) -> Sample:
        """The core's sample of one of the host's attempts."""
        group = self.core.context.group(attempt.sample.id.group)
        assert group is not None
        return group.samples[attempt.sample.id.index]


def submitted(commands: list[do.Command]) -> list[Attempt]:
    """The requests among them."""
    return [c.attempt for c in commands if isinstance(c, do.Submit)]


def started(commands: list[do.Command]) -> Sample:
    """The one sample whose function is to start."""
    (start,) = (c for c in commands if isinstance(c, do.StartSample))
    return start.sample


def requests(**changes: Any) -> tuple[HostSides, list[Attempt]]:
    """A step, one sample without changes, whose requests run on the host."""
    sides = HostSides(settings(**({"n": 1, "samples": 1, "has_reward": False} | changes)))
    sides.pump.post(ev.StepRequested())
    return sides, submitted(sides.down())


def function_at_work() -> tuple[HostSides, Any]:
    """A step of one sample, whose function runs on the host."""
    sides = HostSides(settings(n=1, samples=1), functions=True)
    sides.pump.post(ev.StepRequested())
    return sides, started(sides.down())


def answered(sides: HostSides, sample: Sample, count: int) -> None:
    """The function's call gets so many tokens."""
    sides.mirror.post(ev.CallMade(sample.id, SAMPLING))
    sides.up()
    (attempt,) = submitted(sides.down())
    sides.ends(attempt, count)
    sides.up()
