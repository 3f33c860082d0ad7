"""What does a host in another process cost, per request, in CPU time of each side?

A real core, a real desk and a real mirror in one process: requests end in random order, a frame has the ends of
``--turn`` requests, and frames take no time. Neither engines nor a network: what is measured is commands made into
frames and frames into commands, and the same for events, checks of all tokens included. The core's own time, and that
of the host which makes the tokens, are left out of both. Run: ``python -m benchmarks.host_protocol``.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from typing import Any

import numpy as np

from april.core import commands as do
from april.core import events as ev
from april.core.event_pump import EventPump
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings, EngineLimits
from april.core.state import RolloutCore
from april.core.types import Attempt, EngineFinish, Prompt, Refill
from april.core.versions import PolicyVersion
from april.processes import messages as wire
from april.processes.desk import HostDesk
from april.processes.mirror import Forgotten, Mirror

EOS = 1


class Clock:
    """CPU seconds of one side."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.thread_time() - self._since


class Pair:
    """A core with one host; the trainer, the network and the engines cost nothing that is counted."""

    def __init__(self, in_flight: int, samples: int, prompt: int, tokens: int) -> None:
        groups = max(1, in_flight // samples // 4)
        core_settings = CoreSettings(
            rollout_batch_size=groups, n_samples_per_prompt=samples, over_sampling_batch_size=groups,
            max_response_len=8192, max_in_flight=in_flight, refill=Refill.SAMPLE, max_staleness=8, has_reward=False,
        )  # fmt: skip
        engines = [EngineLimits(f"h/e{i}", 16384, None, (EOS,)) for i in range(8)]
        self.core = core = RolloutCore(core_settings, engines)
        self.desk = HostDesk(core, "h", engines, functions=False, failed=lambda call, error: None)
        self.mirror = Mirror(
            wire.Welcome(
                name="h", version=core.clock.current, eos_token_ids=(EOS,), vocab_size=core.engines.vocab_size,
                max_context=16384, max_response_len=8192, abort_resend_s=1.0, abort_deadline_s=5.0,
                deadline_s=9.0, sampling=SamplingParams(8192),
                any_temperature=True, allow_mismatch=False,
                function_timeout_s=None, stall_timeout_s=None,
            )
        )
        self.pump: EventPump
        self.desk_side, self.mirror_side = Clock(), Clock()
        self.running: list[Attempt] = []
        self.ended = self.steps = 0
        self._prompt = Prompt(np.arange(prompt, dtype=np.int32) + 100)
        self._piece = np.arange(tokens - 1, dtype=np.int32) + 1000
        self._end = np.array([EOS], np.int32)
        self._logprobs = np.full(tokens, -0.5, np.float32)
        self._sampling = SamplingParams(8192)
        here: dict[type[do.Command], Any] = dict.fromkeys(do.Command.__subclasses__(), lambda command: None)
        here |= dict.fromkeys([do.Submit, do.Abort, do.Fence], self._to_host)
        here[do.DrawPrompts] = lambda c: self.pump.post(ev.PromptsDrawn([self._prompt] * c.count, False))
        here[do.StartSample] = lambda c: self.pump.post(ev.CallMade(c.sample.id, self._sampling))
        here[do.CallCompleted] = lambda c: self.pump.post(ev.SampleReturned(c.call.sample.id))
        here[do.Deliver] = self._deliver
        self.pump = EventPump(core, here)
        self.delivered = False

    def _to_host(self, command: do.Command) -> None:
        with self.desk_side:
            self.desk.execute(command)

    def _deliver(self, command: do.Deliver) -> None:
        with self.desk_side:
            self.desk.forget(s.id for s in command.batch.samples)
        self.delivered = True

    # ---------------------------------------------------------------- one turn of the loop on each side

    def down(self) -> None:
        """A frame reaches the host."""
        with self.desk_side:
            frame = self.desk.take()
        if frame is None:
            return
        with self.mirror_side:
            items = list(self.mirror.receive(frame))
        cut: set[str] = set()
        for item in items:
            if isinstance(item, do.Submit):
                self.running.append(item.attempt)
            elif isinstance(item, do.Abort):
                cut.update(item.attempt_ids)
            else:
                assert isinstance(item, Forgotten)
        if cut:
            here, self.running = self.running, [a for a in self.running if a.id not in cut]
            for attempt in here:
                if attempt.id in cut:
                    self._bring(attempt, self._piece[: len(self._piece) // 2])
                    self._ends(attempt, EngineFinish.ABORT)
            self.up()

    def _bring(self, attempt: Attempt, tokens: Any) -> None:
        attempt.tape.append(tokens, self._logprobs[: len(tokens)], self.mirror.current)

    def _ends(self, attempt: Attempt, finish: EngineFinish) -> None:
        event = ev.AttemptEnded.of(attempt, finish)
        with self.mirror_side:
            self.mirror.post(event)
        self.ended += 1

    def finish(self, attempt: Attempt) -> None:
        """A request brings all of its tokens, the last one EOS."""
        self._bring(attempt, self._piece)
        self._bring(attempt, self._end)
        self._ends(attempt, EngineFinish.STOP)

    def up(self) -> None:
        """A frame reaches the core."""
        with self.mirror_side:
            frame = self.mirror.take()
        if frame is None:
            return
        events = self.desk.receive(frame)
        while True:
            with self.desk_side:
                event = next(events, None)
            if event is None:
                return
            self.pump.post(event)

    def train(self) -> None:
        """A step of the trainer's."""
        self.delivered = False
        self.steps += 1
        version = self.core.clock.current
        self.pump.post(ev.WeightsUpdated(PolicyVersion(version.incarnation, version.n + 1), trained=self.steps))
        self.pump.post(ev.StepRequested())


def measure(pair: Pair, turn: int, requests: int) -> dict[str, float]:
    """One run; microseconds of CPU per request of each side, and what travelled."""
    rng = random.Random(0)
    pair.pump.post(ev.StepRequested())
    gc.collect()
    gc.disable()
    while pair.ended < requests:
        pair.down()
        for _ in range(min(turn, len(pair.running))):
            i = rng.randrange(len(pair.running))
            pair.running[i], pair.running[-1] = pair.running[-1], pair.running[i]
            pair.finish(pair.running.pop())
        pair.up()
        while pair.delivered:  # surplus may fill the next batch at once
            pair.train()
    gc.enable()
    desk, n = pair.desk, pair.ended
    return {
        "requests": n,
        "steps": pair.steps,
        "desk_us": round(1e6 * pair.desk_side.seconds / n, 1),
        "mirror_us": round(1e6 * pair.mirror_side.seconds / n, 1),
        "messages": round((desk.messages_in + desk.messages_out) / n, 2),
        "bytes_down": round(desk.bytes_out / n),
        "bytes_up": round(desk.bytes_in / n),
    }


def main() -> None:
    """Prints one line per arm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--tokens", type=int, default=256, help="per request that ends by itself")
    parser.add_argument("--requests", type=int, default=20_000)
    args = parser.parse_args()
    for turn in (1, 8, 64):
        result = measure(Pair(args.in_flight, args.samples, args.prompt, args.tokens), turn, args.requests)
        print(json.dumps({"ends_per_frame": turn} | result), flush=True)


if __name__ == "__main__":
    main()
