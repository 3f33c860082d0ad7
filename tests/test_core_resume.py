"""The resume contract: budgets, seeds, EOS, versions and ids over segments."""

from __future__ import annotations

import itertools

import pytest
from core_machine import EOS, CoreMachine, asked, settings
from msgspec.structs import replace

from april.core import events as ev
from april.core.ledger import DropReason
from april.core.sampling import SamplingParams, attempt_seed
from april.core.settings import EngineLimits
from april.core.types import Attempt, EngineFinish, FinishReason


def cut_once(m: CoreMachine, tokens: int) -> Attempt:
    """One step in which group 1 finishes and group 0 is cut after ``tokens``; returns the resumed attempt."""
    m.ask()
    m.tokens(m.attempt(0).id, tokens)
    m.finish(1)
    m.next_step()
    return m.attempt(0)


def machine(long: int = 60, **changes: object) -> CoreMachine:
    """Group 0 is ``long`` tokens long, all others 4."""
    return CoreMachine(settings(n=1, samples=1, over=2, **changes), {0: long})


def test_resume_sends_prompt_and_partial_as_ids_with_the_rest_of_the_budget() -> None:
    """Resumed by token ids; max_tokens is what is left of the response's budget, and the cost is counted."""
    m = machine(max_response_len=50)
    attempt = cut_once(m, 17)
    assert attempt.request.token_ids.tolist() == [5, 6, *range(10, 27)]
    assert attempt.request.sampling.max_tokens == 50 - 17
    assert (m.core.counters["reprefill_tokens"], m.core.counters["resumed_attempts"]) == (2 + 17, 1)


def test_context_of_the_engine_bounds_the_budget() -> None:
    """prompt + response fit the smallest engine's context."""
    m = asked(500, engines=(EngineLimits("a", 64), EngineLimits("b", 32, None, (EOS,))))
    m.finish(0)
    (sample,) = m.batches[0].samples
    assert (len(sample.tokens), sample.finish) == (32 - 2, FinishReason.LENGTH)


def test_seed_of_an_attempt_depends_on_run_sample_and_offset_only() -> None:
    """With the seed of the first attempt a resumed one would repeat its start; so the offset is part of it."""
    first = machine()
    first.ask()
    assert [a.request.sampling.seed for a in first.in_flight.values()] == [attempt_seed(0, g, 0, 0) for g in range(2)]
    assert cut_once(machine(), 9).request.sampling.seed == attempt_seed(0, 0, 0, 9)
    grid = itertools.product(range(2), range(4), range(4), range(6))
    assert len({attempt_seed(*key) for key in grid}) == 2 * 4 * 4 * 6


@pytest.mark.parametrize(("tokens", "left"), [(8, 12), (30, 0)])
def test_min_tokens_counts_the_whole_response(tokens: int, left: int) -> None:
    """What is there already is subtracted from min_tokens, down to 0."""
    m = machine()
    m.sampling = replace(m.sampling, min_tokens=20)
    assert cut_once(m, tokens).request.sampling.min_tokens == left


def test_min_tokens_never_exceeds_the_rest_of_the_budget() -> None:
    """Near the end of the budget an engine is not asked for more tokens than it may generate."""
    m = machine(max_response_len=20)
    m.sampling = SamplingParams(max_tokens=1000, min_tokens=18)
    m.ask()
    assert {(a.request.sampling.max_tokens, a.request.sampling.min_tokens) for a in m.in_flight.values()} == {(20, 18)}
    assert SamplingParams(max_tokens=50, min_tokens=18).capped(7) == SamplingParams(max_tokens=7, min_tokens=7)


@pytest.mark.parametrize("stop_in_request", [False, True])
def test_partial_that_ends_in_a_stop_token_is_finished(stop_in_request: bool) -> None:
    """An abort that meets the last token must not resume after EOS."""
    engines = (EngineLimits("e0", 4096, None, () if stop_in_request else (EOS,)),)
    m = CoreMachine(settings(n=1, samples=1, over=2), 6, engines=engines)
    if stop_in_request:
        m.sampling = SamplingParams(max_tokens=1000, stop_token_ids=(EOS,))
    m.ask()
    m.finish(0)
    second = m.attempt(1)
    m.tokens(second.id, 6)
    m.post(ev.AttemptEnded.of(m.in_flight.pop(second.id), EngineFinish.ABORT))
    assert m.sample(1).finish is FinishReason.STOP
    assert m.sample(1).chains[0].tape.tokens[-1] == EOS


@pytest.mark.parametrize("end", ["abort", "break"])
@pytest.mark.parametrize(("length", "finish"), [(6, FinishReason.STOP), (500, FinishReason.LENGTH)])
def test_request_that_is_cut_or_breaks_after_its_last_token_is_finished(
    length: int, finish: FinishReason, end: str
) -> None:
    """A connection lost, or an abort, between the last token and the word of its end: nothing is resumed."""
    m = asked(length, max_response_len=12, max_attempt_failures=1)
    attempt = m.only
    assert m.tokens(attempt.id, 12)
    if end == "break":
        m.fail(attempt)
    else:
        m.post(ev.AttemptEnded.of(m.in_flight.pop(attempt.id), EngineFinish.ABORT))
    (sample,) = m.batches[0].samples
    assert (len(sample.tokens), sample.finish) == (min(length, 12), finish)
    assert not m.in_flight


def test_abort_without_tokens_is_no_partial_and_costs_nothing() -> None:
    """A request aborted before its first token starts again from the prompt, and is not counted as re-prefill."""
    m = machine()
    attempt = cut_once(m, 0)
    assert (m.core.counters["reprefill_tokens"], m.core.counters["empty_partials"]) == (0, 1)
    assert attempt.request.token_ids.tolist() == [5, 6]
    assert attempt.request.sampling.seed == attempt_seed(0, 0, 0, 0)
    assert attempt.sample.attempts == 2


def test_a_request_with_a_grammar_begins_again_when_it_is_cut() -> None:
    """Engines begin a grammar at a request's first token, so what a cut request had is dropped by name."""
    m = machine()
    m.sampling = SamplingParams(max_tokens=1000, grammar='{"json_schema": {}}')
    again = cut_once(m, 17)
    assert again.request.token_ids.tolist() == [5, 6]
    assert again.request.sampling == replace(m.sampling, seed=again.request.sampling.seed)
    assert dict(m.core.tokens.dropped) == {DropReason.CUT_GRAMMAR: 17}
    m.finish(0)
    m.finish_aborts()
    row = m.batches[-1].samples[0]
    assert (row.id.group, len(row.tokens), bool(row.constrained_mask.all()), row.resumes) == (0, 60, True, 0)
    m.check_ledger()


@pytest.mark.parametrize("grammar", ["", '{"json_schema": {}}'])
def test_a_stop_string_that_only_the_engine_finds_does_not_come_again_and_again(grammar: str) -> None:
    """The next request has no stop strings, and is streamed, so that april finds them: also if it begins again."""
    m = CoreMachine(settings(n=1, samples=1), 60, engines=(EngineLimits("a", 4096, None, (EOS,), stop_strings=True),))
    m.sampling = SamplingParams(max_tokens=1000, stop=("x",), grammar=grammar)
    m.ask()
    m.end(m.only.id, 17)  # april has found no stop string there
    assert (m.only.request.sampling.stop, m.only.request.stream) == ((), True)
    m.end(m.only.id)
    assert len(m.batches[0].samples[0].tokens) == 60
    m.check_ledger()
