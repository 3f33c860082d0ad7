"""Random lives of agents whose scheduler ends in any moment, over links in memory and over real sockets.

As in ``test_random_host_agents``, whose hosts go on while the scheduler dies, or die with it. Another scheduler loads
the last checkpoint. The oracle knows what each function of the history that is kept has asked and heard, what every
engine of every process handed over, and which batches the trainer still has. Each batch also travels as between ranks,
and each process's record is run again.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from memory_doors import MemoryDoors
from seeds import seeds
from socket_clock import run_with_sockets
from test_hosts import fake
from test_random_host_agents import MISUNDERSTOOD, AgentsLife
from test_random_host_protocol import lived
from test_rank_content import plain

import april
from april.core.batch import Batch
from april.core.tape import SegmentKind
from april.processes.content import pack_batch, unpack_batch
from april.processes.host import Host
from april.processes.link import HOST, Hello, connect
from april.processes.remote_hosts import HostDoor
from april.record.replay import replay
from april.scheduler import RolloutScheduler
from april.testing import run_virtual

LIVES = int(os.environ.get("APRIL_RANDOM_LIVES", "16"))


class Kept(NamedTuple):
    """A checkpoint: april's state in it, and what was true of the history that it keeps."""

    state: bytes
    trained: int
    told: dict[Any, Any]


class RestartedLife(AgentsLife):
    """At most six restarts."""

    folder: Path

    def __init__(self, seed: int) -> None:
        self.restarts = 0
        self.kept: Kept | None = None
        super().__init__(seed)

    def begin(self, local: list[Any], **options: Any) -> None:
        """Every process writes a record of its own; of four lives, one checks april's books after every event."""
        self.path = self.folder / f"{self.seed}-{self.restarts}"
        super().begin(local, record=self.path, check=self.seed % 4 == 0, **options)

    # ---------------------------------------------------------------- the trainer

    async def step(self) -> Batch:
        """A batch that is trained, unless the process ends before."""
        luck = self.luck
        while True:
            waiter = asyncio.ensure_future(self.scheduler.anext_batch())
            if self.restarts < 6 and luck.random() < 0.5:
                await asyncio.wait([waiter], timeout=luck.uniform(0.0, 25.0))
                if self.kept is None or luck.random() < 0.7:
                    await self.keep()
                if luck.random() < 0.6:
                    waiter.cancel()
                    await asyncio.wait([waiter])
                    await self.restart()
                    continue
            batch = await waiter
            if luck.random() < 0.2:  # it is out, and comes again after a restart
                await self.keep()
            self.batches.append(batch)
            if luck.random() < 0.2:
                await self.keep()
            await self.update()
            if self.restarts < 6 and self.kept is not None and luck.random() < 0.1:
                await self.restart()
                continue
            return batch

    async def keep(self) -> None:
        """A checkpoint of weights that were trained on all batches so far."""
        if self.luck.random() < 0.8:  # else without what other processes have not told yet
            await self.scheduler.driver.caught_up()
        state = self.scheduler.driver.state_dict(self.batches[-1].id if self.batches else -1)
        self.kept = Kept(msgspec.msgpack.encode(state), len(self.batches), dict(self.told))
        self.seen["kept"] += 1

    async def restart(self) -> None:
        """The process ends, and its hosts hear nothing; some of them live on, and join the next one."""
        kept = self.kept
        assert kept is not None
        self.restarts += 1
        self.seen["restarts"] += 1
        self.seen["forgotten batches"] += len(self.batches) - kept.trained
        for name, link in self.of_host.items():
            self.cut(link)
            if name in self.here and self.luck.random() < 0.3:
                await self.here.pop(name).aclose()
        await self.closed()
        del self.batches[kept.trained :]
        self.told = dict(kept.told)
        self.begin([fake(f"e{self.restarts}")])
        driver = self.scheduler.driver
        await driver.load_state_dict(msgspec.msgpack.decode(kept.state), "weights")
        self.seen["tokens over a restart"] += driver.core.tokens.held

    async def closed(self) -> None:
        """The process is gone; what its record says is decided again in the same way."""
        core = self.scheduler.driver.core
        await self.scheduler.driver.close()
        run = replay(self.path)
        assert run.core.tokens == core.tokens
        assert run.core.prompts == core.prompts
        self.seen["replays"] += run.core.context.event_number

    async def end(self) -> None:
        """The last process."""
        await self.closed()
        await super().end()

    # ---------------------------------------------------------------- the oracle

    def check_end(self) -> None:
        """The ledger has what was trained in the history that is kept, each generated token once."""
        super().check_end()
        rows = [row for batch in self.batches for row in batch.samples]
        generated = sum(s.count for row in rows for s in row.segments if s.kind is SegmentKind.GENERATED)
        assert self.scheduler.ledger()["tokens"].delivered == generated
        assert len({(row.id, row.chain) for row in rows}) == len(rows)
        self.seen["samples of two lives"] += len(
            {row.id for row in rows if len({s.version.incarnation for s in row.segments}) > 1}
        )

    def check_batch(self, batch: Batch) -> None:
        """Between ranks it arrives as it is, with each sample in one share."""
        super().check_batch(batch)
        shares = [unpack_batch(pack_batch(share)) for share in batch.split(2, "tokens")]
        assert sorted(str(row) for share in shares for row in plain(share)) == sorted(map(str, plain(batch)))
        assert not {s.id for s in shares[0].samples} & {s.id for s in shares[1].samples}


class OverSockets(RestartedLife):
    """Hosts connect with a token, over this machine's network."""

    token = "5a" * 32

    def new_door(self) -> HostDoor:
        """A listener at a free port."""
        return april.HostListener(self.token, deadline_s=20.0)

    async def connect(self, name: str) -> Any:
        """A connection to whoever listens now."""
        return await connect(self.door.address, self.token, Hello(HOST, name))  # type: ignore[attr-defined]

    def silence(self, link: Any) -> None:
        """What it says goes nowhere."""
        link.send = lambda frame: None

    def cut(self, link: Any) -> None:
        """As a process that is killed leaves it."""
        link._ws._writer.transport.abort()


def live(life_type: type[RestartedLife], seed: int, run: Callable[[Any], Any]) -> Counter[str]:
    """One life, to its good end."""

    async def program() -> RestartedLife:
        life = life_type(seed)
        await lived(life)
        return life

    return run(program()).seen


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Agents ask at doors of this process."""
    monkeypatch.setattr(RolloutScheduler, "_gateway_type", MemoryDoors)
    monkeypatch.setattr(Host, "_gateway_type", MemoryDoors)
    RestartedLife.folder = tmp_path


@pytest.mark.parametrize(("transport", "seed"), [*seeds(LIVES // 4, "memory"), *seeds(LIVES // 16, "sockets")])
def test_what_an_agent_heard_is_trained_once_whenever_its_scheduler_ends(
    transport: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are what the kept history's functions asked and heard; tokens are those of the engines, each once."""
    if transport == "memory":
        seen = live(RestartedLife, seed, run_virtual)
    else:
        seen = live(OverSockets, seed, run_with_sockets)
    said = [record.getMessage() for record in caplog.records]
    assert not [text for text in said if any(wrong in text for wrong in MISUNDERSTOOD)]
    assert seen["rows"]
    assert seen["replays"]
