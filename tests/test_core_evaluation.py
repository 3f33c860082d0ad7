"""Evaluations in the core: in the middle of everything, outside of the ledgers, pinned to one policy version."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from core_machine import EOS, CoreMachine, settings
from msgspec.structs import replace
from seeds import seeds

from april.core import commands as do
from april.core import events as ev
from april.core import snapshot
from april.core.engine_table import EngineWeights
from april.core.sampling import SamplingParams, attempt_seed
from april.core.settings import EngineLimits
from april.core.state import RolloutCore
from april.core.types import Attempt, AttemptFailure, EngineFinish, Prompt, SampleId, TimerKind
from april.core.versions import PolicyVersion
from april.errors import InvariantError

ENGINES = tuple(EngineLimits(name, 4096, None, (EOS,), remote=True) for name in "ab")
ENGINE_CALLS = (do.PauseEngine, do.LoadEngine, do.ResumeEngine)


def length(group: int, index: int) -> int:
    """Of a response: 4 to 30 tokens."""
    return 4 + (group * 7 + index * 3) % 27


class Machine(CoreMachine):
    """Answers nothing about engines by itself; asserts that training, evaluations and updates do not overlap."""

    def __init__(self, *, samples: int = 2, places: int = 6, **changes: Any) -> None:
        chosen = settings(n=2, samples=samples, over=3, max_in_flight=places, **changes)
        super().__init__(chosen, length, engines=ENGINES)
        self.evaluated = 0
        """Tokens that evaluations were handed."""
        self.asked: list[Any] = []
        """Calls and probes of engines that have not answered."""
        self.timers: list[Any] = []
        self.requested: dict[int, ev.EvaluationRequested] = {}
        self.results: dict[int, do.EvaluationDone | do.EvaluationFailed] = {}
        self.updates = 0
        self.updating = self.paused = False

    @property
    def running(self) -> list[Any]:
        """Evaluations that have begun."""
        return [e for e in self.core.context.evaluations.values() if e.version is not None]

    def of(self, *, evaluation: bool) -> list[str]:
        """Ids of what is in flight."""
        return sorted(i for i, a in self.in_flight.items() if (a.sample.evaluation is not None) == evaluation)

    def _execute(self, command: do.Command) -> None:
        match command:
            case do.StartSample(sample) if sample.evaluation is not None:
                assert not self.of(evaluation=False)
                self.commands.append(command)
                self.post(ev.CallMade(sample.id, sample.evaluation.request.sampling))
                return
            case do.StartSample() | do.Deliver() if self.running:
                assert isinstance(command, do.Deliver), "training began something beside an evaluation"
            case do.Submit(attempt):
                assert not self.of(evaluation=attempt.sample.evaluation is None), "training and an evaluation at once"
                if attempt.sample.evaluation is not None:
                    assert attempt.sample.evaluation.version == self.core.clock.current == attempt.oldest
            case do.StartTimer(timer, _, _):
                self.timers.append(timer)
            case do.PauseEngine() | do.LoadEngine() | do.ResumeEngine() | do.ProbeEngine():
                engine = command.engine
                if not self.core.engines.states[engine].taken_back and isinstance(command, ENGINE_CALLS):
                    assert not self.running, "an update that does not wait for an evaluation"
                self.asked.append(command)
            case do.UpdateEnded():
                self.updating = False
            case do.Paused():
                assert not self.running
            case do.EvaluationDone(number) | do.EvaluationFailed(number):
                assert number not in self.results
                self.results[number] = command
        super()._execute(command)

    def tokens(self, attempt_id: str, count: int) -> bool:
        """As in CoreMachine; those of evaluations are counted apart."""
        before = self.generated
        complete = super().tokens(attempt_id, count)
        if self.in_flight[attempt_id].sample.evaluation is not None:
            self.evaluated += self.generated - before
            self.generated = before
        return complete

    def evaluate(self, n_prompts: int = 2, n_samples: int = 2, seed: int = 5, **changes: Any) -> int:
        """Ask for one; its number."""
        number = len(self.requested)
        request = ev.EvaluationRequested(
            evaluation=number, prompts=[Prompt(np.array([7, k], np.int32)) for k in range(n_prompts)],
            n_samples=n_samples, sampling=SamplingParams(max_tokens=20), seed=seed,
        )  # fmt: skip
        self.requested[number] = replace(request, **changes)
        self.post(self.requested[number])
        return number

    def break_off(self, attempt_id: str, kind: AttemptFailure) -> None:
        """A request fails."""
        attempt = self.in_flight.pop(attempt_id)
        self.abort_asked.discard(attempt_id)
        self.post(ev.AttemptFailed.of(attempt, f"{kind} at {attempt.engine}", kind))

    def answer(self, command: Any, rng: random.Random | None = None) -> None:
        """An engine answers a call or a probe; without ``rng`` all is well."""
        good = rng is None or rng.random() < 0.8
        if isinstance(command, do.ProbeEngine):
            current = rng is None or rng.random() < 0.9
            number = command.probe
            self.post(ev.EngineProbed(engine=command.engine, probe=number, answered=good, ok=good, current=current))
        else:
            result = ev.CallResult.DONE if good else ev.CallResult.UNREACHABLE
            self.post(ev.EngineCallEnded(command.engine, command.call, result, "" if good else "no answer"))

    def pause_or_resume(self) -> None:
        """Somebody wants a pause, or no longer."""
        self.paused = not self.paused
        self.post(ev.PauseRequested() if self.paused else ev.Resumed())

    def check(self) -> None:
        """Training's ledger has training's tokens and no others; a saved state is that of training."""
        assert self.core.observed_tokens() == self.generated
        state = snapshot.take(self.core, None)
        assert all(group["id"] >= 0 for group in (*state["ready"], *state["waiting"]))
        assert state["tokens"]["observed"] == self.generated
        again = RolloutCore(self.core.settings, ENGINES, check=True)
        snapshot.restore(again, state)
        again.validate()
        assert not again.context.evaluations


def moves(m: Machine, rng: random.Random) -> Iterator[Any]:
    """What may happen now, as functions of no argument; troubles are rarer than work."""
    yield lambda: None
    for _ in range(6):
        if m.in_flight:
            yield lambda: work(m, rng.choice(sorted(m.in_flight)), rng)
    if m.asked:
        yield lambda: m.answer(m.asked.pop(rng.randrange(len(m.asked))), rng)
    if m.core.step is None:
        yield lambda: m.post(ev.StepRequested())
    if m.timers:
        yield lambda: m.post(ev.TimerFired(m.timers.pop(rng.randrange(len(m.timers)))))
    if len(m.requested) < 12:
        yield lambda: m.evaluate(rng.randint(1, 3), rng.randint(1, 3), functions_at_once=rng.choice([None, 1, 3]))
    if rng.random() < 0.6:
        return
    name = rng.choice("ab")
    yield m.pause_or_resume
    yield lambda: m.post(rng.choice([ev.EngineStale, ev.EngineFailed])(name))
    if not m.updating:
        yield lambda: update(m)
    if m.core.context.evaluations and rng.random() < 0.3:
        yield lambda: m.post(ev.EvaluationCancelled(rng.choice(sorted(m.core.context.evaluations))))
    if m.core.context.evaluation_groups and rng.random() < 0.3:
        group = rng.choice(sorted(m.core.context.evaluation_groups))
        yield lambda: m.post(ev.SampleFailed(SampleId(group, 0), "raised"))


def update(m: Machine) -> None:
    """The trainer has new weights on disk."""
    m.updates, m.updating = m.updates + 1, True
    m.post(ev.UpdateRequested(update=m.updates, path=f"/{m.updates}", trained=min(m.core.leased, default=None)))


def work(m: Machine, attempt_id: str, rng: random.Random) -> None:
    """A request gains tokens, ends, or breaks off."""
    what = rng.random()
    if what < 0.06:
        m.tokens(attempt_id, rng.randrange(4))
        m.break_off(attempt_id, rng.choice([AttemptFailure.BROKE_OFF, AttemptFailure.CORRUPT, AttemptFailure.BUSY]))
    elif what < 0.08:
        m.post(ev.AttemptStalled(attempt_id, 9.0))
    elif attempt_id in m.abort_asked:
        m.end(attempt_id, rng.randrange(5))
    elif m.tokens(attempt_id, rng.randrange(1, 12)):
        m.end(attempt_id, 0)


@pytest.mark.parametrize("seed", seeds(40))
def test_an_evaluation_in_the_middle_of_everything(seed: int) -> None:
    """Cuts, failures, pauses, updates and lost engines: each evaluation ends once, training loses nothing."""
    rng, m = random.Random(seed), Machine()
    for number in range(260):
        rng.choice(list(moves(m, rng)))()
        if number % 20 == 0:
            m.check()
    if m.paused:
        m.post(ev.Resumed())
    for _ in range(3000):
        if m.asked:
            m.answer(m.asked.pop(0))
        elif m.abort_asked:
            m.finish_aborts()
        elif m.in_flight:
            m.end(min(m.in_flight))
        elif len(m.results) < len(m.requested) or m.updating:
            m.post(ev.TimerFired(m.timers.pop(0)))
        elif m.core.step is None:
            break
        else:
            m.post(ev.TimerFired(m.timers.pop(0)) if m.timers else ev.Resumed())
    m.check()
    assert set(m.results) == set(m.requested)
    assert not m.core.context.evaluation_groups
    for number, result in m.results.items():
        request = m.requested[number]
        if isinstance(result, do.EvaluationDone):
            assert [len(g.samples) for g in result.groups] == [request.n_samples] * len(request.prompts)
            for sample in (s for g in result.groups for s in g.samples):
                assert len(sample.tape) == min(length(*sample.id), 20)
                assert len({part.attempt_id for part in sample.tape.segments}) == 1
                assert sample.tape.newest_version == sample.tape.oldest_version == sample.group.drawn_under


@pytest.mark.no_cover
def test_the_random_evaluations_end_in_every_way() -> None:
    """Some are done, some fail by engines, functions and cancellations; without that the test above says little."""
    ends: set[Any] = set()
    for seed in range(40):
        rng, m = random.Random(seed), Machine()
        for _ in range(260):
            rng.choice(list(moves(m, rng)))()
        ends |= {getattr(r, "kind", "done") for r in m.results.values()}
    assert {"done", None, AttemptFailure.BROKE_OFF} <= ends


# ---------------------------------------------------------------- one thing at a time


def finish(m: Machine) -> None:
    """Everything in flight runs to its end."""
    while m.in_flight:
        m.end(m.of(evaluation=bool(m.of(evaluation=True)))[0])


def test_its_seeds_are_those_of_the_call() -> None:
    """hash(seed, prompt, sample, token offset), whatever the evaluation's number; a cut request has its seed again."""
    m = Machine()
    for seed in (5, 9):
        number = m.evaluate(seed=seed)
        ids = {tuple(a.sample.key): a for a in m.in_flight.values()}
        assert {k: a.sampling.seed for k, a in ids.items()} == {k: attempt_seed(seed, *k, 0) for k in ids}
        assert set(ids) == {(g, i) for g in range(2) for i in range(2)}
        assert all(a.id[16:20] == "ffff" for a in ids.values())
        cut = ids[1, 0]
        m.tokens(cut.id, 3)
        m.break_off(cut.id, AttemptFailure.BROKE_OFF)
        (again,) = [a for a in m.in_flight.values() if a.sample.key == (1, 0)]
        assert (again.sampling, again.token_ids.tolist()) == (cut.sampling, [7, 1])
        assert again.engine != cut.engine
        finish(m)
        assert isinstance(m.results[number], do.EvaluationDone)
        # the engine that broke off is found well
        m.post(ev.TimerFired(next(t for t in m.timers if t.kind is TimerKind.PROBE)))
        m.answer(m.asked.pop())
        m.timers.clear()


