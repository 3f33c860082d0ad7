"""The two halves of the engine before an actor's vLLM: every token once, aborts and weights exact, failures by name."""

from __future__ import annotations

import asyncio
import copy
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_async_llm import EOS, VOCAB, FakeAsyncLLM, install_vllm
from fake_servers.base import uncut
from fake_servers.images import PLACEHOLDER, TOKENS_EACH, FakeImages, features, salt_of
from msgspec import structs
from PIL import Image
from server_fixtures import until, update

from april.adapters.openrlhf.rollouts import OpenRLHFEngine, connect
from april.core.attachments import Attachment, Placed
from april.core.sampling import LogprobKind, SamplingParams
from april.core.versions import PolicyVersion
from april.engines.protocol import Chunk, EngineFinish, Request
from april.engines.vllm.actor import EngineActor
from april.errors import AttachmentError, EngineBusy, EngineError, RequestRefused

PROMPT = [12, 20, 30]
pytestmark = pytest.mark.asyncio


class Actor:
    """A handle: every call is a task, and what crosses it is copied as Ray would."""

    def __init__(self, llm: FakeAsyncLLM) -> None:
        self.side = EngineActor(llm)
        self.pushes = 0
        self.dead = False
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = name.removeprefix("april_")

        class Method:
            @staticmethod
            def remote(*arguments: Any) -> asyncio.Task[Any]:
                return asyncio.create_task(self._call(method, *copy.deepcopy(arguments)))

        return Method

    async def _call(self, method: str, *arguments: Any) -> Any:
        self.calls.append(method)
        if self.dead:
            raise RuntimeError("the actor died")
        found = self.pushes if method == "pushes" else getattr(self.side, method)
        value = found(*arguments) if callable(found) else found
        return copy.deepcopy(await value if asyncio.iscoroutine(value) else value)


vllm = pytest.fixture(autouse=True)(install_vllm)


@asynccontextmanager
async def world(**options: Any) -> AsyncIterator[tuple[FakeAsyncLLM, Actor, OpenRLHFEngine]]:
    llm = FakeAsyncLLM(mode="processed_logprobs", **options)
    actor = Actor(llm)
    (engine,) = await connect([actor])
    try:
        yield llm, actor, engine
    finally:
        await engine.close()
        await llm.shut()


def request(attempt: str = "a1", tokens: list[int] | None = None, most: int = 200) -> Request:
    sampling = SamplingParams(most, temperature=0.8, seed=3)
    return Request(attempt_id=attempt, token_ids=np.array(tokens or PROMPT, np.int32), sampling=sampling)


async def collect(engine: OpenRLHFEngine, asked: Request) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(asked)]


def text(count: int, weights: str = "tiny0", prompt: list[int] | None = None) -> list[int]:
    """The first tokens of a response."""
    return uncut(prompt or PROMPT, weights=weights, max_tokens=count, mean_length=60)[0]


async def test_a_response_in_one_chunk() -> None:
    """Tokens with their log-probabilities, EOS included, under the version of the weights."""
    async with world() as (_, _, engine):
        (chunk,) = await collect(engine, request())
    assert chunk.finish is EngineFinish.STOP
    assert chunk.tokens[-1] == EOS
    assert chunk.tokens.tolist() == text(len(chunk.tokens))
    assert chunk.logprobs.tolist() == uncut(PROMPT, weights="tiny0", max_tokens=200, mean_length=60)[1]
    assert chunk.version == PolicyVersion(0, 0)


async def test_an_image_in_a_file_is_read_on_this_side(tmp_path: Path) -> None:
    """The actor may run where the file is not: its bytes go along, and a file that has changed is an error by name."""
    buffer = io.BytesIO()
    picture = Image.new("RGB", (4, 4), (9, 8, 7))
    picture.save(buffer, "PNG")
    (tmp_path / "a.png").write_bytes(buffer.getvalue())
    attachment = replace(Attachment.of("image", buffer.getvalue()), data=None, path=str(tmp_path / "a.png"))
    placed = Placed(attachment, 1, TOKENS_EACH, (PLACEHOLDER,))
    ids = [12, *[PLACEHOLDER] * TOKENS_EACH, 30]
    async with world(images=FakeImages()) as (llm, _, engine):
        assert engine.capabilities.attachments == ("image",)
        (chunk,) = await collect(engine, structs.replace(request("a1", ids), attached=(placed,)))
        seen = salt_of([features(picture.tobytes(), "tiny0")])
        assert chunk.tokens.tolist() == text(len(chunk.tokens), "tiny0" + seen, ids)
        (tmp_path / "a.png").write_bytes(b"another")
        with pytest.raises(AttachmentError, match=r"a\.png has changed since its prompt"):
            await collect(engine, structs.replace(request("a2", ids), attached=(placed,)))
        assert len(llm.runs) == 1


async def test_what_the_engine_is() -> None:
    """As vLLM in the actor says, apart from what the wire takes away."""
    async with world() as (_, _, engine):
        found = engine.capabilities
        assert (await engine.health()).ok
    assert (found.vocab_size, found.max_context, found.max_in_flight) == (VOCAB, 1000, 128)
    assert found.logprob_kind is LogprobKind.PROCESSED
    assert found.returns_partials
    assert not found.streams
    assert not found.updates_from_disk
    assert EOS in found.eos_token_ids
    assert "A weight update ends all requests of this vLLM object" in found.notes[0]


