"""A tokenizer that raises: it is asked again, no engine is charged, and what fails in the end names the tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from virtual_rollouts import RecordingEngine, Rollouts, now, on_virtual_time, table, virtual

from april.core.sampling import SamplingParams
from april.core.types import DropReason, FinishReason, Prompt
from april.driver.detokenizer import TRIES, Detokenizer
from april.driver.llm import LLM
from april.errors import RolloutError

pytestmark = on_virtual_time

LONG = 60


class Borrowed:
    """Token 17 is the text ``<17>``; it raises while ``fails`` says so."""

    def __init__(self, fails: Callable[[], bool]) -> None:
        self.fails = fails
        self.asked = self.raised = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        self.asked += 1
        if self.asked > 1 and self.fails():  # not at the trial before anything starts
            self.raised += 1
            raise RuntimeError("Already borrowed")
        return "".join(f"<{i}>" for i in ids)


def run(fails: Callable[[], bool], stop: str, steps: int = 2, **options: Any) -> tuple[list[Any], Rollouts, Borrowed]:
    """Steps of two groups with responses of 60 tokens, of which four come every 4 s."""
    samples: list[Any] = []
    tokenizer = Borrowed(fails)
    kept: list[Rollouts] = []

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        await llm.generate(stop=[stop])

    async def program() -> None:
        lengths = table({}, LONG)
        engine = RecordingEngine(lengths, stream_interval_s=4.0)
        rollouts = Rollouts(lengths, n=2, engines=[engine], rollout=rollout, tokenizer=tokenizer, **options)
        kept.append(rollouts)
        for _ in range(steps):
            batch = await rollouts.driver.next_batch()
            samples.extend(batch.samples)
            rollouts.check_ledger()
            assert not any(s.failures for s in rollouts.core.engines.states.values())
            await rollouts.driver.update_weights()
        await rollouts.close()

    virtual(program)
    return samples, kept[0], tokenizer


def responses(samples: list[Any]) -> list[tuple[Any, ...]]:
    return [(s.id, s.tokens.tolist(), s.finish) for s in samples]


SOUND, *_ = run(lambda: False, "<9")


@pytest.mark.parametrize("begins", [0.0, 3.0, 10.5, 19.0])
@pytest.mark.parametrize("lasts", [0.5, 9.0])
def test_after_a_while_it_works_again(begins: float, lasts: float) -> None:
    """What came meanwhile is looked at with the next chunk, or at the end: responses are as if nothing had been."""
    samples, rollouts, tokenizer = run(lambda: begins <= now() < begins + lasts, "<9")
    assert tokenizer.raised or lasts < 4
    assert responses(samples) == responses(SOUND)
    assert set(rollouts.dropped) <= {DropReason.AFTER_STOP}


def test_one_call_in_a_few_fails() -> None:
    """At any rate below all: nothing is dropped, nothing is charged."""
    calls = iter(range(10**9))
    for of in (2, 5):
        samples, rollouts, tokenizer = run(lambda of=of: next(calls) % of == 0, "<9")  # type: ignore[misc]
        assert tokenizer.raised > 5
        assert responses(samples) == responses(SOUND)
        assert set(rollouts.dropped) <= {DropReason.AFTER_STOP}


def test_it_works_again_at_the_very_end() -> None:
    """The whole answer is here and has no text yet: it is asked a few times more, with pauses."""
    samples, rollouts, _ = run(lambda: 58.0 <= now() < 60.5, "<never")
    assert [s.finish for s in samples] == [FinishReason.STOP] * 4
    assert all(len(s.tokens) == LONG for s in samples)
    assert not rollouts.dropped


async def test_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    """The step fails by the tokenizer's name and words; the engine is well, and the tokens are failed, not corrupt."""
    kept: list[Rollouts] = []

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        await llm.generate(stop=["<9"])

    lengths = table({}, 12)
    rollouts = Rollouts(
        lengths, n=1, engines=[RecordingEngine(lengths, stream_interval_s=4.0)], rollout=rollout,
        tokenizer=Borrowed(lambda: True), max_failed_groups=2,
    )  # fmt: skip
    kept.append(rollouts)
    with pytest.raises(RolloutError, match=r"the tokenizer failed: RuntimeError: Already borrowed \(Borrowed\."):
        await rollouts.driver.next_batch()
    assert not rollouts.core.engines.states["e0"].quarantined
    assert set(rollouts.dropped) == {DropReason.FAILED}
    rollouts.check_ledger()
    await rollouts.close()
    assert "quarantined" not in caplog.text
    assert kept[0].core.engines.states["e0"].failures == 0


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
    samples: list[Any] = []

    async def rollout(prompt: Prompt, llm: LLM) -> None:
        await llm.generate(stop=["<never"])

    lengths = table({(0, 0): 20}, LONG)
    engine = RecordingEngine(lengths, stream_interval_s=4.0)
    rollouts = Rollouts(
        lengths, n=1, over=2, engines=[engine], rollout=rollout, tokenizer=Borrowed(lambda: 17 <= now() < 30)
    )
    step = asyncio.create_task(rollouts.driver.next_batch())
    await asyncio.sleep(40)
    for _ in range(3):
        samples.extend((await step).samples)
        rollouts.check_ledger()
        await rollouts.driver.update_weights()
        step = asyncio.create_task(rollouts.driver.next_batch())
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    assert set(rollouts.dropped) <= {DropReason.FAILED}
    assert not rollouts.core.engines.states["e0"].failures
    await rollouts.close()
    assert len(samples[0].tokens) in (20, LONG)
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

    with pytest.raises(RolloutError, match=r"TypeError: decode must return a str, and returned a .*Odd\.decode of 2"):
        Detokenizer(Odd()).text([1, 2])


def test_it_is_asked_again_at_once() -> None:
    """For the text of a response too: a failure now and then reaches no reward."""
    left = [TRIES - 1]

    def fails() -> bool:
        left[0] -= 1
        return left[0] >= 0

    assert Detokenizer(Borrowed(fails)).text([1, 2]) == "<1><2>"
