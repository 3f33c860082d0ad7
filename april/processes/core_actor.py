"""The core's actor: the scheduler, the place where ranks meet, and the links of hosts and ranks.

Ray calls its methods on a loop of its own. A link lives where its frames are read: that of a host on the scheduler's
loop, that of a rank on the center's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from april.config.engines import EngineConfig
from april.config.settings import Config
from april.core.batch import Batch
from april.core.batch_shares import SplitBy
from april.daemon_pool import DaemonPool
from april.driver.rewards import EvaluationResult
from april.engines.protocol import Engine
from april.errors import LinkError, RankError, SchedulerClosed
from april.processes import content
from april.processes import rank_messages as say
from april.processes.actor_link import ServedLink
from april.processes.actor_scheduler import Seat
from april.processes.center import PURPOSE as RANK
from april.processes.core_center import CoreCenter
from april.processes.frames import Packed, pack_frames, unpack_frames
from april.processes.link import Hello, Link
from april.processes.own_scheduler import OwnScheduler
from april.processes.packed_call import unpack_call
from april.processes.rank_scheduler import look
from april.processes.ranks import Ranks
from april.processes.remote_hosts import HOST, HostDoor
from april.server_text import said

log = logging.getLogger("april")

T = TypeVar("T")
EngineFactory = Callable[[int], Sequence[Engine]]

CORE = "core"
"""Name of the actor in the run's namespace."""
WATCH_S = 1.0
"""Between two looks at an actor that answers at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """What belongs to one host."""

    engine: EngineConfig
    """describes its engines, where there is no ``factory``"""
    factory: EngineFactory | None
    seed: int
    functions: Mapping[str, Any]


class ActorDoor(HostDoor):
    """Where hosts come in by calls of the actor; ``opened`` is called on the scheduler's loop."""

    def __init__(self, opened: Callable[[asyncio.AbstractEventLoop], object]) -> None:
        super().__init__()
        self.where = "the core's actor"
        self._opened = opened

    def open(self, accepted: Callable[[Link], None]) -> None:
        """See :class:`april.processes.remote_hosts.HostDoor`."""
        super().open(accepted)
        self._opened(asyncio.get_running_loop())


