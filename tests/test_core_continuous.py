"""Continuous generation in the core: what a delivery, an update, an evaluation and a trainer that is busy do to it."""

from __future__ import annotations

from typing import Any

import pytest
from core_machine import EOS, CoreMachine, settings

from april.core import commands as do
from april.core import events as ev
from april.core import snapshot
from april.core.settings import EngineLimits
from april.core.state import RolloutCore
from april.core.types import DropReason, GenerationMode, OnDataEnd, Refill

ENGINES = (EngineLimits("e0", 4096, None, (EOS,), remote=True),)


class Machine(CoreMachine):
    """Continuous; engines answer their calls at once, in order."""

    def __init__(
        self, length: Any, *, n: int = 2, samples: int = 2, prompts: int | None = None, **changes: Any
    ) -> None:
        values = {"refill": Refill.SAMPLE, "max_staleness": 2} | changes
        chosen = settings(n=n, samples=samples, generation=GenerationMode.CONTINUOUS, **values)
        super().__init__(chosen, length, prompts=prompts, engines=ENGINES)

    def _execute(self, command: do.Command) -> None:
        super()._execute(command)
        if isinstance(command, do.PauseEngine | do.LoadEngine | do.ResumeEngine):
            self.post(ev.EngineCallEnded(command.engine, command.call, ev.CallResult.DONE))

    def evaluates(self) -> list[bool]:
        """Of each request in flight, whether it is of an evaluation."""
        return [a.sample.evaluation is not None for a in self.in_flight.values()]

    def finish_evaluation(self) -> None:
        """Its requests end."""
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


def test_a_delivery_cuts_nothing_and_work_goes_on_while_the_trainer_trains() -> None:
    """The requests in flight stay the same ones; their places are filled, though nobody has asked for a batch."""
    m = Machine(9, n=2, samples=2)
    m.ask()
    assert m.groups() == [0, 1]
    m.finish(0)
    assert m.groups() == [1, 2]
    goes_on = {a.id for a in m.in_flight.values() if a.sample.id.group == 1}

    m.finish(2)
    assert [b.group_sizes for b in m.batches] == [(2, 2)]
    assert goes_on < set(m.in_flight)
    assert m.groups() == [1, 3]

    m.finish(1, 3)
    assert len(m.batches) == 1
    m.ask()

    assert len(m.batches) == 2, "N groups are ready, so the batch is there at once"
    assert m.aborted() == set()
    m.check_ledger()


def test_admission_ends_where_the_plan_says_and_goes_on_with_an_update() -> None:
    """Undelivered groups are never more than (max_staleness - out + 1) * N; the update makes room for N more."""
    m = Machine(9, n=2, samples=1, max_in_flight=40, max_staleness=2)
    m.ask()
    assert len(m.core.buffer) == 6
    m.finish(0, 1)
    assert (len(m.batches), len(m.core.buffer)) == (1, 4)

    m.ask()
    m.finish(2, 3)
    assert (len(m.batches), len(m.core.buffer)) == (2, 2)

    m.new_weights()
    assert len(m.core.buffer) == 4
    assert m.core.counters["aborted_attempts"] == 2


def test_before_the_first_request_nothing_starts() -> None:
    """Neither prompts are drawn nor samples of a loaded state started, not even beside an evaluation."""
    saved = Machine(9)
    saved.ask()
    saved.tokens(min(saved.in_flight), 4)
    m = Machine(9)
    snapshot.restore(m.core, snapshot.take(saved.core, None))
    m.post(ev.WeightsUpdated(m.core.clock.current))
    m.evaluate(2)

    assert set(m.evaluates()) == {True}
    m.ask()
    assert set(m.evaluates()) == {True, False}


def test_only_an_update_cuts_and_what_it_cut_goes_on_first_under_the_new_weights() -> None:
    """Tokens of before and after the update carry their own versions; carry goes before what was not begun."""
    m = Machine(9, n=2, samples=1, max_in_flight=3)
    m.ask()
    first, second, third = sorted(m.in_flight, key=lambda i: m.in_flight[i].sample.id)
    m.tokens(second, 4)
    m.tokens(third, 5)
    m.end(first)

    m.post(ev.UpdateRequested(update=1, path="/w"))
    assert m.abort_asked >= {second, third}
    started = len(m.commands)
    m.finish_aborts()

    assert m.core.clock.current.n == 1
    assert [c.attempt.sample.id.group for c in m.commands[started:] if isinstance(c, do.Submit)][:2] == [1, 2]
    for group in m.groups():
        m.finish(group)
    (batch,) = m.batches
    assert [(s.id.group, [(part.version.n, part.count) for part in s.segments]) for s in batch.samples] == [
        (0, [(0, 9)]), (1, [(0, 4), (1, 5)]),
    ]  # fmt: skip
    assert all(s.loss_mask.all() for s in batch.samples)


