"""Random lives of a scheduler whose engines are servers of april: they die, come back, join, leave, refuse and tear.

A token follows from the conversation and the sample, its log-probability from the token and the weights that made it:
not from the version under which an engine gives it. So whoever knows which weights each version has can tell whether
every token carries the version of the weights that made it. An engine begins with the weights ``start`` whenever its
process does, and reuses its arrays for the next chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

import april
from april.config.engines import AprilEngineConfig
from april.core.sampling import LogprobKind
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.protocol import Capabilities, Chunk, EngineFinish, Float32, Health, Int32, OnWeightUpdate, Request
from april.engines.served.client import connect_april
from april.engines.served.server import EngineServer, serve
from april.errors import ConfigError, EngineError, RolloutError
from april.testing import rollouts

KEY = "secret"
VOCAB, EOS, START = 1000, 0, "start"
CHUNK = 4
STEP_S = 0.5
FOR_EVER_S = 3600.0


def says(before: Sequence[int] | Int32, key: tuple[int, int] | None, count: int) -> Int32:
    """The response int32 [at most count] to a conversation; its last token is the end if it comes to it."""
    draw = np.random.default_rng([*map(int, before), *(key or (0, 0))])
    tokens = draw.integers(1, VOCAB, int(draw.integers(3, 40))).astype(np.int32)
    return np.append(tokens, np.int32(EOS))[:count].astype(np.int32)


def logprobs_of(tokens: Int32, weights: str) -> Float32:
    """float32 [T] of these tokens, had they been made with these weights."""
    salt = int.from_bytes(hashlib.blake2b(weights.encode(), digest_size=4).digest(), "big")
    return -(((tokens.astype(np.int64) + 1) * 2654435761 + salt) % 3989 / np.float32(1000)).astype(np.float32)


class TrueEngine:
    """An engine of one process; what it must not be asked for, and what it is asked for all the same, it notes."""

    def __init__(self, life: Life | None = None, luck: random.Random | None = None, step_s: float = STEP_S) -> None:
        self.name = "true"
        self.capabilities = Capabilities(
            logprob_kind=LogprobKind.TEMPERATURE, vocab_size=VOCAB, max_context=400, eos_token_ids=(EOS,),
            max_in_flight=6, updates_from_disk=True,
            in_flight_updates=(OnWeightUpdate.KEEP, OnWeightUpdate.RECOMPUTE),
        )  # fmt: skip
        self.weights = START
        self.version = FIRST_VERSION
        self._life, self._luck, self._step_s = life, luck or random.Random(0), step_s
        self._tokens, self._logprobs = np.zeros(CHUNK, np.int32), np.zeros(CHUNK, np.float32)
        self._aborted: set[str] = set()
        self._running: set[str] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._keeps = False

    def _wrong(self, what: str) -> None:
        if self._life is not None:
            self._life.wrong.append(what)

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        if self._life is not None and self.weights not in self._life.allowed:
            self._wrong(f"{request.attempt_id} went to an engine with the weights {self.weights}")
        held = request.response_offset
        answer = says(request.token_ids[: len(request.token_ids) - held], request.sample_key, 1 << 30)
        whole, at = min(len(answer), held + request.sampling.max_tokens), held
        self._running.add(request.attempt_id)
        try:
            while True:
                await asyncio.sleep(self._step_s * self._luck.random())
                if request.attempt_id in self._aborted:
                    yield Chunk(self._tokens[:0], self._logprobs[:0], self.version, EngineFinish.ABORT)
                    return
                if not self._open.is_set():
                    await asyncio.sleep(self._step_s)
                    continue
                count = min(CHUNK, whole - at)
                self._tokens[:count] = answer[at : at + count]
                self._logprobs[:count] = logprobs_of(answer[at : at + count], self.weights)
                at += count
                end = EngineFinish.STOP if answer[at - 1] == EOS else EngineFinish.LENGTH
                yield Chunk(
                    self._tokens[:count], self._logprobs[:count], self.version, end if at >= whole else None,
                    EOS if at >= whole and end is EngineFinish.STOP else None,
                )  # fmt: skip
                if at >= whole:
                    return
        finally:
            self._running.discard(request.attempt_id)

    async def abort(self, attempt_ids: Sequence[str] | None = None) -> None:
        self._aborted |= self._running if attempt_ids is None else self._running.intersection(attempt_ids)

    async def pause(self) -> None:
        self._open.clear()

    async def pause_in_flight(self, in_flight: OnWeightUpdate) -> None:
        self._open.clear()
        self._keeps = True

    async def resume(self) -> None:
        self._open.set()
        self._keeps = False

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        if self._open.is_set() or (self._running and not self._keeps):
            self._wrong(f"weights change under {self._running}")
        fate = self._luck.random() if self._life is not None and path is not None else 1.0
        if fate < 0.04:
            raise EngineError("the load was refused")
        if path is not None:
            self.weights = "torn"
        await asyncio.sleep(self._step_s * self._luck.random())
        if fate < 0.08:
            raise EngineError("the load broke off")
        if path is not None:
            self.weights = path
        self.version = version

    async def content_of(self, path: str) -> str:
        return path

    async def health(self) -> Health:
        return Health(ok=True, current=self.weights != "torn")

    async def close(self) -> None:
        pass


def connections_of(server: Any) -> list[Any]:
    """The connections of an engine's server that are open."""
    return [c for c in server._listener._runner.server.connections if c.transport is not None]


