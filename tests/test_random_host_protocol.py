"""Random lives of a real scheduler whose hosts join, die, hang, lie, come back and repeat themselves, on virtual time.

Links take their time, keep the order and say some frames twice. Every token is compared with what its engine handed
over, every prompt with its end. More lives: ``APRIL_RANDOM_LIVES=1000`` before pytest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter, defaultdict
from typing import Any

import pytest
from test_hosts import Place, fake, two_turns
from virtual_rollouts import on_virtual_time

import april
from april.core.batch import Batch
from april.core.tape import SegmentKind
from april.driver.llm import single_turn
from april.errors import LinkError
from april.processes.host import Host
from april.processes.link import Link, OnFrame, OnLost
from april.testing import FakeEngine, FaultScript

pytestmark = on_virtual_time

LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "40"))
BATCH = 10
NOISE = b"\xc1"
LATE = ("abort_late", "abort_hangs", "abort_ignored", "abort_missed")
NO_FUNCTIONS: dict[str, Any] = {"rollout": single_turn, "reward": None, "filter": None}


class Unsteady(Link):
    """A host's end of a link that takes its time both ways and says some frames twice."""

    def __init__(self, link: Link, luck: random.Random, repeats: float) -> None:
        self.link, self.peer, self.luck, self.repeats = link, link.peer, luck, repeats
        self._down_s = self._up_s = 0.0

    def open(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        def arrives(frame: bytes) -> None:
            self._down_s = self._later(self._down_s, on_frame, frame)

        self.link.open(arrives, on_lost)

    def send(self, frame: bytes) -> None:
        for _ in range(2 if self._up_s and self.luck.random() < self.repeats else 1):  # it joins once
            self._up_s = self._later(self._up_s, self.link.send, frame)

    def close(self) -> None:
        self.link.close()

    async def wait_closed(self) -> None:
        await self.link.wait_closed()

    def _later(self, earliest: float, what: Any, frame: bytes) -> float:
        loop = asyncio.get_running_loop()
        when = max(loop.time(), earliest) + self.luck.random()
        loop.call_at(when, what, frame)
        return when


class HostsLife(Place):
    """One life of a trainer, chosen by a seed; ``seen`` counts what happened to its hosts."""

    longest: tuple[int, ...] = (15, 40)
    prompts = 24
    multi_turn = 0.5

    def __init__(self, seed: int) -> None:
        self.seed, self.luck = seed, random.Random(seed)
        luck = self.luck
        n, samples = luck.randint(1, 3), luck.choice([1, 2, 4])
        config = april.Config(
            rollout_batch_size=n, n_samples_per_prompt=samples, over_sampling_batch_size=n * luck.choice([1, 2]),
            max_response_len=luck.choice(self.longest), max_in_flight=luck.choice([2, 8, 24]),
            refill=luck.choice(["none", "group", "sample"]), generation=luck.choice(["stepwise", "continuous"]),
            max_staleness=luck.choice([1, 3]), group_quorum=luck.choice([1.0, 0.75]) if samples == 4 else 1.0,
            max_attempt_failures=99, max_failed_groups=99, max_filtered_groups=99, outage_deadline_s=1e9,
            abort_deadline_s=6.0, on_data_end="short", engine={"kind": "simulated"},
        )  # fmt: skip
        self.raises, self.repeats = luck.choice([0.0, 0.05]), luck.choice([0.0, 0.1, 0.5])
        functions: dict[str, Any] = {"reward": self.reward}
        self.filters = samples > 1 and luck.random() < 0.3
        if self.filters:
            functions["filter"] = self.filter
        if luck.random() < self.multi_turn:
            functions["rollout"] = self.rollout
        super().__init__(config, self.prompts, [self.engine("e")], **functions)
        self.samples, self.bound = samples, config.max_staleness
        self.here: dict[str, Host] = {}
        self.processes = 0
        self.restless = True
        self.seen: Counter[str] = Counter()

    def engine(self, name: str, faults: FaultScript | None = None) -> FakeEngine:
        """Of the core's process, or of a host."""
        return fake(name, faults)

    async def rollout(self, prompt: Any, llm: april.LLM) -> Any:
        """Half of the lives have it, the others the default one."""
        return await two_turns(prompt, llm)

    def worth(self, response: Any) -> float:
        """The reward of a response."""
        return float(response.tokens.sum() % 7)

    async def reward(self, prompt: Any, response: Any) -> float:
        """Raises now and then: the sample begins again."""
        await asyncio.sleep(self.luck.random())
        if self.luck.random() < self.raises:
            raise ValueError("bad luck")
        return self.worth(response)

    async def filter(self, prompt: Any, responses: Any) -> bool:
        """Sees rewards."""
        assert [r.reward for r in responses] == [self.worth(r) for r in responses]
        return bool(prompt.data["i"] % 5)

    def link(self, link: Link) -> Link:
        """A host's end."""
        return Unsteady(link, self.luck, self.repeats)

    def silence(self, link: Any) -> None:
        """What it says goes nowhere."""
        link._other = None

    def cut(self, link: Any) -> None:
        """Neither end reaches the other any more."""
        link.cut("the cable was pulled")

    # ---------------------------------------------------------------- what happens to hosts

    async def unrest(self) -> None:
        """Again and again, to one of four hosts."""
        while self.restless:
            await asyncio.sleep(self.luck.uniform(0.5, 12.0))
            name = f"h{self.luck.randint(0, 3)}"
            host = self.here.get(name)
            if host is None or host._ended is None or host._ended.done():
                await self.joins(name)
                continue
            what = self.luck.choice(["dies", "hangs", "is cut off", "leaves", "lies"])
            self.seen[what] += 1
            link = self.of_host[name]
            if what == "dies":
                host._ended.cancel()
            elif what == "hangs":
                self.silence(link)
            elif what == "is cut off":
                self.cut(link)
            elif what == "leaves":
                await host.aclose()
            else:
                link.send(NOISE)

    async def joins(self, name: str) -> None:
        """A process of this name, for the first time or anew; who is taken for dead is still there for a while."""
        self.processes += 1
        faults = FaultScript.random(1000 * self.seed + self.processes, 0.2, LATE)  # and so it is told to fence
        engines = [self.engine(f"e{i}", faults) for i in range(int(name[1:]) % 3)]
        with contextlib.suppress(LinkError):
            self.here[name] = await self.host(name, engines, **(NO_FUNCTIONS if len(engines) == 2 else {}))
            self.seen["joins"] += 1

    # ---------------------------------------------------------------- all of it

    async def live(self) -> None:
        """Until every prompt is settled; the books agree then."""
        unrest = asyncio.create_task(self.unrest())
        try:
            while True:
                await asyncio.sleep(self.luck.uniform(0.0, 6.0))
                if self.luck.random() < 0.1:
                    await self.evaluate()
                try:
                    await self.step()
                except april.DataExhausted:
                    break
        finally:
            self.restless = False
            await unrest
        self.check_end()

    async def evaluate(self) -> None:
        """It fails by a function that raises, and by nothing that happens to hosts."""
        expected = contextlib.suppress(april.RolloutError) if self.raises else contextlib.nullcontext()
        with expected:
            result = await self.scheduler.aevaluate([{"token_ids": [5, 6], "i": 1}] * 2, n_samples=2)
            assert result.rewards.tolist() == [[self.worth(r) for r in row] for row in result.responses]

    def check_end(self) -> None:
        """Every prompt once, every token accounted for and as its engine handed it over; nothing is remembered."""
        self.scheduler.validate()
        prompts = [i for i in range(self.prompts) if not self.filters or i % 5]
        trained = Counter(i for b in self.batches for _, i in {(s.id, s.prompt.data["i"]) for s in b.samples})
        assert trained == Counter(dict.fromkeys(prompts, self.samples))
        tokens = self.scheduler.ledger()["tokens"]
        assert tokens.held == 0
        assert tokens.observed == tokens.delivered + sum(tokens.dropped.values())
        for batch in self.batches:
            self.check_batch(batch)
        assert not any(engine.violations for engine in self.engines)
        for desk in self.scheduler.driver.hosts.desks:  # type: ignore[union-attr]
            assert not (*desk.attempts, *desk._groups, *desk._known)

    def check_batch(self, batch: Batch) -> None:
        """Each token was made by the attempt, and under the weights, that its segment names."""
        made: defaultdict[str, list[Any]] = defaultdict(list)
        for engine in self.engines:
            for attempt_id, record in engine.attempts.items():
                versions = map(tuple, record.versions.tolist())
                made[attempt_id] += zip(record.tokens.tolist(), record.logprobs.tolist(), versions, strict=True)
        used: Counter[str] = Counter()
        for sample in batch.samples:
            versions = map(tuple, sample.versions.tolist())
            told = list(zip(sample.tokens.tolist(), sample.logprobs.tolist(), versions, strict=True))
            assert sample.staleness <= self.bound
            for s in sample.segments:
                part, first = told[s.start : s.start + s.count], used[s.attempt_id]
                if s.kind is SegmentKind.ENVIRONMENT:
                    self.check_environment(sample.prompt.data["i"], [token for token, *_ in part])
                    continue
                used[s.attempt_id] += s.count
                assert made[s.attempt_id][first : first + s.count] == part, (sample.id, s)
                assert {version for *_, version in part} == {s.version}
        self.check_rewards(batch)

    def check_environment(self, prompt: int, tokens: list[int]) -> None:
        """What the rollout function has added."""
        assert tokens == [500 + prompt]

    def check_rewards(self, batch: Batch) -> None:
        """Each row has that of its response."""
        assert all(sample.reward == float(sample.tokens.sum() % 7) for sample in batch.samples)


async def lived(life: HostsLife) -> HostsLife:
    """A life, to its good end."""
    try:
        await life.live()
    except BaseException as error:
        error.add_note(f"life {life.seed}")
        raise
    finally:
        await life.end()
    return life


@pytest.mark.parametrize("first", range(0, LIVES, BATCH))
async def test_lives_with_hosts_that_join_die_hang_come_back_and_repeat_themselves(first: int) -> None:
    """Bound, ledgers and provenance hold over the wire; every prompt is settled once; nothing is kept for ever."""
    seen: Counter[str] = Counter()
    for seed in range(first, first + BATCH):
        life = await lived(HostsLife(seed))
        seen += life.seen
        seen["fenced"] += life.scheduler.driver.core.counters["fenced_attempts"]
    assert seen["joins"] > BATCH
    assert min(seen[what] for what in ("dies", "hangs", "is cut off", "leaves", "lies", "fenced")) >= 2
