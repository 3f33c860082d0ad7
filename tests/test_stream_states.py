"""A request at a server under random events: pieces cut anywhere, aborts, lost connections, late weights.

Promises: tokens are a true beginning of what the server made, each once, none before the weights are confirmed where
they must be; a finish is believed only with its mark; what is not whole is an error.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from responses import asked, openai_reader, route_of, sglang_reader, vllm_reader

from april.engines.http.http_client import HttpClient, ResponseBytes
from april.engines.http.response_reader import ResponseReader
from april.engines.http.response_stream import ResponseStream, StreamState
from april.engines.http.server_engine import Admission
from april.engines.protocol import AbortMeans, EngineFinish
from april.engines.sglang.wire import rid_of
from april.errors import EngineError

MEANS = {"vllm": AbortMeans.BY_ID, "sglang": AbortMeans.BY_ID, "openai": AbortMeans.CLOSE}
ROUNDS = 200


class _Connected(BaseProtocol):
    connected = True


class World(HttpClient):
    """One server with one request, the client before it, and the look at its weights; ``wrong`` is what was broken."""

    def __init__(self, kind: str, rng: Random) -> None:
        super().__init__("http://127.0.0.1:1", name="one")
        self.kind, self.rng, self.loop = kind, rng, asyncio.get_running_loop()
        self.budget = rng.randint(1, 9)
        self.corrupt_at = rng.randint(0, 9) if rng.random() < 0.2 else None
        self.marked = kind != "sglang"
        self.weights = self.loop.create_future()
        self.begun = asyncio.Event()
        self.posts = 0
        self.wrong: set[str] = set()
        self.confirmed = kind == "sglang"
        self.content: StreamReader | None = None
        self._reset()

    def _reset(self) -> None:
        self.made: list[int] = []
        self.finish: str | None = None
        self.lines, self.arrived, self.finished = b"", 0, False

    # ---- as the client

    async def post(self, route: str, body: bytes, headers: object = None) -> ResponseBytes:
        task = asyncio.current_task()
        assert task is not None
        self._callers.add(task)
        try:
            await self.begun.wait()
        except asyncio.CancelledError:
            if self._was_cut(task):
                raise self._closed_early() from None
            raise
        finally:
            self._callers.discard(task)
        self._reset()
        self.posts += 1
        self.content = StreamReader(_Connected(self.loop), 1 << 16, loop=self.loop)
        closed = SimpleNamespace(content=self.content, release=lambda: None, close=lambda: None)
        return ResponseBytes(self, route, closed)  # type: ignore[arg-type]

    # ---- as the look at the weights

    needed = staticmethod(lambda: True)

    async def wait_since(self, began_s: float, *, broken: Any) -> None:
        if not await asyncio.shield(self.weights):
            raise EngineError("other weights")
        self.confirmed = True

    # ---- as the server

    def make(self, finish: str | None = None) -> None:
        """One more token, or the end."""
        if self.content is None or self.finish is not None:
            return
        ids = [] if finish == "abort" else [100 + len(self.made)]
        self.made += ids
        if finish is None and len(self.made) == self.budget:
            finish = "length"
        self.finish = finish
        logprobs = [-float(i) for i in ids]
        if len(self.made) == self.corrupt_at:
            logprobs = [*logprobs, -1.0]
            self.wrong.add("corrupt")
        self.lines += self._event(ids, logprobs)
        if finish is not None:
            if self.marked and self.rng.random() < 0.1:
                self.wrong.add("no mark")
            else:
                self.lines += b"data: [DONE]\n\n"

    def _event(self, ids: list[int], logprobs: list[float]) -> bytes:
        said: dict[str, Any]
        if self.kind == "sglang":
            said = {"output_ids": ids, "meta_info": {
                "id": rid_of("a"), "completion_tokens": len(self.made),
                "output_token_logprobs": [[p, i] for p, i in zip(logprobs, [*ids, 7], strict=False)],
                "finish_reason": self.finish and {"type": self.finish},
            }}  # fmt: skip
        elif self.kind == "openai":
            said = {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs},
                                 "finish_reason": self.finish}]}  # fmt: skip
        else:
            content = [{"token_id": i, "logprob": p} for p, i in zip(logprobs, [*ids, 7], strict=False)]
            said = {"choices": [{"token_ids": ids, "logprobs": {"content": content}, "finish_reason": self.finish}]}
        return b"data: " + json.dumps(said).encode() + b"\n\n"

    def flow(self, most: int) -> None:
        """Some bytes arrive; the end of the answer follows its last one."""
        if self.content is None or self.finished:
            return
        piece = self.lines[self.arrived : self.arrived + most]
        self.arrived += len(piece)
        if piece:
            self.content.feed_data(piece)
        if self.finish is not None and self.arrived == len(self.lines):
            self.finished = True
            self.content.feed_eof()

    def lose(self) -> None:
        if self.content is not None and not self.finished and self.content.exception() is None:
            self.finished = True
            self.wrong.add("lost")
            self.content.set_exception(ConnectionResetError("lost"))

    @property
    def came(self) -> int:
        """Tokens whose events have arrived whole."""
        return self.lines[: self.arrived].count(b"\n\n") - self.lines[: self.arrived].count(b"[DONE]\n\n")


class Reading:
    """What was handed over, and how it ended."""

    def __init__(self, world: World, stream: ResponseStream) -> None:
        self.world, self.stream = world, stream
        self.tokens: list[int] = []
        self.finish: EngineFinish | None = None
        self.error: EngineError | None = None
        self.states = [stream.state]

    def take(self) -> None:
        for chunk in self.stream.take():
            assert self.finish is None, "a chunk after the last one"
            assert self.world.confirmed or not len(chunk.tokens), "tokens of weights that nobody has seen"
            assert (chunk.logprobs == -chunk.tokens).all()
            self.tokens += chunk.tokens.tolist()
            self.finish = chunk.finish
        assert self.tokens == self.world.made[: len(self.tokens)]

    async def run(self) -> None:
        try:
            while await self.stream.arrived():
                if self.stream.over or self.world.rng.random() < 0.5:
                    self.take()
        except EngineError as error:
            self.error = error
        finally:
            if self.stream.waiting:
                self.take()
            await self.stream.aclose()


def reader_of(kind: str) -> ResponseReader:
    if kind == "sglang":
        return sglang_reader("a")
    return openai_reader() if kind == "openai" else vllm_reader()


async def one_life(kind: str, seed: int) -> str:
    """Everything that happens to one request; returns how it ended."""
    rng = Random(seed)
    world, admission = World(kind, rng), Admission()
    endpoint = route_of(
        world, lambda *_: (reader_of(kind), b"{}"), MEANS[kind], admission=admission, marks_end=world.marked,
        confirmation=None if kind == "sglang" else world,
    )  # fmt: skip
    stream = ResponseStream(endpoint, asked("a"), streamed=True)
    reading = Reading(world, stream)
    gate = rng.random() < 0.2
    if gate:
        admission.close()
    task = asyncio.create_task(reading.run())
    right = rng.random() < 0.85
    aborted, cancelled, came = False, False, 0

    def abort() -> None:
        nonlocal aborted, came
        if not aborted and rng.random() < 0.3:
            aborted, came = True, world.came if world.content is not None else 0
            admission.abort(["a"])
            endpoint.abort(["a"])
            if kind != "openai":
                world.make("abort")

    def cancel() -> None:
        nonlocal cancelled
        if rng.random() < 0.05:
            cancelled = True
            task.cancel()

    actions = [
        admission.open, world.begun.set, world.make, world.make, lambda: world.flow(rng.randint(1, 90)),
        lambda: world.flow(10**6), reading.take, abort, cancel,
        lambda: world.weights.done() or world.weights.set_result(right),
        lambda: world.lose() if rng.random() < 0.1 else None,
        lambda: (world.flow(10**6), abort()),  # at once: nobody has read it
    ]  # fmt: skip
    for _ in range(rng.randint(0, 80)):
        if not task.done():
            rng.choice(actions)()
        for _ in range(rng.choice([0, 0, 1, 3, 9])):
            await asyncio.sleep(0)
    admission.open()
    world.begun.set()
    if not world.weights.done():
        world.weights.set_result(right)
    for _ in range(200):
        if not task.done():
            world.make()
            world.flow(10**6)
        await asyncio.sleep(0)
    assert task.done(), f"{stream!r} has not ended"
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(outcome, BaseException) and not cancelled:
        raise outcome

    assert not endpoint.open_streams
    assert not admission.inside
    # cancelled before it has begun, nobody has closed it
    assert stream.state is StreamState.CLOSED or (cancelled and stream.state is StreamState.WAITING)
    if cancelled:
        return "cancelled"
    assert (reading.error is None) is (reading.finish is not None)
    if reading.error is not None:
        assert world.wrong or not right, reading.error
        return "failed"
    if reading.finish is EngineFinish.ABORT:
        assert aborted
        assert kind != "openai" or len(reading.tokens) >= came or "lost" in world.wrong, "what had come is kept"
        return "aborted"
    assert reading.finish is EngineFinish.LENGTH
    assert reading.tokens == world.made, "the end is of all tokens"
    assert not world.wrong - {"lost"} or (kind == "openai" and aborted), "an end without its mark"
    assert world.posts == 1
    return "whole"


@pytest.mark.parametrize("kind", MEANS)
def test_a_request_under_random_events(kind: str) -> None:
    """The promises of this file, in hundreds of lives of each kind; every way to end is among them."""

    async def program() -> Counter[str]:
        return Counter([await one_life(kind, seed) for seed in range(ROUNDS)])

    ends = asyncio.run(program())
    assert set(ends) == {"whole", "failed", "aborted", "cancelled"}
    assert min(ends.values()) >= 5, ends
