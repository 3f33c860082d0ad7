"""Runs the core without a clock: attempts gain tokens when the test says so. Counts tokens on its own."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from april.core import commands as do
from april.core import events as ev
from april.core import snapshot
from april.core.batch import Batch
from april.core.event_pump import EventPump
from april.core.rollout_core import RolloutCore
from april.core.sampling import SamplingParams
from april.core.settings import CoreSettings, EngineLimits
from april.core.types import Attempt, EngineFinish, OnWeightUpdate, Prompt, Timer, TimerKind
from april.core.versions import PolicyVersion

EOS = 1
A, B, C = (EngineLimits(name, 4096, None, (EOS,)) for name in "abc")
PROMPT = Prompt(np.array([5, 6], np.int32))
OLD_TIMER = ev.TimerFired(Timer(TimerKind.ABORTS, 99))
"""One that nobody waits for any more: the core does what is due, and no more."""


def timers(commands: Sequence[do.Command], *kinds: TimerKind) -> list[do.StartTimer]:
    return [c for c in commands if isinstance(c, do.StartTimer) and c.timer.kind in kinds]


def settings(n: int = 2, samples: int = 2, over: int | None = None, **changes: Any) -> CoreSettings:
    """Small settings; ``over`` is N'."""
    over = over or n
    values: dict[str, Any] = {
        "rollout_batch_size": n,
        "n_samples_per_prompt": samples,
        "over_sampling_batch_size": over,
        "max_response_len": 1000,
        "max_in_flight": max(n, over) * samples,
    }
    return CoreSettings(**(values | changes))


MOST_COMMANDS = 2_000
"""Commands that follow from one event, at most."""


