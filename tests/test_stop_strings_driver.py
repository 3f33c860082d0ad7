"""Stop strings through the driver: cut by aborts, found in any chunk, with books that balance to the token."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from virtual_rollouts import (
    EOS,
    VOCAB,
    Angles,
    RecordingEngine,
    Rollouts,
    now,
    on_virtual_time,
    prompt_ids,
    table,
    virtual,
)

from april.config.mistakes import UNSUPPORTED
from april.config.settings import Config
from april.core.batch import Batch
from april.core.sampling import SamplingParams
from april.core.types import DropReason, FinishReason, Prompt, SampleId
from april.driver.detokenizer import TRIES, Detokenizer
from april.driver.llm import LLM, Completion, SamplingArguments
from april.driver.rewards import Response
from april.engines.protocol import Chunk, EngineFinish, Request
from april.engines.simulated.engine import synthetic_response
from april.errors import ConfigError, RolloutError
from april.testing.virtual_clock import run_virtual

pytestmark = on_virtual_time

LONG = 200


def response(group: int, count: int) -> list[int]:
    """The first tokens of the uncut response of a group's first sample."""
    tokens, _ = synthetic_response(prompt_ids(group), (group, 0), 0, count, VOCAB, (EOS,))
    return [int(t) for t in tokens]


def stop_around(group: int, first: int, last: int) -> str:
    """A string from the middle of token ``first`` to the middle of token ``last`` of a group's response."""
    return Angles().decode(response(group, LONG)[first : last + 1])[1:-1]


def stopping(stops: dict[int, str], seen: dict[SampleId, Completion] | None = None) -> Callable[..., Any]:
    """A rollout function that gives each group its stop string."""

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        stop = stops.get(llm.sample_id.group)
        done = await llm.generate(stop=[stop] if stop else None)
        if seen is not None:
            seen[llm.sample_id] = done

    return rollout


def with_stop(
    lengths: dict[tuple[int, int], int], default: int = LONG, engine: Callable[..., RecordingEngine] = RecordingEngine,
    stops: dict[int, str] | None = None, interval: float | None = None, **options: Any,
) -> Rollouts:  # fmt: skip
    """Responses of which the first group's, or those named, have a stop string; it ends after their sixth token."""
    rollout = options.pop("rollout", None) or stopping(stops or {0: stop_around(0, 4, 5)})
    made = engine(table(lengths, default), **({} if interval is None else {"stream_interval_s": interval}))
    return Rollouts(table(lengths, default), engines=[made], rollout=rollout, tokenizer=Angles(), **options)


async def until_delivered(rollouts: Rollouts, group: int) -> list[Batch]:
    """Steps, with a weight update before each, until the batch of this group."""
    batches: list[Batch] = []
    while not batches or group not in batches[-1].group_ids:
        await rollouts.driver.update_weights()
        batches.append(await rollouts.driver.next_batch())
        rollouts.check_ledger()
    return batches


def after_stop(rollouts: Rollouts) -> int:
    return rollouts.dropped.get(DropReason.AFTER_STOP, 0)


@pytest.mark.parametrize("interval", [None, 1.0, 2.5])
def test_cut_by_a_resume_it_is_honoured_every_time(interval: float | None) -> None:
    """20 of 20 stop strings cut by the end of a step are found where an uncut run has them, under two versions."""
    honoured = 0

    async def program(cut: int) -> None:
        nonlocal honoured
        # the step ends at t = cut: in the middle of the string's four tokens
        stops = {1: stop_around(1, cut - 2, cut + 1)}
        rollouts = with_stop({(0, 0): cut}, stops=stops, interval=interval, over=2)
        await rollouts.driver.next_batch()
        rollouts.check_ledger()
        assert len(rollouts.sample(1, 0).chains[0].tape) == cut
        batches = await until_delivered(rollouts, 1)
        (sample,) = batches[-1].samples
        assert sample.finish is FinishReason.STOP
        assert sample.attempts == 2
        assert [s.count for s in sample.segments] == [cut, 2]
        assert len({s.version for s in sample.segments}) == 2
        rollouts.check_provenance(sample)
        wasted = sum(rollouts.engines[0].tokens_of((1, 0))) - cut - 2
        assert after_stop(rollouts) == sum(b.metrics["after_stop_tokens"] for b in batches) == wasted
        honoured += sample.tokens.tolist() == response(1, cut + 2)
        await rollouts.close()

    for cut in range(3, 23):
        virtual(lambda cut=cut: program(cut))  # type: ignore[misc]
    assert honoured == 20


