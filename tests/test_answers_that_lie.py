"""Answers that contradict themselves, or end where no response can end: dropped whole as corrupt, and begun again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_servers.base import PlannedFault, RequestFault
from fake_servers.openai import FakeOpenAIServer
from real_schedulers import endless, reward
from test_openai_scheduler import Served, config
from virtual_rollouts import EOS, RecordingEngine, Rollouts, on_virtual_time, table

import april
from april.core.sampling import SamplingParams
from april.core.versions import FIRST_VERSION
from april.engines.protocol import Chunk, EngineFinish, Request
from april.errors import EngineError, WireError

pytestmark = on_virtual_time

LIES = [
    RequestFault.DOUBLED_EVENT,
    RequestFault.ENDS_TWICE,
    RequestFault.EARLY_STOP,
    RequestFault.EARLY_LENGTH,
    RequestFault.CLAMPED_LOGPROB,
    RequestFault.WRONG_COUNT,
    RequestFault.EXTRA_LOGPROBS,
    RequestFault.NULL_LOGPROB,
]


@pytest.mark.parametrize("kind", LIES, ids=str)
def test_a_server_whose_requests_are_ended_by_closing_them(kind: RequestFault) -> None:
    """Every delivered segment is one that the server made behind what stands before it; the lies are in the ledger."""
    server = FakeOpenAIServer(mean_len=60)
    with (
        Served(server) as served,
        april.RolloutScheduler(config=config([served.url]), prompts=endless(), reward=reward, check=True) as rollouts,
    ):
        first = len(server.records)
        server.faults += [PlannedFault(kind, first + n, after_tokens=3) for n in (1, 4)]
        for _ in range(3):
            for sample in rollouts.next_batch().samples:
                tokens, prompt = sample.tokens.tolist(), np.asarray(sample.prompt.token_ids).tolist()
                assert tokens[-1] == server.eos or len(tokens) == 200
                for segment in sample.segments:
                    before, after = segment.start, segment.start + segment.count
                    made = [r.made for r in server.records if r.body["prompt"] == prompt + tokens[:before]]
                    assert any(m[: segment.count] == tokens[before:after] for m in made)
            rollouts.weight_update(transfer=lambda: None)
        books = rollouts.ledger()["tokens"]
        assert books.balanced
        assert set(books.dropped) == {"corrupt"}
        assert not [fault for fault in server.faults if fault.times]


class _Liar(RecordingEngine):
    """Its first ``lies`` answers are ``chunks``."""

    def __init__(self, chunks: list[Chunk], lies: int) -> None:
        super().__init__(table({}, 8))
        self.chunks, self.lies = chunks, lies

    async def generate(self, request: Request) -> Any:
        if self.lies:
            self.lies -= 1
            for chunk in self.chunks:
                yield chunk
            return
        async for chunk in super().generate(request):
            yield chunk


def chunk(*tokens: int, finish: EngineFinish | None = None, logprob: float = -1.0) -> Chunk:
    return Chunk(np.array(tokens, np.int32), np.full(len(tokens), logprob, np.float32), FIRST_VERSION, finish)


FALSE: dict[str, tuple[list[Chunk], type[EngineError], str]] = {
    "length": ([chunk(5, 6, finish=EngineFinish.LENGTH)], WireError, "for want of room"),
    "clamped": ([chunk(5, 6, logprob=-9999.0), chunk(EOS, finish=EngineFinish.STOP)], WireError, "minus infinity"),
    "after its end": ([chunk(5, EOS, finish=EngineFinish.STOP), chunk(7)], WireError, "after the one that ended"),
    "no token": ([chunk(finish=EngineFinish.STOP)], EngineError, "without a token"),
    "no end": ([chunk(5, 6)], EngineError, "without a finish reason"),
}


@pytest.mark.parametrize("what", list(FALSE))
async def test_an_evaluation_is_not_deceived(what: str) -> None:
    """A request whose answer cannot be true begins again, a few times; then the evaluation fails by name."""
    chunks, error, words = FALSE[what]

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
            async for piece in super().generate(request):
                yield piece
            if len(self.requests) == 1:
                raise WireError("it says 3 tokens and came with 2")

    class Names:
        def decode(self, ids: list[int], **options: Any) -> str:
            return "".join(f"<{i}>" for i in ids)

    async def until_a_string(prompt: april.Prompt, llm: Any) -> Any:
        return await llm.generate(stop=["><"])  # complete with the second token

    lengths = table({}, 8)
    engine = Contradicts(lengths, stream_interval_s=1.0)
    rollouts = Rollouts(lengths, n=1, engines=[engine], tokenizer=Names(), rollout=until_a_string)
    batch = await rollouts.driver.next_batch()
    assert batch.samples[0].attempts == 2
    assert len(batch.samples[0].tokens) == 2
    assert rollouts.dropped["corrupt"] == 2
    rollouts.check_ledger()
