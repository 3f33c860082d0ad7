"""A host's actor: engines and functions for the core's actor. Started anew by Ray, it joins anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from april.daemon_pool import DaemonPool
from april.driver.loop_thread import LoopThread
from april.engines.kinds.factory import create_engines
from april.errors import LinkError
from april.processes.actor_calls import link_of, this_actor
from april.processes.core_actor import CORE, HostSpec
from april.processes.host import Host
from april.processes.link import Link
from april.server_text import said


class HostActor:
    """See above; made an actor by ``april.ray.scheduler``.

    Args:
        namespace: of the run; the core's actor says what belongs to this host, also to one that was started anew.
        index: number of this host.
    """

    def __init__(self, namespace: str, index: int) -> None:
        import ray

        core = ray.get_actor(CORE, namespace)
        spec: HostSpec = ray.get(core.host_spec.remote(index))
        name = f"host{index}"
        me = this_actor()
        self._thread = LoopThread("april-host")
        self._threads = DaemonPool("april-host-to-thread")  # none keeps the process alive when Ray lets it end

        async def join() -> Link:
            try:
                return link_of(core, await core.join_as_host.remote(name, me))
            except Exception as error:  # whatever Ray says
                raise LinkError(f"the core's actor cannot be reached: {said(type(error).__name__)}") from None

        if spec.factory is not None:
            made = spec.factory(index)
        else:
            made = create_engines(spec.engine, None, spec.seed, self._thread.run)
        self._engines = list(made)
        self._host = Host(name, engines=self._engines, join=join, **spec.functions)
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
