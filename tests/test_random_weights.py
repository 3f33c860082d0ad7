"""Lives in which weights go wrong: restarted servers, broken links, failed updates, directories that are written over.

Real scheduler, driver, hosts and core on virtual time. The oracle knows nothing of april's books: every token is a hash
of the weights that made it (``hash_engine.py``), and must be of those that its version names. No wait is forgotten.
More lives: ``make random``, or ``APRIL_RANDOM_LIVES=2000`` before pytest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hash_engine import EOS, START, HashEngine, Server, conversation, logprob_of, longer, next_token, save
from msgspec.structs import replace

import april
from april.core import events as ev
from april.core.batch import Batch
from april.core.tape import SegmentKind
from april.core.types import EngineFinish, FinishReason, GenerationMode
from april.core.versions import FIRST_VERSION, PolicyVersion
from april.processes import messages as wire
from april.processes.host import Host
from april.processes.link import Link, MemoryLink, OnFrame, OnLost, memory_links
from april.processes.remote_hosts import HostDoor
from april.testing import rollouts, run_virtual
from april.testing.same_loop import Rollouts

T = TypeVar("T")

PATIENCE_S = 3600.0
"""A wait that has neither ended nor said why by then has been forgotten; no response takes longer than 40 s."""
LONGEST, FIRST_TURN = 30, 8
"""Most tokens of a response, and of the first of two calls."""
TOOL = (901, 902)
UPDATE_TRIES = 8


class Liar(Link):
    """A host's end of a link on which the next report of a request may be a lie."""

    def __init__(self, link: MemoryLink) -> None:
        self.link, self.peer = link, link.peer
        self.lie: Callable[[wire.Message], wire.Message | None] | None = None
        self.lies = 0
        self.late_s = self._last_s = 0.0
        """How long what the host is told is on its way."""

    def open(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        loop = asyncio.get_running_loop()

        def arrives(frame: bytes) -> None:
            if self.late_s or self._last_s > loop.time():
                self._last_s = max(self._last_s, loop.time() + self.late_s)
                loop.call_at(self._last_s, on_frame, frame)
            else:
                on_frame(frame)

        self.link.open(arrives, on_lost)

    def close(self) -> None:
        self.link.close()

    def send(self, frame: bytes) -> None:
        messages = wire.decode_from_host(frame)
        if self.lie is not None:
            told = [self.lie(message) for message in messages]
            self.lies += told != messages
            messages = [message for message in told if message is not None]
        if messages:
            self.link.send(wire.encode(messages))


def no_tokens(message: wire.Message) -> wire.Message | None:
    """What requests bring gets lost, that they end does not."""
    return None if isinstance(message, wire.Came) else message


def early_length(message: wire.Message) -> wire.Message | None:
    """Whatever ends is said to have used up its budget."""
    if isinstance(message, wire.Ended) and message.finish is EngineFinish.STOP:
        return wire.Ended(message.attempt_id, EngineFinish.LENGTH, message.fenced)
    return message


def early_stop(message: wire.Message) -> wire.Message | None:
    """Whatever has used up its budget is said to have stopped."""
    if isinstance(message, wire.Ended) and message.finish is EngineFinish.LENGTH:
        return wire.Ended(message.attempt_id, EngineFinish.STOP, message.fenced)
    return message


def later_version(message: wire.Message) -> wire.Message | None:
    """Tokens of weights that never were."""
    if isinstance(message, wire.Came):
        message.spans = tuple((v._replace(n=v.n + 1), count) for v, count in message.spans)
    return message


def no_such_token(message: wire.Message) -> wire.Message | None:
    """A token that is in no vocabulary."""
    if isinstance(message, wire.Came) and message.tokens:
        message.tokens[0:4] = (10**6).to_bytes(4, "little")
    return message


def other_content(message: wire.Message) -> wire.Message | None:
    """What it has loaded was in no directory of anybody else."""
    if isinstance(message, wire.Happened) and isinstance(message.event, ev.EngineCallEnded) and message.event.content:
        message.event = replace(message.event, content="0" * len(message.event.content))
    return message


def unknown_content(message: wire.Message) -> wire.Message | None:
    """It cannot say what it has loaded."""
    if isinstance(message, wire.Happened) and isinstance(message.event, ev.EngineCallEnded):
        message.event = replace(message.event, content="")
    return message


LIES = (no_tokens, early_length, early_stop, later_version, no_such_token)
LIES_OF_LOADS = (other_content, unknown_content)


@dataclass(eq=False)
class Machine:
    """A host's process with its servers, which outlive it."""

    name: str
    servers: list[Server]
    host: Host | None = None
    engines: list[HashEngine] = field(default_factory=list)
    link: Liar | None = None


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
        self.own = [Server() for _ in range(self.luck.choice([1, 1, 2]))]
        self.machines = [Machine(f"h{i}", [Server() for _ in range(self.luck.choice([1, 1, 2]))]) for i in range(2)]
        self.clients: list[HashEngine] = []
        self.checkpoint: tuple[dict[str, Any], str, str] | None = None
        self.in_one_place = self.luck.random() < 0.5
        """The trainer writes all its weights into one directory."""
        self.unrest_s = self.luck.choice([8.0, 20.0, 60.0])
        self.restless = True
        self.turns = self.luck.choice([1, 1, 2])
        self.weights = START
        """Those of the trainer."""
        self.door: HostDoor | None = None
        """None: no process of the trainer is there."""
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
            for server in self.servers():
                if server not in self.known_to_be_written():
                    server.restart(0.0)
        self.door = HostDoor(deadline_s=20.0, first_s=60.0)
        config = april.Config(
            rollout_batch_size=2, n_samples_per_prompt=2, over_sampling_batch_size=self.luck.choice([2, 4]),
            max_response_len=LONGEST, max_staleness=3, generation=self.mode, max_in_flight=8, outage_deadline_s=120.0,
            max_failed_groups=10_000, max_attempt_failures=10_000, engine={"kind": "simulated"}, seed=7,
        )  # fmt: skip
        own = [self.client(f"own{i}", server) for i, server in enumerate(self.own)]
        prompts = [[1 + i // 900, 1 + i % 900, 5] for i in range(4000)]
        functions: dict[str, Any] = {"reward": lambda p, r: 1.0}
        if self.turns == 2:
            functions["rollout"] = two_turns
        async with rollouts(config, engines=own, prompts=prompts, hosts=self.door, **functions) as run:
            for machine in self.machines:
                if machine.host is None:
                    await self.start(machine)
            if self.checkpoint is not None:
                await self.restore(run, *self.checkpoint)
            self.restless = True
            unrest = asyncio.create_task(self.unrest())
            try:
                await self.train(run, self.luck.randint(2, 6))
            finally:
                self.restless = False
                unrest.cancel()
                await asyncio.wait([unrest])
            if not unrest.cancelled():
                unrest.result()
            run.validate()
            self.door = None
            for machine in self.machines:
                if not self.outlives(machine):
                    await self.stop(machine)

    def known_to_be_written(self) -> list[Server]:
        """Servers of hosts that have seen an update; another one with old weights cannot be told from a new server."""
        return [
            engine.server
            for machine in self.machines
            if machine.host is not None
            for engine in machine.engines
            if engine.name in machine.host._written
        ]

    def outlives(self, machine: Machine) -> bool:
        """A host that heard no goodbye lives on, and joins the trainer's next process with the weights that it has."""
        host, link = machine.host, machine.link
        if host is None or link is None or self.luck.random() < 0.5 or host._ended is None or host._ended.done():
            return False
        link.link.cut("the trainer was killed")
        self.seen["host outlived the trainer"] += self.steps > 0
        return self.steps > 0

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
                state = await self.state(run, batch.id)
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

    async def state(self, run: Rollouts, trained_through: int) -> dict[str, Any]:
        """As ``RolloutScheduler.astate_dict`` would be: what hosts have is in it."""
        await self.hears("state_dict", run._driver.caught_up())
        return run._driver.state_dict(trained_through)

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
            self.luck.choice(self.servers()).restart(self.luck.choice([1.0, 10.0]))
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
                for machine in self.machines:
                    if machine.link is not None:
                        machine.link.late_s, machine.link.lie = 0.0, None
        raise AssertionError("weight_update never worked, with all servers alive")

    async def hand_over(self, weights: str, breaks: bool) -> None:
        """The trainer's own transfer, which reaches all servers that live, or breaks off."""
        now = asyncio.get_running_loop().time()
        servers = [server for server in self.servers() if now >= server.dead_until]
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

    def servers(self) -> list[Server]:
        return [*self.own, *(server for machine in self.machines for server in machine.servers)]

    def revive(self) -> None:
        """Whatever is dead comes back, and what hangs is started anew."""
        for server in self.servers():
            server.dead_until = 0.0
        while self.hung:
            self.hung.pop().restart(1.0)

    def trouble(self) -> None:
        """What the next load meets at some of the servers.

        A host that hides what it has loaded cannot be found out where the directory is written over meanwhile.
        """
        hooks = [self.refuses, self.tears, self.hangs, self.is_late, self.breaks_the_link, self.crashes]
        hooks += [self.overwritten, self.swapped] if self.luck.random() < 0.5 else [self.lies_of_it] * 2
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

    async def breaks_the_link(self, client: HashEngine, path: str) -> None:
        """It works, and the host's connection is lost before it can say so."""
        for machine in self.machines:
            if client in machine.engines and machine.link is not None:
                self.seen["link cut while loading"] += 1
                asyncio.get_running_loop().call_soon(machine.link.link.cut, "the cable was pulled")
        await asyncio.sleep(0.1)

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

    async def lies_of_it(self, client: HashEngine, path: str) -> None:
        """Its host does not say what it has loaded, or says something else."""
        for machine in self.machines:
            if client in machine.engines and machine.link is not None:
                machine.link.lie = self.luck.choice(LIES_OF_LOADS)
                self.seen["lied of a load"] += 1

    async def swapped(self, client: HashEngine, path: str) -> None:
        """The next weights are written when this server has loaded, and before a host has heard that it is to load."""
        link = self.luck.choice(self.machines).link
        if link is None or "checkpoint" in Path(path).name:
            return
        self.seen["directory written over between two loads"] += 1

        def write() -> None:
            self.made += 1
            self.written_over.append(f"w{self.made}")
            save(Path(path), f"w{self.made}")

        link.late_s = 2.0
        asyncio.get_running_loop().call_later(1.0, write)

    async def unrest(self) -> None:
        """Things that happen by themselves."""
        while self.restless:
            await asyncio.sleep(self.luck.uniform(1.0, 2.0 * self.unrest_s))
            event = self.luck.choice([self.restart_a_server, self.cut_a_link, self.kill_a_host, self.part, self.lie])
            await event()

    async def restart_a_server(self) -> None:
        self.seen["server started anew"] += 1
        self.luck.choice(self.servers()).restart(self.luck.choice([0.5, 5.0, 40.0]))

    async def cut_a_link(self) -> None:
        """The host comes back by itself."""
        machine = self.luck.choice(self.machines)
        if machine.link is not None:
            self.seen["link cut"] += 1
            machine.link.link.cut("the cable was pulled")

    async def kill_a_host(self) -> None:
        """Its process dies; another one comes for the same servers."""
        machine = self.luck.choice(self.machines)
        if machine.host is None:
            return
        self.seen["host killed"] += 1
        ended = machine.host._ended
        assert ended is not None
        ended.cancel()
        await asyncio.wait([ended])
        machine.host = machine.link = None
        await asyncio.sleep(self.luck.choice([0.0, 5.0, 25.0]))
        await self.start(machine)

    async def part(self) -> None:
        """A host leaves in peace, and comes back, perhaps under another name, perhaps with another server."""
        machine = self.luck.choice(self.machines)
        if machine.host is None:
            return
        self.seen["host left"] += 1
        await self.stop(machine)
        await asyncio.sleep(self.luck.choice([0.0, 5.0, 25.0]))
        if self.luck.random() < 0.3:
            machine.name += "x"
        if self.luck.random() < 0.2:
            machine.servers = [Server()]
        await self.start(machine)

    async def lie(self) -> None:
        """A host tells lies about its requests for a while."""
        machine = self.luck.choice(self.machines)
        if (link := machine.link) is not None:
            link.lie = self.luck.choice(LIES)
            await asyncio.sleep(20.0)
            link.lie = None
            self.seen["lied"] += link.lies > 0

    # ---------------------------------------------------------------- hosts

    def client(self, name: str, server: Server) -> HashEngine:
        client = HashEngine(name, self.seeds, server)
        self.clients.append(client)
        return client

    async def start(self, machine: Machine) -> None:
        """A process for these servers joins; it tries again where it is refused."""

        async def join() -> Link:
            if self.door is None:
                raise april.LinkError("nobody listens")
            here, there = memory_links()
            machine.link = Liar(there)
            self.door.accept(here)
            return machine.link

        while True:
            machine.engines = [self.client(f"e{i}", server) for i, server in enumerate(machine.servers)]
            machine.host = Host(machine.name, engines=machine.engines, join=join, rejoin_s=1e6)
            try:
                await self.hears("a host that joins", machine.host.astart())
                return
            except april.AprilError as error:
                self.seen[f"host refused: {type(error).__name__}"] += 1
                machine.host = machine.link = None
                await asyncio.sleep(30.0)

    async def stop(self, machine: Machine) -> None:
        host, machine.host, machine.link = machine.host, None, None
        if host is not None:
            await host.aclose()

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


LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "32"))


@pytest.mark.no_cover
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_tokens_are_of_the_weights_that_their_version_names(mode: GenerationMode, tmp_path: Path) -> None:
    """Whatever happens to servers, links, updates and directories: right or dropped. Every wait ends or says why."""
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
        "batches", "crashed while loading", "directory written over between two loads",
        "directory written over while loading", "host killed", "host left", "host outlived the trainer", "lied",
        "lied of a load", "link cut", "link cut while loading", "load hangs", "load late", "load refused", "load torn",
        "restored", "server started anew", "started anew between save and update", "transfer broke off",
    ):  # fmt: skip
        assert seen[what], f"no life had: {what}"
