"""All hosts of a core: where commands go, and what the end of a host means for everything that it had to do with."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
from core_machine import EOS, settings
from test_hosts import CONFIG
from virtual_rollouts import on_virtual_time

from april.core import commands as do
from april.core import events as ev
from april.core.sampling import SamplingParams
from april.core.settings import EngineLimits
from april.core.state import RolloutCore
from april.core.tape import AttemptTape
from april.core.types import (
    Attempt,
    AttemptFailure,
    EngineFinish,
    FinishReason,
    GenerateCall,
    Group,
    Prompt,
    Sample,
    SampleState,
)
from april.errors import EngineUnreachable
from april.processes import messages as wire
from april.processes.desk import HostDesk
from april.processes.link import MemoryLink, memory_links
from april.processes.remote_hosts import HostDoor, RemoteHosts

pytestmark = on_virtual_time


class Hosts:
    """Hosts of a core that say nothing by themselves; what was posted, done here, and raised."""

    def __init__(self) -> None:
        self.core = RolloutCore(settings(), [EngineLimits("e", 200, 4, (EOS,))], check=True)
        self.posted: list[ev.Event] = []
        self.here: list[Any] = []
        self.raised: dict[int, BaseException] = {}
        self.links: dict[str, MemoryLink] = {}
        self._door = HostDoor(deadline_s=8.0)
        self.hosts = RemoteHosts(CONFIG, self._door, tokenizer=False)
        kinds = (
            do.StartSample, do.Submit, do.Abort, do.Fence, do.CallCompleted, do.ScoreSample, do.ScoreGroup,
            do.JudgeGroup, do.CancelSample, do.ProbeEngine, do.PauseEngine, do.LoadEngine, do.ResumeEngine,
        )  # fmt: skip
        local: Any = SimpleNamespace(
            executors=dict.fromkeys(kinds, self.here.append), samples=SimpleNamespace(returned_elsewhere=None),
            functions=SimpleNamespace(detokenizer=None, rollout=None),
        )  # fmt: skip
        self._executors = self.hosts.attach(
            self.core, local, self.posted.append, lambda call, error: self.raised.update({call: error})
        )

    async def join(self, *names: str) -> Hosts:
        """A host of each name, with an engine and functions, is there, for the first time or anew."""
        for name in names:
            here, self.links[name] = memory_links()
            self._door.accept(here)
            card = wire.EngineCard(name="e", written=False, capabilities={
                "logprob_kind": "temperature", "vocab_size": 2**31 - 1, "max_context": 200, "eos_token_ids": [EOS],
                "max_in_flight": 4,
            })  # fmt: skip
            self.says(name, wire.Joined(
                protocol=wire.PROTOCOL, name=name, life=name, engines=(card,), functions=True, reward=True,
                group_reward=False, filter=False, tokenizer=False,
            ))  # fmt: skip
            await asyncio.sleep(0.01)
        return self

    def says(self, name: str, message: wire.Message) -> None:
        """One frame of a host."""
        self.links[name].send(wire.encode([message]))

    async def ends(self, name: str, goodbye: str = "") -> list[ev.Event]:
        """What follows from the end of a host: killed, or with its goodbye."""
        self.posted.clear()
        if goodbye:
            self.says(name, wire.Goodbye(goodbye))
        else:
            self.links[name].cut("killed")
        await asyncio.sleep(0.01)
        return self.posted

    def desk(self, name: str) -> HostDesk:
        """Of a host that is here."""
        (desk,) = (desk for desk in self.hosts.desks if desk.name == name)
        return desk

    def execute(self, command: do.Command) -> None:
        """The core wants it done."""
        self._executors[type(command)](command)


def group(number: int, samples: int = 2) -> Group:
    """With its samples, of which nothing is known."""
    return Group(number, Prompt(np.array([1, 2, number], np.int32), {}, 0, number), samples)


def attempt_of(sample: Sample, engine: str) -> Attempt:
    """A request."""
    sampling = SamplingParams(10)
    return Attempt(
        id=f"{sample.id.group:032}", call=GenerateCall(sample.chains[0], sampling, 0), engine=engine,
        token_ids=sample.group.prompt.token_ids, sampling=sampling, tape=AttemptTape(), end_ids=frozenset([EOS]),
        oldest=None, urgent=False,
    )  # fmt: skip


async def test_all_functions_of_a_group_run_on_one_host() -> None:
    """Groups are dealt to the hosts with the fewest; the samples of one stay together, its rewards too."""
    hosts = await Hosts().join("a", "b")
    groups = [group(i) for i in range(6)]
    for g in groups:
        for sample in g.samples:
            hosts.execute(do.StartSample(sample))
        g.samples[1].finish = FinishReason.STOP
        hosts.execute(do.ScoreSample(g.samples[1]))
    homes = [[name for name in "ab" if g.id in hosts.desk(name)._groups] for g in groups]
    assert all(len(home) <= 1 for home in homes)
    assert sorted(map(str, homes)) == sorted(["[]"] * 2 + ["['a']"] * 2 + ["['b']"] * 2)
    assert len(hosts.here) == 2 * 3  # those whose home is the core's own process


async def test_a_group_that_is_settled_leaves_its_home() -> None:
    """A host is not full of what is over."""
    hosts = await Hosts().join("a")
    first, second, third, fourth = map(group, range(4))
    hosts.execute(do.StartSample(first.samples[0]))
    hosts.execute(do.StartSample(second.samples[0]))
    known = hosts.desk("a")._groups
    assert list(known) == [1]
    hosts.hosts.settled(second)
    assert not known
    hosts.execute(do.StartSample(third.samples[0]))
    assert list(known) == [2]
    for sample in third.samples:
        sample.state = SampleState.LEASED
    hosts.hosts.delivered([s.id for s in third.samples])
    assert not known
    hosts.execute(do.StartSample(fourth.samples[0]))
    assert list(known) == [3]


async def test_engines_are_dead_before_functions_are_lost_before_requests_have_failed() -> None:
    """In this order nothing goes to what is dead, and no call is sent again for a function that is gone as well."""
    hosts = await Hosts().join("a")
    one = group(0)
    hosts.execute(do.StartSample(group(7).samples[0]))  # here
    hosts.execute(do.StartSample(one.samples[0]))
    hosts.execute(do.Submit(attempt_of(one.samples[0], "a/e")))
    events = await hosts.ends("a")
    assert [type(e) for e in events] == [ev.EngineFailed, ev.FunctionsLost, ev.AttemptFailed]
    assert events[1] == ev.FunctionsLost([0], died=True)


async def test_who_leaves_in_peace_has_not_failed() -> None:
    """An engine is dead whose host dies, or leaves in the middle of its requests; else it is only gone, and with it
    what its host's functions had begun, if there is any."""
    hosts = await Hosts().join("a", "b", "c", "d")
    assert await hosts.ends("a") == [ev.EngineFailed("a/e")]
    assert await hosts.ends("b", "bye") == [ev.EnginesLeft(["b/e"])]
    one = group(0)
    for number in (7, 0):
        hosts.execute(do.StartSample(group(number).samples[0]))  # the first one here
    assert await hosts.ends("c", "bye") == [ev.EnginesLeft(["c/e"]), ev.FunctionsLost([0])]
    hosts.execute(do.Submit(attempt_of(one.samples[0], "d/e")))
    assert [type(e) for e in await hosts.ends("d", "bye")] == [ev.EngineFailed, ev.AttemptFailed, ev.EnginesLeft]


