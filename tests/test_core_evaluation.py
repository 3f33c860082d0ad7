"""Evaluations in the core: outside of the ledgers, pinned to one policy version; trainer_lives plays them at random."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_machine import EOS, CoreMachine, settings, timers
from msgspec.structs import replace

from april.core import commands as do
from april.core import events as ev
from april.core.engine_table import EngineHealth, EngineWeights
from april.core.sampling import attempt_seed
from april.core.settings import EngineLimits
from april.core.types import Attempt, AttemptFailure, EngineFinish, Prompt, SampleId, TimerKind
from april.core.versions import PolicyVersion
from april.errors import InvariantError

ENGINES = tuple(EngineLimits(name, 4096, None, (EOS,), remote=True) for name in "ab")
Calls = (do.PauseEngine, do.LoadEngine, do.ResumeEngine)


class Machine(CoreMachine):
    """Stepwise; asserts that training, evaluations and updates do not overlap; engines answer when they are told."""

    def __init__(self, places: int = 6) -> None:
        self.asked: list[Any] = []
        """Calls and probes of engines that have not answered."""
        self.results: dict[int, do.EvaluationDone | do.EvaluationFailed] = {}
        self.updates = self.numbers = 0
        chosen = settings(n=2, samples=2, over=3, max_in_flight=places)
        super().__init__(chosen, lambda g, i: 4 + (g * 7 + i * 3) % 27, engines=ENGINES)

    @property
    def running(self) -> list[Any]:
        return [e for e in self.core.context.evaluations.values() if e.version is not None]

    def of(self, *, evaluation: bool) -> list[str]:
        """Ids of what is in flight."""
        return sorted(i for i, a in self.in_flight.items() if (a.sample.evaluation is not None) == evaluation)

    def _execute(self, command: do.Command) -> None:
        match command:
            case do.Submit(attempt):
                assert not self.of(evaluation=attempt.sample.evaluation is None), "training and an evaluation at once"
                if attempt.sample.evaluation is not None:
                    assert attempt.sample.evaluation.version == self.core.clock.current == attempt.oldest
            case do.PauseEngine() | do.LoadEngine() | do.ResumeEngine() | do.ProbeEngine():
                assert not (self.running and isinstance(command, Calls)), "an update beside an evaluation"
                self.asked.append(command)
            case do.EvaluationDone(number) | do.EvaluationFailed(number):
                assert number not in self.results
                self.results[number] = command
        super()._execute(command)

    def evaluates(self, n_prompts: int = 2, n_samples: int = 2, **changes: Any) -> int:
        self.numbers += 1
        self.evaluate(n_prompts, self.numbers - 1, n_samples=n_samples, **changes)
        return self.numbers - 1

    def answer(self) -> None:
        """An engine answers the oldest call or probe: all is well."""
        command = self.asked.pop(0)
        if isinstance(command, do.ProbeEngine):
            number = command.probe
            self.post(ev.EngineProbed(engine=command.engine, probe=number, answered=True, ok=True, current=True))
        else:
            self.post(ev.EngineCallEnded(command.engine, command.call, ev.CallResult.DONE))

    def update(self) -> None:
        """The trainer has new weights on disk."""
        self.updates += 1
        self.post(ev.UpdateRequested(update=self.updates, path=f"/{self.updates}"))

    def updated(self) -> None:
        """Engines answer until no update runs."""
        while self.core.updates.running:
            self.answer()

    def finish_evaluation(self) -> None:
        while ids := self.of(evaluation=True):
            self.end(ids[0])


def test_its_seeds_are_those_of_the_call() -> None:
    """hash(seed, prompt, sample, token offset), whatever the evaluation's number; a cut request has its seed again."""
    m = Machine()
    for seed in (5, 9):
        number = m.evaluates(seed=seed)
        ids = {tuple(a.sample.key): a for a in m.in_flight.values()}
        assert {k: a.request.sampling.seed for k, a in ids.items()} == {k: attempt_seed(seed, *k, 0) for k in ids}
        assert set(ids) == {(g, i) for g in range(2) for i in range(2)}
        assert all(a.id[16:20] == "ffff" for a in ids.values())
        cut = ids[1, 0]
        m.tokens(cut.id, 3)
        (probe,) = timers(m.fail(cut), TimerKind.PROBE)
        (again,) = [a for a in m.in_flight.values() if a.sample.key == (1, 0)]
        assert (again.request.sampling, again.request.token_ids.tolist()) == (cut.request.sampling, [5, 6])
        assert again.engine != cut.engine
        m.finish_evaluation()
        assert isinstance(m.results[number], do.EvaluationDone)
        m.asked.clear()
        m.fire(probe)
        m.answer()  # the engine that broke off is found well


def test_training_gives_way_and_goes_on() -> None:
    """Its requests are ended first; no count of it moves; the step goes on with what it had."""
    m = Machine()
    m.ask()
    for attempt_id in m.of(evaluation=False):
        m.tokens(attempt_id, 2)
    number = m.evaluates()
    assert m.abort_asked == set(m.of(evaluation=False))
    assert not m.running
    m.finish_aborts()
    counters, tokens = m.core.counters.copy(), m.core.tokens.as_dict()
    assert m.running
    m.finish_evaluation()
    again = sum(len(a.request.token_ids) for a in m.in_flight.values())
    counted = {"attempts": 6, "resumed_attempts": 6, "reprefill_tokens": again}
    assert (m.core.counters - counters, m.core.tokens.as_dict()) == (counted, tokens)
    (*groups,) = m.results[number].groups
    samples = [s for g in groups for s in g.samples]
    assert [len(s.chains[0].tape) for s in samples] == [m.length(*s.id) for s in samples]
    while m.in_flight:
        m.end(min(m.in_flight))
    assert len(m.batches) == 1


