"""All hosts of a core: where commands go, and what the end of a host means for everything that it had to do with."""

from __future__ import annotations

from typing import Any

import numpy as np
from core_machine import EOS, settings

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
from april.processes.desk import HostDesk
from april.processes.remote_hosts import Roster


class Hosts:
    """A roster with hosts that were told of nothing; what was posted, done here, and raised."""

    def __init__(self, *names: str, functions: bool = True) -> None:
        self.core = RolloutCore(settings(), [EngineLimits("e", 200, 4, (EOS,))], check=True)
        self.posted: list[ev.Event] = []
        self.here: list[Any] = []
        self.raised: dict[int, BaseException] = {}
        kinds = (
            do.StartSample, do.Submit, do.Abort, do.Fence, do.CallCompleted, do.ScoreSample, do.ScoreGroup,
            do.JudgeGroup, do.CancelSample, do.ProbeEngine, do.PauseEngine, do.LoadEngine, do.ResumeEngine,
        )  # fmt: skip
        self.roster = Roster(
            self.core, dict.fromkeys(kinds, self.here.append), functions_run=functions, post=self.posted.append,
            failed=lambda call, error: self.raised.update({call: error}), collected=lambda desk: None,
            deadline_s=8.0,
        )  # fmt: skip
        self.desks = {name: self.join(name) for name in names}

    def join(self, name: str, now: float = 0.0) -> HostDesk:
        """A host with one engine and functions is there."""
        limits = [EngineLimits(f"{name}/e", 200, 4, (EOS,))]
        desk = HostDesk(
            self.core, name, limits, functions=True, failed=lambda call, error: self.raised.update({call: error})
        )
        self.posted += list(self.roster.join(desk, now))
        return desk

    def execute(self, command: do.Command) -> None:
        """The core wants it done."""
        self.roster.executors[type(command)](command)


def group(number: int, samples: int = 2) -> Group:
    """With its samples, of which nothing is known."""
    return Group(number, Prompt(np.array([1, 2, number], np.int32), {}, 0, number), samples)


def attempt_of(sample: Sample, engine: str) -> Attempt:
    """A request."""
    sampling = SamplingParams(10)
    return Attempt(
        id=f"{sample.id.group:032}", call=GenerateCall(sample, sampling, 0), engine=engine,
        token_ids=sample.group.prompt.token_ids, sampling=sampling, tape=AttemptTape(), end_ids=frozenset([EOS]),
        oldest=None, urgent=False,
    )  # fmt: skip


def test_all_functions_of_a_group_run_on_one_host() -> None:
    """Groups are dealt to the hosts with the fewest; the samples of one stay together, its rewards too."""
    hosts = Hosts("a", "b")
    groups = [group(i) for i in range(6)]
    for g in groups:
        for sample in g.samples:
            hosts.execute(do.StartSample(sample))
        g.samples[1].finish = FinishReason.STOP
        hosts.execute(do.ScoreSample(g.samples[1]))
    homes = [[name for name, desk in hosts.desks.items() if g.id in desk._groups] for g in groups]
    assert all(len(home) <= 1 for home in homes)
    assert sorted(map(str, homes)) == sorted(["[]"] * 2 + ["['a']"] * 2 + ["['b']"] * 2)
    assert len(hosts.here) == 2 * 3  # those whose home is the core's own process


def test_a_group_that_is_settled_leaves_its_home() -> None:
    """A host is not full of what is over."""
    hosts = Hosts("a")
    first, second = group(0), group(1)
    hosts.execute(do.StartSample(first.samples[0]))
    hosts.execute(do.StartSample(second.samples[0]))
    assert list(hosts.desks["a"]._groups) == [1]
    hosts.roster.settled(second)
    assert not hosts.desks["a"]._groups
    third, fourth = group(2), group(3)
    hosts.execute(do.StartSample(third.samples[0]))
    assert list(hosts.desks["a"]._groups) == [2]
    for sample in third.samples:
        sample.state = SampleState.LEASED
    hosts.roster.delivered([s.id for s in third.samples])
    assert not hosts.desks["a"]._groups
    hosts.execute(do.StartSample(fourth.samples[0]))
    assert list(hosts.desks["a"]._groups) == [3]