def test_training_gives_way_and_goes_on() -> None:
    """Its requests are ended first; no count of it moves; the step goes on with what it had."""
    m = Machine()
    m.post(ev.StepRequested())
    for attempt_id in m.of(evaluation=False):
        m.tokens(attempt_id, 2)
    number = m.evaluate()
    assert m.abort_asked == set(m.of(evaluation=False))
    assert not m.running
    m.finish_aborts()
    counters, tokens = m.core.counters.copy(), m.core.tokens.as_dict()
    assert m.running
    finish_evaluation(m)
    assert (m.core.counters - counters, m.core.tokens.as_dict()) == ({"attempts": 6, "resumed_attempts": 6} | {
        "reprefill_tokens": sum(len(a.token_ids) for a in m.in_flight.values())}, tokens)
    assert isinstance(m.results[number], do.EvaluationDone)
    finish(m)
    assert len(m.batches) == 1


def finish_evaluation(m: Machine) -> None:
    """Its requests run to their ends."""
    while m.of(evaluation=True):
        m.end(m.of(evaluation=True)[0])


def test_an_update_waits_for_it_and_it_for_an_update() -> None:
    """Neither begins while the other runs, and each in the order in which they were asked for."""
    m = Machine()
    first, second = m.evaluate(), m.evaluate()
    assert len(m.running) == 2
    update(m)
    third = m.evaluate()
    assert len(m.running) == 2
    assert not m.asked
    finish_evaluation(m)
    assert set(m.results) == {first, second}
    assert len(m.asked) == 2
    fourth = m.evaluate()
    assert not m.running
    while m.updating:
        m.answer(m.asked.pop(0))
    assert {e.version for e in m.running} == {PolicyVersion(0, 1)}
    finish_evaluation(m)
    assert set(m.results) == {first, second, third, fourth}


