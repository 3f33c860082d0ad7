"""A server that speaks as AReaL asks SGLang: the timing of an engine with so many places, no model.

    python -m benchmarks.areal_server --places 32 --token-s 0.004 --mean 120

prints one JSON line, ``{"address": ...}``, and serves on 127.0.0.1 until standard input is closed. Weights are counted:
``/update_weights_from_disk`` brings the next ones. ``GET /figures`` says what was asked at a wrong time, ``POST
/mishaps`` makes answers late.

Invariants: a log-probability is -1/1024 for each set of weights up to the one that wrote its token, so it tells whose
the token is, whatever label the client gives it. How long a response is depends only on its prompt and on which of the
prompt's responses it is. Decode steps follow the clock, so a busy machine does not make the server slow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from benchmarks.slime_server import Place, Responses

PER_WEIGHTS = 1.0 / 1024
"""Exact in float32, and so is every multiple of it that a run comes to."""
EOS = 2
FIRST_WORD, VOCAB_SIZE = 10, 30_000


@dataclass(eq=False, kw_only=True)
class Row:
    """A request, from its arrival to its answer."""

    ids: list[int]
    """The prompt's and the response's so far."""
    given: int
    """Of the ids, those of the request."""
    limit: int
    stops: frozenset[int]
    logprobs: list[float] = field(default_factory=list)
    reason: str = ""
    """stop, length or abort; empty while it runs."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class ArealServer:
    """AReaL's routes over :meth:`decode`, which a subclass has.

    Args:
        places: requests that decode together; others wait.
        token_s: seconds per decode step.
    """

    def __init__(self, *, places: int, token_s: float) -> None:
        self.places, self.token_s = places, token_s
        self.weights = 0
        """Sets of weights that were loaded after the first ones."""
        self.late_s = 0.0
        """Answers leave so long after their last token."""
        self.aborted = self.made = self.begun = 0
        self.violations: list[str] = []
        self._going = asyncio.Event()
        self._going.set()
        self._wanted = asyncio.Event()
        self._running: list[Row] = []
        self._waiting: deque[Row] = deque()
        self._decoding: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None

    # ---------------------------------------------------------------- for subclasses

    def admitted(self, row: Row) -> None:
        """It has come."""

    def decode(self, rows: Sequence[Row]) -> list[tuple[int, float]]:
        """A token and its log-probability for each row."""
        raise NotImplementedError

    def ended(self, row: Row) -> None:
        """It has got its reason."""

    def load(self, path: str) -> None:
        """Weights, from this directory."""

    # ---------------------------------------------------------------- requests

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        wanted = body["sampling_params"]
        while not self._going.is_set():
            await self._going.wait()
        ids = list(body["input_ids"])
        row = Row(
            ids=ids, given=len(ids), limit=wanted["max_new_tokens"], stops=frozenset(wanted.get("stop_token_ids") or ())
        )
        self.begun += 1
        self.admitted(row)
        self._waiting.append(row)
        self._wanted.set()
        await row.ended.wait()
        if self.late_s:
            await asyncio.sleep(self.late_s)
        made = row.ids[row.given :]
        meta = {
            "finish_reason": {"type": row.reason}, "prompt_tokens": row.given, "completion_tokens": len(made),
            "output_token_logprobs": [[p, token, None] for p, token in zip(row.logprobs, made, strict=True)],
        }  # fmt: skip
        return web.json_response({"text": "", "output_ids": made, "meta_info": meta})

    def _end(self, row: Row, reason: str) -> None:
        row.reason = reason
        self.ended(row)
        row.ended.set()

    async def _decode_for_ever(self) -> None:
        while True:
            while not (self._running or self._waiting):
                self._wanted.clear()
                await self._wanted.wait()
            due = time.perf_counter()
            while self._running or self._waiting:
                due += self.token_s
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                self._step()

    def _step(self) -> None:
        while self._waiting and len(self._running) < self.places:
            self._running.append(self._waiting.popleft())
        rows = self._running
        for row, (token, logprob) in zip(rows, self.decode(rows) if rows else (), strict=True):
            row.ids.append(token)
            row.logprobs.append(logprob)
            if token in row.stops:
                self._end(row, "stop")
            elif len(row.logprobs) >= row.limit:
                self._end(row, "length")
        self.made += len(rows)
        self._running = [row for row in rows if not row.reason]

    # ---------------------------------------------------------------- control

    async def _pause(self, _: web.Request) -> web.Response:
        self._going.clear()
        for row in (*self._running, *self._waiting):
            self.aborted += 1
            self._end(row, "abort")
        self._running, self._waiting = [], deque()
        return web.json_response({"status": "ok"})

    async def _continue(self, _: web.Request) -> web.Response:
        self._going.set()
        return web.json_response({"status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self._running or self._waiting:
            self.violations.append("weights came while requests were in work")
        self.load(body.get("model_path", ""))
        self.weights += 1
        return web.json_response({"success": True, "message": ""})

    async def _release(self, _: web.Request) -> web.Response:
        if self._running or self._waiting:
            self.violations.append("memory was taken away while requests were in work")
        return web.json_response({})

    async def _nothing(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _mishaps(self, request: web.Request) -> web.Response:
        self.late_s = float((await request.json())["late_s"])
        return web.json_response({})

    async def _figures(self, _: web.Request) -> web.Response:
        return web.json_response({"violations": self.violations})

    # ---------------------------------------------------------------- life

    async def start(self) -> str:
        """Serve; the address, host:port."""
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([
            web.get("/health", self._nothing), web.post("/generate", self._generate),
            web.post("/pause_generation", self._pause), web.post("/continue_generation", self._continue),
            web.post("/update_weights_from_disk", self._update),
            web.post("/release_memory_occupation", self._release), web.post("/resume_memory_occupation", self._nothing),
            web.post("/mishaps", self._mishaps), web.get("/figures", self._figures),
        ])  # fmt: skip
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._decoding = asyncio.create_task(self._decode_for_ever())
        host, port = self._runner.addresses[0][:2]
        return f"{host}:{port}"

    async def close(self) -> None:
        """End what runs."""
        assert self._runner is not None
        assert self._decoding is not None
        self._decoding.cancel()
        await self._runner.cleanup()


class TimedServer(ArealServer):
    """Tokens without a model, geometric lengths.

    Args:
        places, token_s: as :class:`ArealServer`.
        mean: tokens per response.
        seed: of lengths and tokens.
    """

    def __init__(self, *, places: int, token_s: float, mean: float, seed: int = 0) -> None:
        super().__init__(places=places, token_s=token_s)
        self._mean, self._seed = mean, seed
        self._words = np.random.default_rng(seed)
        self._responses = Responses()
        self._places: dict[Row, tuple[Place, int]] = {}
        """And the length of the whole response."""

    def admitted(self, row: Row) -> None:
        place = self._responses.place_of(np.array(row.ids, np.int32))
        length = int(np.random.default_rng((self._seed, place.prompt, place.k)).geometric(1.0 / self._mean))
        self._places[row] = place, length

    def decode(self, rows: Sequence[Row]) -> list[tuple[int, float]]:
        logprob = -PER_WEIGHTS * (self.weights + 1)
        words = self._words.integers(FIRST_WORD, VOCAB_SIZE, len(rows)).tolist()
        made = []
        for row, word in zip(rows, words, strict=True):
            place, length = self._places[row]
            made.append((EOS if len(row.ids) + 1 >= place.prompt_len + length else word, logprob))
        return made

    def ended(self, row: Row) -> None:
        place, _ = self._places.pop(row)
        if row.reason == "abort":
            self._responses.cut(place, np.array(row.ids, np.int32))


async def serve(server: ArealServer) -> None:
    """Until standard input is closed."""
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)
    print(json.dumps({"address": await server.start()}), flush=True)
    await over.wait()
    await server.close()


def main() -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.areal_server")
    parser.add_argument("--places", type=int, default=32, help="requests that decode together")
    parser.add_argument("--token-s", type=float, default=0.004, help="seconds per decode step")
    parser.add_argument("--mean", type=float, default=120.0, help="tokens per response")
    parser.add_argument("--seed", type=int, default=0)
    given: dict[str, Any] = vars(parser.parse_args())

    async def run() -> None:
        await serve(TimedServer(**given))

    with suppress(KeyboardInterrupt):
        asyncio.run(run())


if __name__ == "__main__":
    main()
