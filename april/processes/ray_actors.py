"""The actors of a run under Ray, which places, names, watches and restarts them; between them run april's own links.

The core's actor has the scheduler and the center where ranks meet; those of hosts have engines and functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from april.config.engines import EngineConfig
from april.config.settings import Config
from april.core.batch import SplitBy
from april.daemon_pool import DaemonPool
from april.driver.loop_thread import LoopThread
from april.engines.kinds.factory import create_engines
from april.engines.protocol import Engine
from april.errors import RankError, SchedulerClosed
from april.processes.center import Center
from april.processes.host import Host
from april.processes.link import new_token
from april.processes.rank_scheduler import OwnScheduler
from april.processes.ranks import Ranks
from april.processes.remote_hosts import HostListener

EngineFactory = Callable[[int], Sequence[Engine]]

CORE = "core"
"""Name of the actor in the run's namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """What belongs to one host."""

    engine: EngineConfig
    """describes its engines, where there is no ``factory``"""
    factory: EngineFactory | None
    seed: int
    functions: Mapping[str, Any]


class CoreActor:
    """The actor with the scheduler.

    Args:
        ip: where it listens for hosts and ranks; None means the address of its node.
    """

    def __init__(self, ip: str | None = None) -> None:
        if ip is None:
            import ray

            ip = ray.util.get_node_ip_address()
        self._address = f"[{ip}]:0" if ":" in ip else f"{ip}:0"
        self._token = new_token()
        self._scheduler: OwnScheduler | None = None
        self._door: HostListener | None = None
        self.center: Center | None = None
        self._there = asyncio.Event()
        """Hosts and ranks can come."""

    async def start(
        self, *, config: Config, ranks: Ranks, split_by: SplitBy, engines: EngineFactory | None,
        hosts: Sequence[HostSpec], options: Mapping[str, Any],
    ) -> Exception | None:  # fmt: skip
        """Make the scheduler, which waits for the first of its hosts, if there are any; returns what went wrong.

        ``engines``: given number 0 it makes those of this process; with hosts there are none here.
        """
        # no thread may keep the process alive that nobody has closed: Ray lets it end by itself
        asyncio.get_running_loop().set_default_executor(DaemonPool("april-core"))
        self._config, self._hosts = config, hosts

        def make() -> OwnScheduler:
            made = [] if hosts else None if engines is None else list(engines(0))
            return OwnScheduler(
                config, ranks=ranks, split_by=split_by, engines=made, hosts=self._door, travels=True, **options
            )

        try:
            self.center = Center(replace(ranks, address=self._address), name="the core", returns=True)
            address = await asyncio.to_thread(self.center.listen, self._token)
            self._ranks = replace(ranks, address=address, token=self._token)
            if hosts:
                self._door = HostListener(self._token, self._address)
            self._there.set()
            self._scheduler = await asyncio.to_thread(make)
        except Exception as error:
            return error
        self.center.begin(self._scheduler)
        return None

    async def look(self, method: str, arguments: list[Any]) -> bytes | Exception:
        """What a rank may ask for, for whoever has made the run."""
        try:
            if self._scheduler is None:
                raise SchedulerClosed("the core's actor has no scheduler (yet)")
            return await asyncio.to_thread(self._scheduler.look, method, arguments)
        except Exception as error:
            return error

    async def host(self, index: int) -> tuple[HostSpec, str, str]:
        """What belongs to a host, and the address and token with which it joins."""
        await self._there.wait()
        assert self._door is not None
        return self._hosts[index], self._door.address, self._token

    async def rank(self, rank: int) -> tuple[Config, Ranks] | Exception:
        """What a rank must know."""
        await self._there.wait()
        if not 0 <= rank < self._ranks.world_size:
            return RankError(f"rank {rank} is none of {self._ranks.world_size}; ranks count from 0", (rank,))
        return self._config, replace(self._ranks, rank=rank)

    async def close(self) -> None:
        """End everything."""
        for part in (self.center, self._scheduler):
            if part is not None:
                await asyncio.to_thread(part.close)


class HostActor:
    """An actor with engines and functions. Started anew by Ray, it joins anew.

    Args:
        namespace: of the run; the core's actor says what belongs to this host, also to one that was started anew.
        index: number of this host.
    """

    def __init__(self, namespace: str, index: int) -> None:
        import ray

        core = ray.get_actor(CORE, namespace)
        spec, address, token = ray.get(core.host.remote(index))
        self._thread = LoopThread("april-host")
        self._threads = DaemonPool("april-host-to-thread")  # none keeps the process alive when Ray lets it end
        if spec.factory is not None:
            made = spec.factory(index)
        else:
            made = create_engines(spec.engine, None, spec.seed, self._thread.run)
        self._engines = list(made)
        self._host = Host(f"host{index}", engines=self._engines, address=address, token=token, **spec.functions)
        self._joined = self._thread.submit(self._host.astart)

    async def joined(self) -> Exception | None:
        """Returns when it has joined; what went wrong."""
        try:
            await self._in_thread(self._joined.result)
        except Exception as error:
            return error
        return None

    async def apply(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(engines, *arguments)``, in a thread, for a trainer that hands weights over."""
        return await self._in_thread(function, self._engines, *arguments)

    async def close(self) -> None:
        """Leave."""
        await self._thread.run_async(self._host.aclose)
        await self._in_thread(self._thread.stop)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