async def test_what_is_asked_of_a_dead_host_is_answered_at_once() -> None:
    """Nobody waits for it: requests fail, fences end, probes and calls say that nobody answers."""
    hosts = await Hosts().join("a")
    await hosts.ends("a")
    hosts.posted.clear()
    attempt = attempt_of(group(0).samples[0], "a/e")
    hosts.execute(do.Submit(attempt))
    hosts.execute(do.Abort("a/e", (attempt.id,), everything=False))
    hosts.execute(do.Fence("a/e", (attempt.id,)))
    hosts.execute(do.ProbeEngine("a/e", 3))
    hosts.execute(do.PauseEngine("a/e", 5, 1.0))
    failed, fenced, probed, called = hosts.posted
    assert isinstance(failed, ev.AttemptFailed)
    assert failed.kind is AttemptFailure.BROKE_OFF
    assert fenced == ev.AttemptEnded(attempt.id, EngineFinish.ABORT, fenced=True)
    assert isinstance(probed, ev.EngineProbed)
    assert (probed.engine, probed.probe, probed.answered) == ("a/e", 3, False)
    assert isinstance(called, ev.EngineCallEnded)
    assert (called.call, called.result) == (5, ev.CallResult.UNREACHABLE)
    assert isinstance(hosts.raised[5], EngineUnreachable)
    assert not hosts.here


async def test_a_host_that_joins_anew_ends_its_older_connection() -> None:
    """Commands go to the new one, by which alone it lives; what the old one says, or that it ends, is no news."""
    hosts = await Hosts().join("a")
    old, link = hosts.desk("a"), hosts.links["a"]
    await hosts.join("a")
    assert [type(e) for e in hosts.posted] == [ev.EnginesJoined, ev.EngineFailed, ev.EnginesJoined]
    hosts.execute(do.ProbeEngine("a/e", 1))
    assert old.take() is None
    assert hosts.desk("a").take() is not None
    for _ in range(4):
        link.send(wire.encode([wire.Heartbeat()]))
        await asyncio.sleep(1.9)
    assert len(hosts.posted) == 3
    await asyncio.sleep(2.5)
    assert not hosts.hosts.desks


async def test_a_host_is_overdue_by_its_own_last_word() -> None:
    """Another one's is no sign of life of it."""
    hosts = await Hosts().join("a", "b")
    for _ in range(5):
        await asyncio.sleep(1.9)
        hosts.says("b", wire.Heartbeat())
    assert [desk.name for desk in hosts.hosts.desks] == ["b"]


async def test_a_host_that_does_not_end_what_it_must_is_overdue() -> None:
    """Signs of life are not enough: a request that was to end at once would hold up a step for ever."""
    hosts = await Hosts().join("a")
    attempt = attempt_of(group(0).samples[0], "a/e")
    hosts.execute(do.Submit(attempt))
    hosts.execute(do.Fence("a/e", (attempt.id,)))
    for _ in range(5):
        assert hosts.hosts.desks
        await asyncio.sleep(1.9)
        hosts.says("a", wire.Heartbeat())
    await asyncio.sleep(1.9)
    assert not hosts.hosts.desks
    (failed,) = (e for e in hosts.posted if isinstance(e, ev.AttemptFailed))
    assert "still run after 8 s" in failed.error
