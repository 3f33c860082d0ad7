"""The resume contract: budgets, seeds, EOS, versions and ids over segments."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from core_machine import EOS, CoreMachine, settings

from april.core import commands as do
from april.core import events as ev
from april.core.sampling import SamplingParams, attempt_seed
from april.core.settings import EngineLimits
from april.core.types import Attempt, EngineFinish, FinishReason


def cut_once(m: CoreMachine, tokens: int) -> Attempt:
    """One step in which group 1 finishes and group 0 is cut after ``tokens``; returns the resumed attempt."""
    m.post(ev.StepRequested())
    ids = {a.sample.id.group: a.id for a in m.in_flight.values()}
    m.tokens(ids[0], tokens)
    m.end(ids[1])
    m.finish_aborts()
    m.update()
    m.post(ev.StepRequested())
    return next(a for a in m.in_flight.values() if a.sample.id.group == 0)


def machine(long: int = 60, **changes: object) -> CoreMachine:
    """Group 0 is ``long`` tokens long, all others 4."""
    return CoreMachine(settings(n=1, samples=1, over=2, **changes), lambda g, i: long if g == 0 else 4)


def test_resume_sends_prompt_and_partial_as_ids_with_the_rest_of_the_budget() -> None:
    """Resumed by token ids; max_tokens is what is left of the response's budget, never the whole again."""
    attempt = cut_once(machine(max_response_len=50), 17)

    assert attempt.token_ids.tolist() == [5, 6, *range(10, 27)]
    assert attempt.sampling.max_tokens == 50 - 17


def test_response_never_exceeds_its_budget_over_any_number_of_cuts() -> None:
    """A response of 900 tokens under a cap of 100 ends with LENGTH at exactly 100."""
    m = CoreMachine(settings(n=1, samples=1, over=3, max_response_len=100), lambda g, i: 900 if g < 2 else 3)
    rng = random.Random(2)
    for _ in range(12):
        m.step(rng)
        m.update()
    long = [s for b in m.batches for s in b.samples if s.id.group < 2]
    assert [(len(s.tokens), s.finish) for s in long] == [(100, FinishReason.LENGTH)] * 2


def test_context_of_the_engine_bounds_the_budget() -> None:
    """prompt + response fit the smallest engine's context."""
    m = CoreMachine(
        settings(n=1, samples=1), lambda g, i: 500, engines=(EngineLimits("a", 64), EngineLimits("b", 32, None, (EOS,)))
    )
    batch = m.step(random.Random(0))
    assert batch is not None
    assert len(batch.samples[0].tokens) == 32 - 2
    assert batch.samples[0].finish is FinishReason.LENGTH


def test_seed_of_an_attempt_depends_on_run_sample_and_offset_only() -> None:
    """With the seed of the first attempt a resumed one would repeat its start; so the offset is part of it."""
    first = machine()
    first.post(ev.StepRequested())
    seeds = [a.sampling.seed for a in first.in_flight.values()]
    resumed = cut_once(machine(), 9).sampling.seed

    assert seeds == [attempt_seed(0, 0, 0, 0), attempt_seed(0, 1, 0, 0)]
    assert resumed == attempt_seed(0, 0, 0, 9)
    grid = itertools.product(range(2), range(4), range(4), range(6))
    assert len({attempt_seed(*key) for key in grid}) == 2 * 4 * 4 * 6


def test_min_tokens_counts_the_whole_response() -> None:
    """What is there already is subtracted from min_tokens, down to 0."""
    m = machine()
    m.sampling = replace(m.sampling, min_tokens=20)
    assert cut_once(m, 8).sampling.min_tokens == 12
    m = machine()
    m.sampling = replace(m.sampling, min_tokens=20)
    assert cut_once(m, 30).sampling.min_tokens == 0


def test_min_tokens_never_exceeds_the_rest_of_the_budget() -> None:
    """Near the end of the budget an engine is not asked for more tokens than it may generate."""
    m = machine(max_response_len=20)
    m.sampling = SamplingParams(max_tokens=1000, min_tokens=18)
    m.post(ev.StepRequested())
    assert {(a.sampling.max_tokens, a.sampling.min_tokens) for a in m.in_flight.values()} == {(20, 18)}
    assert SamplingParams(max_tokens=50, min_tokens=18).capped(7) == SamplingParams(max_tokens=7, min_tokens=7)


@pytest.mark.parametrize("stop_in_request", [False, True])
def test_partial_that_ends_in_a_stop_token_is_finished(stop_in_request: bool) -> None:
    """An abort that meets the last token must not resume after EOS."""
    engines = (EngineLimits("e0", 4096, None, () if stop_in_request else (EOS,)),)
    m = CoreMachine(settings(n=1, samples=1, over=2), lambda g, i: 6, engines=engines)
    if stop_in_request:
        m.sampling = SamplingParams(max_tokens=1000, stop_token_ids=(EOS,))
    m.post(ev.StepRequested())
    first, second = list(m.in_flight)
    m.end(first)
    m.tokens(second, 6)
    m.post(ev.AttemptEnded.of(m.in_flight.pop(second), EngineFinish.ABORT))

    sample = m.core.buffer.groups[1].samples[0]
    assert sample.finish is FinishReason.STOP
    assert sample.tape.tokens[-1] == EOS