class CoreMachine:
    """The core with everything around it played by the test.

    ``length`` is the true length of a response, EOS included: of (group, index), by group (4 for others), or of all.
    Rewards are ``group + index / 8``. Token ``t`` of a response is ``10 + t``, the last one EOS.
    """

    def __init__(
        self,
        core_settings: CoreSettings,
        length: Any,
        prompts: int | None = None,
        engines: tuple[EngineLimits, ...] = (EngineLimits("e0", 4096, None, (EOS,)),),
        auto_score: bool = True,
        auto_call: bool = True,
    ) -> None:
        self.core = RolloutCore(core_settings, engines, check=True)
        by_group = length if isinstance(length, Mapping) else {}
        others = length if isinstance(length, int) else 4
        self.length = length if callable(length) else lambda group, index: by_group.get(group, others)
        self.prompts_left = prompts
        self.auto_score, self.auto_call = auto_score, auto_call
        self.sampling = SamplingParams(max_tokens=core_settings.max_response_len)
        self.in_flight: dict[str, Attempt] = {}
        self.abort_asked: set[str] = set()
        self.to_score: list[tuple[int, int]] = []
        self.to_call: list[Any] = []
        self.batches: list[Batch] = []
        self.commands: list[do.Command] = []
        self.errors: list[str] = []
        self.ended = False
        self.generated = self.updates_asked = self._most_commands = 0
        self._pump = EventPump(self.core, dict.fromkeys(do.Command.__subclasses__(), self._execute))

    def post(self, event: ev.Event) -> list[do.Command]:
        """One event and everything that follows from it at once; returns the commands."""
        before = len(self.commands)
        self._most_commands = before + MOST_COMMANDS
        self._pump.post(event)
        return self.commands[before:]

    def _execute(self, command: do.Command) -> None:
        self.commands.append(command)
        assert len(self.commands) <= self._most_commands, "what follows from one event does not end"
        match command:
            case do.DrawPrompts(count):
                if self.prompts_left is not None:
                    count = min(count, self.prompts_left)
                    self.prompts_left -= count
                exhausted = self.prompts_left == 0
                self._pump.post(ev.PromptsDrawn([PROMPT] * count, exhausted))
            case do.Continue():
                self._pump.post(ev.Continued())
            case do.StartSample(sample):
                self.to_call.append(sample.id)
                if self.auto_call:
                    self._pump.post(ev.CallMade(self.to_call.pop(), self.sampling))
            case do.Submit(attempt):
                assert attempt.id not in self.in_flight
                self.in_flight[attempt.id] = attempt
            case do.Abort(_, attempt_ids, _):
                self.abort_asked.update(attempt_ids)
            case do.Fence(_, attempt_ids):
                for attempt_id in attempt_ids:
                    self.abort_asked.discard(attempt_id)
                    attempt = self.in_flight.pop(attempt_id)
                    self._pump.post(ev.AttemptEnded.of(attempt, EngineFinish.ABORT, fenced=True))
            case do.CallCompleted(call):
                self._pump.post(ev.SampleReturned(call.sample.id))
            case do.ScoreSample(sample):
                self.to_score.append(sample.id)
                if self.auto_score:
                    self.score(self.to_score.pop())
            case do.ScoreGroup(group):
                rewards = [(s.id.index, group.id + s.id.index / 8) for s in group.samples]
                self._pump.post(ev.Scored(group.id, rewards))
            case do.Deliver(batch):
                self.batches.append(batch)
            case do.EndOfData():
                self.ended = True
            case do.Fail(error):
                self.errors.append(error)
            case _:
                pass

    # ---------------------------------------------------------------- short words for what tests ask

    def attempt(self, group: int, index: int = 0) -> Attempt:
        """The request in flight of a sample, or the first of them."""
        return next(a for a in self.in_flight.values() if a.sample.id == (group, index))

    @property
    def only(self) -> Attempt:
        (attempt,) = self.in_flight.values()
        return attempt

    def groups(self) -> list[int]:
        """The groups of the requests in flight that were not asked to end."""
        return sorted({a.sample.id.group for i, a in self.in_flight.items() if i not in self.abort_asked})

    def sample(self, group: int, index: int = 0) -> Any:
        found = self.core.context.group(group)
        assert found is not None
        return found.samples[index]

    def delivered(self, batch: int = -1) -> list[int]:
        """The groups of a batch's samples."""
        return [s.id.group for s in self.batches[batch].samples]

    @property
    def dropped(self) -> dict[str, int]:
        """Tokens that were dropped, by reason."""
        return {str(reason): count for reason, count in self.core.tokens.dropped.items() if count}

    @property
    def prompts_dropped(self) -> dict[str, int]:
        """Prompts that were dropped, by reason."""
        return {str(reason): count for reason, count in self.core.prompts.dropped.items() if count}

    def finish(self, *samples: int | tuple[int, int]) -> list[do.Command]:
        """Responses end in this order; of a group, all that are in flight."""
        commands = []
        for key in samples:
            of = [a for a in self.in_flight.values() if key in (a.sample.id.group, a.sample.id)]
            assert of, f"nothing of {key} is in flight"
            for attempt in of:
                commands += self.end(attempt.id) if attempt.id in self.in_flight else []
        return commands

    def fail(self, attempt: Attempt, error: str = "reset", **how: Any) -> list[do.Command]:
        """Let a request break off."""
        del self.in_flight[attempt.id]
        self.abort_asked.discard(attempt.id)
        return self.post(ev.AttemptFailed.of(attempt, error, **how))

    def ask(self) -> list[do.Command]:
        """The trainer wants a batch."""
        return self.post(ev.StepRequested())

    def evaluate(self, prompts: int = 1, number: int = 1, **changes: Any) -> list[do.Command]:
        """Somebody wants an evaluation, of one sample per prompt unless ``changes`` say more."""
        values = {"n_samples": 1, "sampling": self.sampling, "seed": 5} | changes
        return self.post(ev.EvaluationRequested(evaluation=number, prompts=[PROMPT] * prompts, **values))

    def next_step(self) -> list[do.Command]:
        """What was asked to end does, the weights are updated, and the trainer wants the next batch."""
        self.finish_aborts()
        self.update()
        return self.ask()

    # ---------------------------------------------------------------- engines and trainer

    def score(self, sample_id: Any) -> None:
        self.post(ev.Scored(sample_id[0], [(sample_id[1], sample_id[0] + sample_id[1] / 8)]))

    def tokens(self, attempt_id: str, count: int) -> bool:
        """Let an attempt gain up to ``count`` tokens; True when its response is now complete."""
        attempt = self.in_flight[attempt_id]
        have = len(attempt.request.token_ids) - len(attempt.sample.group.prompt.token_ids) + attempt.tape.parsed
        end = self.length(*attempt.sample.id)
        budget = attempt.request.sampling.max_tokens - attempt.tape.parsed
        count = min(count, end - have, budget)
        if attempt.tape.stopped:
            attempt.tape.after_stop += count
            self.generated += count
            return have + count == end or count == budget
        ids = np.arange(10 + have, 10 + have + count, dtype=np.int32)
        if count and have + count == end:
            ids[-1] = EOS
        attempt.tape.append(ids, np.full(count, -0.5, np.float32), self.version_at(attempt))
        self.generated += count
        return have + count == end or count == budget

    def version_at(self, attempt: Attempt) -> PolicyVersion:
        """The version of the weights under which an attempt generates now."""
        return self.core.clock.current

    def end(self, attempt_id: str, count: int = 10**6) -> list[do.Command]:
        """Let an attempt run to its end (or gain ``count`` tokens and be aborted)."""
        complete = self.tokens(attempt_id, count)
        attempt = self.in_flight.pop(attempt_id)
        self.abort_asked.discard(attempt_id)
        last = attempt.tape.packed()[0][-1:] if attempt.tape.count else []
        whole = EngineFinish.STOP if len(last) and last[0] == EOS else EngineFinish.LENGTH
        return self.post(ev.AttemptEnded.of(attempt, whole if complete else EngineFinish.ABORT))

    def finish_aborts(self) -> None:
        """Every aborted attempt hands over what it has."""
        while self.abort_asked:
            self.end(min(self.abort_asked), 0)

    def step(self, rng: random.Random, chunk: int = 7) -> Batch | None:
        """Run one step to its end; attempts advance in random order."""
        before = len(self.batches)
        self.post(ev.StepRequested())
        while len(self.batches) == before and not self.ended and not self.errors:
            assert self.in_flight, f"stuck: {self.core!r}"
            attempt_id = rng.choice(sorted(self.in_flight))
            if attempt_id in self.abort_asked:
                self.end(attempt_id, rng.choice([0, 1, chunk]))
            elif self.tokens(attempt_id, rng.randint(1, chunk)):
                self.end(attempt_id, 0)
        return self.batches[-1] if len(self.batches) > before else None

    def update(self, version: PolicyVersion | None = None, *, unreachable: str = "") -> list[do.Command]:
        """One weight update: what is in flight ends, unless it is kept, and engines do what they are asked.

        ``version``: where it is not the next one, as after a restart. ``unreachable``: an engine that does not answer.
        """
        for batch_id in list(self.core.leased):
            self.post(ev.BatchCommitted(batch_id))
        self.updates_asked += 1
        before = len(self.commands)
        self.post(ev.UpdateRequested(update=self.updates_asked, version=version, held=self.core.pause_held))
        if self.core.settings.on_weight_update is OnWeightUpdate.RESUBMIT:
            self.finish_aborts()
        return self.engines_answer(before, unreachable)

    def saved(self, trained_through: int | None = None) -> snapshot.State:
        """The state as it comes back from a trainer's checkpoint file."""
        state = snapshot.take(self.core, trained_through)
        read: snapshot.State = msgspec.msgpack.decode(msgspec.msgpack.encode(state))
        return read

    def restarted(
        self, state: Any = None, engines: tuple[EngineLimits, ...] | None = None, **changes: Any
    ) -> Self:
        """Another process that goes on from the present state, or from ``state``; ``changes`` are core settings."""
        limits = tuple(found.limits for found in self.core.engines.states.values())
        again = type(self)(
            replace(self.core.settings, **changes), self.length, self.prompts_left, engines or limits,
            auto_score=self.auto_score, auto_call=self.auto_call,
        )  # fmt: skip
        snapshot.restore(again.core, self.saved() if state is None else state)
        again.generated = again.core.tokens.observed
        again.restored()
        return again

    def restored(self) -> None:
        """The engines have the weights of the state that was put into the core."""
        self.update(self.core.clock.current)

    def engines_answer(self, since: int, unreachable: str = "") -> list[do.Command]:
        """All calls of engines from this command on, and those that follow, end; returns all commands from there."""
        for command in islice(iter(self.commands), since, None):
            if isinstance(command, (do.PauseEngine, do.LoadEngine, do.ResumeEngine)):
                result = ev.CallResult.UNREACHABLE if command.engine == unreachable else ev.CallResult.DONE
                self.post(ev.EngineCallEnded(command.engine, command.call, result, "no answer" if unreachable else ""))
        return self.commands[since:]

    def probed(self, name: str, **found: Any) -> list[do.Command]:
        """An engine says that it is well and has its weights, or what ``found`` says; it does what it is asked then.

        Only servers and engines in quarantine are asked.
        """
        state, before = self.core.engines.states[name], len(self.commands)
        if not state.quarantined:
            self.post(ev.EnginesAsked())
        elif state.probe_timer:
            self.post(ev.TimerFired(Timer(TimerKind.PROBE, state.probe_timer, name)))
        if state.open_probe:
            values = {"answered": True, "ok": True, "current": True} | found
            self.post(ev.EngineProbed(engine=name, probe=state.open_probe, **values))
        return self.engines_answer(before)

    def fire(self, command: do.StartTimer) -> list[do.Command]:
        """A timer that was started runs out."""
        return self.post(ev.TimerFired(command.timer))

    def check_ledger(self) -> None:
        """The core's books against the count kept here."""
        t = self.core.tokens
        running = sum(a.tape.parsed for a in self.in_flight.values())
        assert t.observed + running == self.generated
        assert t.observed == t.delivered + t.held + sum(t.dropped.values())


Machine = TypeVar("Machine", bound=CoreMachine)


def asked(
    length: Any = 20, engines: tuple[EngineLimits, ...] = (A,), kind: type[Machine] = CoreMachine, **changes: Any
) -> Machine:
    """A machine of which the trainer has asked for a batch; one group of one sample, unless ``changes`` say more."""
    names = ("prompts", "auto_score", "auto_call", "turns")
    options = {name: changes.pop(name) for name in names if name in changes}
    m = kind(settings(**({"n": 1, "samples": 1} | changes)), length, engines=engines, **options)
    m.ask()
    return m