def test_engines_are_dead_before_functions_are_lost_before_requests_have_failed() -> None:
    """In this order nothing goes to what is dead, and no call is sent again for a function that is gone as well."""
    hosts = Hosts("a")
    one = group(0)
    hosts.execute(do.StartSample(group(7).samples[0]))  # here
    hosts.execute(do.StartSample(one.samples[0]))
    attempt = attempt_of(one.samples[0], "a/e")
    hosts.execute(do.Submit(attempt))
    events = list(hosts.roster.lost(hosts.desks["a"], "killed"))
    assert [type(e) for e in events] == [ev.EngineFailed, ev.FunctionsLost, ev.AttemptFailed]
    assert events[1] == ev.FunctionsLost([0], died=True)
    assert list(hosts.roster.lost(hosts.desks["a"], "killed")) == []


def test_a_host_without_work_takes_no_functions_with_it() -> None:
    """FunctionsLost names groups; without any it is not said. Who leaves for good takes its engines along."""
    hosts = Hosts("a")
    assert list(hosts.roster.lost(hosts.desks["a"], "killed")) == [ev.EngineFailed("a/e")]
    hosts = Hosts("a")
    assert list(hosts.roster.lost(hosts.desks["a"], "bye", for_good=True)) == [ev.EnginesLeft(["a/e"])]


def test_who_leaves_in_peace_has_not_failed() -> None:
    """An engine is dead whose host leaves in the middle of its requests; else it is only gone, and with it what its
    host's functions had begun."""
    hosts = Hosts("a")
    hosts.execute(do.StartSample(group(7).samples[0]))  # here
    one = group(0)
    hosts.execute(do.StartSample(one.samples[0]))
    assert list(hosts.roster.lost(hosts.desks["a"], "bye", for_good=True)) == [
        ev.EnginesLeft(["a/e"]), ev.FunctionsLost([0]),
    ]  # fmt: skip
    hosts = Hosts("a")
    hosts.execute(do.Submit(attempt_of(one.samples[0], "a/e")))
    assert [type(e) for e in hosts.roster.lost(hosts.desks["a"], "bye", for_good=True)] == [
        ev.EngineFailed, ev.AttemptFailed, ev.EnginesLeft,
    ]  # fmt: skip


def test_what_is_asked_of_a_dead_host_is_answered_at_once() -> None:
    """Nobody waits for it: requests fail, fences end, probes and calls say that nobody answers."""
    hosts = Hosts("a")
    list(hosts.roster.lost(hosts.desks["a"], "killed"))
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


def test_a_host_that_joins_anew_ends_its_older_connection() -> None:
    """Commands go to the new one; that the old one ends, is no news then."""
    hosts = Hosts("a")
    old, new = hosts.desks["a"], hosts.join("a", 5.0)
    assert [type(e) for e in hosts.posted] == [ev.EnginesJoined, ev.EngineFailed, ev.EnginesJoined]
    hosts.execute(do.ProbeEngine("a/e", 1))
    assert old.take() is None
    assert new.take() is not None
    assert list(hosts.roster.lost(old, "its socket is closed")) == []
    assert hosts.roster.desks == [new]


def test_a_host_is_overdue_by_its_own_last_word() -> None:
    """What an older connection says is no sign of life of the new one."""
    hosts = Hosts("a", "b")
    hosts.roster.heard(hosts.desks["b"], 6.0)
    assert list(hosts.roster.overdue(8.0)) == [hosts.desks["a"]]
    new = hosts.join("a", 9.0)
    hosts.roster.heard(hosts.desks["b"], 12.0)
    for now in (12.0, 16.0):
        hosts.roster.heard(hosts.desks["a"], now)
        assert not hosts.roster.overdue(now)
    assert list(hosts.roster.overdue(17.0)) == [new]


def test_a_host_that_does_not_end_what_it_must_is_overdue() -> None:
    """Signs of life are not enough: a request that was to end at once would hold up a step for ever."""
    hosts = Hosts("a")
    attempt = attempt_of(group(0).samples[0], "a/e")
    hosts.execute(do.Submit(attempt))
    hosts.execute(do.Fence("a/e", (attempt.id,)))
    for now in (1.0, 5.0, 8.9):
        hosts.roster.heard(hosts.desks["a"], now)
        assert not hosts.roster.overdue(now)
    hosts.roster.heard(hosts.desks["a"], 9.0)
    (why,) = hosts.roster.overdue(9.0).values()
    assert "still run" in why