def test_an_update_waits_for_it_and_it_for_an_update() -> None:
    """Neither begins while the other runs, and each in the order in which they were asked for."""
    m = Machine(places=12)
    for _ in range(2):
        m.evaluates()
    assert len(m.running) == 2
    m.update()
    m.evaluates()
    assert len(m.running) == 2
    assert not m.asked
    m.finish_evaluation()
    assert set(m.results) == {0, 1}
    assert len(m.asked) == 2
    m.evaluates()
    assert not m.running
    m.updated()
    assert {e.version for e in m.running} == {PolicyVersion(0, 1)}
    m.finish_evaluation()
    assert set(m.results) == {0, 1, 2, 3}


def test_one_that_is_asked_for_after_the_update_that_mends_the_weights_waits_for_it() -> None:
    """While engines hold different weights an evaluation fails at once, unless an update is on its way."""
    m = Machine()
    m.post(ev.WeightsWritten("nobody knows which weights these are"))
    failed = m.evaluates()
    assert isinstance(m.results[failed], do.EvaluationFailed)
    m.update()
    mended = m.evaluates()
    m.updated()
    m.finish_evaluation()
    assert isinstance(m.results[mended], do.EvaluationDone)


def test_one_without_an_engine_that_could_come_back_fails_at_once() -> None:
    """No update comes before its end: with other weights everywhere it waits for nothing, with a probe it waits."""
    m = Machine()
    for state in m.core.engines.states.values():
        state.lose_weights(EngineWeights.UNKNOWN)
    m.evaluates()
    assert m.results[0] == do.EvaluationFailed(
        0, "all engines are quarantined or have other weights: a, b", AttemptFailure.BROKE_OFF
    )
    m.core.engines.states["a"].health = EngineHealth.QUARANTINED
    m.evaluates()
    assert set(m.results) == {0}
    m.fire(timers(m.commands, TimerKind.OUTAGE)[-1])
    assert set(m.results) == {0, 1}


def test_it_is_over_when_its_last_request_has_ended() -> None:
    """Also one whose function was lost meanwhile: the weight update that follows finds nothing in flight."""
    m = Machine()
    m.evaluates(1, 1)
    m.finish_aborts()
    (old,) = m.of(evaluation=True)
    m.post(ev.FunctionLost(m.in_flight[old].sample.id))
    (new,) = set(m.of(evaluation=True)) - {old}
    m.end(new)
    m.update()
    assert not m.results
    m.end(old, 0)
    assert isinstance(m.results[0], do.EvaluationDone)


def test_a_function_that_fails_ends_it_and_its_requests() -> None:
    """The prompt is named; it is over when the last request is accounted for; a late answer changes nothing."""
    m = Machine(places=4)
    m.evaluates()
    requests = m.of(evaluation=True)
    group = m.in_flight[requests[0]].sample.group
    m.post(ev.SampleFailed(SampleId(group.id + 1, 0), "raised"))
    assert m.abort_asked == set(requests)
    assert not m.results
    assert m.post(ev.Scored(group.id, [(0, 1.0)])) == []
    m.finish_aborts()
    assert m.results[0] == do.EvaluationFailed(0, "evaluation prompt 1: raised", None)
    assert not m.core.counters["late_events"]


def test_an_end_that_nobody_asked_for_is_a_failure() -> None:
    """Its tokens are lost, as a cut response begins again; so an engine that cuts each time is not asked for ever."""
    m = Machine()
    m.evaluates(1, 1)
    for _ in range(m.core.settings.max_attempt_failures):
        attempt = m.only
        assert isinstance(attempt, Attempt)
        assert attempt.request.token_ids.tolist() == [5, 6]
        m.tokens(attempt.id, 2)
        m.in_flight.clear()
        m.post(ev.AttemptEnded.of(attempt, EngineFinish.ABORT))
    assert "ended a request that april still wanted" in getattr(m.results[0], "error", "")
    assert m.core.tokens.observed == 0


def test_what_cannot_be_is_refused() -> None:
    """A number that is in use, and no prompts; a prompt without room fails the evaluation by name."""
    m = Machine()
    m.evaluates(1, 1)
    request = m.running[0].request
    for wrong in (request, replace(request, evaluation=7, prompts=[])):
        with pytest.raises(InvariantError, match="was requested twice, or without prompts"):
            m.core.handle(wrong)
    m = Machine()
    m.post(replace(request, prompts=[Prompt(np.array([7], np.int32)), Prompt(np.zeros(4096, np.int32))]))
    words = "evaluation prompt 1: it has 4096 tokens, so there is no room for a response"
    assert m.results[0] == do.EvaluationFailed(0, words, None)


BROKEN: dict[str, Any] = {
    "counted in flight": lambda e: setattr(e, "in_flight", 9),
    "its ledger says": lambda e: e.tokens.observe(3),
    "functions and": lambda e: setattr(e, "running_functions", 0),
    "groups, not": lambda e: setattr(e, "unfinished", 0),
    "weights changed or training continued": lambda e: setattr(e, "version", PolicyVersion(0, 9)),
    "are evaluated": lambda e: e.fail("without giving anything up"),
    "tokens of other versions": lambda e: (
        e.groups[0].samples[0].chains[0].tape.add_environment(np.array([1], np.int32), PolicyVersion(0, 9))
    ),
}


@pytest.mark.parametrize("words", BROKEN)
def test_the_books_of_an_evaluation_are_checked(words: str) -> None:
    """Each of its indices against a recount."""
    m = Machine()
    m.evaluates()
    m.core.validate()
    BROKEN[words](m.running[0])
    with pytest.raises(InvariantError, match=words):
        m.core.validate()
