"""A custom generate function as an engine: what the protocol asks of it, where requests end only all at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from adapters.slime_stand_in import DataSource, Sample, Tokenizer, installed, namespace
from april.adapters.slime.framework import Framework
from april.adapters.slime.functions import FunctionEngine
from april.adapters.slime.samples import Groups, Held
from april.core.sampling import SamplingParams
from april.core.types import SampleId
from april.core.versions import PolicyVersion
from april.engines.protocol import Chunk, EngineFinish, Request
from april.errors import EngineError, RequestRefused

PROMPT = np.array([5, 7], np.int32)
pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def framework() -> Iterator[None]:
    with installed():
        yield


class Told:
    """A function that adds one token per call, when it is told to; ``begun`` counts its calls."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = False
        self.seen: list[dict[str, Any]] = []

    async def generate(self, args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Any:
        assert not evaluation
        self.seen.append(sampling_params)
        self.begun += 1
        while not self.go:  # noqa: ASYNC110 - told by the test, from another thread
            await asyncio.sleep(0)
        sample.tokens = [*(sample.tokens or PROMPT.tolist()), 9]
        sample.response_length += 1
        sample.status = Sample.Status.ABORTED if sample.response_length == 1 else Sample.Status.COMPLETED
        return sample


@asynccontextmanager
async def world(**flags: Any) -> AsyncIterator[tuple[FunctionEngine, Told, Held]]:
    """The engine with two samples of one group, its function, and what it keeps of samples."""
    args = namespace(**flags)
    framework, told, samples = Framework("slime"), Told(), dict[Any, Any]()
    groups = Groups(DataSource(args), 2, lambda text: Tokenizer().encode(text, False), framework.check_sample)
    group = next(groups)["group"]
    engine = FunctionEngine(args, framework, told.generate, groups, samples, ())
    engine._fresh = {SampleId(0, i): group[i] for i in range(2)}
    async with asyncio.timeout(20):
        yield engine, told, samples
    await engine.close()


def request(index: int, attempt: str, offset: int = 0) -> Request:
    return Request(
        attempt_id=attempt,
        token_ids=PROMPT,
        sampling=SamplingParams(100),
        sample_key=(0, index),
        response_offset=offset,
    )


async def read(engine: FunctionEngine, asked: Request) -> Chunk:
    (chunk,) = [chunk async for chunk in engine.generate(asked)]
    return chunk


async def begun(told: Told, count: int) -> None:
    while told.begun < count:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_sample_goes_on_where_it_stood() -> None:
    """The function gets what it made before, and april the new tokens only, under the present version."""
    async with world() as (engine, told, samples):
        told.go = True
        first = await read(engine, request(0, "a"))
        await engine.update_weights(PolicyVersion(0, 1))
        second = await read(engine, request(0, "b", offset=1))
        assert (first.finish, first.version) == (EngineFinish.ABORT, (0, 0))
        assert (second.finish, second.version) == (EngineFinish.STOP, (0, 1))
        assert first.tokens.tolist() == second.tokens.tolist() == [9]
        assert samples[SampleId(0, 0)].tokens == [5, 7, 9, 9]
        # april has dropped what it had: so does the function
        await read(engine, request(0, "c"))
        assert samples[SampleId(0, 0)].tokens == [5, 7, 9]


async def test_a_response_that_april_has_refused_goes_on_where_it_stood() -> None:
    """From the state before the call that april did not believe; without that state nothing is made up."""
    async with world() as (engine, told, samples):
        told.go = True
        await read(engine, request(0, "a"))
        await read(engine, request(0, "b", offset=1))
        again = await read(engine, request(0, "c", offset=1))
        assert again.tokens.tolist() == [9]
        assert samples[SampleId(0, 0)].tokens == [5, 7, 9, 9]
        with pytest.raises(EngineError, match=r"no state of sample .* with the 7 tokens"):
            await read(engine, request(0, "d", offset=7))


async def test_one_of_several_is_ended_without_the_others() -> None:
    """Its call is given up, the sample stays as it was; the other one runs to its end."""
    async with world() as (engine, told, samples):
        calls = [asyncio.create_task(read(engine, request(i, name))) for i, name in enumerate("ab")]
        await begun(told, 2)
        await engine.abort(["a", "unknown"])
        cut = await calls[0]
        assert (cut.finish, len(cut.tokens)) == (EngineFinish.ABORT, 0)
        told.go = True
        assert (await calls[1]).tokens.tolist() == [9]
        assert set(samples) == {SampleId(0, 1)}


async def test_a_pause_waits_for_the_end_of_calls_and_holds_new_ones() -> None:
    """Nothing runs when pause returns; what waits before the gate can be aborted there."""
    async with world() as (engine, told, _):
        running = asyncio.create_task(read(engine, request(0, "a")))
        await begun(told, 1)
        pausing = asyncio.create_task(engine.pause())
        told.go = True
        await pausing
        assert running.done() or (await running).finish is EngineFinish.ABORT
        waiting = [asyncio.create_task(read(engine, request(1, name))) for name in "bc"]
        await asyncio.sleep(0)
        await engine.abort(["b"])
        assert (await waiting[0]).finish is EngineFinish.ABORT
        await engine.resume()
        assert (await waiting[1]).tokens.tolist() == [9]
        assert told.begun == 2
        assert (await engine.health()).ok


async def test_a_pause_ends_calls_that_do_not_end_themselves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the deadline of a pause, said in the log: weights are not held up by a tool that hangs."""
    monkeypatch.setattr("april.engines.http.server_engine.PAUSE_DEADLINE_S", 0.05)
    async with world() as (engine, told, samples):
        running = asyncio.create_task(read(engine, request(0, "a")))
        await begun(told, 1)
        with pytest.raises(EngineError, match="weights were updated while 1 requests run"):
            await engine.update_weights(PolicyVersion(0, 1))
        await engine.pause()
        cut = await running
        assert (cut.finish, len(cut.tokens)) == (EngineFinish.ABORT, 0)
        assert not samples
        await engine.update_weights(PolicyVersion(0, 1))
        await engine.resume()
        told.go = True
        assert (await read(engine, request(0, "b"))).version == (0, 1)
    assert "has not ended 1 aborted requests within 0.05 s" in caplog.text
    assert "and their tokens are lost" in caplog.text


async def test_the_function_gets_slimes_sampling_parameters() -> None:
    """Top-p with the ids that the trainer replays; and no weights through april."""
    async with world(rollout_top_p=0.9, rollout_temperature=0.7) as (engine, told, _):
        told.go = True
        await read(engine, request(0, "a"))
        (params,) = told.seen
        assert (params["top_p"], params["max_new_tokens"], params["temperature"]) == (0.9, 100, 0.7)
        assert params["custom_params"] == {"return_top_p_token_ids": True}
        with pytest.raises(EngineError, match="slime updates the weights of its servers itself"):
            await engine.update_weights(PolicyVersion(0, 1), "/weights")


async def test_several_samples_for_one_are_refused() -> None:
    """Before april's books could be wrong."""
    async with world() as (engine, _, samples):
        async def several(*_: Any) -> list[Sample]:
            return [Sample(), Sample()]

        engine._function = several
        with pytest.raises(RequestRefused, match="returned several samples for one"):
            await read(engine, request(0, "a"))
        assert not samples
