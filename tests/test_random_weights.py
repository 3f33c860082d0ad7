"""Lives in which weights go wrong: restarted servers, failed updates, directories that are written over.

Real scheduler, driver and core on virtual time. The oracle knows nothing of april's books: every token is a hash
of the weights that made it (``hash_engine.py``), and must be of those that its version names. No wait is forgotten.
More lives: ``make random``, or ``APRIL_RANDOM_LIVES=2000`` before pytest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hash_engine import EOS, START, HashEngine, Server, conversation, logprob_of, longer, next_token, save

import april
from april.core.batch import Batch
from april.core.tape import SegmentKind
from april.core.types import FinishReason, GenerationMode
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.testing import rollouts, run_virtual
from april.testing.same_loop import Rollouts

T = TypeVar("T")

PATIENCE_S = 3600.0
"""A wait that has neither ended nor said why by then has been forgotten; no response takes longer than 40 s."""
LONGEST, FIRST_TURN = 30, 8
"""Most tokens of a response, and of the first of two calls."""
TOOL = (901, 902)
UPDATE_TRIES = 8


async def two_turns(prompt: Any, llm: Any) -> None:
    """A call, a tool's answer, and a call that has them both before it."""
    first = await llm.generate(max_tokens=FIRST_TURN)
    await llm.generate([*first.conversation, *TOOL])