async def test_a_streaming_engine_is_asked_to_end_that_one_request() -> None:
    """The abort names the one attempt, the others go on; what came meanwhile is dropped by name."""
    seen: dict[SampleId, Completion] = {}
    rollout = stopping({0: stop_around(0, 4, 5)}, seen)
    rollouts = with_stop({(1, 0): 30, (2, 0): 40}, interval=4.0, n=3, rollout=rollout)
    (engine,) = rollouts.engines
    batch = await rollouts.driver.next_batch()
    assert [ids for _, ids in engine.aborts] == [(next(iter(engine.requests)),)]
    assert engine.aborts[0][0] == pytest.approx(8, abs=0.01)  # tokens 5 and 6 came in the second chunk
    assert {s.id.group: len(s.tokens) for s in batch.samples} == {0: 6, 1: 30, 2: 40}
    assert seen[SampleId(0, 0)].tokens.tolist() == response(0, 6)
    assert seen[SampleId(0, 0)].finish is FinishReason.STOP
    assert after_stop(rollouts) == engine.tokens_of((0, 0))[0] - 6 > 0
    assert batch.metrics["aborted_attempts"] == 1
    rollouts.check_ledger()
    first, second, _ = engine.requests.values()
    assert (first.stream, second.stream) == (True, False)
    assert first.sampling.stop == ()


class Deaf(RecordingEngine):
    """Streams every second and ignores aborts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, stream_interval_s=1.0, **options)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        self.aborts.append((now(), attempt_ids and tuple(attempt_ids)))


async def test_an_engine_that_does_not_end_the_request() -> None:
    """Asked again until the deadline, then fenced: the response is complete all the same, and counted exactly."""
    rollouts = with_stop({}, engine=Deaf, abort_resend_s=1.0, abort_deadline_s=10.0)
    (engine,) = rollouts.engines
    waiter = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(9.5)
    (attempt,) = rollouts.core.attempts.values()
    assert attempt.tape.count == 6
    assert attempt.tape.after_stop >= 2
    assert rollouts.core.observed_tokens() == engine.tokens == attempt.tape.parsed  # live
    batch = await waiter
    assert now() == pytest.approx(6 + 10, abs=1.1)
    assert len(engine.aborts) == 10
    assert batch.samples[0].tokens.tolist() == response(0, 6)
    assert batch.samples[0].finish is FinishReason.STOP
    assert batch.metrics["fenced_attempts"] == 1
    assert batch.metrics["after_stop_tokens"] == attempt.tape.after_stop == engine.tokens - 6
    rollouts.check_ledger()


class EndsOtherwise(Deaf):
    """Goes wrong after ten tokens, in the way of ``fault``."""

    fault = ""

    def alter_chunk(self, request: Request, chunk: Chunk) -> Chunk:
        if not self.fault or sum(len(c.tokens) for c in self.yielded[request.attempt_id]) < 10:
            return chunk
        if self.fault == "raises":
            raise ConnectionError("reset")
        if self.fault == "ends without a reason":
            return replace(chunk, finish=None)
        return replace(chunk, tokens=chunk.tokens + np.int32(VOCAB))


@pytest.mark.parametrize("fault", ["", "raises", "ends without a reason", "sends what cannot be"])
@pytest.mark.parametrize("budget", [LONG, 12])
async def test_an_engine_that_ends_it_otherwise(fault: str, budget: int) -> None:
    """STOP, LENGTH or a failure of the engine, after a string was found, changes nothing: the string came first. A
    failure is counted, and nothing is generated again."""
    rollouts = with_stop({}, 15, engine=EndsOtherwise, max_response_len=budget)
    (engine,) = rollouts.engines
    engine.fault = fault  # type: ignore[attr-defined]
    batch = await rollouts.driver.next_batch()
    (sample,) = batch.samples
    assert (sample.tokens.tolist(), sample.finish, sample.attempts) == (response(0, 6), FinishReason.STOP, 1)
    assert batch.metrics["failed_attempts"] == bool(fault)
    assert sum(rollouts.dropped.values()) == engine.tokens - 6
    assert fault or rollouts.dropped == {DropReason.AFTER_STOP: min(15, budget) - 6}
    assert (DropReason.CORRUPT in rollouts.dropped) == (fault == "sends what cannot be")
    rollouts.check_ledger()


@pytest.mark.parametrize("first", [5, 6, 7])
@pytest.mark.parametrize("interval", [1.0, None])
async def test_the_step_ends_in_the_same_moment(first: int, interval: float | None) -> None:
    """The other group completes the step a second before, at, or after the string's last token: one completion."""
    rollouts = with_stop({(0, 0): first}, stops={1: stop_around(1, 4, 5)}, interval=interval, over=2)
    batch = await rollouts.driver.next_batch()
    rollouts.check_ledger()
    if 1 not in batch.group_ids:
        batch = (await until_delivered(rollouts, 1))[-1]
    (sample,) = batch.samples
    assert sample.tokens.tolist() == response(1, 6)
    assert sample.finish is FinishReason.STOP
    assert rollouts.core.story(sample.id).count("call complete") == 1


