"""Weight updates, evaluations and restarts for ``trainer_player``: servers that answer, refuse, are silent, or die."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import numpy as np
from trainer_books import Books
from trainer_player import Request, Server, TrainerPlayer, Update

from april.core import commands as do
from april.core import events as ev
from april.core import snapshot
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings
from april.core.state import RolloutCore
from april.core.types import AttemptFailure, OnStale, Prompt, TimerKind
from april.core.versions import PolicyVersion
from april.errors import CheckpointError

DONE, REFUSED, UNREACHABLE = ev.CallResult.DONE, ev.CallResult.REFUSED, ev.CallResult.UNREACHABLE



class Saved(NamedTuple):
    """A state, what is true of the history that it is of, and the settings that it was saved under."""

    state: bytes
    books: Books
    settings: CoreSettings


class UpdatingPlayer(TrainerPlayer):
    """Adds everything that moves weights."""

    # ---------------------------------------------------------------- what the core asks of servers

    def on_StartTimer(self, command: do.StartTimer) -> None:
        """Runs out when the life says so."""
        assert command.seconds > 0
        self.timers.append(command.timer)

    def on_ProbeEngine(self, command: do.ProbeEngine) -> None:
        """Answered later."""
        self.probes.append(command)

    def on_PauseEngine(self, command: do.PauseEngine) -> None:
        """As all calls; one that runs is cancelled."""
        self.calls[command.engine] = command

    on_ResumeEngine = on_PauseEngine

    def on_LoadEngine(self, command: do.LoadEngine) -> None:
        """No weights are written under requests, nor for an update that was cancelled in time."""
        server = self.servers[command.engine]
        assert not server.open, "weights are loaded by a server that is not paused"
        assert not any(r.server is server for r in self.running.values())
        if command.version > self.core.clock.current:
            update = self.updates[min(self.updates)]
            assert not update.cancelled
            update.loads += 1
        self.calls[command.engine] = command

    def answer(self, *, well: bool = False) -> None:
        """A call of a server ends, or is lost."""
        name = self.rng.choice(sorted(self.calls))
        command, server = self.calls.pop(name), self.servers[name]
        result = DONE if well or self.rng.random() < 0.8 else self.rng.choice(list(ev.CallResult))
        if not server.alive:
            result = UNREACHABLE
        if isinstance(command, do.LoadEngine):
            handed_over = self._weights_of(command.version) if command.path is None else ""
            if result is DONE and command.path is None and server.weights != handed_over:
                result = REFUSED  # it was started anew since the transfer, and sees that
            if result is DONE:
                server.weights, server.lost = command.path or server.weights, False
            elif result is UNREACHABLE:
                server.weights, server.lost = self.rng.choice(["half", command.path or "half"]), True
        elif result is DONE or (result is UNREACHABLE and self.rng.random() < 0.5):
            server.open = isinstance(command, do.ResumeEngine)
        self.seen[f"{type(command).__name__} {result}"] += 1
        self.post(ev.EngineCallEnded(name, command.call, result, f"{name}: {result}"))

    def _weights_of(self, version: PolicyVersion) -> str:
        """The present ones, or those of the update that runs."""
        return self.books.weights.get(version) or self.updates[min(self.updates)].weights

    def probe_answered(self) -> None:
        """A server says how it is."""
        probe = self.probes.pop(self.rng.randrange(len(self.probes)))
        server = self.servers[probe.engine]
        event = ev.EngineProbed(
            engine=probe.engine, probe=probe.probe, answered=server.alive, ok=server.alive, current=not server.lost
        )
        if server.lost and server.alive:
            for request in self.at(server):
                request.doubtful = True
        self.post(event)

    def at(self, server: Server) -> list[Request]:
        """Its requests."""
        return [r for r in self.running.values() if r.server is server]

    def die(self) -> None:
        """A server dies in the middle of its requests; the next process has the weights of the start."""
        server = self.rng.choice(list(self.servers.values()))
        requests = self.at(server)
        if not requests:
            return
        server.alive, server.weights, server.lost = False, "start", True
        self.seen["died"] += 1
        for request in requests:
            self.break_off(request.attempt.id, AttemptFailure.BROKE_OFF)

    def lose_weights(self) -> None:
        """Somebody else gives a server other weights, which is found out."""
        name = self.rng.choice(sorted(self.servers))
        server = self.servers[name]
        if self.books.version == (0, 0) or name in self.calls:
            return  # those of the start are taken for granted until then
        server.weights, server.lost = "of others", True
        for request in self.at(server):
            request.doubtful = True
        self.seen["lost its weights"] += 1
        self.post(ev.EngineStale(name))
        self.post(ev.EngineFailed(name))

    def stall(self) -> None:
        """A server is silent about a request."""
        request = self.running[self.rng.choice(sorted(self.running))]
        request.stalled = True
        self.causes["failed", request.key[0]] += 1
        self.seen["stalled"] += 1
        self.post(ev.AttemptStalled(request.attempt.id, 9.0))

    def fire(self, *kinds: TimerKind) -> None:
        """A timer of these kinds runs out, in any order."""
        if due := [t for t in self.timers if t.kind in kinds]:
            timer = self.rng.choice(due)
            self.timers.remove(timer)
            self.causes["outage", 0] += timer.kind is TimerKind.OUTAGE
            self.post(ev.TimerFired(timer))

    # ---------------------------------------------------------------- the trainer's weights

    def ask_update(self, trained: int | None, *, transfers: bool = False) -> None:
        """New weights, from the batches up to ``trained``."""
        self.said += 1
        self.updates[self.said] = update = Update(f"weights {self.said}", trained, transfers)
        path = None if transfers else update.weights
        self.post(ev.UpdateRequested(update=self.said, path=path, transfers=transfers, trained=trained))

    def cancel_update(self) -> None:
        """Nobody waits for it any more: it has no effect, unless engines load already."""
        number = self.rng.choice(sorted(self.updates))
        update = self.updates[number]
        update.cancelled |= not update.loads
        self.handing = None if self.handing == number else self.handing
        self.seen[f"cancelled, loads={update.loads > 0}"] += 1
        self.post(ev.UpdateCancelled(number))

    def on_HandOver(self, command: do.HandOver) -> None:
        """The trainer may write now."""
        assert command.update == min(self.updates)
        assert not self.updates[command.update].cancelled
        assert not self.running
        self.handing = command.update

    def hand_over(self, *, well: bool = False) -> None:
        """It writes into all servers, or breaks off in the middle."""
        number, self.handing = self.handing, None
        assert number is not None
        broken = not well and self.rng.random() < 0.2
        for server in self.servers.values():
            if server.alive and not server.open:
                server.weights = "half" if broken else self.updates[number].weights
                server.lost = broken
        self.seen[f"handed over, broken={broken}"] += 1
        self.post(ev.HandedOver(number, "no route" if broken else None))

    def on_UpdateEnded(self, command: do.UpdateEnded) -> None:
        """It was adopted, or had no effect."""
        update = self.updates.pop(command.update)
        assert command.version == self.books.version
        assert update.adopted or update.cancelled or command.failed is not None
        assert not (update.adopted and update.cancelled)
        self.handing = None if self.handing == command.update else self.handing
        self.seen[f"update: adopted={update.adopted}"] += 1
        self.seen["one update of several"] += update.adopted and len(self.trains) > 1
        if update.adopted:
            self.trains = []

    trains: list[int] = []  # noqa: RUF012 - replaced, never changed
    """Batches that are being trained together."""

    # ---------------------------------------------------------------- pauses and evaluations

    def pause(self) -> None:
        """Somebody wants quiet."""
        self.held = True
        self.post(ev.PauseRequested())

    def resume(self) -> None:
        """No longer."""
        self.held = False
        self.post(ev.Resumed())

    def on_Paused(self, command: do.Paused) -> None:
        """Nothing runs."""
        assert self.held
        assert not self.running

    def evaluate(self) -> None:
        """A few prompts, under the present weights."""
        self.said += 1
        self.evaluations[self.said] = request = ev.EvaluationRequested(
            evaluation=self.said, prompts=[Prompt(np.array([7, k], np.int32)) for k in range(self.rng.randint(1, 3))],
            n_samples=self.rng.randint(1, 2), sampling=SamplingParams(max_tokens=12), seed=5,
            functions_at_once=self.rng.choice([None, 1, self.settings.max_in_flight]),
        )  # fmt: skip
        self.post(request)

    def cancel_evaluation(self) -> None:
        """Nobody waits for it."""
        self.post(ev.EvaluationCancelled(self.rng.choice(sorted(self.evaluations))))

    def on_EvaluationDone(self, command: do.EvaluationDone) -> None:
        """Every response is there, whole, under one version."""
        request = self.evaluations.pop(command.evaluation)
        version = self.under.pop(command.evaluation)
        assert [len(group.samples) for group in command.groups] == [request.n_samples] * len(request.prompts)
        for sample in (sample for group in command.groups for sample in group.samples):
            sent = self.evaluated.pop(tuple(sample.id))
            assert sample.tape.tokens.tolist() == [token.id for token in sent]
            assert {token.version for token in sent} == {version} == {self.books.version}
            self.functions.pop(tuple(sample.id))
        self.seen["evaluated"] += 1

    def on_EvaluationFailed(self, command: do.EvaluationFailed) -> None:
        """Nothing of it runs any more."""
        del self.evaluations[command.evaluation]
        self.under.pop(command.evaluation, None)
        self.seen["evaluation failed"] += 1

    # ---------------------------------------------------------------- restarts

    def save(self, trained_through: int | None) -> Saved:
        """A checkpoint, taken now."""
        running = [
            (r.key, r.tokens, r.lost or ("unknown_weights" if r.doubtful else None))
            for r in self.running.values()
            if r.key[0] >= 0
        ]
        keeps = not (self.settings.has_filter or self.settings.group_reward)
        before = repr(self.core)
        state = snapshot.take(self.core, trained_through)
        assert repr(self.core) == before
        books = self.books.saved(trained_through, running, keeps=keeps)
        return Saved(msgspec.msgpack.encode(state), books, self.settings)

    def restart(self, saved: Saved, settings: CoreSettings) -> None:
        """The process dies at this moment, another one goes on from a checkpoint, with these settings if it can."""
        state, books = msgspec.msgpack.decode(saved.state), saved.books.copy()
        in_part = settings.whole_groups and any(
            group.delivered or (group.cohort and any((g, i) not in books.finished for i in group.members))
            for g, group in books.groups.items()
            if group.members
        )
        self.seen["part of a group refused"] += in_part
        try:
            snapshot.restore(RolloutCore(settings, self.limits), state)
        except CheckpointError:
            self.seen["other settings refused"] += 1
            assert settings.on_stale is OnStale.FINISH or in_part, "refused for no reason"
            settings = saved.settings
        else:
            assert not in_part, "what counts in part is to be delivered whole"
        books.as_promised &= settings.on_stale is OnStale.FINISH
        books.quorum = settings.group_quorum
        if settings.max_staleness != saved.settings.max_staleness:
            books.bound = math.inf
        self.settings = settings
        self.new_process()
        for server in self.servers.values():
            server.weights, server.lost = "of before", True
        self.trains = []
        self.pause()
        self.said += 1
        self.updates[self.said] = update = Update(f"restored {self.said}", None, transfers=False)
        books.weights[books.version] = update.weights
        self.restored = state, books
        self.post(
            ev.UpdateRequested(
                update=self.said, version=PolicyVersion(*books.version), path=update.weights, restores=True
            )
        )
        while self.calls:
            self.answer(well=True)
        assert not self.updates
        self.resume()

    def on_Restore(self, command: do.Restore) -> None:
        """Engines have the weights of the state."""
        state, self.books = self.restored
        snapshot.restore(self.core, state)
        for group in self.books.held:
            self._counts_now(group)
        self.updates[command.update].adopted = True
        assert self.core.clock.current == self.books.version
        self.seen["restarted"] += 1
        self.post(ev.Restored(command.update))