class WeightLife:
    """One trainer's life, chosen by a seed; :meth:`run` it on a virtual loop.

    ``named`` holds the weights that each version may mean: more than one where the directory was written over while it
    was loaded. All tokens of such a version must be of the same one.
    """

    def __init__(self, seed: int, mode: GenerationMode, directory: Path, steps: int = 8) -> None:
        self.luck = random.Random(f"weights {seed}")
        self.mode, self.directory, self.steps = mode, directory, steps
        self.named: dict[PolicyVersion, set[str]] = {FIRST_VERSION: {START}}
        self.seeds: dict[str, int | None] = {}
        self.seen: Counter[str] = Counter()
        self.tokens = self.made = self.saved = 0
        self.servers = {f"e{i}": Server() for i in range(self.luck.choice([2, 3, 4]))}
        """By the names of their engines; they outlive the trainer's processes."""
        self.clients: list[HashEngine] = []
        self.checkpoint: tuple[dict[str, Any], str, str] | None = None
        self.in_one_place = self.luck.random() < 0.5
        """The trainer writes all its weights into one directory."""
        self.unrest_s = self.luck.choice([8.0, 20.0, 60.0])
        self.restless = True
        self.turns = self.luck.choice([1, 1, 2])
        self.weights = START
        """Those of the trainer."""
        self.written_over: list[str] = []
        """What was written into the directory while it was loaded."""
        self.hung: list[Server] = []
        """Servers whose load does not end by itself."""

    # ---------------------------------------------------------------- the trainer

    async def run(self) -> None:
        """From the start to the last batch, over restarts."""
        while self.steps:
            await self.process()
        for client in self.clients:
            assert not client.violations, client.violations

    async def process(self) -> None:
        """One process of the trainer, to the end or to its next restart."""
        if self.checkpoint is None:  # it begins, or begins anew
            for server in self.servers.values():
                server.restart(0.0)
        config = april.Config(
            rollout_batch_size=2, n_samples_per_prompt=2, over_sampling_batch_size=self.luck.choice([2, 4]),
            max_response_len=LONGEST, max_staleness=3, generation=self.mode, max_in_flight=8, outage_deadline_s=120.0,
            max_failed_groups=10_000, max_attempt_failures=10_000, engine={"kind": "simulated"}, seed=7,
        )  # fmt: skip
        engines = [self.client(*named) for named in self.servers.items()]
        prompts = [[1 + i // 900, 1 + i % 900, 5] for i in range(4000)]
        functions: dict[str, Any] = {"reward": lambda p, r: 1.0}
        if self.turns == 2:
            functions["rollout"] = two_turns
        async with rollouts(config, engines=engines, prompts=prompts, **functions) as run:
            if self.checkpoint is not None:
                await self.restore(run, *self.checkpoint)
            self.restless = True
            unrest = asyncio.create_task(self.unrest(run))
            try:
                await self.train(run, self.luck.randint(2, 6))
            finally:
                self.restless = False
                unrest.cancel()
                await asyncio.wait([unrest])
            if not unrest.cancelled():
                unrest.result()
            run.validate()

    async def train(self, run: Rollouts, steps: int) -> None:
        """Batches and updates, sometimes with the next batch asked for ahead."""
        ahead: asyncio.Task[Batch] | None = None
        for _ in range(steps):
            asked = ahead or asyncio.create_task(run.next_batch())
            ahead = None
            try:
                batch = await self.hears("next_batch", asked)
            except april.AprilError as error:
                self.seen[f"next_batch: {type(error).__name__}"] += 1
                await self.update(run, None)
                continue
            self.check(batch)
            self.steps = max(0, self.steps - 1)
            if self.luck.random() < 0.25:
                await self.evaluate(run)
            if self.luck.random() < 0.4:
                ahead = asyncio.create_task(run.next_batch())
            await asyncio.sleep(self.luck.choice([0.0, 3.0, 15.0]))
            await self.update(run, batch.id)
            if self.luck.random() < 0.4 and run.ledger()["tokens"].delivered:
                state = run.state_dict(batch.id)
                place = save(self.directory / f"checkpoint{self.saved}", self.weights)
                self.saved += 1
                self.checkpoint = state, place, self.weights
        if ahead is not None:
            ahead.cancel()
            await asyncio.wait([ahead])

    async def evaluate(self, run: Rollouts) -> None:
        """Of one version, that at which it was asked for."""
        try:
            result = await self.hears("evaluate", run.evaluate([[950, 1, n] for n in range(3)], max_tokens=20))
        except april.AprilError as error:
            self.seen[f"evaluate: {type(error).__name__}"] += 1
            return
        self.seen["evaluated"] += 1
        for n, responses in enumerate(result.responses):
            for response in responses:
                made = conversation([950, 1, n])
                for token, logprob, generated in zip(
                    response.tokens, response.logprobs, response.loss_mask, strict=True
                ):
                    if generated:
                        is_of = {w for w in self.named[run.version] if logprob_of(w, made, int(token)) == logprob}
                        assert is_of, f"evaluated under {run.version}, which is {self.named[run.version]}"
                    made = longer(made, int(token))

    async def hears(self, what: str, awaited: Awaitable[T]) -> T:
        """What comes of it, in good time."""
        task = asyncio.ensure_future(awaited)
        done, _ = await asyncio.wait([task], timeout=PATIENCE_S)
        if not done:
            task.cancel()
            raise AssertionError(f"{what}: neither an end nor a sentence in {PATIENCE_S:g} s")
        return task.result()

    async def restore(self, run: Rollouts, state: dict[str, Any], place: str, weights: str) -> None:
        """The checkpoint's state and weights, in a new process."""
        self.weights = weights
        self.named.setdefault(FIRST_VERSION, {START})
        for _ in range(UPDATE_TRIES):
            try:
                version = await self.hears("load_state_dict", run.load_state_dict(state, place))
            except april.EngineError as error:
                self.seen[f"load_state_dict: {type(error).__name__}"] += 1
                self.revive()
                await asyncio.sleep(30.0)
            else:
                self.named[version] = {weights}
                self.seen["restored"] += 1
                return
        raise AssertionError("load_state_dict never worked, with all servers alive")

    async def update(self, run: Rollouts, trained: int | None) -> None:
        """New weights, by a directory or by hand, until one of the tries works."""
        self.made += 1
        weights = self.weights = f"w{self.made}"
        path = self.directory / ("weights" if self.in_one_place else f"weights{self.made}")
        by_hand = self.luck.random() < 0.25
        save(path, weights)
        if self.luck.random() < 0.3:
            self.a_server().restart(self.luck.choice([1.0, 10.0]))
            self.seen["started anew between save and update"] += 1
            await asyncio.sleep(self.luck.choice([2.0, 12.0]))
        for tries in range(UPDATE_TRIES):
            if tries < 2:
                self.trouble()
            if self.written_over:
                save(path, weights)
                self.written_over = []
            try:
                if by_hand:
                    breaks = tries < 2 and self.luck.random() < 0.4
                    call = run.weight_update(transfer=lambda: self.hand_over(weights, breaks), trained=trained)  # noqa: B023
                else:
                    call = run.weight_update(path=str(path), trained=trained)
                version = await self.hears("weight_update", call)
            except (april.EngineError, OSError) as error:
                self.seen[f"weight_update: {type(error).__name__}"] += 1
                if tries >= 2:  # a name alone does not mend what a broken load has left
                    by_hand = False
                    self.revive()
                await asyncio.sleep(self.luck.choice([0.0, 5.0, 30.0]))
                if tries < 2 and self.luck.random() < 0.3:  # the trainer goes on without it
                    with contextlib.suppress(april.AprilError):
                        self.check(await self.hears("next_batch", run.next_batch()))
            else:
                self.named[version] = {weights, *self.written_over}
                return
            finally:
                for client in self.clients:
                    client.on_load = None
        raise AssertionError("weight_update never worked, with all servers alive")

    async def hand_over(self, weights: str, breaks: bool) -> None:
        """The trainer's own transfer, which reaches all servers that live, or breaks off."""
        now = asyncio.get_running_loop().time()
        servers = [server for server in self.servers.values() if now >= server.dead_until]
        if any(server.loading.locked() for server in servers):
            raise OSError("a server loads from a directory")
        self.luck.shuffle(servers)
        for n, server in enumerate(servers):
            if breaks and n == len(servers) - 1:
                self.seen["transfer broke off"] += 1
                raise OSError("the transfer broke off")
            await asyncio.sleep(0.5)
            server.weights = weights
        if breaks:
            raise OSError("the transfer broke off")

    # ---------------------------------------------------------------- what goes wrong

    def a_server(self) -> Server:
        return self.luck.choice([*self.servers.values()])

    def revive(self) -> None:
        """Whatever is dead comes back, and what hangs is started anew."""
        for server in self.servers.values():
            server.dead_until = 0.0
        while self.hung:
            self.hung.pop().restart(1.0)

    def trouble(self) -> None:
        """What the next load meets at some of the servers."""
        hooks = [self.refuses, self.tears, self.hangs, self.is_late, self.crashes, self.overwritten]
        for client in self.clients:
            if self.luck.random() < 0.25:
                client.on_load = self.luck.choice(hooks)

    async def refuses(self, client: HashEngine, path: str) -> None:
        """It keeps what it had."""
        self.seen["load refused"] += 1
        raise april.EngineError("it refuses to load")

    async def tears(self, client: HashEngine, path: str) -> None:
        """It breaks off with a part of the new weights."""
        self.seen["load torn"] += 1
        client.server.weights = "torn"
        raise april.EngineError("it broke off in the middle")

    async def hangs(self, client: HashEngine, path: str) -> None:
        """It never ends, until somebody starts the server anew."""
        self.seen["load hangs"] += 1
        life = client.server.life
        self.hung.append(client.server)
        while client.server.life == life:
            await asyncio.sleep(50.0)
            if self.luck.random() < 0.1:
                client.server.restart(1.0)

    async def is_late(self, client: HashEngine, path: str) -> None:
        """It ends after everybody has given it up."""
        self.seen["load late"] += 1
        await asyncio.sleep(130.0)

    async def crashes(self, client: HashEngine, path: str) -> None:
        """It is started anew with the weights of its start."""
        self.seen["crashed while loading"] += 1
        client.server.restart(self.luck.choice([1.0, 30.0]))

    async def overwritten(self, client: HashEngine, path: str) -> None:
        """The trainer writes the next weights into the directory while this server reads; never into a checkpoint."""
        if "checkpoint" in Path(path).name:
            return
        self.seen["directory written over while loading"] += 1
        await asyncio.sleep(1.0)
        self.made += 1
        self.written_over.append(f"w{self.made}")
        save(Path(path), f"w{self.made}")

    async def unrest(self, run: Rollouts) -> None:
        while self.restless:
            await asyncio.sleep(self.luck.uniform(1.0, 2.0 * self.unrest_s))
            if self.luck.random() < 0.6:
                self.seen["server started anew"] += 1
                self.a_server().restart(self.luck.choice([0.5, 5.0, 40.0]))
            elif len(run.engines) > 1:
                await self.part(run)

    async def part(self, run: Rollouts) -> None:
        """An engine leaves; its server comes back, perhaps as another one, perhaps under another name."""
        name = self.luck.choice([engine.name for engine in run.engines])
        cut = self.luck.random() < 0.5
        try:
            await self.hears("remove_engine", run.scheduler.aremove_engine(name, cut=cut))
        except april.AprilError as error:
            self.seen[f"remove_engine: {type(error).__name__}"] += 1
            return
        self.seen["engine left"] += 1
        server = self.servers.pop(name)
        name += "x" * (self.luck.random() < 0.3)
        self.servers[name] = Server() if self.luck.random() < 0.2 else server
        await asyncio.sleep(self.luck.choice([0.0, 5.0, 25.0]))
        await self.hears("add_engine", run.scheduler.aadd_engine(self.client(name, self.servers[name])))

    def client(self, name: str, server: Server) -> HashEngine:
        client = HashEngine(name, self.seeds, server)
        self.clients.append(client)
        return client

    # ---------------------------------------------------------------- the oracle

    def check(self, batch: Batch) -> None:
        """Each token is what the weights that its version names make of what stands before it."""
        for sample in batch.samples:
            made = conversation(sample.prompt.token_ids)
            for segment in sample.segments:
                if segment.kind is not SegmentKind.GENERATED:
                    first = sample.tokens[: segment.start]
                    assert first[-1] == EOS or len(first) == FIRST_TURN, f"the first call of {sample.id} did not end"
                    for token in sample.tokens[segment.start : segment.start + segment.count]:
                        made = longer(made, int(token))
                    continue
                for at in range(segment.start, segment.start + segment.count):
                    token, logprob = int(sample.tokens[at]), sample.logprobs[at]
                    self.tokens += 1
                    may = self.named.get(segment.version, set())
                    is_of = {w for w in may if next_token(w, self.seeds[segment.attempt_id], made) == (token, logprob)}
                    if not is_of:
                        every = [START, "torn", *(f"w{n}" for n in range(1, self.made + 1))]
                        seed = self.seeds[segment.attempt_id]
                        really = [w for w in every if next_token(w, seed, made) == (token, logprob)]
                        raise AssertionError(
                            f"batch {batch.id}, {sample.id}, token {at} of {segment.engine} is said to be of "
                            f"{segment.version}, which is {may or 'nothing'}, and is of {really or 'no weights'}"
                        )
                    if len(may) > 1:
                        self.named[segment.version] = is_of
                    made = longer(made, token)
            if sample.finish is FinishReason.STOP:
                assert list(sample.tokens[-1:]) == [EOS], f"{sample.id} stopped without an end"
            else:
                assert sample.finish is FinishReason.LENGTH
                assert len(sample.tokens) == LONGEST, f"{sample.id} is said to be too long"
        self.seen["batches"] += 1


LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "20"))


@pytest.mark.no_cover
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_tokens_are_of_the_weights_that_their_version_names(mode: GenerationMode, tmp_path: Path) -> None:
    """Whatever happens to servers, updates and directories: right or dropped. Every wait ends or says why."""
    seen: Counter[str] = Counter()
    for number in range(LIVES // 2):
        directory = tmp_path / str(number)
        directory.mkdir()
        life = WeightLife(number, mode, directory)
        try:
            run_virtual(life.run())
        except BaseException as error:
            error.add_note(f"life {number}, {mode}")
            raise
        seen += life.seen
    for what in (
        "batches", "crashed while loading", "directory written over while loading", "engine left", "load hangs",
        "load late", "load refused", "load torn", "restored", "server started anew",
        "started anew between save and update", "transfer broke off",
    ):  # fmt: skip
        assert seen[what], f"no life had: {what}"