async def test_the_group_is_given_up_after_the_string() -> None:
    """Tokens before the string go with the group, those after it are what they are; nothing is lost."""

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        if llm.sample_id == (0, 1):
            await asyncio.sleep(8.5)
            raise ValueError("no")
        await llm.generate(stop=stop_around(0, 4, 5) if llm.sample_id == (0, 0) else None)

    rollouts = with_stop({}, 30, engine=Deaf, samples=2, rollout=rollout, max_attempt_failures=1)
    (engine,) = rollouts.engines
    batch = await rollouts.driver.next_batch()
    assert batch.group_ids.tolist() == [1, 1]
    assert rollouts.dropped == {DropReason.FAILED: 6, DropReason.AFTER_STOP: engine.tokens_of((0, 0))[0] - 6}
    rollouts.check_ledger()


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize("interval", [4.0, None])
async def test_evaluations_stop_too(interval: float | None) -> None:
    """The response is cut at the string, the request is ended at an engine that streams, no count of training is
    touched."""
    lengths = table({}, LONG)
    engine = RecordingEngine(lengths, stream_interval_s=interval)
    rollouts = Rollouts(lengths, n=1, engines=[engine], tokenizer=Angles())
    sampling = SamplingParams(max_tokens=500, stop=(stop_around(0, 4, 5),))
    result = await rollouts.driver.evaluate([Prompt(prompt_ids(0))], 1, sampling, seed=0)
    (answer,) = result.responses[0]
    assert answer.tokens.tolist() == response(0, 6)
    assert answer.finish is FinishReason.STOP
    assert answer.text() == Angles().decode(response(0, 6))
    assert rollouts.core.tokens.observed == 0
    (request,) = engine.requests.values()
    if interval is None:
        assert engine.aborts == []
        return
    assert now() < 9
    assert engine.aborts[-1][1] == (request.attempt_id,)
    # asked to end, and read to that end: closing the stream first would leave some engines generating
    assert engine.yielded[request.attempt_id][-1].finish is EngineFinish.ABORT
    assert (request.stream, request.sampling.stop) == (True, ())


# ---------------------------------------------------------------- what is refused, and text


def an_llm(sampling: SamplingParams, generate: Any) -> LLM:
    """What a rollout function has, without conversations."""
    unused: Any = pytest.fail
    return LLM(SampleId(0, 0), sampling, generate, unused, unused, unused, unused)