def test_evaluations_without_a_gap_do_not_keep_an_update_out() -> None:
    """Those that are asked for after it come after it; where it is cancelled, they begin."""
    m = Machine()
    m.evaluate()
    update(m)
    for _ in range(3):
        m.evaluate()
    assert len(m.running) == 1
    m.post(ev.UpdateCancelled(m.updates))
    assert len(m.running) == 4
    update(m)
    last = m.evaluate()
    finish_evaluation(m)
    update(m)
    while m.core.clock.current.n < 1 or m.core.updates.running:
        m.answer(m.asked.pop(0))
    (running,) = m.running
    assert running.version == PolicyVersion(0, 1)
    assert last not in m.results
    finish_evaluation(m)
    assert last in m.results
    while m.core.updates.running:
        m.answer(m.asked.pop(0))
    assert m.core.clock.current == PolicyVersion(0, 2)


def test_one_that_is_asked_for_after_the_update_that_mends_the_weights_waits_for_it() -> None:
    """While engines hold different weights an evaluation fails at once, unless an update is on its way."""
    m = Machine()
    m.post(ev.WeightsWritten("nobody knows which weights these are"))
    failed = m.evaluate()
    assert isinstance(m.results[failed], do.EvaluationFailed)
    update(m)
    mended = m.evaluate()
    while m.updating:
        m.answer(m.asked.pop(0))
    finish_evaluation(m)
    assert isinstance(m.results[mended], do.EvaluationDone)


