"""Ends, counts and versions that cannot be true: of an engine object, of a trainer's own servers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_machine import EOS
from virtual_rollouts import EOS as VIRTUAL_EOS
from virtual_rollouts import Angles, RecordingEngine, Rollouts, on_virtual_time, table

import april
from april.core.sampling import SamplingParams
from april.core.types import DropReason
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.driver.wire_checks import AnswerChecks
from april.engines.protocol import Chunk, EngineFinish, Request
from april.errors import EngineError, WireError
from april.testing import FakeEngine, rollouts

pytestmark = on_virtual_time


# ---------------------------------------------------------------- engines of this process


def request(**sampling: Any) -> Request:
    return Request(
        attempt_id="a", token_ids=np.ones(3, np.int32), sampling=SamplingParams(**({"max_tokens": 20} | sampling))
    )


def chunk(*tokens: int, finish: Any = None, version: Any = FIRST_VERSION, logprob: float = -1.0) -> Chunk:
    return Chunk(np.array(tokens, np.int32), np.full(len(tokens), logprob, np.float32), version, finish)


def answer(*chunks: Chunk, eos: tuple[int, ...] = (EOS,), **sampling: Any) -> EngineFinish:
    checks = AnswerChecks(request(**sampling), vocab_size=50, max_context=99, eos_token_ids=eos, oldest=FIRST_VERSION)
    for piece in chunks:
        checks.check_next(piece, FIRST_VERSION)
    return checks.end(chunks[-1])


def test_answers_that_can_be_true() -> None:
    """EOS at the end, in the first min_tokens as well; a stop token; an engine whose EOS is not known; plain words."""
    assert answer(chunk(5, 6), chunk(EOS, finish=EngineFinish.STOP)) is EngineFinish.STOP
    assert answer(chunk(5, EOS, 6, EOS, finish=EngineFinish.STOP), min_tokens=2) is EngineFinish.STOP
    assert answer(chunk(5, 7), chunk(finish=EngineFinish.STOP), stop_token_ids=(7,)) is EngineFinish.STOP
    assert answer(chunk(5, EOS, 6, finish=EngineFinish.STOP), eos=()) is EngineFinish.STOP
    assert answer(chunk(5, finish="abort")) is EngineFinish.ABORT
    assert answer(chunk(*range(5, 25), finish="length")) is EngineFinish.LENGTH


@pytest.mark.parametrize(
    ("chunks", "sampling", "words"),
    [
        ([chunk(5, EOS, 6)], {}, "which ends responses; if it does not"),
        ([chunk(5, EOS), chunk(6)], {}, "which ends responses"),
        ([chunk(5, 7, 6)], {"stop_token_ids": (7,)}, "tokens came after token 7"),
        ([chunk(5, EOS, 6)], {"min_tokens": 1}, "which ends responses"),
        ([chunk(5, finish="tired")], {}, "'tired', which is not a finish reason"),
        ([chunk(5), chunk(finish=EngineFinish.STOP), chunk(6)], {}, "after the last chunk of the stream"),
        ([chunk(5, version=PolicyVersion(0, 1))], {}, "policy version 0.1 came"),
        ([chunk(5, version=None)], {}, "must be a PolicyVersion, got None"),
        ([chunk(finish=EngineFinish.STOP)], {}, "without a token"),
        ([chunk(5, 7, finish=EngineFinish.STOP)], {"min_tokens": 3, "stop_token_ids": (7,)}, "min_tokens is 3"),
    ],
)
def test_answers_that_cannot_be_true(chunks: list[Chunk], sampling: dict[str, Any], words: str) -> None:
    """Tokens behind an end, a finish that is none, a version that is none, nothing at all."""
    with pytest.raises(EngineError, match=words):
        answer(*chunks, **sampling)


class _GoesOn(FakeEngine):
    """Its first two answers go on after EOS."""

    lies = 2

    async def generate(self, request: Request) -> Any:
        async for piece in super().generate(request):
            if self.lies and piece.finish is EngineFinish.STOP:
                self.lies -= 1
                yield Chunk(piece.tokens, piece.logprobs, piece.version)
                yield Chunk(np.array([9], np.int32), np.array([-1], np.float32), piece.version, piece.finish)
            else:
                yield piece


async def test_an_engine_object_that_goes_on_after_eos_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    """A user-written engine is held to the same: its answer is corrupt, whole, and begins again."""

    config = april.Config(rollout_batch_size=2, max_response_len=30, engine={"kind": "simulated"})
    async with rollouts(config, engines=[_GoesOn("e", lengths=9)], prompts=[[1, 2], [3, 4]], reward=None) as run:
        batch = await run.next_batch()
        assert all(s.tokens[-1] == 0 and np.count_nonzero(s.tokens == 0) == 1 for s in batch.samples)
        assert set(run.ledger()["tokens"].dropped) == {DropReason.CORRUPT}
    assert caplog.text.count("tokens came after token 0, which ends responses") == 2


# ----------------------------------------------------------------
# Answers that contradict themselves, or end where no response can end: dropped whole as corrupt, and begun again.


class _Liar(RecordingEngine):
    """Its first ``lies`` answers are ``chunks``."""

    def __init__(self, chunks: list[Chunk], lies: int) -> None:
        super().__init__(table({}, 8))
        self.chunks, self.lies = chunks, lies

    async def generate(self, request: Request) -> Any:
        if self.lies:
            self.lies -= 1
            for piece in self.chunks:
                yield piece
            return
        async for piece in super().generate(request):
            yield piece


CONTRADICTIONS: dict[str, tuple[list[Chunk], type[EngineError], str]] = {
    "length": ([chunk(5, 6, finish=EngineFinish.LENGTH)], WireError, "for lack of room"),
    "clamped": (
        [chunk(5, 6, logprob=-9999.0), chunk(VIRTUAL_EOS, finish=EngineFinish.STOP)], WireError, "minus infinity",
    ),
    "after its end": (
        [chunk(5, VIRTUAL_EOS, finish=EngineFinish.STOP), chunk(7)], WireError, "after the last chunk of the stream",
    ),
    "no token": ([chunk(finish=EngineFinish.STOP)], EngineError, "without a token"),
    "no end": ([chunk(5, 6)], EngineError, "without a finish reason"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(CONTRADICTIONS))
async def test_an_evaluation_is_not_deceived(what: str) -> None:
    """A request whose answer cannot be true begins again, a few times; then the evaluation fails by name."""
    chunks, error, words = CONTRADICTIONS[what]

    prompt = april.Prompt(np.array([1, 2], np.int32))
    for lies in (2, 10**6):
        rollouts = Rollouts(table({}, 8), n=1, engines=[_Liar(chunks, lies)])
        evaluator = rollouts.driver
        if lies == 2:
            result = await evaluator.evaluate([prompt], 1, SamplingParams(100), 1)
            assert len(result.responses[0][0].tokens) == 8
        else:
            with pytest.raises(error, match=words):
                await evaluator.evaluate([prompt], 1, SamplingParams(100), 1)
        await rollouts.driver.close()


async def test_a_stop_string_does_not_excuse_an_answer_that_contradicts_itself() -> None:
    """What the engine says after a stop string is not looked at; that its whole answer is wrong is believed."""

    class Contradicts(RecordingEngine):
        async def generate(self, request: Request) -> Any:
            async for chunk in super().generate(request):
                yield chunk
            if len(self.requests) == 1:
                raise WireError("it reports 3 tokens but contains 2")

    async def until_a_string(prompt: april.Prompt, llm: Any) -> Any:
        return await llm.generate(stop=["><"])  # complete with the second token

    lengths = table({}, 8)
    engine = Contradicts(lengths, stream_interval_s=1.0)
    rollouts = Rollouts(lengths, n=1, engines=[engine], tokenizer=Angles(), rollout=until_a_string)
    batch = await rollouts.driver.next_batch()
    assert batch.samples[0].attempts == 2
    assert len(batch.samples[0].tokens) == 2
    assert rollouts.dropped["corrupt"] == 2
    rollouts.check_ledger()
