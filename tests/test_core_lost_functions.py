"""Rollout functions that die with their process begin again, answered from the tape; see also test_core_lives."""

from __future__ import annotations

from collections import Counter
from typing import Any

from core_machine import EOS, A, B, CoreMachine, asked

from april.core import commands as do
from april.core import events as ev
from april.core.sampling import SamplingParams
from april.core.types import (
    SampleId,
    SampleState,
)

Key = tuple[int, int]
FIRST_CALL = 6
"""Tokens of the first call of a function that makes two."""


class Processes(CoreMachine):
    """Functions of ``turns`` calls that die with their process; whatever is asked of one that is dead is an error."""

    def __init__(self, *args: Any, turns: int = 1, **options: Any) -> None:
        self.turns = turns
        self.functions: dict[Key, int] = {}
        """Calls that each has made, of those that are alive."""
        self.started: Counter[Key] = Counter()
        super().__init__(*args, **options)

    def _execute(self, command: do.Command) -> None:
        match command:
            case do.StartSample(sample):
                key = tuple(sample.id)
                assert key not in self.functions, "started twice"
                self.functions[key] = 0
                self.started[key] += 1
                self.commands.append(command)
                if self.auto_call:
                    self.call(sample.id)
            case do.CallCompleted(call):
                self.commands.append(command)
                key = tuple(call.sample.id)
                assert key in self.functions, "an answer to a function that is dead"
                if self.functions[key] < self.turns:
                    self.call(call.sample.id)
                else:
                    self._pump.post(ev.SampleReturned(call.sample.id))
            case do.CancelSample(sample):
                self.commands.append(command)
                self.functions.pop(tuple(sample.id), None)
            case _:
                super()._execute(command)

    def call(self, sample_id: SampleId) -> None:
        """A function asks for tokens."""
        self.functions[tuple(sample_id)] += 1
        last = self.functions[tuple(sample_id)] == self.turns
        self._pump.post(ev.CallMade(sample_id, SamplingParams(max_tokens=1000 if last else FIRST_CALL)))

    def lose(self, group: int, index: int = 0) -> list[do.Command]:
        """The process of a function has died."""
        self.functions.pop((group, index), None)
        return self.post(ev.FunctionLost(SampleId(group, index)))


def machine(**changes: Any) -> Processes:
    """A step has begun; responses have 20 tokens."""
    return asked(20, (A, B), Processes, **changes)


def expected(length: int = 20) -> list[int]:
    return [*range(10, 10 + length - 1), EOS]


def only_batch(m: Processes) -> list[list[int]]:
    """Tokens of the one batch that was delivered; the books balance."""
    (batch,) = m.batches
    m.check_ledger()
    assert m.dropped == {}
    return [s.tokens.tolist() for s in batch.samples]


def test_a_loss_that_is_told_too_late_is_none() -> None:
    """Of a function that has returned, or of a sample that is settled: nothing is begun again."""
    m = machine(auto_score=False)
    m.finish(0)
    assert m.lose(0) == []
    m.score(m.sample(0).id)
    assert m.started[0, 0] == 1
    assert only_batch(m) == [expected()]
    assert m.lose(0) == m.lose(-(1 << 40)) == []
    assert m.core.counters["lost_functions"] == 0


# ---------------------------------------------------------------- evaluations


def evaluated(losses: tuple[int, ...]) -> tuple[Processes, list[Any], set[Any]]:
    """An evaluation of two prompts with functions of two calls, one of them at a time, beside training.

    ``losses``: requests in whose middle the process of their function dies. Its responses, and with which seed each of
    their tokens came.
    """
    m = machine(turns=2)
    m.evaluate(2, functions_at_once=1, seed=3)
    m.finish_aborts()
    seeds, step = set(), 0
    while theirs := [a for a in m.in_flight.values() if a.sample.evaluation is not None]:
        (attempt,), step = theirs, step + 1
        seeds.add((attempt.sample.key, len(attempt.request.token_ids), attempt.request.sampling.seed))
        m.tokens(attempt.id, 4)
        if step in losses:
            m.lose(attempt.sample.id.group)
        m.end(attempt.id, 1 if step in losses else 1000)
    (done,) = [c for c in m.commands if isinstance(c, do.EvaluationDone)]
    return m, [(g.samples[0].chains[0].tape.tokens.tolist(), g.samples[0].reward) for g in done.groups], seeds


def test_an_evaluation_begins_again_and_answers_as_if_nothing_had_died() -> None:
    """The same tokens by the same seeds; never more of its functions than it may run; training hears nothing of it."""
    _, *undisturbed = evaluated(())
    m, *disturbed = evaluated((2, 5))
    assert disturbed == undisturbed
    assert [tokens for tokens, _ in undisturbed[0]] == [expected()] * 2
    assert m.core.counters["lost_functions"] == 0
    for _ in range(2):
        m.finish(0)
    assert m.batches[0].samples[0].tokens.tolist() == expected()
    assert m.dropped == {}


# ---------------------------------------------------------------- functions of which processes die


def test_a_function_whose_process_always_dies_fails_in_the_end() -> None:
    """As one that raises at every try: it does not kill one process after the other."""
    m = machine(auto_call=False, max_attempt_failures=3, over=1)
    for _ in range(2):
        m.lose(0)
        assert m.sample(0).state is SampleState.RUNNING
    commands = m.lose(0)
    (drop,) = (c for c in commands if isinstance(c, do.ReportDrop))
    assert "3 processes in a row died while they ran its function" in drop.why
    assert [c.sample.id for c in commands if isinstance(c, do.StartSample)] == [(1, 0)]
    m.core.validate()


def test_a_function_that_waits_for_an_answer_is_not_to_blame() -> None:
    """It does nothing when its process dies of another one, however often."""
    m = machine(max_attempt_failures=2)
    for _ in range(4):
        m.lose(0)
        m.finish_aborts()
    assert m.sample(0).state is SampleState.RUNNING
    m.core.validate()


class Thinking(Processes):
    """Functions that have their answer and compute, until the test lets them ask again."""

    def _execute(self, command: do.Command) -> None:
        if not isinstance(command, do.CallCompleted):
            super()._execute(command)


def test_a_function_that_gets_further_from_process_to_process_goes_on() -> None:
    """It does not kill them: as long as tokens come between, nothing is counted."""
    m = asked(60, (A, B), Thinking, turns=9, max_attempt_failures=2)
    for calls in range(1, 6):
        m.end(m.attempt(0).id, FIRST_CALL)
        assert len(m.sample(0).chains[0].tape) == calls * FIRST_CALL
        m.lose(0)
        assert m.sample(0).chains[0].open_call is None
        m.functions[0, 0] = 0
        m.call(m.sample(0).id)
        while not m.in_flight:  # what it was answered before comes from the tape
            m.functions[0, 0] = 0
            m.call(m.sample(0).id)
    m.core.validate()


def test_an_evaluation_of_which_processes_die_ends() -> None:
    """It names the prompt, and says what has happened."""
    m = machine(max_attempt_failures=2)
    m.auto_call = False
    m.evaluate()
    m.finish_aborts()
    (group,) = {key[0] for key in m.functions} - {0}
    assert not [c for c in m.lose(group) if isinstance(c, do.EvaluationFailed)]
    (failed,) = (c for c in m.lose(group) if isinstance(c, do.EvaluationFailed))
    assert "2 processes in a row died" in failed.error
