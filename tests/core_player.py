"""Plays everything around the core: engines, rollout functions, rewards, a filter, prompts and a trainer.

Each command of the core is obeyed, and checked at once against the :class:`core_world.World`, which is kept apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from core_batches import check_batch
from core_rewards import RewardsPlayer
from core_world import EOS, Held, Key, Life, Running, Token, World

from april.core import commands as do
from april.core import events as ev
from april.core.engine_table import RESTS_BEFORE_QUARANTINE, AdmissionCap
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings, EngineLimits
from april.core.state import RolloutCore
from april.core.types import (
    Attempt,
    AttemptFailure,
    EngineFinish,
    GenerationMode,
    OnDataEnd,
    OnLongPrompt,
    OnStale,
    Prompt,
    SampleId,
    Timer,
    TimerKind,
)
from april.core.versions import PolicyVersion

ENGINES = (EngineLimits("a", 40, 5, (EOS,)), EngineLimits("b", 60, None, (EOS,)), EngineLimits("c", 48, 3, (EOS,)))
ENDLESS = 1 << 20


class CorePlayer(RewardsPlayer):
    """The core, and all that is around it. ``start`` begins a run, ``new_process`` what comes after a crash."""

    generation = GenerationMode.STEPWISE

    def start(self, chosen: dict[str, Any]) -> None:
        """A fresh process. ``strict``: weights are updated after every batch and at no other time."""
        self.chosen = chosen
        n, strict = chosen["n"], chosen["strict"]
        bound = min(chosen["max_staleness"], chosen["max_age"])
        over = min(chosen["over"], (bound + 1) * n) if chosen["on_stale"] is OnStale.FINISH else chosen["over"]
        self.settings = CoreSettings(
            rollout_batch_size=n,
            n_samples_per_prompt=chosen["samples"],
            over_sampling_batch_size=over,
            on_long_prompt=OnLongPrompt.SKIP,
            abort_deadline_s=2.0,
            run_seed=7,
            generation=self.generation,
            **{
                name: chosen[name]
                for name in (
                    "refill", "on_stale", "max_staleness", "max_age", "max_response_len", "max_in_flight",
                    "max_held_tokens", "group_reward", "has_reward", "has_filter", "on_data_end",
                    "max_attempt_failures", "max_failed_groups", "max_filtered_groups",
                )
            },
            max_resumes=100 if strict else chosen["max_resumes"],
        )  # fmt: skip
        self.strict = strict
        self.engines = ENGINES[: chosen["engines"]]
        self.context = min(e.max_context for e in self.engines)
        keeps = not (self.settings.has_filter or self.settings.group_reward)
        self.world = World(chosen["prompts"], keeps)
        self.all_ids: set[str] = set()
        self.gone: list[str] = []
        """Requests that are accounted for, or died with an older process."""
        self.handed = 0
        self.restarts = 0
        self.new_process()

    def new_process(self) -> None:
        """What does not survive a crash."""
        self.core = RolloutCore(replace(self.settings, run_id=self.restarts), self.engines, check=True)
        self.stepping = self.paused = False
        self.generates = False
        """Training may go on: while a batch is awaited, or (continuous) since one was asked for."""
        self.aborting: dict[str, int] = {}
        """Requests that were asked to end, and how often the timer may fire until they are fenced."""
        self.abort_timer: Timer | None = None  # the one that runs
        self.fenced: list[str] = []
        """Those that a timer has fenced just now, and whose end the core has not heard of."""
        self.untold: list[str] = []
        """Requests whose stop string the core has not heard of."""
        self.functions: set[Key] = set()
        self.timers = [Timer(TimerKind.ABORTS, 0)]
        self.outage, self.old_version = Timer(TimerKind.OUTAGE, 0), self.world.version
        self.quarantined: set[str] = set()
        self.confirmed = {e.name for e in self.engines}
        self.caps = {e.name: AdmissionCap(e.max_in_flight) for e in self.engines}
        self.rests: dict[Timer, str] = {}
        self.in_a_row = dict.fromkeys(self.caps, 0)  # refusals of an engine, of which each is a rest
        self.busy = ""  # the engine that says so at this moment, soon to be among those that rest
        self.to_score: list[tuple[int, list[tuple[int, int]]]] = []
        self.scored: list[tuple[int, list[tuple[int, int]]]] = []
        self.to_judge: list[tuple[int, int]] = []
        self.to_draw = 0
        self.forgetful = 0
        """Rollout functions that will not ask what they asked before the restart."""

    # ---------------------------------------------------------------- talking to the core

    def send(self, *events: ev.Event) -> list[do.Command]:
        """Events, and what the layer above does about the commands."""
        seen = []
        for event in events:
            commands = self.core.handle(event)
            seen += commands
            for command in commands:
                self.obey(command)
            while self.fenced:
                attempt = self.core.attempts[self.fenced.pop(0)]
                self.over(attempt.id, "fenced")
                seen += self.send(ev.AttemptEnded.of(attempt, EngineFinish.ABORT, fenced=True))
        if self.to_draw and not self.chosen["slow_source"]:
            seen += self.draw()
        return seen

    def obey(self, command: do.Command) -> None:
        """Play the layer above, and check that the command makes sense."""
        match command:
            case do.DrawPrompts(count):
                assert count > 0
                assert not self.to_draw
                self.to_draw = count
            case do.StartSample(sample):
                life = self.world.life(sample.id)
                assert life.where == "new"
                assert sample.id not in self.functions
                assert self.generates > self.paused
                life.where = "started"
                self.functions.add(tuple(sample.id))
            case do.CancelSample(sample):
                self.functions.discard(tuple(sample.id))
            case do.Submit(attempt):
                self.submitted(attempt)
            case do.Abort(engine, ids, everything):
                theirs = {i for i, running in self.world.running.items() if running.engine == engine}
                assert set(ids) == theirs if everything else set(ids) <= theirs
                rounds = round(self.settings.abort_deadline_s / self.settings.abort_resend_s)
                for attempt_id in ids:
                    self.aborting.setdefault(attempt_id, rounds + (self.abort_timer is not None))
            case do.Fence(engine, ids):
                assert {self.world.running[attempt_id].engine for attempt_id in ids} == {engine}
                self.fenced += ids
            case do.CallCompleted(call):
                self.completed(tuple(call.sample.id), call.result)
            case do.ScoreSample(sample):
                self.ask_score(sample.id.group, [sample.id.index])
            case do.ScoreGroup(group):
                self.ask_score(group.id, list(range(self.settings.n_samples_per_prompt)))
            case do.JudgeGroup(group, judgement):
                held = self.world.held[group.id]
                assert all(life.where == "finished" for life in held.lives)
                assert not held.accepted
                assert all((group.id, i) in self.functions for i in range(len(held.lives))), "what was returned is gone"
                held.judgement = judgement
                self.to_judge.append((group.id, judgement))
            case do.StartTimer(timer, seconds):
                self.timers.append(timer)
                if timer.kind is TimerKind.REST and seconds <= 60:
                    assert self.busy not in {*self.rests.values(), *self.quarantined}
                    self.rests[timer], self.busy = self.busy, ""
                elif timer.kind is TimerKind.OUTAGE:
                    assert seconds == self.settings.outage_deadline_s
                    self.outage = timer
                elif timer.kind is TimerKind.PROBE:
                    assert timer.engine not in self.quarantined
                    self.quarantined.add(timer.engine)
                else:
                    assert seconds == self.settings.abort_resend_s
                    assert not self.abort_timer, "two timers for the aborts"
                    self.abort_timer = timer
            case do.Paused():
                assert self.paused > bool(self.world.running)
            case do.Deliver(batch):
                check_batch(self, batch)
            case do.EndOfData(kept):
                self.stop_step()
                self.generates = False
                assert self.world.exhausted
                assert kept == len(self.world.held)
                assert all(held.accepted for held in self.world.held.values())
                assert kept == 0 or (self.settings.on_data_end is OnDataEnd.WAIT and kept < self.chosen["n"])
            case do.Fail(error):
                assert error
                self.stop_step()
                self.generates = False

    def stop_step(self) -> None:
        """The trainer has its answer."""
        assert self.stepping
        self.stepping = False
        self.generates = self.continuous

    @property
    def continuous(self) -> bool:
        """A delivery ends nothing."""
        return self.generation is GenerationMode.CONTINUOUS

    # ---------------------------------------------------------------- prompts

    def draw(self, error: str | None = None) -> list[do.Command]:
        """The source answers, perhaps with an error after half of the prompts."""
        world, wanted = self.world, self.to_draw
        self.to_draw = 0
        if error is not None:
            wanted //= 2
        count = min(wanted, world.available - world.position)
        prompts = []
        for k in range(world.position, world.position + count):
            prompts.append(Prompt(self.prompt(k), {"k": k}, 0, k))
            if len(self.prompt(k)) >= self.context:
                world.settle(k, "dropped (too_long)")
            else:
                world.held[world.drawn] = Held(k, [Life() for _ in range(self.settings.n_samples_per_prompt)])
            world.drawn += 1
        world.position += count
        world.exhausted |= count < wanted
        commands = self.send(ev.PromptsDrawn(prompts, count < wanted, error))
        assert error is None or self.core.step is not None or not self.stepping
        return commands

    def prompt(self, k: int) -> np.ndarray[Any, Any]:
        """Prompt k: its own tokens; some are too long for every engine."""
        length = 70 if self.chosen["long_prompts"] and k % 5 == 3 else 2 + k % 3
        return np.array([5, *range(k, k + length - 1)], np.int32)

    # ---------------------------------------------------------------- rollout functions

    def room(self, key: Key) -> int:
        """Longest response."""
        return min(self.settings.max_response_len, self.context - len(self.prompt(self.world.held[key[0]].prompt)))

    def script(self, key: Key, turn: int) -> tuple[list[int] | None, SamplingParams]:
        """What this sample's function asks for in its call number ``turn``: tokens of the environment, or as is."""
        salt = self.world.held[key[0]].prompt * 7 + key[1] * 3 + turn
        environment = None if salt % 3 == 0 else [900_000 + salt + i for i in range(salt % 4 if turn else 0)]
        sampling = SamplingParams(
            max_tokens=(1000, 6, 9)[salt % 3], min_tokens=(0, 0, 2)[salt % 3], temperature=(1.0, 0.5)[salt % 2]
        )
        return environment, sampling

    def call(self, key: Key, *, stray: bool = False) -> None:
        """A rollout function asks for tokens; ``stray``: for something else than before, or rewrites its past."""
        world, life = self.world, self.world.life(key)
        environment, sampling = self.script(key, life.asked)
        told = [t.id for t in life.tape[: life.told]]
        if stray:
            environment = [1, 2, 3, 4, 5, 6, 7, *(environment or [])] if life.replaying else []
        asked = None if environment is None else [*self.prompt(world.held[key[0]].prompt).tolist(), *told, *environment]
        rewritten = stray and not life.replaying
        if rewritten:
            asked = [4]  # not the beginning of the prompt
        cut = (environment or [])[: self.room(key) - len(told)]
        event = ev.CallMade(SampleId(*key), sampling, None if asked is None else np.array(asked, np.int32))
        if life.replaying:
            start = life.calls[life.asked][0] if life.asked < len(life.calls) else life.open
            assert start is not None
            if cut != [t.id for t in life.tape[life.told : start]]:
                world.begin_again(key, "replay_diverged")
            elif life.asked < len(life.calls):
                life.where = "completing"
            else:
                self.open_call(key, start, sampling)
        elif rewritten:
            world.drop_group(key[0], "failed")
        else:
            life.tape += [Token(t, 0.0, None) for t in cut]
            self.open_call(key, len(life.tape), sampling)
        self.send(event)

    def open_call(self, key: Key, start: int, sampling: SamplingParams) -> None:
        """The call waits for tokens, if it is not complete at once."""
        life = self.world.life(key)
        life.open, life.sampling = start, sampling
        if self.is_complete(key):
            self.completing(life)
        else:
            life.where = "waiting"

    def completing(self, life: Life, finish: str = "") -> None:
        """The open call is complete, by itself or because its request ended so."""
        life.where = "completing"
        life.finish = finish or ("stop" if self.ends_in_eos(life) else "length")
        life.attempt_failures, life.avoid = 0, ""

    def left(self, key: Key) -> int:
        """Tokens that the open call may still generate."""
        life = self.world.life(key)
        assert life.open is not None
        assert life.sampling is not None
        return min(self.room(key) - len(life.tape), life.sampling.max_tokens - (len(life.tape) - life.open))

    def is_complete(self, key: Key) -> bool:
        """Its last token is EOS, or its budget is used."""
        return self.ends_in_eos(self.world.life(key)) or self.left(key) <= 0

    def ends_in_eos(self, life: Life) -> bool:
        """The open call's last token is one that may end it."""
        assert life.open is not None
        assert life.sampling is not None
        return len(life.tape) - life.open > life.sampling.min_tokens and life.tape[-1].id == EOS

    def completed(self, key: Key, call: Any) -> None:
        """The function is told what it got."""
        life = self.world.life(key)
        assert life.where == "completing"
        assert key in self.functions
        if life.asked < len(life.calls):
            assert tuple(call) == life.calls[life.asked]
        else:
            assert tuple(call) == (life.open, len(life.tape), life.finish)
            life.calls.append((call.start, call.end, life.finish))
            life.open, life.finish = None, ""
        life.asked += 1
        life.where = "outside"

    def go_on(self, key: Key) -> None:
        """A rollout function does what it always does: its next call, or the end."""
        life = self.world.life(key)
        if life.replaying and self.forgetful:
            self.forgetful -= 1
            if self.forgetful % 2:
                self.call(key, stray=True)
            else:
                self.finish_function(key)
        elif life.asked < self.chosen["turns"]:
            self.call(key)
        else:
            self.finish_function(key)

    def finish_function(self, key: Key) -> None:
        """A rollout function returns, perhaps earlier than before the restart, or without a call."""
        life = self.world.life(key)
        if life.replaying:
            self.world.begin_again(key, "replay_diverged")
        elif not life.asked:
            self.world.drop_group(key[0], "failed")
        elif self.settings.has_reward:
            life.where = "scoring"
        else:
            life.where, life.reward = "finished", 0.0
            self.complete(key[0])
        self.send(ev.SampleReturned(SampleId(*key)))

    def fail_function(self, key: Key) -> None:
        """A rollout function raises, or is cancelled by its own kind."""
        life = self.world.life(key)
        life.failures += 1
        if life.failures >= self.settings.max_attempt_failures:
            self.world.drop_group(key[0], "failed")
        else:
            self.world.begin_again(key, "failed")
        self.send(ev.SampleFailed(SampleId(*key), "raised"))

    def complete(self, group_id: int) -> None:
        """A group counts once all its samples are finished, if there is no filter to ask."""
        held = self.world.held[group_id]
        if all(life.where == "finished" for life in held.lives) and not self.settings.has_filter:
            held.accepted = True

    # ---------------------------------------------------------------- engines

    def submitted(self, attempt: Attempt) -> None:
        """A request: what it asks for is exactly what is missing."""
        key = tuple(attempt.sample.id)
        world, life = self.world, self.world.life(key)
        assert self.generates > self.paused, "submitted outside of a step, or while nothing may start"
        assert life.where == "waiting"
        assert life.attempt is None, "two requests for one sample"
        assert attempt.id not in self.all_ids
        assert len(attempt.id) == 32
        assert attempt.engine in (engines := [e.name for e in self.engines if self.has_room(e)])
        assert attempt.engine != life.avoid or len(engines) == 1, "the latest one broke off there"
        assert attempt.token_ids.tolist() == [*self.prompt(world.held[key[0]].prompt), *(t.id for t in life.tape)]
        assert attempt.sampling.max_tokens == self.left(key) > 0
        self.all_ids.add(attempt.id)
        life.attempt = attempt.id
        world.running[attempt.id] = Running(key, attempt.engine, attempt.sampling.max_tokens)
        assert len(world.running) + len(self.keys("started")) <= self.settings.max_in_flight

    def hand_over(self, attempt_id: str, count: int, *, end: bool = False) -> None:
        """An engine gives tokens, ``end``: the last one is EOS if the budget and min_tokens allow it.

        What comes after a stop string is looked at and counted.
        """
        running = self.world.running[attempt_id]
        attempt = self.core.attempts[attempt_id]
        version = self.world.version if running.engine in self.confirmed else self.old_version
        count = min(count, running.budget - len(running.tokens) - running.after_stop)
        if running.stopped:
            running.after_stop += count
            attempt.tape.after_stop += count
            self.world.observed += count
            return
        tokens = []
        for _ in range(count):
            self.handed += 1
            logprob = float(np.float32(-0.001 * (self.handed % 977)))
            tokens.append(Token(1000 + self.handed, logprob, version))
        if end and tokens and len(running.tokens) + count > attempt.sampling.min_tokens:
            tokens[-1] = tokens[-1]._replace(id=EOS)
        if tokens:
            ids, logprobs = [t.id for t in tokens], [t.logprob for t in tokens]
            attempt.tape.append(np.array(ids, np.int32), np.array(logprobs, np.float32), PolicyVersion(*version))
        running.tokens += tokens
        self.world.observed += count

    def has_room(self, engine: EngineLimits) -> bool:
        """Whether it is well, has the present weights and takes one more request."""
        well = engine.name in self.confirmed - self.quarantined - set(self.rests.values())
        return well and self.caps[engine.name].admits(self.at(engine.name))

    def at(self, engine: str) -> int:
        """Requests there."""
        return sum(r.engine == engine for r in self.world.running.values())

    def engine_event(self, event: ev.EngineReady | ev.EngineStale | ev.EngineFailed | ev.LoadReported) -> None:
        """Something is found out about an engine outside of any request."""
        name = event.engine
        if isinstance(event, ev.EngineReady):
            self.quarantined.discard(name)
            if event.version is not None:
                self.confirmed.add(name)
        elif isinstance(event, ev.EngineStale):
            self.confirmed.discard(name)
            for running in self.world.running.values():
                running.doubtful |= running.engine == name
        elif isinstance(event, ev.LoadReported):
            self.caps[name].report(self.at(name), event.running, event.waiting, event.kv_usage, event.preemptions)
        self.is_outage_over()
        self.send(event)
        assert name in self.quarantined or not isinstance(event, ev.EngineFailed)

    def is_outage_over(self) -> None:
        """The timer of the outage is void once an engine is well, has the weights and is not busy for ever."""
        if any(self.in_a_row[name] <= RESTS_BEFORE_QUARANTINE for name in self.confirmed - self.quarantined):
            self.outage = Timer(TimerKind.OUTAGE, 0)

    def fire(self, timer: Timer) -> list[do.Command]:
        """A timer runs out: exactly those requests are fenced that had their time, and their engines are suspect."""
        fencing: set[str] = set()
        if timer == self.abort_timer:
            self.abort_timer = None
            self.aborting = {attempt_id: left - 1 for attempt_id, left in self.aborting.items()}
            fencing = {attempt_id for attempt_id, left in self.aborting.items() if left == 0}
        self.rests.pop(timer, None)
        engines = {self.world.running[attempt_id].engine for attempt_id in fencing}
        commands = self.send(ev.TimerFired(timer))
        fenced = [attempt_id for c in commands if isinstance(c, do.Fence) for attempt_id in c.attempt_ids]
        assert sorted(fenced) == sorted(fencing)
        assert engines <= self.quarantined
        return commands

    def over(self, attempt_id: str, finish: str) -> None:
        """A request has ended: what the world expects of its sample."""
        self.gone.append(attempt_id)
        self.aborting.pop(attempt_id, None)
        running = self.world.keep(attempt_id, corrupt=finish == "corrupt")
        if finish in ("stop", "length") or (finish == "abort" and (running.tokens or running.after_stop)):
            self.caps[running.engine].request_ended(self.at(running.engine))
            self.in_a_row[running.engine] = 0
            self.is_outage_over()
        if finish == "busy":
            again = running.engine in {*self.rests.values(), *self.quarantined}
            self.caps[running.engine].refused(self.at(running.engine), again=again)
            self.in_a_row[running.engine] += not again
        if running.dropped is not None:
            return
        life = self.world.life(running.key)
        if running.doubtful:
            return
        if finish == "refused":
            self.world.drop_group(running.key[0], "failed")
        elif running.stopped:
            self.completing(life, "stop")
        elif finish in ("stop", "length"):
            self.completing(life, finish)
        elif self.is_complete(running.key):
            self.completing(life)
        elif finish == "busy":
            life.avoid = running.engine
        elif running.stalled or finish in ("fail", "corrupt"):
            life.avoid = running.engine
            life.attempt_failures = 0 if running.tokens and finish != "corrupt" else life.attempt_failures + 1
            if life.attempt_failures >= self.settings.max_attempt_failures:
                self.world.drop_group(running.key[0], "failed")
        else:
            life.attempt_failures, life.avoid = 0, ""

    def end_attempt(self, attempt_id: str, finish: str, rejected: int = 0) -> None:
        """A request ends, and the core hears of it."""
        if finish == "corrupt" and self.world.running[attempt_id].stopped:
            finish = "fail"  # what a stop string has ended was found good before
        engine, attempt = self.world.running[attempt_id].engine, self.core.attempts[attempt_id]
        self.over(attempt_id, finish)
        if finish in ("fail", "corrupt"):
            self.world.observed += rejected
            self.world.dropped["corrupt"] += rejected
            kind = AttemptFailure.CORRUPT if finish == "corrupt" else AttemptFailure.BROKE_OFF
            self.send(ev.AttemptFailed.of(attempt, "broke off", kind, rejected=rejected))
        elif finish == "refused":
            self.send(ev.AttemptFailed.of(attempt, "HTTP 400", AttemptFailure.REFUSED))
        elif finish == "busy":
            self.busy = engine
            self.send(ev.AttemptFailed.of(attempt, "HTTP 503", AttemptFailure.BUSY, busy_s=float(rejected)))
            self.busy = ""
        else:
            self.send(ev.AttemptEnded.of(attempt, EngineFinish(finish)))

    # ---------------------------------------------------------------- the trainer

    def request_batch(self) -> None:
        """The trainer wants a batch; it will be trained after those that are out."""
        if not self.generates:
            self.world.drop_too_old(self.settings)
        self.stepping = self.generates = True
        self.send(ev.StepRequested())

    def update_weights(self, engines: list[str] | None, trained: int | None = None) -> None:
        """New weights, on all engines or some; they are trained on the batches up to ``trained``."""
        self.old_version = self.world.version
        self.world.new_weights(trained)
        self.give_version(engines, trained)

    def give_version(self, engines: list[str] | None, trained: int | None = None) -> None:
        """Engines confirm the present version; what is too old for it is treated as the settings say."""
        self.confirmed = {e.name for e in self.engines} if engines is None else set(engines)
        self.world.drop_too_old(self.settings)
        self.is_outage_over()
        self.send(ev.WeightsUpdated(PolicyVersion(*self.world.version), engines, trained))

    # ---------------------------------------------------------------- looking

    def keys(self, *where: str) -> list[Key]:
        """Samples that are there."""
        return [(g, i) for g, h in self.world.held.items() for i, x in enumerate(h.lives) if x.where in where]

    def eager(self) -> None:
        """Functions, rewards and verdicts that never keep anybody waiting."""
        while True:
            if self.chosen["eager_functions"] and (keys := self.keys("started", "outside")):
                self.go_on(keys[0])
            elif self.chosen["eager_scores"] and self.to_score:
                self.give_score(self.to_score.pop(0), "good")
            elif self.chosen["eager_scores"] and self.to_judge:
                self.judge(self.to_judge.pop(0), "keep")
            else:
                return

    def nothing_left(self) -> bool:
        """The data has ended, and what is held is fewer groups than a batch takes, which wait for more prompts."""
        world, waits = self.world, self.settings.on_data_end is OnDataEnd.WAIT
        complete = all(held.accepted for held in world.held.values())
        return world.exhausted and complete and len(world.held) < (self.chosen["n"] if waits else 1)