def test_partial_at_its_budget_is_finished() -> None:
    """An abort that meets the last token of the budget is the end of the response."""
    m = machine(max_response_len=12)
    m.post(ev.StepRequested())
    ids = {a.sample.id.group: a.id for a in m.in_flight.values()}
    m.end(ids[1])
    m.tokens(ids[0], 12)
    m.post(ev.AttemptEnded.of(m.in_flight.pop(ids[0]), EngineFinish.ABORT))

    assert m.core.buffer.groups[0].samples[0].finish is FinishReason.LENGTH


@pytest.mark.parametrize(("length", "finish"), [(6, FinishReason.STOP), (500, FinishReason.LENGTH)])
def test_stream_that_breaks_after_its_last_token_is_finished(length: int, finish: FinishReason) -> None:
    """A connection lost between the last token and the word of its end must not resume after EOS, or with no budget."""
    m = CoreMachine(settings(n=1, samples=1, max_response_len=12, max_attempt_failures=1), lambda g, i: length)
    m.post(ev.StepRequested())
    (attempt_id,) = m.in_flight
    assert m.tokens(attempt_id, 12)
    m.post(ev.AttemptFailed.of(m.in_flight.pop(attempt_id), "connection reset"))

    (sample,) = m.batches[0].samples
    assert (len(sample.tokens), sample.finish) == (min(length, 12), finish)
    assert not m.in_flight


def test_abort_without_tokens_is_no_partial_and_costs_nothing() -> None:
    """A request aborted before its first token starts again from the prompt, and is not counted as re-prefill."""
    m = machine()
    attempt = cut_once(m, 0)

    assert m.core.counters["reprefill_tokens"] == 0
    assert m.core.counters["empty_partials"] == 1
    assert attempt.token_ids.tolist() == [5, 6]
    assert attempt.sampling.seed == attempt_seed(0, 0, 0, 0)
    assert attempt.sample.attempts == 2


def test_every_token_carries_the_version_it_was_generated_under() -> None:
    """Three steps, three segments; versions and counts are exact, and staleness is that of the oldest token."""
    m = CoreMachine(settings(n=1, samples=1, over=2), lambda g, i: 30 if g == 0 else 4)
    for tokens in (7, 11):
        m.post(ev.StepRequested())
        long = next(a for a in m.in_flight.values() if a.sample.id.group == 0)
        other = next(a for a in m.in_flight.values() if a.sample.id.group != 0)
        m.tokens(long.id, tokens)
        m.end(other.id)
        m.finish_aborts()
        m.update()
    m.post(ev.StepRequested())
    m.end(next(a.id for a in m.in_flight.values() if a.sample.id.group == 0))
    m.finish_aborts()
    sample = m.batches[-1].samples[0]

    assert [(s.start, s.count, s.version) for s in sample.segments] == [
        (0, 7, (0, 0)), (7, 11, (0, 1)), (18, 12, (0, 2)),
    ]  # fmt: skip
    assert sample.versions[:, 1].tolist() == [0] * 7 + [1] * 11 + [2] * 12
    assert sample.tokens.tolist() == [*range(10, 39), EOS]
    assert sample.staleness == 2
    assert m.batches[-1].off_policy_share == pytest.approx(18 / 30)


def test_reprefill_counts_prompt_and_partial_of_resumed_attempts_only() -> None:
    """The cost of resuming is reported: prompt + partial of each resumed attempt."""
    m = machine()
    cut_once(m, 25)
    assert m.core.counters["reprefill_tokens"] == 2 + 25
    assert m.core.counters["resumed_attempts"] == 1


def test_attempt_ids_are_unique_and_none_is_a_prefix_of_another() -> None:
    """Engines match ids by prefix: fixed length makes that harmless."""
    m = CoreMachine(settings(n=2, samples=3, over=4, run_id=0xABC), lambda g, i: (g * 13 + i) % 50 + 1)
    rng = random.Random(1)
    for _ in range(5):
        m.step(rng)
        m.update()
    ids = [c.attempt.id for c in m.commands if isinstance(c, do.Submit)]

    assert len(ids) == len(set(ids))
    assert {len(i) for i in ids} == {32}
    assert all(i.startswith("0000000000000abc") for i in ids)


def test_segments_survive_as_packed_arrays() -> None:
    """At most 12 bytes per held token: int32 ids and float32 log-probabilities, versions run-length coded."""
    m = machine(long=900)
    cut_once(m, 500)
    tape = m.core.buffer.groups[0].samples[0].tape
    assert tape.tokens.dtype == np.int32
    assert tape.logprobs.dtype == np.float32
    assert len(tape.segments) == 1