class Process:
    """A server with its engine, which can be killed and started anew at its port; all in this process."""

    def __init__(self, life: Life) -> None:
        self.life, self.port = life, 0
        self.engine: TrueEngine
        self.server: EngineServer | None = None
        self.url = ""

    async def start(self) -> None:
        self.engine = TrueEngine(self.life, self.life.luck)
        self.server = await serve(self.engine, port=self.port, key=KEY)
        self.url, self.port = self.server.url, int(self.server.url.rsplit(":", 1)[1])

    def tear(self) -> None:
        """Some of its connections break."""
        for connection in connections_of(self.server):
            if self.life.luck.random() < 0.5:
                connection.transport.abort()

    async def kill(self) -> None:
        """All of it is gone, as after SIGKILL: nothing says goodbye."""
        assert self.server is not None
        for connection in connections_of(self.server):
            connection.transport.abort()
        server, self.server = self.server, None
        await server.close()


class Life:
    """One life of a trainer, chosen by a seed."""

    def __init__(self, seed: int) -> None:
        self.luck = luck = random.Random(seed)
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()
        self.allowed = {START}
        self.named: dict[PolicyVersion, str] = {FIRST_VERSION: START}
        how = luck.choice(["resubmit", "resubmit", "keep", "recompute"])
        self.updates_by = luck.choice(["path", "path", "transfer"])
        self.config = april.Config(
            rollout_batch_size=3, n_samples_per_prompt=2, over_sampling_batch_size=luck.choice([3, 6]),
            max_response_len=luck.choice([15, 60]), on_weight_update=how, max_staleness=luck.choice([2, 5]),
            generation="continuous" if how != "resubmit" else luck.choice(["stepwise", "continuous"]),
            max_attempt_failures=99, max_failed_groups=999, outage_deadline_s=60.0, abort_deadline_s=6.0,
            engine={
                "kind": "april", "urls": ["http://127.0.0.1:1"], "api_key": KEY,
                "interval_s": luck.choice([0.3, 1.0, 5.0]),
            },
        )  # fmt: skip
        self.processes: list[Process] = []
        """Those whose engines belong to the run."""
        self.started: list[Process] = []
        """All of them, also those that the run has let go."""
        self.restarts: set[asyncio.Task[None]] = set()

    async def run(self, steps: int) -> None:
        """Live; what went wrong is in ``wrong`` afterwards."""
        async with asyncio.timeout(FOR_EVER_S):
            for _ in range(3):
                await self._process()
            assert isinstance(self.config.engine, AprilEngineConfig)
            urls = tuple(p.url for p in self.processes)
            engines = list(await connect_april(self.config.engine.model_copy(update={"urls": urls})))
            prompts = [[5, 1 + i % 900, 7 + i // 900] for i in range(6 * steps + 60)]
            run = rollouts(self.config, engines=engines, prompts=prompts, reward=lambda p, r: 1.0)
            async with run:
                trouble = asyncio.ensure_future(self._trouble(run))
                try:
                    for step in range(steps):
                        self._check(await self._next(run, step))
                        await self._update(run, step)
                        run.validate()
                        if trouble.done():
                            await trouble
                finally:
                    trouble.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await trouble
                ledger = run.ledger()["tokens"]
                if not ledger.balanced:
                    self.wrong.append(f"the ledger: {ledger}")
        for restart in self.restarts:
            restart.cancel()
        await asyncio.gather(*self.restarts, return_exceptions=True)
        for process in self.started:
            if process.server is not None:
                await process.kill()

    async def _next(self, run: Any, step: int) -> Any:
        """The next batch; where all engines have lost what was handed over to them, they are given it anew."""
        while True:
            try:
                return await run.next_batch()
            except (EngineError, RolloutError):
                self.seen["outages"] += 1
                await self._update(run, step)

    async def _process(self) -> Process:
        process = Process(self)
        self.started.append(process)
        await process.start()
        self.processes.append(process)
        return process

    def _check(self, batch: Any) -> None:
        for sample in batch.samples:
            tokens, at = sample.tokens, 0
            expected = says(sample.prompt.token_ids, tuple(sample.id), self.config.max_response_len)
            if not np.array_equal(tokens, expected):
                self.wrong.append(f"{sample.id} has the tokens {tokens.tolist()}, and not {expected.tolist()}")
            for segment in sample.segments:
                part = slice(at, at + segment.count)
                at += segment.count
                if not np.array_equal(logprobs_of(tokens[part], self.named[segment.version]), sample.logprobs[part]):
                    self.wrong.append(f"{sample.id} has tokens of other weights than those of {segment.version}")
            self.seen["tokens"] += len(tokens)
            self.seen["of several versions"] += len({s.version for s in sample.segments}) > 1

    async def _update(self, run: Any, step: int) -> None:
        for tried in range(50):
            name = f"weights://{step}.{len(self.named)}.{tried}"
            self.allowed = self.allowed | {name}
            try:
                if self.updates_by == "path":
                    version = await run.weight_update(name)
                else:
                    version = await run.weight_update(transfer=lambda name=name: self._hand_over(name))
            except EngineError:
                self.seen["failed updates"] += 1
                await asyncio.sleep(1.0)
                continue
            self.named[version], self.allowed = name, {name}
            return
        raise AssertionError("no update succeeds")

    async def _hand_over(self, name: str) -> None:
        if self.luck.random() < 0.1:
            raise EngineError("the transfer broke off")
        for process in self.processes:
            if process.server is not None:
                process.engine.weights = name
        await asyncio.sleep(self.luck.random())

    async def _trouble(self, run: Any) -> None:
        while True:
            await asyncio.sleep(self.luck.expovariate(1 / 6.0))
            what = self.luck.choice(["kill", "kill", "tear", "tear", "join", "leave", "cut", "rival"])
            alive = [p for p in self.processes if p.server is not None]
            if not alive:
                continue
            process = self.luck.choice(alive)
            self.seen[what] += 1
            if what == "kill":
                await process.kill()
                self.restarts.add(asyncio.create_task(self._come_back(process)))
            elif what == "tear":
                process.tear()
            elif what == "join" and len(self.processes) < 5:
                joins = await self._process()
                with contextlib.suppress(EngineError, ConfigError):
                    await run.scheduler.aadd_engine(joins.url)
            elif what in ("leave", "cut") and len(run.engines) > 2:
                name = self.luck.choice(run.engines).name
                with contextlib.suppress(ConfigError):
                    await run.scheduler.aremove_engine(name, cut=what == "cut")
                self.processes = [p for p in self.processes if not p.url.endswith(name)]
            elif what == "rival":
                await self._rival(process)

    async def _come_back(self, process: Process) -> None:
        await asyncio.sleep(self.luck.random() * 4)
        await process.start()

    async def _rival(self, process: Process) -> None:
        """Another client takes the engine for a while."""
        with contextlib.suppress(EngineError):
            config = AprilEngineConfig(urls=(process.url,), api_key=KEY)  # type: ignore[arg-type]
            (rival,) = await connect_april(config)
            try:
                await asyncio.sleep(self.luck.random() * 2)
            finally:
                await rival.close()


async def live(seed: int, steps: int = 6) -> Life:
    life = Life(seed)
    await life.run(steps)
    return life
