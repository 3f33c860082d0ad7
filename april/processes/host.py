"""A host: a process that lends its engines and functions to a scheduler in another one."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from april.driver.detokenizer import Detokenizer
from april.driver.llm import BlockingRolloutFunction, RolloutFunction, single_turn
from april.driver.loop_thread import LoopThread
from april.driver.sample_functions import UserFunctions
from april.driver.user_code import check_function
from april.engines.protocol import Engine
from april.errors import ConfigError, LinkError
from april.processes.link import Hello, Link, connect
from april.processes.remote_hosts import HOST
from april.processes.serving import HostRefused, Serving

log = logging.getLogger("april")

RETRY_S = 1.0
"""Between two tries to reach the scheduler."""


class Host:
    """Engines and functions of this process, for a scheduler with ``hosts=``: use it as ``with Host(...) as host``.

    It joins when it is entered, works in the background, and comes back by itself when the connection was lost.

    Args:
        name: unique among the hosts of a scheduler, without a slash; its engines are ``name/engine`` there.
        engines: engine objects; those of a server need nothing else, and may be none where there are functions.
        rollout, reward, group_reward, filter: as for the scheduler, which must have the same kinds of functions; with
            none of them this host only lends its engines.
        tokenizer: as for the scheduler; needed where that has one.
        address: where the scheduler's :class:`april.HostListener` listens.
        token: the listener's.
        join: instead of both, what makes a link on the host's loop.
        rejoin_s: how long it tries to reach the scheduler, at first and after the connection was lost.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        name: str,
        *,
        engines: Sequence[Engine] = (),
        rollout: RolloutFunction | BlockingRolloutFunction = single_turn,
        reward: Callable[..., Any] | None = None,
        group_reward: Callable[..., Any] | None = None,
        filter: Callable[..., Any] | None = None,
        tokenizer: Any = None,
        address: str | None = None,
        token: str | None = None,
        join: Callable[[], Awaitable[Link]] | None = None,
        rejoin_s: float = 60.0,
    ) -> None:
        if (join is None) == (address is None or token is None):
            raise ConfigError("a host needs address and token of a HostListener, or join")
        for what, function, takes in (
            ("rollout", rollout, ("prompt", "llm")),
            ("reward", reward, ("prompt", "response")),
            ("group_reward", group_reward, ("prompt", "responses")),
            ("filter", filter, ("prompt", "responses")),
        ):
            if function is not None:
                check_function(what, function, takes)
        self.name = name
        self._life = secrets.token_hex(8)
        self._engines = list(engines)
        self._written: set[str] = set()
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._functions = UserFunctions(rollout, reward, group_reward, filter, detokenizer)
        self._runs_functions = rollout is not single_turn or any((reward, group_reward, filter))
        if not self._engines and not self._runs_functions:
            raise ConfigError("a host needs engines, or functions")
        if join is None:
            assert address is not None
            assert token is not None
            join = partial(connect, address, token, Hello(HOST, name))
        self._join = join
        self._where = address or "the scheduler"
        self._rejoin_s = rejoin_s
        self._serving: Serving | None = None
        self._thread: LoopThread | None = None
        self._ended: asyncio.Task[str] | None = None
        self._joined: asyncio.Future[None] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Host {self.name!r} of {self._where}>"

    # ---------------------------------------------------------------- on a loop

    async def astart(self) -> None:
        """Join; returns when the scheduler has welcomed it. The host lives on the running loop.

        Raises:
            LinkError: the scheduler refuses it, with its reason; or it could not be reached in ``rejoin_s``.
        """
        if self._ended is not None:
            raise ConfigError("a host can be started once")
        loop = asyncio.get_running_loop()
        self._joined = loop.create_future()
        self._ended = loop.create_task(self._live())
        waits: list[asyncio.Future[Any]] = [self._joined, self._ended]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not self._joined.done():
            self._ended.result()

    async def aend(self) -> str:
        """Wait until the scheduler says goodbye; returns its reason.

        Raises:
            LinkError: the connection was lost, and the scheduler could not be reached again in ``rejoin_s``.
        """
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    async def aclose(self) -> None:
        """Tell the scheduler that this host leaves, end everything, and close the engines."""
        self._closed = True
        if self._serving is not None:
            await self._serving.leave(f"host {self.name} is closed")
        if self._ended is not None:
            self._ended.cancel()
            await asyncio.wait([self._ended])
        for engine in self._engines:
            await engine.close()

    # ---------------------------------------------------------------- on a thread of its own

    def __enter__(self) -> Self:
        """:meth:`astart` on a background loop. Raises as that does."""
        self._thread = LoopThread("april-host")
        try:
            self._thread.run(self.astart)
        except BaseException:
            self.close()
            raise
        return self

    def wait(self) -> str:
        """:meth:`aend`: blocks until the scheduler says goodbye; returns its reason."""
        if self._thread is None:
            raise ConfigError("a host is waited for inside of its with block")
        return self._thread.run(self.aend)

    def close(self) -> None:
        """:meth:`aclose`, and the end of the background loop; idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.run(self.aclose)
            finally:
                thread.stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- one connection after the other

    async def _live(self) -> str:
        """One connection after the other, until the scheduler says goodbye."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            serving: Serving | None = None
            try:
                link = await self._join()
                serving = self._serving = Serving(
                    link, self.name, self._life, self._engines, self._functions if self._runs_functions else None,
                    self._functions, self._written,
                )  # fmt: skip
                await serving.welcomed
                log.info("host %s has joined %s", self.name, self._where)
                assert self._joined is not None
                if not self._joined.done():
                    self._joined.set_result(None)
                try:
                    return await serving.ended
                finally:
                    since = loop.time()
            except HostRefused:
                raise
            except LinkError as error:
                if loop.time() - since >= self._rejoin_s:
                    raise
                log.warning("host %s: %s; it tries again", self.name, error)
            finally:
                if serving is not None:
                    await serving.end()
            await asyncio.sleep(RETRY_S)