def test_a_pause_waits_for_it_and_it_waits_for_the_end_of_a_pause() -> None:
    """What has begun goes on; what has not does not begin."""
    m = Machine(places=2)
    m.evaluate()
    assert not any(isinstance(c, do.Paused) for c in m.post(ev.PauseRequested()))
    m.evaluate()
    finish_evaluation(m)
    assert set(m.results) == {0}
    assert isinstance(m.commands[-1], do.Paused)
    m.post(ev.Resumed())
    finish_evaluation(m)
    assert set(m.results) == {0, 1}


def test_refusals_and_rests_are_those_of_the_engine() -> None:
    """An evaluation's refusals make rests and caps, its requests that end in order recover them."""
    m = Machine(places=8)
    m.evaluate(4, 2)
    theirs = [i for i in m.of(evaluation=True) if m.in_flight[i].engine == "b"]
    state = m.core.engines.states["b"]
    m.break_off(theirs[0], AttemptFailure.BUSY)
    assert (state.rests, state.cap.value, state.resting) == (1, 3, True)
    assert not m.core.counters["busy_refusals"]
    m.post(ev.TimerFired(next(t for t in m.timers if t.kind is TimerKind.REST)))
    assert not state.resting
    m.end(theirs[1])
    assert state.rests == 0


def test_one_without_an_engine_that_could_come_back_fails_at_once() -> None:
    """No update comes before its end: with other weights everywhere it waits for nothing, with a probe it waits."""
    m = Machine()
    for state in m.core.engines.states.values():
        state.lose(EngineWeights.UNKNOWN)
    m.evaluate()
    assert m.results[0] == do.EvaluationFailed(
        0, "all engines are quarantined or have other weights: a, b", AttemptFailure.BROKE_OFF
    )
    m.post(ev.EngineFailed("a"))
    m.evaluate()
    assert set(m.results) == {0}
    outage = next(t for t in m.timers if t.kind is TimerKind.OUTAGE)
    m.post(ev.TimerFired(outage))
    assert set(m.results) == {0, 1}