async def test_stop_strings_of_a_call_replace_the_configured_ones() -> None:
    """stop="ab" is one string and not two, and an empty list is none."""
    asked: list[Any] = []

    async def generate(sampling: SamplingParams, token_ids: Any) -> Any:
        asked.append(sampling.stop)

    llm = an_llm(SamplingParams(max_tokens=5, stop=("configured",)), generate)
    await llm.generate()
    for stop in ("ab", ["a", "b"], []):
        await llm.generate(stop=stop)
    assert asked == [("configured",), ("ab",), ("a", "b"), ()]


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_everything_that_is_refused_has_its_sentence(name: str) -> None:
    """In a call and in the configuration; none of these names is an argument after all."""
    known = [*list(inspect.signature(LLM.generate).parameters)[1:-1], *SamplingArguments.__annotations__]
    assert name not in known
    with pytest.raises(TypeError, match=rf"^llm.generate: {name}: .+; april supports ") as caught:
        run_virtual(an_llm(SamplingParams(max_tokens=5), None).generate(**{name: 1}))
    assert sorted(str(caught.value).rpartition("april supports ")[2].split(", ")) == sorted(known)
    # what is only called otherwise in a call may be called otherwise again in the configuration
    other_names = {"max_new_tokens": "max_response_len", "stop_strings": "sampling.stop"}
    reason = UNSUPPORTED[name] if name not in other_names else f"unknown setting; do you mean {other_names[name]}?"
    with pytest.raises(ConfigError, match=f"^sampling.{name}: {re.escape(reason)}$"):
        Config(rollout_batch_size=1, max_response_len=9, sampling={name: 1})


async def test_text_for_rewards() -> None:
    """The whole response as text, tools included, special tokens in or out; without a tokenizer one clear sentence."""
    texts: list[str] = []

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        done = await llm.generate(max_tokens=2)
        await llm.generate([*done.conversation.tolist(), 500])

    async def reward(prompt: Prompt, response: Response) -> float:
        texts.extend([response.text(), response.text(special_tokens=True)])
        return 1.0

    rollouts = Rollouts(table({}, 4), n=1, rollout=rollout, reward=reward, tokenizer=Angles())
    (sample,) = (await rollouts.driver.next_batch()).samples
    tokens = sample.tokens.tolist()
    assert tokens[2] == 500
    assert tokens[-1] == EOS
    assert texts == [Angles().decode(tokens[:-1]), Angles().decode(tokens)]
    await rollouts.close()
    response = Response(SampleId(0, 0), (), FinishReason.STOP, None)
    with pytest.raises(RolloutError, match=r"response.text\(\) needs a tokenizer; give the scheduler tokenizer="):
        response.text()


# ----------------------------------------------------------------
# A tokenizer that raises: it is asked again, no engine is charged, and what fails in the end names the tokenizer.


SIXTY = 60


class Borrowed(Angles):
    """It raises while ``fails`` says so."""

    def __init__(self, fails: Callable[[], bool]) -> None:
        self.fails = fails
        self.asked = self.raised = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.asked += 1
        if self.asked > 1 and self.fails():  # not at the trial before anything starts
            self.raised += 1
            raise RuntimeError("Already borrowed")
        return super().decode(ids, skip_special_tokens)


async def failing(
    fails: Callable[[], bool], stop: str, lengths: dict[tuple[int, int], int] | None = None, steps: int = 2,
    train_s: float = 0.0, **options: Any,
) -> tuple[list[Any], Rollouts, Borrowed]:  # fmt: skip
    """Steps of two groups with responses of 60 tokens, of which four come every 4 s; no engine is charged."""
    tokenizer, samples, given = Borrowed(fails), list[Any](), table(lengths or {}, SIXTY)

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        await llm.generate(stop=[stop])

    engine = RecordingEngine(given, stream_interval_s=4.0)
    values: dict[str, Any] = {"n": 2, "engines": [engine], "rollout": rollout, "tokenizer": tokenizer} | options
    rollouts = Rollouts(given, **values)
    for _ in range(steps):
        samples.extend((await rollouts.driver.next_batch()).samples)
        rollouts.check_ledger()
        assert not any(s.failures for s in rollouts.core.engines.states.values())
        await asyncio.sleep(train_s)
        await rollouts.driver.update_weights()
    return samples, rollouts, tokenizer


async def require_as_sound(samples: list[Any], rollouts: Rollouts) -> None:
    """The responses are those of a tokenizer that never fails."""
    sound, *_ = await failing(lambda: False, "<9")
    assert [(s.id, s.tokens.tolist(), s.finish) for s in samples] == [
        (s.id, s.tokens.tolist(), s.finish) for s in sound
    ]
    assert set(rollouts.dropped) <= {DropReason.AFTER_STOP}


