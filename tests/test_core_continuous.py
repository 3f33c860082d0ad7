"""Continuous generation: what a delivery, an update, an evaluation and a busy trainer do; more in random lives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_machine import EOS, CoreMachine, settings

from april.core import commands as do
from april.core import events as ev
from april.core import rollout_core
from april.core.engine_table import EngineWeights
from april.core.settings import EngineLimits
from april.core.types import DropReason, GenerationMode, OnStale, Refill

ENGINES = (EngineLimits("e0", 4096, None, (EOS,), remote=True),)


class Machine(CoreMachine):
    """Continuous; engines answer their calls at once, in order."""

    def __init__(
        self, length: Any, *, n: int = 2, samples: int = 2, prompts: int | None = None, slots: int | None = None,
        single: bool = True, **changes: Any,
    ) -> None:
        values = {"refill": Refill.SAMPLE, "max_staleness": 2} | changes
        chosen = settings(n=n, samples=samples, generation=GenerationMode.CONTINUOUS, **values)
        engine = replace(ENGINES[0], max_in_flight=slots, cuts_single_requests=single)
        super().__init__(chosen, length, prompts=prompts, engines=(engine,))

    def _execute(self, command: do.Command) -> None:
        super()._execute(command)
        if isinstance(command, do.PauseEngine | do.LoadEngine | do.ResumeEngine):
            self.post(ev.EngineCallEnded(command.engine, command.call, ev.CallResult.DONE))

    def evaluates(self) -> list[bool]:
        """Of each request in flight, whether it is of an evaluation."""
        return [a.sample.evaluation is not None for a in self.in_flight.values()]

    def finish_evaluation(self) -> None:
        for attempt in [a for a in self.in_flight.values() if a.sample.evaluation is not None]:
            self.end(attempt.id)

    def new_weights(self, trained: int | None = None, update: int = 1) -> None:
        """The trainer's update; what is in flight ends with what it has."""
        if trained is None:
            trained = min(self.core.leased, default=None)
        self.post(ev.UpdateRequested(update=update, path="/w", trained=trained))
        self.finish_aborts()

    def aborted(self) -> set[str]:
        """Whatever an engine was asked to end."""
        return {i for c in self.commands if isinstance(c, do.Abort) for i in c.attempt_ids}


def test_an_evaluation_cuts_nothing_and_an_update_waits_for_it() -> None:
    """Its requests have places beyond max_in_flight and leave training its own; the weights stay until it has ended."""
    m = Machine(9, n=2, samples=1, max_in_flight=2)
    m.ask()
    m.evaluate(2)
    assert m.evaluates() == [False, False, True]

    m.finish(0)
    assert m.evaluates() == [False, True, False], "it has its share, so the place that came free is training's"
    m.post(ev.UpdateRequested(update=1, path="/w"))
    assert m.aborted() == set()
    m.finish(1)
    assert len(m.batches) == 1, "training goes on beside it"
    m.finish_evaluation()
    assert m.evaluates().count(True) == 1, "its place passes from its first request to its second"
    m.finish_evaluation()

    assert any(isinstance(c, do.EvaluationDone) for c in m.commands)
    m.finish_aborts()
    assert m.core.clock.current.n == 1


def test_full_engines_make_room_for_an_evaluation_up_to_its_share() -> None:
    """The newest requests of training end, are replaced by the evaluation's, and go on later with their tokens."""
    m = Machine(9, n=2, samples=1, max_in_flight=8, slots=4)
    m.ask()
    for attempt in list(m.in_flight.values()):
        m.tokens(attempt.id, 3)
    m.evaluate(3)
    assert m.aborted() == {m.attempt(2).id, m.attempt(3).id}
    assert m.evaluates() == [False] * 4
    m.finish_aborts()
    assert m.evaluates() == [False, False, True, True]

    m.finish(0)
    assert m.evaluates() == [False, True, True, False], "training's place passes to training"
    assert len(m.attempt(2).request.token_ids) == 2 + 3, "the request that was cut first goes on with its tokens"
    m.finish_evaluation()
    assert m.evaluates() == [False, False, True, False]
    assert len(m.aborted()) == 2
    assert m.core.tokens.dropped.total() == 0


def test_full_engines_make_room_for_a_whole_evaluation_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions start in portions, and do not wait until requests of training have ended for the ones before."""
    monkeypatch.setattr(rollout_core, "MOST_COMMANDS", 2)
    monkeypatch.setattr(rollout_core, "NEWEST_REQUESTS", 0)
    m = Machine(9, n=2, samples=1, max_in_flight=16, slots=16, max_staleness=8)
    m.ask()
    m.evaluate(20)
    assert len(m.aborted()) == 8
    m.finish_aborts()
    assert m.evaluates().count(True) == 8


def test_a_cancelled_evaluation_cuts_nothing_more() -> None:
    """Its calls no longer wait, so that another evaluation's call cuts one request of training."""
    m = Machine(50, n=2, samples=1, max_in_flight=12, slots=12, max_staleness=8)
    m.ask()
    m.auto_call = False
    m.evaluate(prompts=1, number=1)
    m.evaluate(prompts=5, number=2)
    first, *others = sorted(m.to_call)
    for sample in others:
        m.post(ev.CallMade(sample, m.sampling))
    assert len(m.aborted()) == 5
    m.post(ev.EvaluationCancelled(2))
    m.finish_aborts()
    m.post(ev.CallMade(first, m.sampling))
    assert len(m.abort_asked) == 1


