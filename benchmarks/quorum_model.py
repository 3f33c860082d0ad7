"""A model of steps with over-sampling, refill and group quorum that shares no code with april.

Every engine has a token clock: all of its running samples gain tokens together, so a heap by the clock at which each of
them ends gives the next end, and the time until then has a closed form. Tokens are real numbers, decode steps are not
counted. A step ends when a batch of N x n samples is there of which groups have their quorum, and when what stays can
still be delivered within the staleness bound; then everything is cut and prefilled again. Training takes no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush


@dataclass(frozen=True)
class EngineCost:
    """Seconds: of a decode step, of a sequence and of a resident token in it, and of a prefilled token."""

    step: float
    sequence: float
    resident: float
    prefill: float


@dataclass(slots=True, eq=False)
class Response:
    """One sample; tokens, the version of its first token, and when it ended."""

    group: int
    length: float
    tokens: float = 0.0
    at_step_start: float = 0.0
    """What it had then: tokens of older weights."""
    version: int | None = None
    ended: float | None = None
    joined: float = 0.0
    """The token clock of its engine when it joined."""


@dataclass(slots=True)
class _Engine:
    clock: float = 0.0
    """Tokens that a sequence gained which ran all the time."""
    resident: float = 0.0
    prefill_s: float = 0.0
    """Seconds for which it prefills before it decodes."""
    ends: list[tuple[float, int, Response]] = field(default_factory=list)

    def until_next_end(self, cost: EngineCost) -> float:
        if not self.ends:
            return math.inf
        tokens = self.ends[0][0] - self.clock
        n = len(self.ends)
        step_s = cost.step + cost.sequence * n + cost.resident * (self.resident + 0.5 * n * tokens)
        return self.prefill_s + tokens * step_s

    def advance(self, seconds: float, cost: EngineCost) -> None:
        prefill_s = min(seconds, self.prefill_s)
        self.prefill_s -= prefill_s
        seconds -= prefill_s
        n = len(self.ends)
        if n == 0 or seconds <= 0.0:
            return
        # half t^2 + slope t = seconds, t in tokens
        half = 0.5 * cost.resident * n
        slope = cost.step + cost.sequence * n + cost.resident * self.resident
        tokens = 2.0 * seconds / (slope + math.sqrt(slope * slope + 4.0 * half * seconds))
        self.clock += tokens
        self.resident += n * tokens


class QuorumModel:
    """Steps of one trainer.

    Args:
        cost: of one engine.
        lengths: of the n samples of a group, by its number; cut at the longest by the caller.
        over: N', groups in work at the start of a step; None: refill, a constant number in flight.
    """

    def __init__(
        self, cost: EngineCost, lengths: Callable[[int], Sequence[float]], *, quorum: float, over: int | None,
        slots: int, bound: int, groups: int = 32, n: int = 8, engines: int = 4, prompt: int = 128,
    ) -> None:  # fmt: skip
        self.cost, self.lengths = cost, lengths
        self.finishers = math.ceil(round(quorum * n, 9))
        self.whole = quorum == 1.0
        self.over, self.slots, self.bound = over, slots, bound
        self.n, self.batch, self.prompt = n, groups * n, prompt
        self.engines = [_Engine() for _ in range(engines)]
        self.now, self.version, self.drawn, self.tie = 0.0, 0, 0, 0
        self.held: dict[int, list[Response]] = {}
        self.undelivered = 0
        self.ended_of: dict[int, int] = {}
        self.ready = 0
        self.due: list[Response] = []
        """What this step must deliver; those that can be are taken off from behind."""
        self.queue: list[Response] = []
        """What goes next is last."""
        self.delivered: list[tuple[float, float, float, float, int]] = []
        """Time, tokens, tokens of older weights, mean and greatest staleness of each batch."""

    def run(self, steps: int) -> None:
        """Until so many batches more are delivered."""
        for _ in range(steps):
            late = [m if self.whole else [r for r in m if self._slack(r) == 0] for m in self.held.values()]
            self.due = [r for unit in late for r in unit if min(map(self._slack, unit)) == 0]
            waiting = [r for members in self.held.values() for r in members if r.ended is None]
            self.queue = waiting[::-1]
            if self.over is not None:
                while self.undelivered < self.over * self.n:
                    self._draw()
            self._admit()
            while not self._deliver():
                self._next_end()
                self._admit()

    def _draw(self) -> None:
        members = [Response(self.drawn, float(length)) for length in self.lengths(self.drawn)]
        self.held[self.drawn] = members
        self.queue[:0] = members[::-1]
        self.undelivered += self.n
        self.drawn += 1

    def _admit(self) -> None:
        running = sum(len(engine.ends) for engine in self.engines)
        while running < self.slots:
            if not self.queue:
                if self.over is not None or self.undelivered + self.n > (self.bound + 1) * self.batch:
                    return
                self._draw()
            response = self.queue.pop()
            engine = min(self.engines, key=lambda e: len(e.ends))
            response.joined = engine.clock
            self.tie += 1
            heappush(engine.ends, (engine.clock + response.length - response.tokens, self.tie, response))
            engine.resident += self.prompt + response.tokens
            engine.prefill_s += self.cost.prefill * (self.prompt + response.tokens)
            if response.version is None:
                response.version = self.version
            running += 1

    def _next_end(self) -> None:
        times = [engine.until_next_end(self.cost) for engine in self.engines]
        seconds = min(times)
        first = self.engines[times.index(seconds)]
        for engine in self.engines:
            engine.advance(seconds, self.cost)
        self.now += seconds
        first.clock, _, response = heappop(first.ends)
        first.resident -= self.prompt + response.length
        response.tokens, response.ended = response.length, self.now
        count = self.ended_of[response.group] = self.ended_of.get(response.group, 0) + 1
        if count == self.finishers:
            self.ready += count
        elif count > self.finishers:
            self.ready += 1

    def _slack(self, response: Response) -> int:
        return self.bound - (0 if response.version is None else self.version - response.version)

    def _counts(self, response: Response) -> bool:
        return response.ended is not None and self.ended_of.get(response.group, 0) >= self.finishers

    def _deliver(self) -> bool:
        """If there is a batch, and what stays behind can be delivered in time."""
        if self.ready < self.batch:
            return False
        while self.due and self._counts(self.due[-1]):
            self.due.pop()
        if self.due:
            return False
        units: list[tuple[bool, int, float, list[Response]]] = []
        for group, members in self.held.items():
            counts = self.ended_of.get(group, 0) >= self.finishers
            for unit in [members] if self.whole else [[r] for r in members]:
                ended = max(math.inf if r.ended is None else r.ended for r in unit)
                ready = counts and ended < math.inf
                units.append((not ready, min(self._slack(r) for r in unit), ended, unit))
        units.sort(key=lambda u: u[:3])
        taken = self.batch // len(units[0][3])
        behind = [0] * (self.bound + 1)
        for _, slack, _, unit in units[taken:]:
            behind[slack] += len(unit)
        total = 0
        for k, count in enumerate(behind):
            total += count
            if total > k * self.batch:
                return False
        self._take([response for *_, unit in units[:taken] for response in unit])
        return True

    def _take(self, batch: list[Response]) -> None:
        for engine in self.engines:  # all that runs is cut
            for _, _, response in engine.ends:
                response.tokens += engine.clock - response.joined
            engine.ends, engine.resident, engine.prefill_s = [], 0.0, 0.0
        ages = [self.version - (r.version or 0) for r in batch]
        tokens, old = math.fsum(r.tokens for r in batch), math.fsum(r.at_step_start for r in batch)
        self.delivered.append((self.now, tokens, old, sum(ages) / len(ages), max(ages)))
        gone = set(map(id, batch))
        for group in {r.group for r in batch}:
            self.held[group] = [r for r in self.held[group] if id(r) not in gone]
            if not self.held[group]:
                del self.held[group]
        self.undelivered -= len(batch)
        self.ready -= len(batch)
        self.version += 1
        for members in self.held.values():
            for response in members:
                response.at_step_start = response.tokens

    def figures(self, skip: int) -> dict[str, float]:
        """Tokens per second, off-policy share, mean and greatest staleness, without the first ``skip`` batches."""
        first, kept = self.delivered[skip - 1], self.delivered[skip:]
        tokens = math.fsum(row[1] for row in kept)
        return {
            "tokens_per_s": tokens / (kept[-1][0] - first[0]),
            "off_policy": math.fsum(row[2] for row in kept) / tokens,
            "staleness": math.fsum(row[3] for row in kept) / len(kept),
            "staleness_max": max(row[4] for row in kept),
        }
