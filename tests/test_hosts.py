"""Hosts and a scheduler over links in memory, on virtual time: real hosts and driver, fake engines that keep books."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from virtual_rollouts import on_virtual_time

import april
from april.core.batch import Batch
from april.errors import LinkError, RolloutError
from april.processes.host import RETRY_S, Host
from april.processes.link import Link, MemoryLink, memory_links
from april.processes.remote_hosts import HostDoor
from april.testing import FakeEngine, FaultScript
from april.testing.same_loop import _SameLoopScheduler

pytestmark = on_virtual_time

CONFIG = april.Config(
    rollout_batch_size=2, n_samples_per_prompt=2, over_sampling_batch_size=4, max_response_len=40, max_in_flight=8,
    engine={"kind": "simulated"},
)  # fmt: skip


async def reward(prompt: Any, response: Any) -> float:
    return float(response.tokens.sum() % 7)


class Place:
    """A scheduler, its hosts, and all engines and batches."""

    def __init__(self, config: april.Config, prompts: int, local: list[FakeEngine], **functions: Any) -> None:
        self.config, self.functions = config, functions or {"reward": reward}
        self.source = [{"token_ids": [1, 2, i + 3], "i": i} for i in range(prompts)]
        self.links: list[MemoryLink] = []
        self.of_host: dict[str, MemoryLink] = {}
        self.engines: list[FakeEngine] = []
        self.batches: list[Batch] = []
        self.hosts: list[Host] = []
        self.begin(local)

    def begin(self, local: list[FakeEngine], **options: Any) -> None:
        """A scheduler, with engines of its own."""
        self.door = self.new_door()
        self.engines += local
        options = {"check": True} | self.functions | options
        self.scheduler = _SameLoopScheduler(self.config, prompts=self.source, engines=local, hosts=self.door, **options)

    def new_door(self) -> HostDoor:
        """Where hosts come in."""
        return HostDoor(deadline_s=20.0)

    async def host(self, name: str, engines: list[FakeEngine], **changes: Any) -> Host:
        """A host that has joined."""

        async def join() -> Link:
            there = await self.connect(name)
            self.links.append(there)
            self.of_host[name] = there
            return self.link(there)

        host = Host(name, engines=engines, join=join, **(self.functions | changes))
        await host.astart()
        await asyncio.sleep(0)  # the scheduler is told
        self.hosts.append(host)
        self.engines += engines
        return host

    async def connect(self, name: str) -> Any:
        """The end of a new link that is the host's."""
        here, there = memory_links()
        self.door.accept(here)
        return there

    def link(self, link: MemoryLink) -> Link:
        """What a host gets as its end of a link."""
        return link

    async def step(self) -> Batch:
        """A batch, trained."""
        batch = await self.scheduler.anext_batch()
        self.batches.append(batch)
        await self.update()
        return batch

    async def update(self) -> None:
        """New weights."""
        await self.scheduler.driver.update_weights("weights")

    async def all_batches(self) -> None:
        """Until the data end."""
        while True:
            try:
                await self.step()
            except april.DataExhausted:
                return

    async def end(self) -> None:
        """The scheduler, then its hosts."""
        await self.scheduler.driver.close()
        for host in self.hosts:
            await host.aclose()

    def check(self, prompts: int, samples: int = 2) -> None:
        """Every prompt once, every token as its engine handed it over."""
        trained = Counter(s.prompt.data["i"] for b in self.batches for s in b.samples)
        assert trained == Counter(dict.fromkeys(range(prompts), samples))
        assert not any(engine.violations for engine in self.engines)
        ledger = self.scheduler.ledger()
        assert ledger["tokens"].held == 0
        assert sum(ledger["tokens"].dropped.values()) == 0
        rewards = {float(s.tokens.sum() % 7) == s.reward for b in self.batches for s in b.samples}
        assert rewards == {True}


@asynccontextmanager
async def place(prompts: int = 12, config: april.Config = CONFIG, **functions: Any) -> AsyncIterator[Place]:
    made = Place(config, prompts, [FakeEngine("here", lengths=LENGTHS, chunk_tokens=1)], **functions)
    try:
        yield made
    finally:
        await made.end()


def LENGTHS(request: Any) -> int:
    group, index = request.sample_key
    return 3 + (7 * group + 11 * index) % 17


def fake(name: str, faults: FaultScript | None = None) -> FakeEngine:
    return FakeEngine(name, lengths=LENGTHS, chunk_tokens=1, faults=faults)


async def test_samples_are_generated_and_scored_on_hosts() -> None:
    """Both hosts' engines are used, under names with their host's; what is delivered is what they handed over."""
    async with place() as p:
        await p.host("a", [fake("f")])
        await p.host("b", [fake("f"), fake("g")])
        await p.all_batches()
        p.check(12)
        used = {s.engine for b in p.batches for x in b.samples for s in x.segments}
        assert used == {"here", "a/f", "b/f", "b/g"}