def test_full_engines_make_room_while_training_waits_for_an_update() -> None:
    """Training may start nothing then, but its requests in flight have all places."""
    m = Machine(50, n=1, samples=1, over=12, max_in_flight=8, slots=8, max_staleness=0, on_stale=OnStale.MASK)
    m.ask()
    m.finish(0)
    assert m.core.train_first
    assert m.evaluates() == [False] * 7
    m.evaluate(8)
    m.finish_aborts()
    assert m.evaluates().count(True) == 4


def test_without_training_in_the_queue_an_evaluation_takes_more_than_its_share() -> None:
    """Places that training leaves free are not left empty."""
    m = Machine(9, n=2, samples=1, prompts=2, max_in_flight=8, slots=8)
    m.ask()
    m.evaluate(9)
    assert m.evaluates() == [False] * 2 + [True] * 6
    m.finish_evaluation()
    m.finish_evaluation()
    assert m.aborted() == set()


def test_a_request_with_priority_is_cut_for_an_evaluation_only_when_no_others_are_left() -> None:
    """The steps wait for requests with priority, so newer ones without it go first."""
    m = Machine(9, n=2, samples=1, max_in_flight=4, slots=4)
    m.ask()
    m.sample(3).urgent = True
    m.evaluate(1)
    assert m.aborted() == {m.attempt(2).id}


def test_an_engine_that_can_only_abort_all_requests_gives_an_evaluation_the_next_places() -> None:
    """No request of training is cut for it; the places that come free are its own until it has its share."""
    m = Machine(9, n=2, samples=1, max_in_flight=4, slots=4, single=False)
    m.ask()
    m.evaluate(3)
    m.finish(0, 1)
    assert m.aborted() == set()
    assert m.evaluates() == [False, False, True, True]
    m.finish(2)
    assert m.evaluates() == [False, True, True, False]


def test_an_evaluation_hears_of_a_lost_engine_when_its_requests_have_ended() -> None:
    """Training's requests find no engine before; they wait for one, and end no evaluation."""
    m = Machine(9, n=2, samples=1, max_in_flight=3)
    m.ask()
    m.evaluate(2, functions_at_once=1)
    m.finish(0)
    (own,) = [a.id for a in m.in_flight.values() if a.sample.evaluation is not None]
    m.core.engines.states["e0"].lose_weights(EngineWeights.UNKNOWN)
    for attempt_id in sorted(set(m.in_flight) - {own}):
        m.end(attempt_id, 0)
    assert not any(isinstance(c, do.EvaluationFailed) for c in m.commands)
    m.end(own, 0)
    assert any(isinstance(c, do.EvaluationFailed) for c in m.commands)


def test_a_failure_while_the_trainer_trains_is_told_at_the_next_request() -> None:
    """Nothing is admitted meanwhile, what is in flight ends and is kept; the request after that goes on with it."""
    m = Machine(9, n=1, samples=1, max_in_flight=2, max_failed_groups=1)
    m.ask()
    m.finish(0)
    assert m.groups() == [1, 2]
    m.post(ev.SampleFailed(next(a.sample.id for a in m.in_flight.values() if a.sample.id.group == 1), "broken"))
    for _ in range(m.core.settings.max_attempt_failures):
        m.finish_aborts()
        if 1 in m.core.buffer.groups:
            m.post(ev.SampleFailed(m.core.buffer.groups[1].samples[0].id, "broken"))
    assert 1 not in m.core.buffer.groups
    assert m.errors == []
    assert m.abort_asked == set(m.in_flight)
    m.finish_aborts()
    assert m.in_flight == {}

    m.ask()
    assert len(m.errors) == 1
    assert "broken" in m.errors[0]
    m.ask()
    assert m.groups()[0] == 2
    m.finish(2)
    assert [b.samples[0].id.group for b in m.batches] == [0, 2]
    assert m.core.prompts.dropped[DropReason.FAILED] == 1


def test_a_report_of_written_weights_ends_what_is_generated_ahead() -> None:
    """While the trainer trains and asks for nothing: all requests end, and none begins before an update."""
    m = Machine(lambda g, i: 5)
    m.ask()
    m.finish(0, 1)
    assert len(m.batches) == 1
    assert m.in_flight
    running = set(m.in_flight)
    m.commands.clear()
    m.post(ev.WeightsWritten("somebody wrote"))
    assert m.aborted() == running
    m.finish_aborts()
    assert not m.in_flight
    m.new_weights()
    assert m.in_flight
    m.check_ledger()