@pytest.mark.parametrize("begins", [0.0, 3.0, 10.5, 19.0])
@pytest.mark.parametrize("lasts", [0.5, 9.0])
async def test_after_a_while_it_works_again(begins: float, lasts: float) -> None:
    """What came meanwhile is looked at with the next chunk, or at the end: responses are as if nothing had been."""
    samples, rollouts, tokenizer = await failing(lambda: begins <= now() < begins + lasts, "<9")
    assert tokenizer.raised or lasts < 4
    await require_as_sound(samples, rollouts)


@pytest.mark.parametrize("of", [2, 5])
async def test_one_call_in_a_few_fails(of: int) -> None:
    """At any rate below all: nothing is dropped, nothing is charged."""
    calls = iter(range(10**9))
    samples, rollouts, tokenizer = await failing(lambda: next(calls) % of == 0, "<9")
    assert tokenizer.raised > 5
    await require_as_sound(samples, rollouts)


async def test_it_works_again_at_the_very_end() -> None:
    """The whole answer is here and has no text yet: it is asked a few times more, with pauses."""
    samples, rollouts, _ = await failing(lambda: 58.0 <= now() < 60.5, "<never")
    assert [s.finish for s in samples] == [FinishReason.STOP] * 4
    assert all(len(s.tokens) == SIXTY for s in samples)
    assert not rollouts.dropped


async def test_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    """The step fails by the tokenizer's name and words; the engine is well, and the tokens are failed, not corrupt."""
    _, rollouts, _ = await failing(lambda: True, "<9", steps=0, n=1, max_failed_groups=2)
    with pytest.raises(RolloutError, match=r"the tokenizer failed: RuntimeError: Already borrowed \(Borrowed\."):
        await rollouts.driver.next_batch()
    assert not rollouts.core.engines.states["e0"].quarantined
    assert set(rollouts.dropped) == {DropReason.FAILED}
    rollouts.check_ledger()
    assert "quarantined" not in caplog.text
    assert rollouts.core.engines.states["e0"].failures == 0


async def test_an_evaluation_fails_by_the_tokenizers_name() -> None:
    """A RolloutError, as for every function of the user's."""
    lengths = table({}, 8)
    rollouts = Rollouts(lengths, n=1, tokenizer=Borrowed(lambda: True))
    prompt = Prompt(np.array([1, 2], np.int32))
    with pytest.raises(RolloutError, match="the tokenizer failed: RuntimeError"):
        await rollouts.driver.evaluate([prompt], 1, SamplingParams(100, stop=("<9",)), 1)
    assert not rollouts.core.engines.states["e0"].quarantined


async def test_a_step_that_ends_meanwhile_loses_only_what_has_no_text() -> None:
    """The partial is kept as far as it was read, goes on from there, and ends where it would have ended."""
    samples, rollouts, _ = await failing(
        lambda: 17 <= now() < 30, "<never", lengths={(0, 0): 20}, steps=3, train_s=20.0, n=1, over=2
    )
    assert set(rollouts.dropped) <= {DropReason.FAILED}
    assert len(samples[0].tokens) in (20, SIXTY)
    assert all(s.finish is FinishReason.STOP for s in samples)


@pytest.mark.parametrize("answer", [None, b"text", 5])
def test_what_is_no_text(answer: Any) -> None:
    """A decode that returns something else has failed, by name."""

    class Odd:
        first = True

        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> Any:
            if self.first:
                self.first = False
                return ""
            return answer

    with pytest.raises(RolloutError, match=r"TypeError: decode must return a str, but returned a .*Odd\.decode of 2"):
        Detokenizer(Odd()).text([1, 2])


def test_it_is_asked_again_at_once() -> None:
    """For the text of a response too: a failure now and then reaches no reward."""
    left = [TRIES - 1]

    def fails() -> bool:
        left[0] -= 1
        return left[0] >= 0

    assert Detokenizer(Borrowed(fails)).text([1, 2]) == "<1><2>"
