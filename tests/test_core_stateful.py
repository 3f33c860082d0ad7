"""A state machine plays everything around the core, in any order, with restarts from checkpoints at any time.

The core checks its own books after every event; the world of ``core_world`` checks them from the outside: what
engines handed over is what is delivered, dropped by name, or held; every prompt is settled once in the history kept.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from core_player import ENDLESS, CorePlayer
from core_world import EOS, World, generated, one_of
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from april.core import commands as do
from april.core import events as ev
from april.core import snapshot
from april.core.state import RolloutCore
from april.core.types import (
    EngineFinish,
    GenerationMode,
    GroupState,
    OnDataEnd,
    OnStale,
    Refill,
    Sample,
    SampleState,
    Timer,
    TimerKind,
)
from april.core.versions import PolicyVersion
from april.errors import CheckpointError

ANY = st.integers(0, 1 << 16)
SETTINGS = st.fixed_dictionaries(
    {
        "n": st.integers(1, 3),
        "samples": st.integers(1, 3),
        "over": st.integers(1, 6),
        "refill": st.sampled_from(list(Refill)),
        "on_stale": st.sampled_from(list(OnStale)),
        "max_staleness": st.integers(0, 3),
        "max_age": st.sampled_from([24, 2]),
        "max_resumes": st.sampled_from([100, 2]),
        "max_response_len": st.sampled_from([16, 30, 100]),
        "max_in_flight": st.integers(1, 9),
        "max_held_tokens": st.sampled_from([None, 40]),
        "group_reward": st.booleans(),
        "has_reward": st.sampled_from([True, True, False]),
        "has_filter": st.booleans(),
        "on_data_end": st.sampled_from([OnDataEnd.SHORT, OnDataEnd.WAIT]),
        "max_attempt_failures": st.integers(1, 3),
        "max_failed_groups": st.sampled_from([3, 50]),
        "max_filtered_groups": st.sampled_from([3, 50]),
        "engines": st.integers(1, 3),
        "prompts": st.sampled_from([5, 12, ENDLESS]),
        "long_prompts": st.booleans(),
        "strict": st.booleans(),
        "eager_functions": st.sampled_from([True, True, False]),
        "eager_scores": st.booleans(),
        "slow_source": st.sampled_from([True, False, False]),
        "turns": st.integers(1, 3),
    }
)


class CoreLife(CorePlayer, RuleBasedStateMachine):
    """Rules: what may happen next."""

    @initialize(chosen=SETTINGS)
    def begin(self, chosen: dict[str, Any]) -> None:
        """A run with these settings. ``strict``: weights are updated after every batch and at no other time."""
        self.saved: list[tuple[bytes, World]] = []
        self.start(chosen)

    @invariant()
    def all_books_agree(self) -> None:
        """The core's books say what the world saw."""
        if hasattr(self, "core"):
            self.books_agree()

    @precondition(lambda self: not self.stepping and (self.world.fresh or not self.strict))
    @rule()
    def request_step(self) -> None:
        """The trainer wants a batch."""
        self.request_batch()
        self.eager()

    @precondition(lambda self: self.world.running)
    @rule(pick=ANY, count=st.integers(1, 9))
    def tokens(self, pick: int, count: int) -> None:
        """A chunk arrives."""
        self.hand_over(one_of(sorted(self.world.running), pick), count)

    @precondition(lambda self: self.world.running)
    @rule(pick=ANY, count=st.integers(0, 12))
    def finish(self, pick: int, count: int) -> None:
        """A response ends by itself: EOS, or its budget."""
        attempt_id = one_of(sorted(self.world.running), pick)
        self.hand_over(attempt_id, count, end=True)
        tokens = self.world.running[attempt_id].tokens
        if tokens and tokens[-1].id == EOS:
            self.end_attempt(attempt_id, "stop")
        else:
            self.hand_over(attempt_id, 1000)
            self.end_attempt(attempt_id, "length")
        self.eager()

    @precondition(lambda self: self.world.running)
    @rule(count=st.integers(1, 12))
    def finish_many(self, count: int) -> None:
        """Several responses end, oldest first."""
        for attempt_id in sorted(self.world.running)[:4]:
            if attempt_id in self.world.running:
                self.hand_over(attempt_id, count, end=True)
                self.end_attempt(attempt_id, "abort" if attempt_id in self.aborting else "stop")
        self.eager()

    @rule(pick=ANY, count=st.integers(2, 25))
    def run(self, pick: int, count: int) -> None:
        """Work goes on for a while, as it does most of the time."""
        rng = random.Random(pick)
        for _ in range(count):
            self.work(rng)
            self.eager()

    @rule(pick=ANY)
    def run_to_a_batch(self, pick: int) -> None:
        """Work goes on until the trainer has its batch, or cannot get one."""
        rng = random.Random(pick)
        for _ in range(60):
            self.work(rng)
            self.eager()
            if not self.stepping:
                break

    def work(self, rng: random.Random) -> None:
        """The next thing that is due."""
        pick = rng.randrange(1 << 16)
        if self.to_draw:
            self.draw()
        elif not self.stepping and self.nothing_left():
            self._extend(pick)
        elif self.stepping and self.core.train_first and not (self.strict and self.world.running):
            self.update_weights(None, min(self.world.leased))
        elif not (self.stepping or self.world.fresh or self.world.running) and (self.strict or pick % 2):
            self.commit_all()
            self.update_weights(None)
        elif not self.stepping and (self.world.fresh or not self.strict):
            self.request_step()
        elif self.to_score and pick % 4:
            self.give_score(self.to_score.pop(pick % len(self.to_score)), "good")
        elif self.to_judge and pick % 3:
            self.judge(self.to_judge.pop(pick % len(self.to_judge)), "reject" if pick % 8 == 7 else "keep")
        elif keys := self.keys("started", "outside"):
            self.go_on(one_of(keys, pick))
        elif self.aborting and pick % 2:
            attempt_id = one_of(sorted(self.aborting), pick)
            self.hand_over(attempt_id, pick % 3)
            self.end_attempt(attempt_id, "abort")
        elif self.world.running:
            attempt_id = one_of(sorted(self.world.running), pick)
            self.hand_over(attempt_id, rng.randrange(8))
            if rng.random() < 0.5:
                self.hand_over(attempt_id, 3, end=True)
                if (tokens := self.world.running[attempt_id].tokens) and tokens[-1].id == EOS:
                    self.end_attempt(attempt_id, "stop")
            elif pick % 16 == 0 and self.reach_stop(attempt_id, 2, pick % 3):
                self.tell_stop(attempt_id)
            elif pick % 16 == 1:
                self.stall(attempt_id)

    @precondition(lambda self: self.world.running)
    @rule(
        pick=ANY,
        count=st.integers(1, 6),
        after=st.sampled_from([0, 2, 2, 1000]),
        how=st.sampled_from(["now", "saved", "later", "stop", "length", "abort", "fail"]),
    )
    def stop_string(self, pick: int, count: int, after: int, how: str) -> None:
        """A response has a stop string: the core hears of it, unless the request ends in the same moment."""
        given_up = [i for i, running in self.world.running.items() if running.dropped]
        attempt_id = one_of(sorted((how == "saved" and given_up) or self.world.running), pick)
        if self.reach_stop(attempt_id, count, after):
            if how == "saved":
                self.checkpoint(pick)
            if how in ("now", "saved"):
                self.tell_stop(attempt_id)
            elif how == "later":
                self.untold.append(attempt_id)
            else:
                self.end_attempt(attempt_id, how)
        self.eager()

    def reach_stop(self, attempt_id: str, count: int, after: int) -> bool:
        """Tokens up to a stop string, and what the engine makes after it; False where none may be."""
        running, attempt = self.world.running[attempt_id], self.core.attempts[attempt_id]
        if running.stopped:
            return False
        self.hand_over(attempt_id, count)
        if len(running.tokens) <= attempt.sampling.min_tokens:
            return False
        running.stopped = attempt.tape.stopped = True
        self.hand_over(attempt_id, after)
        return True

    def tell_stop(self, attempt_id: str) -> None:
        """The core hears of a stop string, perhaps when its request has ended."""
        commands = self.send(ev.StopFound(attempt_id))
        if attempt_id in self.world.running:
            assert attempt_id in self.aborting
        else:
            assert commands == []

    def stall(self, attempt_id: str) -> None:
        """An engine is silent about a request."""
        self.world.running[attempt_id].stalled = True
        self.send(ev.AttemptStalled(attempt_id))
        assert attempt_id in self.aborting

    def _tell_stop_late(self, pick: int = 0, pick_too: int = 0) -> None:
        """The core hears of a stop string when other things have happened."""
        self.tell_stop(self.untold.pop(pick % len(self.untold)))
        self.eager()

    @precondition(lambda self: self.world.running)
    @rule(pick=ANY, what=st.sampled_from(["request", "group", "engine"]), deaf=st.booleans())
    def silence(self, pick: int, what: str, deaf: bool) -> None:
        """An engine is silent about one request, all of a group or all it has, and perhaps does not even end them."""
        chosen = one_of(sorted(self.world.running), pick)
        key, engine = self.world.running[chosen].key, self.world.running[chosen].engine
        for attempt_id, running in list(self.world.running.items()):
            group, one = running.key[0] == key[0], attempt_id == chosen
            if {"request": one, "group": group, "engine": running.engine == engine}[what]:
                self.stall(attempt_id)
        if deaf:
            self._deaf_engines()
        self.eager()

    @precondition(lambda self: self.aborting)
    @rule(count=st.sampled_from([0, 0, 1, 5]), end=st.booleans())
    def abort_answered(self, count: int, end: bool) -> None:
        """Every request that was asked to end does, some in the moment in which they finish."""
        for attempt_id in sorted(self.aborting):
            if attempt_id in self.aborting:
                self.hand_over(attempt_id, count, end=end)
                self.end_attempt(attempt_id, "abort")
        self.eager()

    def _one_abort_answered(self, pick: int = 0, pick_too: int = 0) -> None:
        """One of them does."""
        attempt_id = one_of(sorted(self.aborting), pick)
        self.hand_over(attempt_id, pick_too % 4)
        self.end_attempt(attempt_id, "abort")
        self.eager()

    @precondition(lambda self: self.world.running)
    @rule(pick=ANY, count=st.sampled_from([0, 0, 3, 1000]), end=st.booleans(), corrupt=st.booleans(), lost=ANY)
    def break_off(self, pick: int, count: int, end: bool, corrupt: bool, lost: int) -> None:
        """A stream breaks, with or without tokens that cannot be true; perhaps after the last token."""
        attempt_id = one_of(sorted(self.world.running), pick)
        self.hand_over(attempt_id, count, end=end)
        self.end_attempt(attempt_id, "corrupt" if corrupt else "fail", lost % 4 if corrupt else 0)
        self.eager()

    def _lose_engine(self, pick: int = 0, pick_too: int = 0) -> None:
        """An engine dies with all it has."""
        engine = one_of(self.engines, pick).name
        for attempt_id in [i for i, running in self.world.running.items() if running.engine == engine]:
            if attempt_id in self.world.running:
                self.hand_over(attempt_id, pick_too % 2 * 4)
                self.end_attempt(attempt_id, "fail")
        self.eager()

    @precondition(lambda self: self.world.running)
    @rule(pick=ANY, count=st.integers(1, 5), how=st.sampled_from(["busy", "busy", "refused"]), seconds=ANY)
    def turned_away(self, pick: int, count: int, how: str, seconds: int) -> None:
        """An engine takes no requests for now, perhaps says for how long, or calls one of them wrong."""
        engine = self.world.running[one_of(sorted(self.world.running), pick)].engine
        theirs = [i for i, r in self.world.running.items() if r.engine == engine and not r.tokens and not r.after_stop]
        for attempt_id in theirs[-count:]:
            if attempt_id in self.world.running:
                self.end_attempt(attempt_id, how, seconds % 9)
        self.eager()

    @precondition(lambda self: self.quarantined)
    @rule(given=st.booleans())
    def engine_ready(self, given: bool = True) -> None:
        """A probe finds an engine well, and perhaps gives it the present weights."""
        version = PolicyVersion(*self.world.version) if given else None
        self.engine_event(ev.EngineReady(min(self.quarantined), version))
        self.eager()

    @rule(
        pick=ANY,
        what=st.sampled_from(["load", "load", "stale", "stale and failed", "failed"]),
        running=st.integers(0, 6),
        waiting=st.integers(0, 3),
        kv_usage=st.sampled_from([0.2, 0.9, 1.0]),
        preemptions=st.integers(0, 4),
    )
    def engine_says(
        self, pick: int, what: str, running: int, waiting: int, kv_usage: float, preemptions: int
    ) -> None:
        """An engine is asked between requests: its load, weights that it has lost, or no answer."""
        name = one_of(self.engines, pick).name
        if what == "load":
            load = {"running": running, "waiting": waiting, "kv_usage": kv_usage, "preemptions": preemptions}
            self.engine_event(ev.LoadReported(engine=name, **load))
        if "stale" in what:
            self.engine_event(ev.EngineStale(name))
        if "failed" in what:
            self.engine_event(ev.EngineFailed(name))
        self.eager()

    def _rest_over(self, pick: int = 0, pick_too: int = 0) -> None:
        """An engine has rested."""
        self.fire(one_of(sorted(self.rests), pick))
        self.eager()

    def _late(self, pick: int = 0, pick_too: int = 0) -> None:
        """The end of a request that is accounted for, or of an older process: nothing happens."""
        attempt_id = one_of(self.gone, pick)
        events = [
            ev.AttemptFailed(attempt_id=attempt_id, error="late"),
            ev.AttemptEnded(attempt_id, EngineFinish.STOP),
            ev.AttemptStalled(attempt_id),
            ev.StopFound(attempt_id),
        ]
        assert self.send(one_of(events, pick_too)) == []

    @precondition(lambda self: self.keys("started", "outside"))
    @rule(pick=ANY, how=st.sampled_from(["go on", "go on", "go on", "stray", "return"]))
    def function(self, pick: int, how: str) -> None:
        """A rollout function goes on, asks for what does not fit what it has, or returns."""
        key = one_of(self.keys("started", "outside"), pick)
        if how == "stray":
            self.call(key, stray=True)
        elif how == "return":
            self.finish_function(key)
        else:
            self.go_on(key)
        self.eager()

    def _function_raises(self, pick: int = 0, pick_too: int = 0) -> None:
        """A rollout function raises, whatever it is doing."""
        self.fail_function(one_of(self.keys("started", "outside", "waiting"), pick))
        self.eager()

    @precondition(lambda self: self.to_score)
    @rule(pick=ANY, how=st.sampled_from(["good", "good", "nan", "raises"]))
    def reward(self, pick: int, how: str) -> None:
        """A reward comes, late or not, or fails."""
        self.give_score(self.to_score.pop(pick % len(self.to_score)), how)
        self.eager()

    def _duplicate_reward(self, pick: int = 0, pick_too: int = 0) -> None:
        """The same reward once more, with other numbers: it changes nothing."""
        request = one_of(self.scored, pick)
        if not self.is_current(request) or all(x.where == "finished" for x in self.world.held[request[0]].lives):
            self.send(ev.Scored(request[0], [(i, -77.0) for i, _ in request[1]]))

    @precondition(lambda self: self.to_judge)
    @rule(pick=ANY, how=st.sampled_from(["keep", "keep", "reject", "error"]))
    def verdict(self, pick: int, how: str) -> None:
        """The filter speaks, perhaps of a group that is no longer what it was."""
        self.judge(self.to_judge.pop(pick % len(self.to_judge)), how)
        self.eager()

    @precondition(lambda self: self.to_draw)
    @rule(error=st.sampled_from([None, None, "prompt 3 is no prompt"]))
    def source_answers(self, error: str | None) -> None:
        """A slow source."""
        self.draw(error)
        self.eager()

    def _extend(self, pick: int = 0, pick_too: int = 0) -> None:
        """More prompts."""
        self.world.available += 1 + pick % 3
        self.world.exhausted = False
        self.send(ev.SourceExtended())
        self.eager()

    @precondition(lambda self: not self.strict or not (self.stepping or self.world.fresh or self.world.running))
    @rule(pick=ANY)
    def update(self, pick: int) -> None:
        """New weights: between the steps after a commit, or in the middle of everything."""
        subsets = [None, None, [self.engines[0].name]]
        out = sorted(self.world.leased)
        trained = one_of([None, *out[:1], *out], pick // 3)  # none, the oldest, or all up to one
        if self.strict:
            self.update_weights(None, max(out, default=None))
        else:
            self.update_weights(one_of(subsets, pick), trained)
        self.eager()

    def commit_all(self) -> None:
        """The trainer has trained on all it got."""
        for batch_id in sorted(self.world.leased):
            self.commit(batch_id)

    def commit(self, batch_id: int) -> None:
        """One of them."""
        del self.world.leased[batch_id]
        self.world.committed = max(self.world.committed, batch_id)
        self.send(ev.BatchCommitted(batch_id))

    def _commit_one(self, pick: int = 0, pick_too: int = 0) -> None:
        """In any order."""
        self.commit(one_of(sorted(self.world.leased), pick))

    def _confirm(self, pick: int = 0, pick_too: int = 0) -> None:
        """The other engines have the weights as well."""
        self.give_version(None)
        self.eager()

    def _pause_or_resume(self, pick: int = 0, pick_too: int = 0) -> None:
        """Generation stops, or goes on."""
        self.paused = not self.paused
        commands = self.send(ev.PauseRequested() if self.paused else ev.Resumed())
        if self.paused and not self.world.running:
            assert any(isinstance(c, do.Paused) for c in commands)
        self.eager()

    def _timer(self, pick: int = 0, pick_too: int = 0) -> None:
        """A timer runs out: the latest abort's, the outage's, or an old one."""
        aborts = [t for t in self.timers if t.kind is TimerKind.ABORTS]
        others = [t for t in self.timers if t.kind is not TimerKind.ABORTS]
        timer = one_of([aborts[-1], aborts[-1], (others or aborts)[-1], *self.timers], pick)
        needed = self.stepping and self.core.step is not None and not self.core.step.stopping and not self.paused
        needed &= not any(r.engine not in self.quarantined for r in self.world.running.values())
        over = timer == self.outage and needed
        commands = self.fire(timer)
        assert any(isinstance(c, do.Fail) for c in commands) == over
        if timer == self.outage:
            self.outage = Timer(TimerKind.OUTAGE, 0)
        self.eager()

    @rule(pick=ANY)
    def checkpoint(self, pick: int) -> None:
        """The trainer saves, having trained on all, some or none of what it got."""
        world, before = self.world, repr(self.core)
        through = one_of([None, *range(world.committed, world.batches)], pick)
        state = snapshot.take(self.core, through)
        assert repr(self.core) == before
        found = world.restarted(through)
        assert state["tokens"] == {
            "observed": found.observed,
            "delivered": found.delivered,
            "dropped": {reason: count for reason, count in found.dropped.items() if count},
        }
        for group in [*state["ready"], *state["waiting"]]:
            for sample, life in zip(group["samples"], found.held[group["id"]].lives, strict=True):
                assert sample["tokens"] == (np.array([t.id for t in life.tape], "<i4").tobytes() or None)
                assert sample["calls"] == [list(call) for call in life.calls]
                assert sample["open_call"] == life.open
        self.saved = [*self.saved[-1:], (msgspec.msgpack.encode(state), found)]

    def _deaf_engines(self, pick: int = 0, pick_too: int = 0) -> None:
        """No abort is answered before the deadline: all that were asked to end are fenced."""
        asked = set(self.aborting)
        while asked & set(self.aborting):
            self.fire(self.abort_timer)
        self.eager()

    def _checkpoint_of_the_past(self, pick: int = 0, pick_too: int = 0) -> None:
        """What is committed is no longer held, and what is not delivered cannot be trained."""
        for through in (pick % (self.world.committed + 1) - 1, self.world.batches + pick % 3):
            with pytest.raises(CheckpointError, match=f"trained_through={through}"):
                snapshot.take(self.core, through)

    def _crash(self, pick: int = 0, pick_too: int = 0) -> None:
        """The process dies, and another one goes on from a checkpoint. Engines forget everything."""
        state, world = one_of(self.saved, pick)
        self.gone += self.world.running
        self.world = copy.deepcopy(world)
        self.restarts += 1
        self.new_process()
        snapshot.restore(self.core, msgspec.msgpack.decode(state))
        assert self.core.clock.current == self.world.version
        self.books_agree()
        self.forgetful = max(0, pick_too % 7 - 3)
        self.give_version(None)
        self.eager()

    @rule(what=ANY, pick=ANY, pick_too=ANY)
    def nuisance(self, what: int, pick: int, pick_too: int) -> None:
        """Something that happens now and then; together one rule, or little else would happen."""
        world = self.world
        possible = {
            "pause_or_resume": True,
            "one_abort_answered": self.aborting,
            "lose_engine": world.running,
            "rest_over": self.rests,
            "timer": len(self.timers) > 1,
            "deaf_engines": self.aborting,
            "tell_stop_late": self.untold,
            "confirm": len(self.confirmed) < len(self.engines),
            "commit_one": not self.strict and world.leased,
            "extend": world.available < ENDLESS and world.position == world.available,
            "checkpoint_of_the_past": world.committed >= 0,
            "duplicate_reward": self.scored,
            "late": self.gone,
            "crash": self.saved,
            "function_raises": self.keys("started", "outside", "waiting"),
        }
        name = one_of([name for name, now in possible.items() if now], what)
        getattr(self, f"_{name}")(pick, pick_too)

    def teardown(self) -> None:
        """Once troubles end, a finite source is settled to the last prompt."""
        if not hasattr(self, "core") or self.world.available >= ENDLESS:
            return
        self.chosen |= {"eager_functions": True, "eager_scores": True, "slow_source": False}
        if self.paused:
            self._pause_or_resume()
        self._confirm()
        for _ in range(500):
            while self.quarantined:
                self.engine_event(ev.EngineReady(min(self.quarantined), PolicyVersion(*self.world.version)))
            while self.rests:
                self._rest_over()
            if self.to_draw:
                self.draw()
            self.eager()
            if self.core.train_first and not (self.strict and self.world.running):
                self.update_weights(None, min(self.world.leased))
            if self.world.running:
                self.finish_many(30)
            elif not self.stepping:
                if self.nothing_left():
                    break
                if not self.world.fresh:
                    self.commit_all()
                    self.update_weights(None)
                self.request_step()
        self.books_agree()
        assert self.world.position == self.world.available, repr(self.core)
        waits = self.chosen["n"] - 1 if self.settings.on_data_end is OnDataEnd.WAIT else 0
        assert len(self.world.held) <= waits, repr(self.core)

    # ---------------------------------------------------------------- what must always hold

    def books_agree(self) -> None:
        """The core's books say what the world saw."""
        world, core = self.world, self.core
        held = sum(generated(life.tape) for group in world.held.values() for life in group.lives)
        assert core.tokens.as_dict() == {
            "observed": world.observed - sum(len(r.tokens) + r.after_stop for r in world.running.values()),
            "delivered": world.delivered,
            "held": held,
            "dropped": {reason: count for reason, count in sorted(world.dropped.items()) if count},
        }
        assert core.observed_tokens() == world.observed
        assert set(core.buffer.groups) == set(world.held)
        assert set(core.attempts) == set(world.running)
        assert core.aborts.pending == len(self.aborting)
        assert self.abort_timer or not self.aborting, "nothing ends what was asked to end"
        assert set(core.leased) == set(world.leased)
        assert core.wanted == self.stepping
        assert (core.step is not None) == self.generates
        for group_id, group in world.held.items():
            assert (core.buffer.groups[group_id].state is GroupState.READY) == group.accepted
            for sample, life in zip(core.buffer.groups[group_id].samples, group.lives, strict=True):
                assert where(core, sample) == life.where, f"{sample} is {life.where}\n{core.story(sample.id)}"
                alive = tuple(sample.id) in self.functions
                assert alive == (life.where != "new" and not life.outlived)
        kept = {g.prompt for g in world.held.values()}
        assert kept.isdisjoint(world.settled)
        assert kept | set(world.settled) == set(range(world.position))
        p = core.prompts
        assert (p.observed, p.held) == (world.position, len(kept))
        assert p.delivered == sum(how.startswith("delivered") for how in world.settled.values())


def where(core: RolloutCore, sample: Sample) -> str:
    """As the world calls it."""
    if sample.state is not SampleState.RUNNING:
        return str(sample.state)
    if sample.open_call is not None:
        return "waiting"
    return "started" if sample.id in core.context.places.reserved else "outside"


class ContinuousLife(CoreLife):
    """The same, and a delivery ends nothing."""

    generation = GenerationMode.CONTINUOUS


def runs(examples: int) -> hypothesis_settings:
    """So many, and the same ones every time."""
    return hypothesis_settings(
        max_examples=examples, stateful_step_count=60, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip


TestContinuousLife = ContinuousLife.TestCase
TestContinuousLife.settings = runs(80)
TestCoreLife = CoreLife.TestCase
TestCoreLife.settings = runs(200)
