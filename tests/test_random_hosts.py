"""Hosts at random: engines and functions that join, die, come back and leave, whatever else happens to a trainer.

What hosts do is drawn from a generator of its own. A request that dies with its host has brought nothing: what it had
streamed was never reported. The same books as in ``test_random_trainers``: tokens as servers sent them under the
weights that these really had, each prompt settled once, group cohorts fixed, nothing trained too old. Besides, nothing
is asked of what is dead. More lives: ``make random``, or ``APRIL_RANDOM_LIVES=2000`` before pytest.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from test_random_trainers import TimedLife
from trainer_books import Key
from trainer_lives import Life
from trainer_player import EOS, Request, Server, TrainerPlayer

from april.core import commands as do
from april.core import events as ev
from april.core.event_pump import Observed
from april.core.run_times import SHARES, TrainerTime
from april.core.settings import CoreSettings, EngineLimits
from april.core.tape import AttemptTape
from april.core.types import AttemptFailure, GenerationMode
from april.record.file import RunRecord
from april.record.recorder import Recorder
from april.record.replay import replay

FIRST = "h0"
"""Brings the engines with which a process begins."""


@dataclass(eq=False)
class Host:
    """A process with engines and functions; one that is known and not alive has died, and may come back."""

    engines: tuple[EngineLimits, ...]
    alive: bool = False
    known: bool = False
    """The core has its engines."""
    servers: dict[str, Server] = field(default_factory=dict)
    """As they were, of those that outlive it."""


class HostLife(Life):
    """Functions of a group are together on one host; what is asked of one that is dead is an error."""

    def __init__(
        self, seed: int, mode: GenerationMode, wanted: Callable[[CoreSettings], bool] = lambda settings: True
    ) -> None:
        self.luck = random.Random(f"hosts {seed}")
        self.unrest = self.luck.choice([0.02, 0.05, 0.15])
        self.losing: set[int] = set()
        """Groups whose functions die at this moment."""
        super().__init__(seed, mode, wanted)

    def new_process(self) -> None:
        """Hosts must join anew, but the first one."""
        super().new_process()
        self.hosts = {FIRST: Host(self.limits, alive=True, known=True)}
        for number in range(1, 4):
            names = [f"h{number}/e{i}" for i in range(self.luck.randint(0, 2))]
            most, extras = self.luck.choice([None, 2]), self.settings.extras
            engines = (EngineLimits(n, 4096, most, (EOS,), remote=True, extras=extras) for n in names)
            self.hosts[f"h{number}"] = Host(tuple(engines))
        self.homes: dict[int, str] = {}

    def one_event(self) -> None:
        """Something happens to a host, or else."""
        if self.luck.random() < self.unrest:
            self.host_event()
        else:
            super().one_event()

    def host_event(self) -> None:
        """One joins, dies, or leaves for good."""
        name = self.luck.choice(sorted(self.hosts))
        host = self.hosts[name]
        if not host.alive:
            self.join(name)
        elif self.luck.random() < 0.7:
            self.dies(name)
        else:
            self.leave(name)

    # ---------------------------------------------------------------- hosts

    def join(self, name: str) -> None:
        """It comes, for the first time or again, with servers that have gone on, or new ones."""
        host = self.hosts[name]
        self.seen["host came back" if host.known else "host joined"] += 1
        self.seen["joined during an update"] += any(u.loads for u in self.updates.values())
        late: list[ev.Event] = []
        for limits in host.engines:
            engine = limits.name
            before = host.servers.pop(engine, None)
            server = before if before is not None and self.luck.random() < 0.5 else Server()
            # nobody has told its host's new client what it should have
            server.alive, server.lost = True, self.books.version != (0, 0) and self.luck.random() < 0.5
            self.servers[engine] = server
            if (call := self.calls.pop(engine, None)) is not None:
                late.append(ev.EngineCallEnded(engine, call.call, ev.CallResult.DONE))
            for probe in [p for p in self.probes if p.engine == engine]:
                self.probes.remove(probe)
                late.append(ev.EngineProbed(engine=engine, probe=probe.probe, answered=True, ok=True, current=True))
        host.alive = host.known = True
        self.post(ev.EnginesJoined(host.engines))
        for event in late:  # of a life before
            self.seen["late answer"] += 1
            before_it = repr(self.core.engines.states[event.engine])
            assert self.core.handle(event) == []
            assert repr(self.core.engines.states[event.engine]) == before_it

    def dies(self, name: str) -> None:
        """Its link is lost: its requests fail, its engines are ill, its functions are gone; in any order."""
        host = self.hosts[name]
        host.alive = False
        self.seen["host died"] += 1
        ends = [self.engines_fail, self.functions_die]
        self.luck.shuffle(ends)
        for end in ends:
            end(name)

    def engines_fail(self, name: str) -> None:
        """Nothing was reported of what their requests had streamed."""
        host = self.hosts[name]
        for limits in host.engines:
            server = self.servers[limits.name]
            server.alive = False
            host.servers[limits.name] = server
            for request in self.at(server):
                self.forget(request)
                self.break_off(request.attempt.id, AttemptFailure.BROKE_OFF)
            self.post(ev.EngineFailed(limits.name))

    def forget(self, request: Request) -> None:
        """Its tokens were never observed."""
        self.books.sent -= len(request.tokens) if request.key[0] >= 0 else 0
        request.tokens.clear()
        request.attempt.tape = AttemptTape()

    def functions_die(self, name: str) -> None:
        """The core hears which groups were there."""
        groups = [group for group, home in self.homes.items() if home == name]
        keeps = not (self.settings.has_filter or self.settings.group_reward)
        books = self.books
        for group in groups:
            del self.homes[group]
            for key in [key for key in self.functions if key[0] == group]:
                self.seen[f"function lost: {self.functions.pop(key)}"] += 1
                self.runs[key] += 1
                if group < 0:
                    self.evaluated.pop(key, None)  # from nothing
                    self._leave(key, "failed")
            if group in books.held and group not in books.accepted and not keeps:
                for key in [key for key in books.finished if key[0] == group]:
                    books.unfinish(key)
        self.losing = set(groups)
        self.post(ev.FunctionsLost(groups))
        self.losing = set()

    def leave(self, name: str) -> None:
        """It says goodbye, with or without requests that run."""
        host = self.hosts[name]
        self.dies(name)
        self.seen["host left"] += 1
        self.seen["left during an update"] += any(e.name in self.calls for e in host.engines)
        for limits in host.engines:
            del self.servers[limits.name]
            self.calls.pop(limits.name, None)
            self.probes = [p for p in self.probes if p.engine != limits.name]
        host.known = False
        self.post(ev.EnginesLeft([e.name for e in host.engines]))
        self.seen["no engine is left"] += not self.core.engines.states

    # ---------------------------------------------------------------- what the core asks for

    def on_StartSample(self, command: do.StartSample) -> None:
        """All functions of a group have one home."""
        super().on_StartSample(command)
        alive = [name for name, host in self.hosts.items() if host.alive]
        self.homes.setdefault(command.sample.id.group, self.luck.choice([*alive, "here"]))

    def _want_score(self, keys: list[Key]) -> None:
        assert all(key in self.functions for key in keys), "what was returned is gone"
        super()._want_score(keys)

    def on_JudgeGroup(self, command: do.JudgeGroup) -> None:
        """Of what its functions have returned."""
        assert all(tuple(sample.id) in self.functions for sample in command.group.first), "what was returned is gone"
        super().on_JudgeGroup(command)

    def on_Submit(self, command: do.Submit) -> None:
        """Nothing goes to a host that is dead, nor for a function that is."""
        super().on_Submit(command)
        assert self.servers[command.attempt.engine].alive, "sent to a server that nobody reaches"
        assert self.functions[tuple(command.attempt.sample.id)] == "waiting"

    def on_Abort(self, command: do.Abort) -> None:
        """Also because a function is lost."""
        self.to_end.update(i for i in command.attempt_ids if self.running[i].key[0] in self.losing)
        super().on_Abort(command)

    def check_engines_are_full(self) -> None:
        """Places are empty wherever a host is dead or has just come."""

    # ---------------------------------------------------------------- single servers, and the end

    def revive(self) -> None:
        """A server comes back whose host is there."""
        here = [e.name for host in self.hosts.values() if host.alive for e in host.engines]
        if dead := [name for name in here if not self.servers[name].alive]:
            self.servers[self.luck.choice(dead)].alive = True

    def end_well(self) -> None:
        """Hosts that have died come back or are missed; one at least has engines."""
        for name, host in self.hosts.items():
            if not host.alive and (host.known or name == FIRST):
                self.join(name)
        super().end_well()


LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "80"))


def live(number: int, mode: GenerationMode) -> HostLife:
    """One life, to its good end."""
    life = HostLife(number, mode)
    try:
        life.happen(300)
        life.end_well()
    except BaseException as error:
        error.add_note(f"life {number}, {mode}")
        raise
    return life


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_whatever_hosts_do_nothing_is_lost(mode: GenerationMode) -> None:
    """Every promise of the books, after every event, to the last prompt; and the lives are full of hosts."""
    seen: Counter[str] = Counter()
    for number in range(LIVES // 2):
        seen += live(number, mode).seen
    for what in (
        "host joined", "host came back", "host died", "host left", "joined during an update", "left during an update",
        "no engine is left", "late answer", "restarted", "evaluated", "function lost: started",
        "function lost: waiting", "function lost: between", "function lost: scoring", "function lost: finished",
    ):  # fmt: skip
        assert seen[what], f"no life had: {what}"


class Unrecorded:
    """A core as it is before a recorder observes it."""

    def __init__(self, core: Any) -> None:
        self._core, self.handle = core, core.handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


class RecordedLife(HostLife):
    """The events of its one process are in a file."""

    def new_process(self) -> None:
        super().new_process()
        core: Any = self.core
        self.recorder = Recorder(RunRecord(self.path), Unrecorded(core), lambda: 0.0)  # type: ignore[arg-type]
        core.handle = Observed(Unrecorded(core), [self.recorder]).handle

    path: Path


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_a_recorded_life_is_decided_again(mode: GenerationMode, tmp_path: Path) -> None:
    """Engines that join and leave and functions that are lost are in the record, with all that was decided on them."""
    events: Counter[str] = Counter()
    for number in (n for n in range(24) if not HostLife(n, mode).habits.crashes):
        RecordedLife.path = tmp_path / str(number)
        life = RecordedLife(number, mode)
        life.happen(100)
        life.recorder.close()
        run = replay(life.path)
        assert run.core.tokens == life.core.tokens
        assert list(run.core.engines.states) == list(life.core.engines.states)
        events += run.events
    assert min(events[what] for what in ("EnginesJoined", "EnginesLeft", "FunctionsLost")) >= 5


class TimedHostLife(TimedLife, HostLife):
    """The witness also counts the places that there were."""

    def new_process(self) -> None:
        super().new_process()
        self.places = 0

    def post(self, event: ev.Event) -> None:
        """Places come and go with engines."""
        super().post(event)
        most = self.settings.max_in_flight
        slots = {e.name: e.max_in_flight or most for host in self.hosts.values() for e in host.engines}
        if not self.depth:
            self.places = min(most, sum(slots[name] for name in self.servers))

    def passes(self, seconds: float) -> None:
        if self.holds is not None:
            self.counted["places"] += seconds * self.places
        super().passes(seconds)

    def on_Deliver(self, command: do.Deliver) -> None:
        """The account of the step against the one kept here."""
        found = self.times.delivered(self.now_s)
        for name in ("step_s", *TrainerTime):
            assert found[name] == pytest.approx(self.counted[name])
        if self.counted["places"]:
            assert found["engines_busy"] * self.counted["places"] == pytest.approx(self.counted["busy"])
            assert sum(found[name] for name in SHARES) == pytest.approx(1.0)
            assert all(-1e-9 <= found[name] <= 1.0 + 1e-9 for name in (*SHARES, "bubble"))
            self.seen["timed"] += 1
        self.counted.clear()
        TrainerPlayer.on_Deliver(self, command)


@pytest.mark.no_cover
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_shares_are_of_the_places_that_there_were(mode: GenerationMode) -> None:
    """While engines with few slots and with many join and leave, every second of every place is counted once."""
    seen: Counter[str] = Counter()
    for number in range(12):
        life = TimedHostLife(number, mode)
        life.happen(300)
        life.end_well()
        seen += life.seen
    assert min(seen["timed"], seen["host joined"], seen["host left"]) >= 12
