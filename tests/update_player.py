"""Plays servers and a trainer around the core's weight updates, with all that goes wrong there, from a seed.

What a server really has (its weights, its gate) is kept here and never read from the core: whatever the core sends to a
server is checked against it at once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from core_machine import EOS, CoreMachine, settings

from april.core import commands as do
from april.core import events as ev
from april.core.settings import EngineLimits
from april.core.types import Attempt, AttemptFailure, OnWeightUpdate, Timer, TimerKind
from april.core.versions import FIRST_VERSION, PolicyVersion


def limits_of(name: str) -> EngineLimits:
    return EngineLimits(name, 4096, None, (EOS,), remote=True, in_flight_updates=tuple(OnWeightUpdate))


Call = do.PauseEngine | do.LoadEngine | do.ResumeEngine
START = "start"


@dataclass
class Server:
    """The truth about one engine."""

    weights: str = START
    open: bool = True
    alive: bool = True
    lost: bool = False
    """It has other weights than it was given, and says so when it is asked."""
    unseen: bool = False
    """It has lost them without a word, and the core has had no chance to find out."""


@dataclass
class Update:
    """One that was asked for and has not ended."""

    weights: str
    transfers: bool
    sends: bool = False
    """april hands them over itself, and says of each engine what it got."""
    cancelled: bool = False
    loads: int = 0
    """Engines that were asked to load for it."""


class UpdatePlayer(CoreMachine):
    """``silent``: servers may also lose their weights without a word. ``in_flight``: what becomes of requests."""

    def __init__(
        self, seed: int, engines: int, *, silent: bool = False, in_flight: OnWeightUpdate = OnWeightUpdate.RESUBMIT
    ) -> None:
        self.rng = random.Random(seed)
        self.silent = silent
        self.cuts, self.keeps = in_flight is OnWeightUpdate.RESUBMIT, in_flight is OnWeightUpdate.KEEP
        self.under: dict[str, PolicyVersion] = {}
        """The version under which each request was sent."""
        limits = tuple(limits_of(f"e{i}") for i in range(engines))
        self.servers = {e.name: Server() for e in limits}
        self.contents = {FIRST_VERSION: START}
        """What each version stands for."""
        self.directories: dict[str, str] = {}
        """What those hold that were written over; the others what they are called."""
        self.read: dict[int, str] = {}
        """By call: what its directory held when it began."""
        self.calls: dict[str, Call] = {}
        self.probes: list[do.ProbeEngine] = []
        self.timers: list[Timer] = []
        self.updates: dict[int, Update] = {}
        self.asked = 0
        self.handing: int | None = None
        self.handed_to: tuple[str, ...] = ()
        self.failed: int | None = None
        """Of the update that ended last."""
        self.seen: Counter[str] = Counter()
        """What has happened, so that a test can say that it did."""
        super().__init__(
            settings(
                n=2, samples=2, max_attempt_failures=50, abort_deadline_s=2.0, max_staleness=9,
                on_weight_update=in_flight,
            ),
            lambda g, i: 4 + (3 * g + i) % 9, engines=limits,
        )  # fmt: skip

    # ---------------------------------------------------------------- what runs on servers

    def _sound(self, attempt: Attempt) -> PolicyVersion | None:
        """The version of the weights under which a request goes on now; None: its server stands, or says no version."""
        server, current = self.servers[attempt.engine], self.core.clock.current
        versions = [v for v, weights in self.contents.items() if weights == server.weights and v <= current]
        sound = server.open and server.alive and not server.lost
        return max(versions, default=None) if sound else None

    def version_at(self, attempt: Attempt) -> PolicyVersion:
        """That of its server's weights, where requests live through updates."""
        return super().version_at(attempt) if self.cuts else self._sound(attempt) or self.core.clock.current

    def tokens(self, attempt_id: str, count: int) -> bool:
        """As its server generates them: where it keeps requests, none while it is paused."""
        attempt = self.in_flight[attempt_id]
        if self.cuts or attempt.engine not in self.servers:
            return super().tokens(attempt_id, count)
        version, had, state = self._sound(attempt), attempt.tape.count, self.servers[attempt.engine]
        if version is None and state.open and state.alive and not (state.lost or attempt_id in self.abort_asked):
            raise AssertionError(f"it goes on under {state.weights}")
        complete = super().tokens(attempt_id, 0 if version is None else count)
        if attempt.tape.count > had and version is not None:
            self.seen["goes on over an update"] += version > self.under[attempt_id]
            first, _ = attempt.tape.spans[0]
            if self.keeps and attempt_id not in self.abort_asked:
                assert first == self.under[attempt_id], "it has begun over keys of older weights"
        return complete

    def _silent(self, engine: str) -> tuple[str, ...]:
        return tuple(i for i, a in self.in_flight.items() if a.engine == engine and not a.tape.count)

    # ---------------------------------------------------------------- what the core asks for

    def _execute(self, command: do.Command) -> None:
        super()._execute(command)
        current = self.core.clock.current
        match command:
            case do.Submit(attempt):
                server, self.under[attempt.id] = self.servers[attempt.engine], current
                assert server.open, "sent to an engine that is paused"
                assert server.unseen or (server.weights, server.lost) == (self.contents[current], False), (
                    f"sent under {self.contents[current]} to an engine with {server.weights}"
                )
            case do.PauseEngine() | do.ResumeEngine():
                self.calls[command.engine] = command
            case do.LoadEngine(engine=engine, version=version, path=path):
                assert not self.servers[engine].open, "weights are written under an engine that is open"
                here = [a for a in self.in_flight.values() if a.engine == engine]
                assert not here or (not self.cuts and version > current)
                assert not self.keeps or all(a.tape.count for a in here), "a request without a token is kept"
                if version > current:
                    assert not (self.cuts and self.in_flight)
                    update = self.updates[min(self.updates)]
                    assert not update.cancelled, "an update that was cancelled in time loads all the same"
                    update.loads += 1
                    self.contents[version] = update.weights
                else:
                    assert path is None or path == self.contents[version]
                self.calls[engine] = command
                self.read[command.call] = "" if path is None else self.directories.get(path, path)
            case do.ProbeEngine():
                self.probes.append(command)
            case do.StartTimer(timer, seconds):
                assert seconds > 0
                self.timers.append(timer)
            case do.HandOver(update, engines):
                assert not any(self.servers[name].open for name in engines), "written while open"
                self.handed_to = engines
                assert self.handing is None
                assert update == min(self.updates)
                assert not self.updates[update].cancelled
                assert not (self.cuts and self.in_flight)
                self.handing = update
            case do.Deliver(batch):
                for part in (part for sample in batch.samples for part in sample.segments):
                    under = self.under[part.attempt_id]
                    assert part.over == (under if self.keeps and under < part.version else None)
                    self.seen["delivered over an update"] += under < part.version
            case do.UpdateEnded(number, version, failed):
                update, self.failed = self.updates.pop(number), failed
                assert version == current
                if update.loads and self.failed is None and not update.cancelled:
                    assert self.contents[version] == update.weights
                if not update.loads:
                    assert self.contents[version] != update.weights, "new weights that no engine has loaded"
                    assert update.cancelled or self.failed is not None
                self.handing = None if self.handing == number else self.handing
                self.seen[f"ended: cancelled={update.cancelled}, failed={self.failed is not None}"] += 1

    # ---------------------------------------------------------------- what may happen

    def one_event(self) -> None:
        possible = {
            self.ask_batch: self.core.step is None
            and (self.core.updates.half_updated is None or self.rng.random() < 0.05),
            self.attempt: self.in_flight,
            self.abort_answered: self.abort_asked and self.rng.random() < 0.7,
            self.ask_update: len(self.updates) < 3 and self.rng.random() < 0.2,
            self.cancel: self.updates and self.rng.random() < 0.1,
            self.hand_over: self.handing is not None,
            self.answer: self.calls,
            self.probe_answered: self.probes,
            self.fire: self.timers and self.rng.random() < 0.5,
            self.die: self.rng.random() < 0.1,
            self.revive: not all(s.alive for s in self.servers.values()) and self.rng.random() < 0.4,
            self.lose_weights: self.silent and self.rng.random() < 0.1,
            self.late: self.rng.random() < 0.1,
            self.write_over: self.rng.random() < 0.02,
            self.hold: self.rng.random() < (0.4 if self.core.pause_held else 0.05),
        }
        if events := [event for event, now in possible.items() if now]:
            self.rng.choice(events)()
        broken = self.core.updates.half_updated is not None and not self.updates
        assert not (broken and self.core.batch_wanted), "a batch is waited for that cannot come before an update"
        self.seen["told of weights that are not whole"] += broken and bool(self.errors)

    def ask_batch(self) -> None:
        """The trainer wants a batch; it has trained on those before."""
        for batch in list(self.core.leased)[: self.rng.randint(0, 3)]:
            self.post(ev.BatchCommitted(batch))
        self.post(ev.StepRequested())

    def attempt(self) -> None:
        """A request goes on, ends, or breaks off with its server."""
        attempt_id = self.rng.choice(sorted(self.in_flight))
        attempt = self.in_flight[attempt_id]
        server = self.servers[attempt.engine]  # one that says the weights of each token says foreign ones too
        if not server.alive or (server.lost and not self.cuts) or self.rng.random() < 0.05:
            del self.in_flight[attempt_id]
            self.abort_asked.discard(attempt_id)
            kind = self.rng.choice([AttemptFailure.BROKE_OFF, AttemptFailure.BUSY])
            self.post(ev.AttemptFailed.of(attempt, "reset", kind))
        elif self.tokens(attempt_id, self.rng.randint(1, 4)):
            self.end(attempt_id, 0)

    def abort_answered(self) -> None:
        """A request that was asked to end does."""
        attempt_id = self.rng.choice(sorted(self.abort_asked))
        if self.servers[self.in_flight[attempt_id].engine].alive:
            self.end(attempt_id, self.rng.randint(0, 1))

    def ask_update(self, *, transfers: bool | None = None) -> None:
        """New weights, from a directory or by a transfer, perhaps while another update runs."""
        self.asked += 1
        self.seen["second update meanwhile"] += bool(self.updates)
        transfers = self.rng.random() < 0.3 if transfers is None else transfers
        weights = f"transfer {self.asked}" if transfers else f"/{self.asked}"
        sends = transfers and self.rng.random() < 0.6
        self.updates[self.asked] = Update(weights, transfers, sends)
        path = None if transfers else weights
        trained = min(self.core.leased, default=None)
        self.post(
            ev.UpdateRequested(update=self.asked, path=path, transfers=transfers, sends=sends, trained=trained)
        )

    def cancel(self) -> None:
        """Nobody waits for an update any more."""
        number = self.rng.choice(sorted(self.updates))
        running = number == min(self.updates)
        self.seen[f"cancelled while {self.core.updates.phase if running else 'it waits'}"] += 1
        self.updates[number].cancelled |= not self.updates[number].loads
        self.handing = None if self.handing == number else self.handing  # a transfer that had not begun never will
        self.post(ev.UpdateCancelled(number))

    def hand_over(self, *, well: bool = False) -> None:
        """The trainer writes its weights into all servers, or breaks off in the middle."""
        number, self.handing = self.handing, None
        assert number is not None
        states = self.core.engines.states
        assert all(not s.open or states[name].quarantined for name, s in self.servers.items()), "written while open"
        if self.updates[number].sends:
            self._send(number, well=well)
            return
        broken = not well and self.rng.random() < 0.3
        for server in self.servers.values():
            if server.alive and (self.rng.random() < 0.5 or not (broken or server.open)):
                server.weights = "half" if broken else self.updates[number].weights
                server.lost &= broken
        self.seen[f"transfer broken={broken}"] += 1
        self.post(ev.HandedOver(number, "no route" if broken else None))

    def _send(self, number: int, *, well: bool) -> None:
        """april sends to those that are paused: each gets everything, a part, or nothing, and all of that is known."""
        broken, fates = not well and self.rng.random() < 0.2, []
        for name in self.handed_to:
            if name not in self.servers:  # it has left meanwhile
                fates.append(ev.TransferFailure(name, f"{name} is not there any more", torn=False))
                continue
            server = self.servers[name]
            torn = not well and self.rng.random() < 0.5
            if broken or not server.alive or (not well and self.rng.random() < 0.2):
                fates.append(ev.TransferFailure(name, f"{name} did not get them", torn))
                if torn and server.alive:
                    server.weights, server.lost, server.unseen = "half", True, False
                self.seen[f"sent to, torn={torn}"] += 1
            else:
                server.weights, server.lost, server.unseen = self.updates[number].weights, False, False
        error = "nobody got them" if len(fates) == len(self.handed_to) else None
        self.seen[f"sent, error={error is not None}"] += 1
        self.post(ev.HandedOver(number, error, tuple(fates)))

    def answer(self, *, well: bool = False) -> None:
        """A call of an engine ends, or is lost."""
        name = self.rng.choice(sorted(self.calls))
        command, server = self.calls.pop(name), self.servers[name]
        results = [result for result in ev.CallResult if result is not ev.CallResult.OTHER_CONTENT]
        result = ev.CallResult.DONE if well or self.rng.random() < 0.7 else self.rng.choice(results)
        if not server.alive:
            result = ev.CallResult.UNREACHABLE
        done, unheard = result is ev.CallResult.DONE, result is ev.CallResult.UNREACHABLE
        content = ""
        if isinstance(command, do.LoadEngine):
            content = self.read.pop(command.call)
            if command.contents and content not in command.contents:
                result = ev.CallResult.OTHER_CONTENT
            elif done and command.path is not None and content != self.directories.get(command.path, command.path):
                result = ev.CallResult.UNREACHABLE  # it was written over meanwhile
                self.seen["written over while it was loaded"] += 1
            if done and command.path is None and server.lost and server.weights != self.contents[command.version]:
                result = ev.CallResult.REFUSED  # it was started anew since the transfer, and sees that
            self._load(command, server, result, well=well)
        elif done or (unheard and self.rng.random() < 0.5):
            server.open = isinstance(command, do.ResumeEngine)
        self.seen[f"{type(command).__name__} {result}"] += 1
        content = content if result is ev.CallResult.DONE else ""
        silent = self._silent(name) if self.keeps and done and isinstance(command, do.PauseEngine) else ()
        self.post(ev.EngineCallEnded(name, command.call, result, f"{name}: {result}", content, silent))

    def _load(self, command: do.LoadEngine, server: Server, result: ev.CallResult, *, well: bool) -> None:
        here = server.weights
        if result is ev.CallResult.DONE:
            lies = self.silent and not well and self.rng.random() < 0.1
            server.lost = server.unseen = lies
            server.weights = "old ones" if lies else command.path or here
            self.seen["says yes and did not"] += lies
        elif result is ev.CallResult.UNREACHABLE:
            server.lost = self.rng.random() < 0.7  # one that never said so may think that all is well
            server.weights = here if command.path is None else self.rng.choice([here, "half", command.path])
        elif result is ev.CallResult.REFUSED and command.path is not None and self.rng.random() < 0.5:
            server.lost, server.weights = True, "half"
            self.seen["refused and torn"] += 1

    def probe_answered(self, *, well: bool = False) -> None:
        """A server says how it is, perhaps late."""
        probe = self.probes.pop(self.rng.randrange(len(self.probes)))
        name, server = probe.engine, self.servers[probe.engine]
        answered = server.alive and (well or self.rng.random() < 0.9)
        ok = well or self.rng.random() < 0.9
        self.post(ev.EngineProbed(engine=name, probe=probe.probe, answered=answered, ok=ok, current=not server.lost))
        if not self.core.engines.states[name].loaded:
            server.unseen = False

    def fire(self) -> None:
        """A timer runs out, in any order."""
        timer = self.timers.pop(self.rng.randrange(len(self.timers)))
        if timer.kind is not TimerKind.OUTAGE:
            self.post(ev.TimerFired(timer))

    def die(self) -> None:
        """A server dies with all it has; the next process has the weights of the start, and no label."""
        name = self.rng.choice(sorted(self.servers))
        server = self.servers[name]
        call = self.calls.get(name)
        self.seen[f"dies while {self.core.updates.phase}{' and is called' if call else ''}"] += 1
        believed = bool(self.core.engines.states[name].loaded)
        if self.silent or any(a.engine == name for a in self.in_flight.values()) or not believed:
            server.alive, server.weights, server.lost, server.unseen = False, START, True, believed

    def _used(self, name: str) -> bool:
        state = self.core.engines.states[name]
        return not state.quarantined and self.core.clock.current in state.loaded

    def revive(self) -> None:
        self.rng.choice([s for s in self.servers.values() if not s.alive]).alive = True

    def lose_weights(self) -> None:
        """Somebody else changes the weights of a server; before the first update its start's are taken for granted."""
        if self.core.clock.current == FIRST_VERSION:
            return
        server = self.rng.choice(list(self.servers.values()))
        server.weights, server.lost, server.unseen = "of others", True, True

    def write_over(self) -> None:
        """The trainer writes its next weights where the present ones are, or those that are being loaded."""
        paths = {c.path for c in self.calls.values() if isinstance(c, do.LoadEngine) and c.path is not None}
        if (present := self.contents[self.core.clock.current]).startswith("/"):
            paths.add(present)
        if paths:
            path = self.rng.choice(sorted(paths))
            self.directories[path] = f"{path} written over {len(self.seen)} {self.directories.get(path, '')}"
            self.seen["written over"] += 1

    def late(self) -> None:
        """Answers to calls, probes and updates that are over: nothing happens."""
        name = self.rng.choice(sorted(self.servers))
        for event in (
            ev.EngineCallEnded(name, -1, ev.CallResult.DONE),
            ev.EngineProbed(engine=name, probe=-1, answered=True, ok=True, current=True),
            ev.HandedOver(-1), ev.UpdateCancelled(-1), ev.TimerFired(Timer(TimerKind.PROBE, -1, name)),
        ):  # fmt: skip
            assert self.post(event) == []

    def hold(self) -> None:
        """Somebody pauses generation, or lets it go on."""
        self.post(ev.Resumed() if self.core.pause_held else ev.PauseRequested())

    # ---------------------------------------------------------------- when troubles are over

    def calm(self, until: object) -> None:
        """Everybody answers, truthfully, until a condition holds."""
        assert callable(until)
        self.silent = False
        if self.core.pause_held:
            self.post(ev.Resumed())
        for server in self.servers.values():
            server.alive = True
        for _ in range(2000):
            if until():
                return
            if self.handing is not None:
                self.hand_over(well=True)
            elif self.calls:
                self.answer(well=True)
            elif self.probes:
                self.probe_answered(well=True)
            elif self.abort_asked:
                self.end(min(self.abort_asked), 0)
            elif self.in_flight and self.rng.random() < 0.7:
                self.attempt()
            elif self.timers:
                self.fire()
        raise AssertionError(f"it never comes to an end: {self.core!r} {self.core.updates.phase}")

    def end_well(self) -> None:
        """All updates end; one more reaches every engine; a batch comes, and every engine is used under its version."""
        self.calm(lambda: not self.updates)
        self.ask_update(transfers=False)
        self.calm(lambda: not self.updates)
        assert self.failed is None
        assert self.core.updates.half_updated is None
        for _ in range(2):
            batches = len(self.batches)
            for batch in list(self.core.leased):
                self.post(ev.BatchCommitted(batch))
            if self.core.step is None:
                self.post(ev.StepRequested())
            self.calm(lambda batches=batches: len(self.batches) > batches)
        self.calm(lambda: all(map(self._used, self.servers)))
        present = self.contents[self.core.clock.current]
        assert {(s.weights, s.open, s.lost) for s in self.servers.values()} == {(present, True, False)}
        self.check_ledger()


def play(seeds: Iterable[int], player_of: Callable[[int], UpdatePlayer], events: int) -> Counter[str]:
    """Run of each seed so many random events, with everything checked after each, and its end; what has happened."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            player = player_of(seed)
            for _ in range(events):
                player.one_event()
            player.end_well()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seen += player.seen
    return seen
