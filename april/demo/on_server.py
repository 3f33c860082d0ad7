"""The demo on a real server: weights from disk at every step, work counted by the server, time by the clock.

Invariant: an arm's engine loads the arm's first weights before its first token; what an arm before it has left on the
server is never used.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from transformers import PreTrainedModel

from april.config.engines import EngineConfig
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.demo import task
from april.demo.served_model import WeightsDirectory
from april.demo.settings import DemoSettings
from april.demo.stage import MAX_LEN, Work
from april.engines.kinds.factory import open_servers
from april.engines.protocol import Capabilities, Chunk, Engine, Health, Request

TICK_S = 0.01
"""Parts of time in which the busy slots are counted."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What a server calls its own counts: Prometheus names, with a label where there are several series."""

    tokens: str
    steps: str


COUNTERS = {
    # iterations of the engine that gave tokens
    "vllm": Counters("vllm:generation_tokens_total", "vllm:iteration_tokens_total_count"),
    # forward passes over running requests
    "sglang": Counters("sglang:generation_tokens_total", 'sglang:cuda_graph_passes_total{mode="decode_none"}'),
}


class OnServer:
    """See :class:`april.demo.stage.Stage`."""

    def __init__(self, settings: DemoSettings, model: PreTrainedModel, weights: Path) -> None:
        assert settings.url is not None
        self._url = settings.url
        self._model = model
        self._weights = WeightsDirectory(weights)
        self._counters = COUNTERS[settings.engine]
        self._engine = ServedEngine(settings, self._weights.write(model), self._count_from_here)
        self._began = 0.0
        self._before = (0, 0)

    @property
    def engine(self) -> ServedEngine:
        return self._engine

    def publish(self) -> str:
        return self._weights.write(self._model)

    def begin(self) -> None:
        self._count_from_here()
        self._began = time.perf_counter()

    def end(self) -> Work:
        ended = time.perf_counter()
        steps, tokens = (now - before for now, before in zip(self._counts(), self._before, strict=True))
        return Work(steps, tokens, self._engine.in_flight.between(self._began, ended))

    def close(self) -> None:
        self._weights.remove()

    def _count_from_here(self) -> None:
        """Also when the engine is opened, in the first step: it asks the server for a few tokens of its own then."""
        self._before = self._counts()

    def _counts(self) -> tuple[int, int]:
        """(steps, tokens) of the server since its start."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=30.0) as reply:  # noqa: S310 - given by the user
            text = reply.read().decode()
        return _total(text, self._counters.steps), _total(text, self._counters.tokens)


class ServedEngine:
    """The server as an engine, opened on the loop that uses it first, with the weights in ``path``.

    ``opened`` is called in a thread when that has been done.
    """

    def __init__(self, settings: DemoSettings, path: str, opened: Callable[[], None]) -> None:
        self._config: Any = TypeAdapter(EngineConfig).validate_python(
            {
                "kind": settings.engine, "urls": [settings.url], "max_in_flight": settings.slots,
                "vocab_size": task.VOCAB_SIZE, "max_len": MAX_LEN, "eos_token_ids": [task.EOS_ID],
            }
        )  # fmt: skip
        self._path = path
        self._tell_opened = opened
        self._engine: Engine | None = None
        self._opening = asyncio.Lock()
        self._capabilities = asyncio.run(self._asked())
        self.in_flight = InFlight()

    async def _asked(self) -> Capabilities:
        (engine,) = await open_servers(self._config)
        await engine.close()
        return engine.capabilities

    async def _opened(self) -> Engine:
        async with self._opening:
            if self._engine is None:
                (engine,) = await open_servers(self._config)
                await engine.pause()
                await engine.update_weights(FIRST_VERSION, self._path)
                await engine.resume()
                await asyncio.to_thread(self._tell_opened)
                self._engine = engine
        return self._engine

    @property
    def name(self) -> str:
        """The kind of server."""
        return str(self._config.kind)

    @property
    def capabilities(self) -> Capabilities:
        """As asked at the start."""
        return self._capabilities

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Passed on, and counted while it runs."""
        engine = await self._opened()
        self.in_flight.change(+1)
        try:
            async with aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
        finally:
            self.in_flight.change(-1)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        """Passed on."""
        await (await self._opened()).abort(attempt_ids)

    async def pause(self) -> None:
        """Passed on."""
        await (await self._opened()).pause()

    async def resume(self) -> None:
        """Passed on."""
        await (await self._opened()).resume()

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        """Passed on."""
        await (await self._opened()).update_weights(version, path)

    async def health(self) -> Health:
        """Passed on."""
        return await (await self._opened()).health()

    async def close(self) -> None:
        """Passed on, if it was ever opened."""
        if self._engine is not None:
            await self._engine.close()


class InFlight:
    """The number of requests in flight over time; written on one thread, read on another."""

    def __init__(self) -> None:
        self._changes: list[tuple[float, int]] = []
        self._lock = threading.Lock()

    def change(self, by: int) -> None:
        """Now it changes."""
        with self._lock:
            self._changes.append((time.perf_counter(), by))

    def between(self, began: float, ended: float) -> list[int]:
        """Requests in flight in the middle of every tick of :data:`TICK_S` between two moments."""
        with self._lock:
            changes = list(self._changes)
        times = np.array([at for at, _ in changes])
        levels = [0, *accumulate(by for _, by in changes)]
        ticks = np.arange(began + TICK_S / 2, ended, TICK_S)
        return [levels[i] for i in np.searchsorted(times, ticks, side="right")]


def _total(metrics: str, wanted: str) -> int:
    """Sum of a Prometheus counter over its series that have the label given in braces."""
    name, _, label = wanted.rstrip("}").partition("{")
    rows = re.findall(rf"^{re.escape(name)}(?:\{{([^}}]*)\}})? (\S+)$", metrics, re.MULTILINE)
    return int(sum(float(value) for labels, value in rows if label in labels))