async def test_an_abort_hands_over_what_there_is() -> None:
    """The other request goes on; the aborted one continues under another id where it stood."""
    async with world(mean_length=10**9) as (llm, _, engine):
        llm.limit(20)
        first = asyncio.create_task(collect(engine, request("a1")))
        second = asyncio.create_task(collect(engine, request("a2", [40])))
        await until(lambda: llm.stopped == 2)
        await engine.abort(["a1", "unknown"])
        (cut,) = await first
        llm.limit()
        (whole,) = await second
        again = np.array([*PROMPT, *cut.tokens.tolist()], np.int32)
        (rest,) = await collect(
            engine, Request(attempt_id="a3", token_ids=again, sampling=SamplingParams(180), response_offset=20)
        )
    assert (cut.finish, len(cut.tokens)) == (EngineFinish.ABORT, 20)
    assert (whole.finish, len(whole.tokens)) == (EngineFinish.LENGTH, 200)
    expected = uncut(again.tolist(), weights="tiny0", max_tokens=180, mean_length=10**9)[0]
    assert rest.tokens.tolist() == expected


async def test_weights() -> None:
    """After a transfer and its announcement, tokens are of the new weights and carry the new version."""
    async with world() as (llm, actor, engine):
        await engine.pause()
        waits = asyncio.create_task(collect(engine, request()))
        llm.weights = "tiny1"
        actor.pushes += 1
        await engine.update_weights(PolicyVersion(0, 1))
        await engine.resume()
        (chunk,) = await waits
        assert await engine.pushes() == 1
    assert chunk.version == PolicyVersion(0, 1)
    assert chunk.tokens.tolist() == text(len(chunk.tokens), "tiny1")


async def test_weights_wait_for_no_request() -> None:
    """Those that arrive, or are announced, while requests run are refused: tokens would be of no version."""
    async with world(mean_length=10**9) as (llm, actor, engine):
        llm.limit(5)
        running = asyncio.create_task(collect(engine, request()))
        await until(lambda: llm.stopped == 1)
        with pytest.raises(EngineError, match="weights were updated while 1 requests run"):
            actor.side.require_idle()
        with pytest.raises(EngineError, match="pause the engine first"):
            await engine.update_weights(PolicyVersion(0, 1))
        await engine.abort()
        await running
        with pytest.raises(EngineError, match="only the trainer itself loads weights into its engines"):
            await engine.update_weights(PolicyVersion(0, 1), "somewhere")


async def test_an_actor_that_was_started_anew() -> None:
    """Its weights are those of its start: no token of it is believed."""
    async with world() as (llm, actor, engine):
        await engine.update_weights(PolicyVersion(0, 1))
        assert (await engine.health()).current
        llm.label = "default"  # of a new process
        actor.side = EngineActor(llm)
        with pytest.raises(EngineError, match=r"under weights 0\.0 instead of 0\.1; was its actor restarted"):
            await collect(engine, request())
        health = await engine.health()
        assert (health.ok, health.current) == (True, False)
        assert "restarted" in health.detail


async def test_an_actor_that_was_started_anew_during_a_transfer() -> None:
    """The trainer has written into one that is gone: the update is refused, and the next one is whole."""
    async with world() as (llm, actor, engine):
        await engine.pause()
        actor.side = EngineActor(llm)
        with pytest.raises(EngineError, match="restarted while weights were handed over"):
            await engine.update_weights(PolicyVersion(0, 1))
        await engine.resume()
        await update(engine, PolicyVersion(0, 1))
        (chunk,) = await collect(engine, request())
        assert chunk.version == PolicyVersion(0, 1)


async def test_a_dead_actor() -> None:
    """What Ray says of it comes as an error of the engine; it is not healthy."""
    async with world() as (_, actor, engine):
        actor.dead = True
        with pytest.raises(EngineError, match="RuntimeError: the actor died"):
            await collect(engine, request())
        health = await engine.health()
    assert not health.ok
    assert "the actor died" in health.detail


async def test_what_is_refused() -> None:
    """Here what cannot fit, and there what vLLM will not take, each as a refusal."""
    async with world() as (llm, actor, engine):
        with pytest.raises(RequestRefused, match="has room for 1000"):
            await collect(engine, request(most=998))
        with pytest.raises(RequestRefused, match="outside the vocabulary"):
            await collect(engine, request(tokens=[VOCAB]))
        assert "generate" not in actor.calls
        running = asyncio.create_task(collect(engine, request("twice")))
        await asyncio.sleep(0)
        with pytest.raises(RequestRefused, match="attempt twice is already in flight"):
            await collect(engine, request("twice"))
        await running
        assert not llm.open_requests


async def test_a_vllm_that_the_trainer_has_paused_is_busy() -> None:
    """Which is no failure here either: the request goes elsewhere, or waits."""
    async with world(release=33) as (llm, _, engine):
        await llm.pause_generation(mode="abort", clear_cache=False)
        with pytest.raises(EngineBusy, match="Generation is paused"):
            await collect(engine, request())


async def test_a_request_that_is_given_up() -> None:
    """Nobody will read it: it is ended at vLLM too."""
    async with world(mean_length=10**9) as (llm, _, engine):
        llm.limit(5)
        running = asyncio.create_task(collect(engine, request()))
        await until(lambda: llm.stopped == 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: not llm.open_requests)