async def two_turns(prompt: Any, llm: april.LLM) -> str:
    first = await llm.generate(max_tokens=15)
    await llm.generate([*first.conversation, 500 + prompt.data["i"]])
    return f"told {prompt.data['i']}"


async def test_functions_of_several_turns_run_on_hosts() -> None:
    """A group's functions, rewards and filter are in one process, which sees what they returned."""
    outputs = []

    async def group_reward(prompt: Any, responses: Any) -> list[float]:
        outputs.append([r.output for r in responses])
        assert {r.output for r in responses} == {f"told {prompt.data['i']}"}
        return [float(r.tokens.sum() % 7) for r in responses]

    async def keeps(prompt: Any, responses: Any) -> bool:
        assert [r.reward for r in responses] == [float(r.tokens.sum() % 7) for r in responses]
        return True

    async with place(rollout=two_turns, group_reward=group_reward, filter=keeps) as p:
        await p.host("a", [fake("f")])
        await p.host("functions", [])
        await p.all_batches()
        p.check(12)
        assert all((s.loss_mask == 0).sum() == 1 for b in p.batches for s in b.samples)
    assert len(outputs) == 12


@pytest.mark.parametrize("functions", [{}, {"rollout": two_turns, "reward": reward}], ids=["one turn", "two turns"])
async def test_a_host_that_dies_in_the_middle_loses_nothing_that_was_told(functions: dict[str, Any]) -> None:
    """Its samples go on elsewhere, its functions begin again, answered from the tape; it comes back by itself."""
    async with place(**functions) as p:
        await p.host("a", [fake("f")])
        await p.step()
        step = asyncio.ensure_future(p.step())
        await asyncio.sleep(4)
        p.links[0].cut("the cable was pulled")
        await step
        await p.all_batches()
        p.check(12)
        assert len(p.links) > 1  # it came back


async def test_an_error_of_words_that_utf8_does_not_have_costs_its_sample_alone() -> None:
    """The name of a file may have half a character: the host that says so keeps its connection and what runs there."""
    failed: set[Any] = set()

    async def often(prompt: Any, response: Any) -> float:
        if response.sample_id not in failed:
            failed.add(response.sample_id)
            raise OSError("caf\udce9")
        return await reward(prompt, response)

    async with place(6, reward=often) as p:
        await p.host("a", [fake("f")])
        await p.all_batches()
        p.check(6)
        assert len(p.links) == 1
    assert len(failed) == 12


async def test_a_pause_of_the_process_itself_is_nobody_elses_death(caplog: pytest.LogCaptureFixture) -> None:
    """A function blocks the loop for longer than the deadline: what both sides have said meanwhile is heard first."""

    async def blocks(prompt: Any, response: Any) -> float:
        loop = asyncio.get_running_loop()
        if not blocked:
            blocked.append(loop.time())
            loop._virtual_now += 300.0  # type: ignore[attr-defined]
        return await reward(prompt, response)

    blocked: list[float] = []

    async with place(reward=blocks) as p:
        host = await p.host("a", [fake("f")])
        await p.all_batches()
        assert blocked
        assert host._ended is not None
        assert not host._ended.done()
        assert len(p.links) == 1
        p.check(12)
    assert not [record for record in caplog.records if "lost" in record.getMessage()]


# -------------------------------------------------------------------- two of one name


async def test_a_second_host_of_a_name_is_refused_while_the_first_one_lives() -> None:
    """It reads which name, and where both are; the first one goes on as if nothing had been."""
    async with place() as p:
        first = await p.host("a", [fake("f")])
        desks = list(p.scheduler.driver.hosts.desks)  # type: ignore[union-attr]
        with pytest.raises(LinkError, match="host a already, at this process, and it lives; this one is"):
            await p.host("a", [fake("f")])
        assert asyncio.get_running_loop().time() <= 2 * p.door.deadline_s / 4
        assert list(p.scheduler.driver.hosts.desks) == desks  # type: ignore[union-attr]
        assert first._ended is not None
        assert not first._ended.done()
        await p.all_batches()
        p.check(12)


@pytest.mark.parametrize("died", ["seen", "unseen"])
async def test_a_process_that_takes_the_place_of_a_dead_one_joins(died: str) -> None:
    """At once where the connection has ended; otherwise when the dead one is silent for two heartbeats."""
    async with place() as p:
        first = await p.host("a", [fake("f")])
        await p.step()
        if died == "seen":
            await first.aclose()
        else:
            p.links[0]._other = None  # what it says goes nowhere
        now = asyncio.get_running_loop().time
        began = now()
        await p.host("a", [fake("f")])
        beat = p.door.deadline_s / 4
        assert now() - began == 0 if died == "seen" else 2 * beat <= now() - began <= 3 * beat
        if died == "unseen":
            assert (await first.aend()).startswith("another host has joined as a")
        await p.all_batches()
        p.check(12)