def test_with_too_many_batches_out_nothing_begins_and_nothing_is_delivered() -> None:
    """max_staleness 0: one batch may be out and nothing beside it; the update lets the next begin."""
    m = Machine(9, n=1, samples=1, max_staleness=0, max_in_flight=4)
    m.ask()
    assert m.groups() == [0]
    m.finish(0)
    assert len(m.batches) == 1
    m.ask()
    assert m.in_flight == {}
    assert m.core.train_first

    m.new_weights()
    assert m.groups() == [1]
    m.finish(1)
    assert [b.version.n for b in m.batches] == [0, 1]
    assert [s.staleness for b in m.batches for s in b.samples] == [0, 0]


def test_what_the_next_batch_owes_is_waited_for() -> None:
    """A group that would be too old in the batch after the next is in the next one, though N others are complete."""
    m = Machine(lambda group, index: 50 if group == 0 else 9, n=1, samples=1, max_in_flight=2, max_staleness=1)
    m.ask()
    assert m.groups() == [0, 1]
    m.tokens(min(m.in_flight), 3)
    m.finish(1)
    assert [b.samples[0].id.group for b in m.batches] == [1]
    m.new_weights()
    assert m.groups() == [0, 2]
    m.ask()
    m.finish(2)
    assert len(m.batches) == 1, "group 0 has tokens of version 0, and this batch is the last that may have them"

    m.finish(0)
    assert [(s.id.group, s.staleness) for s in m.batches[1].samples] == [(0, 1)]


def test_an_evaluation_cuts_nothing_and_an_update_waits_for_it() -> None:
    """Its requests take places as they come free, before training's; the weights stay until it has ended."""
    m = Machine(9, n=2, samples=1, max_in_flight=2)
    m.ask()
    m.evaluate(2)
    assert m.groups() == [0, 1]
    assert m.aborted() == set()

    m.finish(0)
    assert m.evaluates() == [False, True]
    m.post(ev.UpdateRequested(update=1, path="/w"))
    assert m.aborted() == set()
    m.finish(1)
    m.finish_evaluation()
    assert len(m.batches) == 1, "training goes on beside it"
    m.finish_evaluation()

    assert any(isinstance(c, do.EvaluationDone) for c in m.commands)
    m.finish_aborts()
    assert m.core.clock.current.n == 1


def test_functions_of_an_evaluation_beyond_those_at_once_wait() -> None:
    """A limit of one: the second begins when the first has ended; training has the other places."""
    m = Machine(9, n=2, samples=1, max_in_flight=3)
    m.ask()
    m.evaluate(2, functions_at_once=1)
    m.finish(0, 1)
    assert m.evaluates().count(True) == 1
    assert len(m.in_flight) == 3, "samples of the evaluation that may not start keep training waiting"


def test_an_evaluation_hears_of_a_lost_engine_when_its_requests_have_ended() -> None:
    """Training's requests find no engine before; they wait for one, and end no evaluation."""
    m = Machine(9, n=2, samples=1, max_in_flight=3)
    m.ask()
    m.evaluate(2, functions_at_once=1)
    m.finish(0)
    (own,) = [a.id for a in m.in_flight.values() if a.sample.evaluation is not None]
    m.post(ev.EngineStale("e0"))
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


@pytest.mark.parametrize("on_data_end", [OnDataEnd.SHORT, OnDataEnd.WAIT])
def test_the_data_ends(on_data_end: OnDataEnd) -> None:
    """Every prompt is settled, or kept for more prompts, once each; then the trainer is told."""
    m = Machine(9, n=2, samples=1, prompts=5, on_data_end=on_data_end, max_in_flight=3)
    for update in range(1, 9):
        m.ask()
        while m.in_flight and m.core.wanted:
            m.end(min(m.in_flight))
        if m.ended:
            break
        m.new_weights(update=update)
    assert m.ended
    short = on_data_end is OnDataEnd.SHORT
    assert [len(b.group_sizes) for b in m.batches] == ([2, 2, 1] if short else [2, 2])
    assert len(m.core.buffer) == (0 if short else 1)
    assert m.core.step is None


def test_a_state_of_any_moment_goes_on() -> None:
    """Ready groups, partials and batches that are out: another core delivers all of it, no token twice."""
    m = Machine(lambda group, index: 9 + 20 * (group == 1), n=1, samples=1, max_in_flight=3, max_staleness=5)
    m.ask()
    m.finish(0)
    m.finish(2)
    m.tokens(min(m.in_flight), 4)
    state = snapshot.take(m.core, -1)
    assert len(state["ready"]) == 2

    again = RolloutCore(m.core.settings, ENGINES, check=True)
    snapshot.restore(again, state)
    tokens = {s.id.group: len(s.tape) for s in again.buffer.samples() if len(s.tape)}
    assert tokens == {0: 9, 1: 4, 2: 9}


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
