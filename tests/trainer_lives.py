"""Lives of trainers that do not wait, from a seed: updates, evaluations, pauses, restarts, servers that die."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import numpy as np
from trainer_books import Books
from trainer_player import Request, Server, TrainerPlayer, Update

from april.config.settings import LEAST_QUORUM
from april.core import commands as do
from april.core import events as ev
from april.core import snapshot
from april.core.rollout_core import RolloutCore
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings, quorum_of
from april.core.types import (
    AttemptFailure,
    EngineFinish,
    GenerationMode,
    OnDataEnd,
    OnFailedSample,
    OnStale,
    Prompt,
    Refill,
    TimerKind,
)
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
        if isinstance(command, do.LoadEngine) and result is not DONE:
            self.causes["weights", 0] += 1
        self.post(ev.EngineCallEnded(name, command.call, result, f"{name}: {result}"))

    def _weights_of(self, version: PolicyVersion) -> str:
        """The present ones, or those of the update that runs."""
        return self.books.weights.get(version) or self.updates[min(self.updates)].weights

    def probe_answered(self) -> None:
        self.says(self.probes.pop(self.rng.randrange(len(self.probes))))

    def says(self, probe: do.ProbeEngine) -> None:
        """That it is well, if it is alive, and whether it has its weights."""
        server = self.servers[probe.engine]
        event = ev.EngineProbed(
            engine=probe.engine, probe=probe.probe, answered=server.alive, ok=server.alive, current=not server.lost
        )
        if server.lost and server.alive:
            for request in self.at(server):
                request.doubtful = True
        self.post(event)

    def at(self, server: Server) -> list[Request]:
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
        if not server.alive or self.core.updates.running or self.core.engines.states[name].quarantined:
            return  # it is not asked, or the answer says nothing
        if self.books.version == (0, 0) or name in self.calls:
            return  # those of the start are taken for granted until then
        server.weights, server.lost = "of others", True
        for request in self.at(server):
            request.doubtful = True
        self.seen["lost its weights"] += 1
        self.post(ev.EnginesAsked())
        probe = next(p for p in reversed(self.probes) if p.engine == name)
        self.probes.remove(probe)
        self.says(probe)

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
        self.causes["weights", 0] += broken
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
        self.held = True
        self.post(ev.PauseRequested())

    def resume(self) -> None:
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
        self.post(ev.EvaluationCancelled(self.rng.choice(sorted(self.evaluations))))

    def on_EvaluationDone(self, command: do.EvaluationDone) -> None:
        """Every response is there, whole, under one version."""
        request = self.evaluations.pop(command.evaluation)
        version = self.under.pop(command.evaluation)
        assert [len(group.samples) for group in command.groups] == [request.n_samples] * len(request.prompts)
        for sample in (sample for group in command.groups for sample in group.samples):
            sent = self.evaluated.pop(tuple(sample.id))
            assert sample.chains[0].tape.tokens.tolist() == [token.id for token in sent]
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
        if self.freezer is not None:
            assert self.freezer.finish(trained_through)() == state, "a state that is collected in parts is another"
            self.freezer = None
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
            loaded = snapshot.restore(RolloutCore(settings, self.limits), state)
        except CheckpointError:
            self.seen["other settings refused"] += 1
            assert settings.on_stale is OnStale.FINISH or in_part, "refused for no reason"
            settings = saved.settings
            loaded = snapshot.restore(RolloutCore(settings, self.limits), state)
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
        self.restored = loaded, books
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
        loaded, self.books = self.restored
        snapshot.move(loaded, self.core)
        for group in self.books.held:
            self._counts_now(group)
        self.updates[command.update].adopted = True
        assert self.core.clock.current == self.books.version
        self.seen["restarted"] += 1
        self.post(ev.Restored(command.update))


TROUBLES = [AttemptFailure.BROKE_OFF, AttemptFailure.CORRUPT, AttemptFailure.BUSY, AttemptFailure.REFUSED]
WORK_TIMERS = [TimerKind.RETRY, TimerKind.REST, TimerKind.PROBE, TimerKind.CHECK]


def habits(rng: random.Random) -> SimpleNamespace:
    """Some trainer; many have no troubles of one kind or the other, and shares are of the chances that it has.

    It fetches batches ``ahead`` before it trains the first of them, trains ``several`` by one update, and ``skips`` it;
    ``extra`` updates are of no batch. A restart may ``change`` the settings, the mode of generation among them. Groups
    that the filter ``rejects``; the chance of each token that the response ``ends``.
    """
    some = lambda share, *values: rng.choice(values) if rng.random() < share else 0.0  # noqa: E731
    return SimpleNamespace(
        ahead=rng.choice([0, 0, 1, 2, 4]), several=rng.choice([1, 1, 1, 2, 3]), skips=some(0.3, 0.1, 0.4),
        extra=some(0.15, 0.1), cancels=some(0.4, 0.3), evaluates=some(0.4, 0.02, 0.1), pauses=some(0.2, 0.02),
        saves=some(0.7, 0.03, 0.1), crashes=some(0.6, 0.01, 0.03), transfers=rng.random() < 0.4,
        changes=rng.random() < 0.5, engine_troubles=some(0.5, 0.02, 0.06), function_troubles=some(0.5, 0.05, 0.15),
        rejects=some(0.7, 0.1, 0.4), ends=rng.choice([0.02, 0.1, 0.3]), slow_rewards=some(0.6, 0.7, 0.95),
        slow_functions=some(0.3, 0.7), slow_prompts=some(0.3, 0.8), lowers=some(0.3, 0.3, 1.0),
    )  # fmt: skip


def settings(rng: random.Random, mode: GenerationMode) -> CoreSettings:
    """Small ones, of every kind."""
    n, bound = rng.choice([1, 2, 2, 3, 4]), rng.choice([0, 1, 1, 2, 2, 3, 5])
    return planned(
        CoreSettings(
            rollout_batch_size=n, n_samples_per_prompt=rng.choice([1, 2, 3, 4, 5, 8]), over_sampling_batch_size=n,
            max_response_len=rng.choice([5, 20, 60]), max_in_flight=1, generation=mode, max_staleness=bound,
            on_stale=rng.choice([OnStale.FINISH] * 5 + list(OnStale)), group_reward=rng.random() < 0.2,
            has_reward=rng.random() < 0.9, has_filter=rng.random() < 0.4, max_attempt_failures=rng.randint(1, 3),
            retry_pause_s=rng.choice([0.0, 4.0]), max_failed_groups=rng.choice([2, 1000]), abort_deadline_s=2.0,
            max_held_tokens=rng.choice([None, None, None, 30]),
            on_data_end=rng.choice([OnDataEnd.SHORT, OnDataEnd.SHORT, OnDataEnd.WAIT]),
        ),
        rng,
    )  # fmt: skip


def quorum(rng: random.Random, base: CoreSettings) -> float:
    """Some share that makes a group of three or more count; 1 for most groups of fewer, and with group rewards."""
    shares = [share for share in (0.5, 0.75, 0.9) if quorum_of(share, base.n_samples_per_prompt) >= LEAST_QUORUM]
    return rng.choice([*shares * 2, 1.0]) if not base.group_reward else 1.0


def planned(base: CoreSettings, rng: random.Random) -> CoreSettings:
    """Another way to keep the engines busy."""
    n, bound = base.rollout_batch_size, base.max_staleness
    over = rng.randint(1, 3 * n)
    refills = [Refill.SAMPLE] * 3 + [Refill.GROUP, Refill.NONE]
    return replace(
        base, over_sampling_batch_size=min(over, (bound + 1) * n) if base.on_stale is OnStale.FINISH else over,
        refill=rng.choice(refills if base.generation is GenerationMode.CONTINUOUS else list(Refill)),
        max_in_flight=rng.randint(1, 2 * n * base.n_samples_per_prompt + 2), evaluation_share=(0.1, 0.5, 1.0)[n % 3],
        group_quorum=quorum(rng, base),
        on_failed_sample=rng.choice(list(OnFailedSample)), min_group_size=rng.randint(1, base.n_samples_per_prompt),
    )  # fmt: skip


class Life(UpdatingPlayer):
    """A run from its first prompt to its last."""

    def __init__(
        self, seed: int, mode: GenerationMode, wanted: Callable[[CoreSettings], bool] = lambda settings: True
    ) -> None:
        rng = random.Random(seed)
        self.habits = habits(rng)
        prompts = rng.choice([6, 15, 30])
        chosen = settings(rng, mode)
        while not wanted(chosen):
            chosen = settings(rng, mode)
        if seed % 3 == 0:  # without a draw, so that lives are as they were
            chosen = replace(chosen, extras=("read",))
        super().__init__(chosen, rng.randint(1, 3), prompts, rng.choice([1, 1, 2]), rng)
        self.books.as_promised = self.settings.on_stale is OnStale.FINISH
        self.saved: list[Saved] = []

    def happen(self, events: int) -> None:
        for _ in range(events):
            if self.ended:
                return
            self.one_event()
            self.eager()
            self.look()

    def look(self) -> None:
        """After every event, when what follows from it has happened."""
        self.check()
        self.check_engines_are_full()

    # ---------------------------------------------------------------- what happens

    def one_event(self) -> None:
        h, rng = self.habits, self.rng
        possible: list[tuple[float, Callable[[], None]]] = []
        if self.running:
            possible.append((6 + len(self.running), self.generate))
            if h.engine_troubles:
                possible.append((40 * h.engine_troubles, self.trouble))
        if self.to_end:
            possible.append((6, self.end_one))
        if self.calls or self.handing is not None or self.probes:
            possible.append((6, self.work_on_update))
        if self.timers:
            possible.append((1, lambda: self.fire(*WORK_TIMERS)))
            if h.engine_troubles:  # requests that were asked to end go on
                possible.append((3, lambda: self.fire(TimerKind.ABORTS)))
            if h.engine_troubles and rng.random() < 0.02:
                possible.append((1, lambda: self.fire(TimerKind.OUTAGE)))
        if any(not server.alive for server in self.servers.values()):
            possible.append((1, self.revive))
        if self.to_draw:
            possible.append((3, self.source))
        if self.to_score or self.to_judge or any(f in ("started", "between") for f in self.functions.values()):
            possible.append((6, self.functions_go_on))
        possible.append((3, self.trainer))
        if h.evaluates and len(self.evaluations) < 3:
            possible.append((20 * h.evaluates, self.evaluate))
        if self.evaluations:
            possible.append((0.1, self.cancel_evaluation))
        if self.held or h.pauses:
            possible.append((0.5, self.resume) if self.held else (10 * h.pauses, self.pause))
        if h.saves:
            possible.append((10 * h.saves, self.checkpoint))
        if h.crashes and self.saved:
            possible.append((10 * h.crashes, self.crash))
        weights = [weight for weight, _ in possible]
        rng.choices([event for _, event in possible], weights)[0]()

    def generate(self) -> None:
        """A request gains tokens; one that is complete ends."""
        attempt_id = self.rng.choice(list(self.running))
        request = self.send(attempt_id, self.rng.randint(0, 8), self.habits.ends)
        if request.complete:
            self.finish(attempt_id)

    def finish(self, attempt_id: str) -> None:
        ends = self.running[attempt_id].ends
        self.end(attempt_id, EngineFinish.STOP if ends else EngineFinish.LENGTH)

    def end_one(self) -> None:
        """A request that was asked to end does, with what came in the meantime."""
        attempt_id = self.rng.choice(sorted(self.to_end))
        self.send(attempt_id, self.rng.choice([0, 0, 1, 3]), self.habits.ends)
        self.end(attempt_id, EngineFinish.ABORT)

    def trouble(self) -> None:
        what = self.rng.random()
        if what < 0.1:
            self.die()
        elif what < 0.2:
            self.lose_weights()
        elif what < 0.3:
            self.stall()
        else:
            attempt_id = self.rng.choice(sorted(self.running))
            kind = self.rng.choice(TROUBLES)
            if kind in (AttemptFailure.BUSY, AttemptFailure.REFUSED):
                if self.running[attempt_id].tokens:
                    return
            else:
                self.send(attempt_id, self.rng.randint(0, 3), self.habits.ends)
            self.break_off(attempt_id, kind, self.rng.randint(0, 3) if kind is AttemptFailure.CORRUPT else 0)

    def revive(self) -> None:
        self.rng.choice([s for s in self.servers.values() if not s.alive]).alive = True

    def work_on_update(self) -> None:
        """A server or the trainer answers."""
        well = not self.habits.engine_troubles
        if self.handing is not None:
            self.hand_over(well=well)
        elif self.probes and (not self.calls or self.rng.random() < 0.3):
            self.probe_answered()
        else:
            self.answer(well=well)

    def source(self) -> None:
        """The source answers, perhaps that it cannot."""
        fails = self.habits.function_troubles and self.rng.random() < 0.1
        self.draw("the loader was away" if fails else None)

    def functions_go_on(self, *, well: bool = False) -> None:
        """A function, a reward function or the filter does something."""
        rng, h = self.rng, self.habits
        keys = [key for key, state in self.functions.items() if state in ("started", "between")]
        trouble = not well and rng.random() < h.function_troubles
        what = rng.choice(["function"] * bool(keys) + ["score"] * bool(self.to_score) + ["judge"] * bool(self.to_judge))
        if what == "function":
            key = rng.choice(keys)
            if trouble:
                self.fail(key)
            else:
                self.go_on(key)
        elif what == "score":
            request = self.to_score.pop(rng.randrange(len(self.to_score)))
            self.score(request, rng.choice(["raises", "nan"]) if trouble else "good")
        else:
            verdict = "raises" if trouble else "reject" if rng.random() < h.rejects else "keep"
            self.judge(self.to_judge.pop(rng.randrange(len(self.to_judge))), verdict)

    def eager(self) -> None:
        """What keeps nobody waiting."""
        h, rng = self.habits, self.rng
        if self.to_draw and rng.random() >= h.slow_prompts:
            self.draw()
        while any(f in ("started", "between") for f in self.functions.values()) and rng.random() >= h.slow_functions:
            key = next(key for key, state in self.functions.items() if state in ("started", "between"))
            self.go_on(key)
        while self.to_score and rng.random() >= h.slow_rewards:
            self.score(self.to_score.pop(0), "good")
        while self.to_judge and rng.random() >= h.slow_rewards:
            self.judge(self.to_judge.pop(0), "reject" if rng.random() < h.rejects else "keep")

    # ---------------------------------------------------------------- the trainer

    def trainer(self) -> None:
        rng, h, out = self.rng, self.habits, list(self.books.out)
        if rng.random() < 0.02 * h.lowers:
            self.lower()
        elif self.updates:
            if rng.random() < 0.1 * h.cancels:
                self.cancel_update()
            elif rng.random() < 0.1 * h.extra and len(self.updates) < 3:
                self.ask_update(None, transfers=h.transfers)
        elif not self.wanted and len(out) <= h.ahead and rng.random() < 0.8:
            self.ask()
        elif out and rng.random() < 0.5:
            self.trains = out[: h.several]
            if rng.random() < h.skips:
                self.commit(out[0])
            else:
                self.ask_update(self.trains[-1], transfers=h.transfers)
        elif rng.random() < 0.1 * h.extra:
            self.ask_update(None, transfers=h.transfers)

    def ask(self) -> None:
        self.wanted = self.begun = True
        self.post(ev.StepRequested())

    @property
    def most_out(self) -> float:
        """Batches beyond which nothing is generated before one is trained."""
        return min(self.settings.max_staleness, self.books.bound)

    def lower(self) -> None:
        """Tokens are to be younger from now on."""
        bound = self.rng.randint(0, int(self.most_out))
        if bound < self.settings.max_staleness:
            self.books.bound = bound
            self.seen["bound lowered"] += 1
        self.post(ev.StalenessLowered(bound))

    def commit(self, batch: int) -> None:
        """No update follows from it."""
        self.books.train([batch])
        self.seen["committed without an update"] += 1
        self.post(ev.BatchCommitted(batch))

    def checkpoint(self) -> None:
        """The trainer saves, having trained on all, some or none of what it got."""
        through = self.rng.choice([None, *range(self.books.committed, self.books.batches)])
        self.saved = [*self.saved[-2:], self.save(through)]

    def crash(self) -> None:
        """The process dies; what comes after it may have other settings."""
        saved = self.rng.choice(self.saved)
        now = saved.settings
        if self.habits.changes:
            flips = self.rng.random() < 0.5
            modes = [GenerationMode.STEPWISE, GenerationMode.CONTINUOUS]
            mode = modes[now.generation is modes[0]] if flips else now.generation
            bound = self.rng.choice([now.max_staleness] * 2 + [0, 1, 4])
            n = self.rng.choice([now.rollout_batch_size] * 2 + [1, 3])
            now = planned(replace(now, generation=mode, max_staleness=bound, rollout_batch_size=n), self.rng)
            self.seen["the other mode"] += flips
        self.restart(saved, now)

    # ---------------------------------------------------------------- nobody is idle for no reason

    def check_engines_are_full(self) -> None:
        """Continuous: no place is free while a sample waits for it, or a prompt may be drawn for it.

        What is kept for functions that were started keeps others from starting, and no call.
        """
        h, s, books = self.habits, self.settings, self.books
        quiet = self.held or self.updates or not self.begun
        troubles = h.engine_troubles or h.function_troubles or self.core.context.failure is not None
        if not self.continuous or quiet or troubles or s.on_stale is not OnStale.FINISH:
            return
        if len(books.out) > self.most_out:
            return
        generating = {request.key for request in self.running.values()}
        started = sum(state == "started" for state in self.functions.values())
        queued = sum(s == "waiting" and k not in generating and k[0] >= 0 for k, s in self.functions.items())
        new = sum(key not in self.functions and key not in books.finished for key in books.tapes)
        places = self.places
        assert places >= 0
        assert not (places and queued), f"{places} places are free, {queued} samples wait"
        free = max(0, places - started)
        assert not (free and new), f"{free} places are free, {new} samples wait"
        held, full = self.groups_held, s.max_held_tokens is not None and books.tokens_held >= s.max_held_tokens
        if self.to_draw or full or books.position >= self.prompts:
            return
        if held >= min(self.most_held, 8 * s.groups_at_a_time):
            return
        work = held - len(books.accepted) if books.whole else (
            len(books.tapes) - len(books.countable)
        ) // books.samples
        assert s.refill is not Refill.SAMPLE or not free, f"{free} places are free, {held} groups of {self.most_held}"
        assert s.refill is not Refill.GROUP or work >= s.groups_wanted, f"{work} groups in work of {s.groups_wanted}"

    # ---------------------------------------------------------------- the end

    def end_well(self) -> None:
        """Troubles are over: every prompt is settled, once."""
        if self.held:
            self.resume()
        for server in self.servers.values():
            server.alive = True
        for _ in range(20_000):
            if self.ended:
                return
            self.next_of_what_is_due()
            self.look()
        raise AssertionError(f"it never comes to an end: {self.core!r} {self.updates} {self.functions}")

    def next_of_what_is_due(self) -> None:
        out = list(self.books.out)
        if self.to_draw:
            self.draw()
        elif self.handing is not None:
            self.hand_over(well=True)
        elif self.calls:
            self.answer(well=True)
        elif self.probes:
            self.probe_answered()
        elif self.to_end:
            self.end(min(self.to_end), EngineFinish.ABORT)
        elif self.to_score or self.to_judge or any(f in ("started", "between") for f in self.functions.values()):
            self.functions_go_on(well=True)
        elif out and not self.updates and (len(out) > self.most_out or self.rng.random() < 0.3):
            self.ask_update(out[0], transfers=self.habits.transfers)
        elif self.wants_weights and not self.updates:
            self.wants_weights = False
            self.ask_update(None)
        elif not self.wanted:
            self.ask()
        elif self.running:
            attempt_id = self.rng.choice(list(self.running))
            if self.send(attempt_id, 4, 0.5).complete:
                self.finish(attempt_id)
        elif any(t.kind in WORK_TIMERS for t in self.timers) and self.rng.random() < 0.95:
            self.fire(*WORK_TIMERS)
        elif not self.updates:
            self.ask_update(None)  # of weights that nobody can give again
        else:
            self.fire(TimerKind.OUTAGE)