def test_a_function_that_fails_ends_it_and_its_requests() -> None:
    """The prompt is named; it is over when the last request is accounted for; a late answer changes nothing."""
    m = Machine(places=4)
    m.evaluate()
    (first, *others) = m.of(evaluation=True)
    group = m.in_flight[first].sample.group
    m.post(ev.SampleFailed(SampleId(group.id + 1, 0), "raised"))
    assert m.abort_asked == {first, *others}
    assert not m.results
    assert m.post(ev.Scored(group.id, [(0, 1.0)])) == []
    m.finish_aborts()
    assert m.results[0] == do.EvaluationFailed(0, "evaluation prompt 1: raised", None)
    assert not m.core.counters["late_events"]


def test_functions_that_hold_threads_are_started_as_they_may_run() -> None:
    """At most so many rollout functions have begun and not returned."""
    m = Machine(places=9)
    m.evaluate(4, 2, functions_at_once=3)
    most = 0
    while m.of(evaluation=True):
        most = max(most, len(m.of(evaluation=True)))
        m.end(m.of(evaluation=True)[0])
    assert most == 3
    assert isinstance(m.results[0], do.EvaluationDone)


def test_an_end_that_nobody_asked_for_is_a_failure() -> None:
    """Its tokens are lost, as a cut response begins again; so an engine that cuts each time is not asked for ever."""
    m = Machine()
    m.evaluate(1, 1)
    for _ in range(m.core.settings.max_attempt_failures):
        (attempt,) = m.in_flight.values()
        assert isinstance(attempt, Attempt)
        m.tokens(attempt.id, 2)
        m.in_flight.clear()
        m.post(ev.AttemptEnded.of(attempt, EngineFinish.ABORT))
    assert "ended a request that april wanted" in getattr(m.results[0], "error", "")


def test_what_cannot_be_is_refused() -> None:
    """A number that is in use, and no prompts; a prompt without room fails the evaluation by name."""
    m = Machine()
    m.evaluate(1, 1)
    for wrong in (m.requested[0], replace(m.requested[0], evaluation=7, prompts=[])):
        with pytest.raises(InvariantError, match="was requested twice, or without prompts"):
            m.core.handle(wrong)
    m = Machine()
    m.evaluate(prompts=[Prompt(np.array([7], np.int32)), Prompt(np.zeros(4096, np.int32))])
    words = "evaluation prompt 1: it has 4096 tokens, which leaves no room for a response"
    assert m.results[0] == do.EvaluationFailed(0, words, None)


BROKEN: dict[str, Any] = {
    "counted in flight": lambda m, e: setattr(e, "in_flight", 9),
    "its ledger says": lambda m, e: e.tokens.observe(3),
    "functions and": lambda m, e: setattr(e, "functions", 0),
    "groups, not": lambda m, e: setattr(e, "unfinished", 0),
    "weights changed or training went on": lambda m, e: setattr(e, "version", PolicyVersion(0, 9)),
    "are evaluated": lambda m, e: e.fail("without giving anything up"),
    "tokens of other versions": lambda m, e: e.groups[0].samples[0].tape.add_environment(
        np.array([1], np.int32), PolicyVersion(0, 9)
    ),
}


@pytest.mark.parametrize("words", BROKEN)
def test_the_books_of_an_evaluation_are_checked(words: str) -> None:
    """Each of its indices against a recount."""
    m = Machine()
    m.evaluate()
    m.core.validate()
    BROKEN[words](m, m.running[0])
    with pytest.raises(InvariantError, match=words):
        m.core.validate()