async def test_a_host_that_connects_again_needs_not_wait_for_its_old_connection() -> None:
    """Only it knows that this one is broken; and it is the same host."""
    async with place() as p:
        first = await p.host("a", [fake("f")])
        assert first._serving is not None
        p.links[0]._other = None
        first._serving._break(LinkError("broken"))
        await asyncio.sleep(RETRY_S + 0.1)
        assert len(p.links) == 2
        assert first._serving.welcomed.done()
        await p.all_batches()
        p.check(12)


async def test_a_state_has_what_runs_on_hosts() -> None:
    """Tapes on request: tokens of running requests are in the state, and another scheduler goes on from them."""
    async with place(config=CONFIG.model_copy(update={"over_sampling_batch_size": 2})) as p:
        await p.host("a", [fake("f")])
        step = asyncio.ensure_future(p.scheduler.anext_batch())
        await asyncio.sleep(3)
        driver = p.scheduler.driver
        await driver.caught_up()
        held = {a.engine: a.tape.count for a in driver.core.attempts.values()}
        assert any(count > 0 for engine, count in held.items() if engine.startswith("a/"))
        state = driver.state_dict(None)
        step.cancel()
    async with place() as again:
        await again.host("a", [fake("f")])
        await again.scheduler.driver.load_state_dict(state, "weights")
        await again.all_batches()
        resumed = sum(s.resumes > 0 for b in again.batches for s in b.samples)
        assert resumed > 0
        trained = Counter(s.prompt.data["i"] for b in again.batches for s in b.samples)
        assert trained == Counter(dict.fromkeys(range(12), 2))


async def test_an_evaluation_runs_on_hosts() -> None:
    """Its prompts are answered there as well, and scored."""
    async with place() as p:
        await p.host("a", [fake("f")])
        result = await p.scheduler.aevaluate([[5, 6], [7, 8], [9, 10]], n_samples=4)
        assert result.rewards.shape == (3, 4)
        assert [[float(np.sum(r.tokens) % 7) for r in row] for row in result.responses] == result.rewards.tolist()


async def says_where(prompt: Any, llm: april.LLM) -> Any:
    completion = await llm.generate()
    said = {"tokens": completion.tokens.tolist(), "sample": str(llm.sample_id), "by": b"\0", "none": None}
    return said if prompt.token_ids[0] == 5 else {1, 2}


async def test_an_evaluation_returns_what_functions_on_hosts_returned(caplog: pytest.LogCaptureFixture) -> None:
    """As it was there; what would arrive as another thing stays away, and a warning says what that is."""
    async with place(rollout=says_where, reward=reward) as p:
        await p.host("a", [fake("f")])
        await p.host("b", [fake("f")])
        result = await p.scheduler.aevaluate([[5, 6]] * 3 + [[7, 8]] * 3, n_samples=2)
        for row in result.responses[:3]:
            for r in row:
                assert r.output == {
                    "tokens": r.tokens.tolist(), "sample": str(r.sample_id), "by": b"\0", "none": None
                }  # fmt: skip
        outputs = [r.output for row in result.responses[3:] for r in row]
        assert sorted(map(str, outputs)) == ["None"] * 4 + ["{1, 2}"] * 2
        warnings = [r.getMessage() for r in caplog.records if "(it is a set)" in r.getMessage()]
        assert sorted(w.partition(":")[0] for w in warnings) == ["host a", "host b"]
        samples = p.scheduler.driver.local.samples
        assert not samples.elsewhere
        assert not samples._runners


async def test_a_host_that_does_not_fit_is_refused_with_the_reason() -> None:
    """Another vocabulary, other functions, a name with a slash: its user reads why."""
    async with place() as p:
        small = FakeEngine("f", vocab_size=10)
        with pytest.raises(LinkError, match="vocabulary"):
            await p.host("a", [small])
        with pytest.raises(LinkError, match="reward"):
            await p.host("b", [fake("f")], reward=None, filter=april.rewards_differ)
        with pytest.raises(LinkError, match="slash"):
            await p.host("a/b", [fake("f")])


async def test_a_mistake_is_seen_though_each_host_has_one_group(caplog: pytest.LogCaptureFixture) -> None:
    """Failures of functions count together, wherever they run: the step ends at once, with the line."""

    async def wrong(prompt: Any, response: Any) -> float:
        return float(prompt.data["anwser"])

    config = april.Config(
        rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=40, engine={"kind": "simulated"}
    )
    async with place(9, config, reward=wrong) as p:
        for name in "ab":
            await p.host(name, [fake("f")])
        with pytest.raises(RolloutError, match=r"KeyError: 'anwser' \(line \d+ of test_hosts.py\)$"):
            await p.scheduler.driver.next_batch()
        assert asyncio.get_running_loop().time() < 20.0  # the longest response; nothing is asked again
        assert len(caplog.records) == 2, "one line per host"
        assert p.scheduler.driver.core.prompts.as_dict()["dropped"] == {}
