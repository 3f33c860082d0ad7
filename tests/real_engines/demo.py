"""``make demo-vllm``, ``make demo-sglang``: start a server with the demo's model, run the demo on it, stop it.

The demo's stage is there: weights from disk at every step, work counted by the server, time by the clock. Invariant: an
arm's engine loads the arm's first weights before its first token; what an arm before it has left on the server is never
used.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.protocol import Capabilities, Chunk, Engine, Health, Request
from april.errors import AprilError
from benchmarks.demo.arm import MAX_LEN, MODES, DemoSettings, Stage, Work
from benchmarks.demo.run import run_and_show
from benchmarks.study import countdown as task
from benchmarks.study.training import Settings
from benchmarks.study.warmup import build_model
from tests.real_engines.commands import server_of
from tests.real_engines.environments import ROOT
from tests.real_engines.servers import Server, emptied, opened, program, ready

CONTEXT = 512
assert CONTEXT >= MAX_LEN, "the demo's longest response must fit"
KEPT = 2
"""Sets of weights that stay on the disk: those the servers have, and those they are about to load."""
TICK_S = 0.01
"""Parts of time in which the busy slots are counted."""


STEPS = {
    # iterations of the engine that gave tokens
    "vllm": ("vllm:iteration_tokens_total_count", ""),
    # forward passes over running requests
    "sglang": ("sglang:cuda_graph_passes_total", 'mode="decode_none"'),
}
"""By kind of server: name and label of its own count of decode steps."""


class ServerStage(Stage):
    """A stage whose engine is ``server``, which loads its weights from directories below ``weights``."""

    def __init__(self, settings: Settings, model: PreTrainedModel, server: Server, weights: Path) -> None:
        self._server = server
        self._model = model
        self._weights = WeightsDirectory(weights)
        self._kind = settings.served
        path = self._weights.write(model)
        self.engine = self._served = ServedEngine(settings, server.url, path, self._count_from_here)
        self._began = 0.0
        self._counted = (0, 0)

    def publish(self) -> str:
        return self._weights.write(self._model)

    def begin(self) -> None:
        self._count_from_here()
        self._began = time.perf_counter()

    def end(self) -> Work:
        ended = time.perf_counter()
        steps, tokens = (now - before for now, before in zip(self._counts(), self._counted, strict=True))
        return Work(steps, tokens, self._served.in_flight.between(self._began, ended))

    def close(self) -> None:
        self._weights.remove()

    def _count_from_here(self) -> None:
        """Also when the engine is opened, in the first step: it asks the server for a few tokens of its own then."""
        self._counted = self._counts()

    def _counts(self) -> tuple[int, int]:
        """(steps, tokens) of the server since its start."""
        tokens = self._server.metric(f"{self._kind}:generation_tokens_total")
        return int(self._server.metric(*STEPS[self._kind])), int(tokens)


class ServedEngine:
    """The server as an engine, opened on the loop that uses it first, with the weights in ``path``.

    ``opened`` is called in a thread when that has been done.
    """

    def __init__(self, settings: Settings, url: str, path: str, opened: Callable[[], None]) -> None:
        self._settings = {
            "kind": settings.served, "urls": [url], "max_in_flight": settings.slots,
            "first_weights": "present",  # loaded below, before the first token
            "vocab_size": task.VOCAB_SIZE, "max_len": MAX_LEN, "eos_token_ids": [task.EOS_ID],
        }  # fmt: skip
        self._path = path
        self._tell_opened = opened
        self._engine: Engine | None = None
        self._opening = asyncio.Lock()
        self._capabilities = asyncio.run(self._asked())
        self.in_flight = InFlight()

    async def _asked(self) -> Capabilities:
        engine = await opened(self._settings)
        await engine.close()
        return engine.capabilities

    async def _opened(self) -> Engine:
        async with self._opening:
            if self._engine is None:
                engine = await opened(self._settings)
                await engine.pause()
                await engine.update_weights(FIRST_VERSION, self._path)
                await engine.resume()
                await asyncio.to_thread(self._tell_opened)
                self._engine = engine
        return self._engine

    @property
    def name(self) -> str:
        """The kind of server."""
        return str(self._settings["kind"])

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


# ---------------------------------------------------------------- the model as a directory


def write_model(model: PreTrainedModel, where: Path) -> None:
    """Everything that a server needs to start, into ``where``; in silence, for a bar of its own is on the screen."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(where)
    _tokenizer().save_pretrained(where)


class WeightsDirectory:
    """Sets of weights in numbered directories, of which only the newest stay."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._written = 0

    def write(self, model: PreTrainedModel) -> str:
        """Write the weights as they are now; the directory's name."""
        where = self._root / str(self._written)
        write_model(model, where)
        self._written += 1
        shutil.rmtree(self._root / str(self._written - 1 - KEPT), ignore_errors=True)
        return str(where.resolve())

    def remove(self) -> None:
        """All of them."""
        shutil.rmtree(self._root, ignore_errors=True)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Servers want one at the start; the demo itself knows token ids only."""
    words = {f"<{number}>": number for number in range(task.VOCAB_SIZE)}
    made = Tokenizer(models.WordLevel(words, unk_token="<2>"))  # noqa: S106 - a word, no secret
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, eos_token=f"<{task.EOS_ID}>", pad_token=f"<{task.PAD_ID}>"
    )


# ---------------------------------------------------------------- the command


def settings_on(kind: str) -> DemoSettings:
    """Return settings smaller than those of `make demo`, as the server shares two cores with the trainer."""
    return DemoSettings(served=kind, steps=12, seeds=1, evaluate_every=4, modes=MODES)


def main(kind: Annotated[str, typer.Argument(help="vllm or sglang")]) -> None:
    """Run the demo; exit code 1 if a check does not hold."""
    settings, out = settings_on(kind), ROOT / "runs" / f"demo-{kind}"
    emptied(out)
    # its weights are replaced before the first token; what counts is the shape
    write_model(build_model(0, for_servers=True), out / "model")
    with program():
        server = server_of(kind, out / "model", out, context=CONTEXT, in_flight=settings.slots)
        with ready(server):

            def stage_of(settings: Settings, model: PreTrainedModel) -> Stage:
                return ServerStage(settings, model, server, out / "weights")

            holds = False
            try:
                holds = run_and_show(settings, out, stage_of)
            except AprilError as error:
                print(f"the demo failed: {error}", file=sys.stderr)
            last_lines = server.last_lines()
    if not holds:
        print(f"the end of the server's log:\n{last_lines}", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