class CoreActor:
    """See above; made an actor by ``april.ray.scheduler``."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._links: dict[int, tuple[ServedLink, asyncio.AbstractEventLoop]] = {}
        self._watching: set[asyncio.Task[None]] = set()
        self._scheduler: OwnScheduler | None = None
        self._center: CoreCenter | None = None
        self._door: ActorDoor | None = None
        self._scheduler_loop: asyncio.Future[asyncio.AbstractEventLoop] | None = None
        self._there = asyncio.Event()
        """Ranks can come."""
        self._split_by: SplitBy = "samples"
        self._conductor = threading.Thread(target=self._conduct, name="april-conductor", daemon=True)
        self._asked: set[asyncio.Future[Any]] = set()
        """What is waited for on april's loops."""

    # ---------------------------------------------------------------- whoever has made it

    async def start(
        self, *, config: Config, ranks: Ranks, split_by: SplitBy, engines: EngineFactory | None,
        hosts: Sequence[HostSpec], options: Mapping[str, Any],
    ) -> Exception | None:  # fmt: skip
        """Make the scheduler, which waits for the first of its hosts, if there are any; returns what went wrong.

        ``engines``: given number 0 it makes those of this process; with hosts there are none here.
        """
        self._config, self._ranks, self._split_by, self._hosts = config, ranks, split_by, hosts
        here = asyncio.get_running_loop()
        # no thread may keep the process alive that nobody has closed: Ray lets it end by itself
        here.set_default_executor(DaemonPool("april-core"))
        loop = here.create_future()
        if hosts:
            self._door = ActorDoor(lambda scheduler: here.call_soon_threadsafe(loop.set_result, scheduler))

        def make() -> OwnScheduler:
            made = [] if hosts else None if engines is None else list(engines(0))
            return OwnScheduler(config, engines=made, hosts=self._door, travels=True, **options)

        self._scheduler_loop = loop
        self._center = CoreCenter(ranks, self._look, self._end_waits)
        self._there.set()
        try:
            self._scheduler = await asyncio.to_thread(make)
        except Exception as error:
            return error
        self._conductor.start()
        return None

    async def look(self, method: str, arguments: list[Any]) -> bytes | Exception:
        """What a rank may ask for, for whoever has made the run."""
        try:
            return await asyncio.to_thread(self._look, method, arguments)
        except Exception as error:
            return error

    async def close(self) -> None:
        """End everything: who waits for frames hears of it before the loops end."""
        if self._center is not None:
            await self._on(self._center.loop, self._center.say_goodbye)
            if self._asked:
                await asyncio.wait(self._asked, timeout=WATCH_S)
            await asyncio.to_thread(self._center.shut)
        if self._scheduler is not None:
            await asyncio.to_thread(self._scheduler.close)
        for future in self._asked.copy():
            if not future.done():
                future.set_exception(LinkError("the scheduler is closed"))

    # ---------------------------------------------------------------- hosts and ranks

    async def host_spec(self, index: int) -> HostSpec:
        """What belongs to a host."""
        await self._there.wait()
        return self._hosts[index]

    async def join_as_host(self, name: str, actor: list[Any]) -> int:
        """A host's link: its number."""
        await self._there.wait()
        door, there = self._door, self._scheduler_loop
        assert door is not None
        assert there is not None
        loop = await asyncio.shield(there)

        def enter() -> ServedLink:
            link = ServedLink(Hello(HOST, name))
            door.accept(link)
            return link

        return self._served(await self._on(loop, enter), loop, actor)

    async def join_as_rank(self, rank: int, actor: list[Any]) -> Seat | Exception:
        """A rank's link, and what it must know."""
        await self._there.wait()
        center = self._center
        assert center is not None
        if not 0 <= rank < self._ranks.world_size:
            return RankError(f"rank {rank} is none of {self._ranks.world_size}; ranks count from 0", (rank,))

        def enter() -> tuple[ServedLink, int]:
            link = ServedLink(Hello(RANK, str(rank)))
            return link, center.enter(rank, link)

        link, first = await self._on(center.loop, enter)
        number = self._served(link, center.loop, actor)
        ranks = replace(self._ranks, rank=rank)
        return Seat(link=number, first_call=first, config=self._config, ranks=ranks)

    async def poll(self, number: int) -> list[Packed] | None:
        """Frames for the other end of a link; None: it is over."""
        if number not in self._links:
            return None
        link, loop = self._links[number]
        if link.over:
            del self._links[number]
            return None
        frames = await self._run(loop, link.poll)
        if frames is None:
            self._links.pop(number, None)
            return None
        return pack_frames(frames)

    async def take(self, number: int, frames: list[Packed]) -> bool:
        """Frames of the other end; False: the link is over."""
        if number not in self._links:
            return False
        link, loop = self._links[number]
        return bool(await self._on(loop, lambda: link.take(unpack_frames(frames))))

    async def leave(self, number: int) -> None:
        """The other end has closed a link."""
        await self._lose(number, "it has left")

    async def _lose(self, number: int, why: str) -> None:
        if number in self._links:
            link, loop = self._links.pop(number)
            with suppress(LinkError):
                await self._on(loop, lambda: link.lose(why))

    def _served(self, link: ServedLink, loop: asyncio.AbstractEventLoop, actor: list[Any]) -> int:
        number = next(self._numbers)
        self._links[number] = link, loop
        if actor:
            task = asyncio.get_running_loop().create_task(self._watch(number, actor[0]))
            self._watching.add(task)
            task.add_done_callback(self._watching.discard)
        return number

    async def _watch(self, number: int, actor: Any) -> None:
        """Ray tells of an actor that died by the calls that it has not answered; a busy one answers late.

        Not tried again: a new process in its place would answer for the one that died.
        """
        while number in self._links:
            try:
                await actor.__ray_ready__.options(max_task_retries=0).remote()
            except Exception as error:
                await self._lose(number, f"its actor is gone ({said(type(error).__name__)})")
            await asyncio.sleep(WATCH_S)

    async def _on(self, loop: asyncio.AbstractEventLoop, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return await self._run(loop, call)

    async def _run(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of work on april's loop; raises LinkError if that ends before."""
        here = asyncio.get_running_loop()
        there: asyncio.Future[T] = here.create_future()

        def begin() -> None:
            loop.create_task(work()).add_done_callback(lambda task: here.call_soon_threadsafe(give, task))

        def give(task: asyncio.Task[T]) -> None:
            if there.done():
                return
            if task.cancelled():
                there.set_exception(LinkError("the scheduler is closed"))
            elif (error := task.exception()) is not None:
                there.set_exception(error)
            else:
                there.set_result(task.result())

        self._asked.add(there)
        try:
            loop.call_soon_threadsafe(begin)
            return await there
        except RuntimeError:  # the loop is closed
            raise LinkError("the scheduler is closed") from None
        finally:
            self._asked.discard(there)

    # ---------------------------------------------------------------- the conductor, in a thread

    def _conduct(self) -> None:
        """Carry out what the ranks have come together for, call after call, until they do not go on together."""
        center = self._center
        assert center is not None
        with suppress(RankError, SchedulerClosed):
            while True:
                self._carry_out(center, *center.next_call())

    def _carry_out(self, center: CoreCenter, call: int, asked: bytes) -> None:
        scheduler = self._scheduler
        assert scheduler is not None
        batch: int | None = None
        contents: Any
        try:
            method, arguments, named = unpack_call(asked, lambda: center.transfer(call))
            result = getattr(scheduler, method)(*arguments, **named)
            batch = result.id if isinstance(result, Batch) else None
            contents = _packed(result, self._ranks.world_size, self._split_by)
        except Exception as error:
            contents = say.told(error, "the core")
        center.ended(call, contents, batch=batch, out=scheduler.batches_out)

    def _look(self, method: str, arguments: list[Any]) -> bytes:
        if self._scheduler is None:
            raise SchedulerClosed("the core's actor has no scheduler (yet)")
        return look(self._scheduler, method, arguments)

    def _end_waits(self, why: RankError) -> None:
        log.warning("the ranks do not go on together: %s", why)
        if self._scheduler is not None:
            self._scheduler.end_waits(why)


def _packed(result: Any, ranks: int, split_by: SplitBy) -> list[bytes]:
    """The result of a call for each rank: its share of a batch, or the same for all."""
    if isinstance(result, Batch):
        for prompt in {s.id.group: s.prompt for s in result.samples}.values():
            content.refuse_not_plain(prompt)
        return [content.pack_batch(share) for share in result.split(ranks, split_by)]
    one = content.pack_evaluation(result) if isinstance(result, EvaluationResult) else content.pack_plain(result)
    return [one] * ranks
