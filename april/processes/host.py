"""A host: a process that lends its engines and functions to a scheduler in another one."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec

from april.agents.chat import ALIVE_S, COMMIT_S
from april.agents.gateway import Gateway
from april.config.images import ImagesConfig
from april.core import commands as do
from april.core import events as ev
from april.core.versions import FIRST_VERSION
from april.driver.detokenizer import Detokenizer
from april.driver.llm import BlockingRolloutFunction, RolloutFunction, single_turn
from april.driver.local_host import LocalHost
from april.driver.loop_thread import LoopThread
from april.driver.sample_functions import RolloutSettings, UserFunctions
from april.driver.user_code import check_signatures
from april.engines.protocol import Engine
from april.errors import ConfigError, LinkError
from april.images.placing import Images
from april.processes.link import HOST, Heartbeats, Hello, Link, close_all, connect
from april.processes.messages import (
    PROTOCOL,
    AskQuiet,
    AskTapes,
    EngineCard,
    Goodbye,
    Heartbeat,
    Joined,
    ProtocolError,
    Quieted,
    Refusal,
    TapesSent,
    Welcome,
    decode_to_host,
    encode,
)
from april.processes.mirror import Forgotten, Mirror

log = logging.getLogger("april")


class HostRefused(LinkError):
    """The scheduler does not want this host, and says why."""


class Serving:
    """A connection of a host to its scheduler; made and used on the loop.

    Args:
        link: to the scheduler; not opened yet.
        life: the same at every connection of this host, and no other's.
        functions: None: it runs none.
        written: engines that a weight update has paused, in this connection or an earlier one; it adds to them.
    """

    def __init__(
        self,
        link: Link,
        name: str,
        life: str,
        engines: Sequence[Engine],
        functions: UserFunctions | None,
        no_functions: UserFunctions,
        written: set[str],
    ) -> None:
        self._link = link
        self._engines = engines
        self._functions = functions or no_functions
        self._loop = asyncio.get_running_loop()
        self._mirror: Mirror | None = None
        self._local: LocalHost | None = None
        self._flushes = False
        self._beats = Heartbeats[None](0.0)
        self._timer: asyncio.TimerHandle | None = None
        self._asking: set[asyncio.Task[None]] = set()
        self.welcomed: asyncio.Future[None] = self._loop.create_future()
        """Done when it has joined; or it has raised LinkError."""
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """The scheduler's reason for the end; or it has raised LinkError."""
        self.welcomed.add_done_callback(_heard_of)
        self.ended.add_done_callback(_heard_of)
        link.open(self._receive, self._lost)
        self._written = written
        f = functions
        joined = Joined(
            protocol=PROTOCOL,
            name=name,
            life=life,
            engines=tuple(
                # limits are sentences for whoever looks at the engine itself
                EngineCard(
                    name=e.name, capabilities=msgspec.to_builtins(replace(e.capabilities, limits=())),
                    written=f"{name}/{e.name}" in written,
                )
                for e in engines
            ),
            functions=f is not None,
            reward=f is not None and f.reward is not None,
            group_reward=f is not None and f.group_reward is not None,
            filter=f is not None and f.filter is not None,
            tokenizer=no_functions.detokenizer is not None,
        )  # fmt: skip
        link.send(encode([joined]))

    async def leave(self, why: str) -> None:
        """Say goodbye and end everything that runs; the engines stay open."""
        if self._mirror is not None and not self.ended.done():
            self._mirror.say(Goodbye(why))
            self._flush()
        self._over(why)
        await self.end()

    async def end(self) -> None:
        """End all that still runs; the engines stay open."""
        await close_all([self._link])
        if self._timer is not None:
            self._timer.cancel()
        for task in self._asking:
            task.cancel()
        if self._local is not None:
            await self._local.end()

    # ---------------------------------------------------------------- frames

    def _receive(self, frame: bytes) -> None:
        self._beats.hear(None, self._loop.time())
        if self.ended.done():
            return
        try:
            if self._mirror is None:
                self._begin(frame)
                return
            assert self._local is not None
            for asked in self._mirror.receive(frame):
                if isinstance(asked, Forgotten):
                    self._local.samples.forget(asked)
                elif isinstance(asked, AskTapes):
                    self._local.streams.catch_up()
                    self._mirror.report()
                    self._say(TapesSent(asked.number))
                elif isinstance(asked, AskQuiet):
                    self._ask_quiet(asked.number)
                elif isinstance(asked, Goodbye):
                    self._over(asked.why)
                else:
                    self._note(asked)
                    self._local.executors[type(asked)](asked)
        except LinkError as error:
            self._break(error)
        except Exception as error:
            log.error("host: april stops", exc_info=error)
            self._break(error)

    def _note(self, asked: do.Command) -> None:
        """Note engines that may have other weights than those of the start: a transfer is told by its pause only."""
        if isinstance(asked, do.PauseEngine):
            self._written.add(asked.engine)
        elif isinstance(asked, do.LoadEngine) and asked.version == FIRST_VERSION:
            self._written.discard(asked.engine)  # they are named again, for nobody has written any

    def _begin(self, frame: bytes) -> None:
        """The first frame: it is welcome, or it is not."""
        for message in decode_to_host(frame):
            if isinstance(message, Refusal):
                raise HostRefused(message.why)
            if isinstance(message, Goodbye):
                raise LinkError(message.why)
            if not isinstance(message, Welcome):
                raise ProtocolError(f"the scheduler says {type(message).__name__} before its welcome")
            self._join(message)

    def _join(self, welcome: Welcome) -> None:
        self._mirror = mirror = Mirror(welcome)
        self._local = LocalHost(
            mirror, self._engines, self._functions, RolloutSettings(
                sampling=welcome.sampling, allow_mismatch=welcome.allow_mismatch,
                function_timeout_s=welcome.function_timeout_s, stall_timeout_s=welcome.stall_timeout_s,
                warn_after_s=welcome.warn_after_s, vocab_size=welcome.vocab_size,
                any_temperature=welcome.any_temperature,
            ),
            post=self._post, failed=lambda call, error: None, broke=self._break, prefix=f"{welcome.name}/",
        )  # fmt: skip
        mirror.output_of = self._local.samples.output_of
        self._beats = Heartbeats(welcome.deadline_s)
        self._beats.hear(None, self._loop.time())
        self._beat()
        if not self.welcomed.done():  # its host may have been ended meanwhile
            self.welcomed.set_result(None)

    def _post(self, event: ev.Event) -> None:
        assert self._mirror is not None
        self._mirror.post(event)
        self._flush_soon()

    def _say(self, message: TapesSent | Quieted | Heartbeat) -> None:
        assert self._mirror is not None
        self._mirror.say(message)
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Send all that is said in this turn of the loop as one frame."""
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushes = False
        if self._mirror is None or self.ended.done():
            return
        try:
            while (frame := self._mirror.take()) is not None:
                self._link.send(frame)
        except LinkError as error:
            self._break(error)

    def _beat(self) -> None:
        """Tell that this host lives, and look whether the scheduler does."""
        if self.ended.done():
            return
        if self._beats.silent(self._loop.time()):
            self._break(LinkError(f"the scheduler has said nothing for {self._beats.deadline_s:g} s"))
            return
        self._say(Heartbeat())
        self._timer = self._loop.call_later(self._beats.interval_s, self._beat)

    def _ask_quiet(self, number: int) -> None:
        async def quiet() -> None:
            assert self._local is not None
            await self._local.quiet()
            self._say(Quieted(number))

        task = self._loop.create_task(quiet())
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    # ---------------------------------------------------------------- the end

    def _lost(self, why: str) -> None:
        self._break(LinkError(why))

    def _over(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)
        if not self.welcomed.done():
            self.welcomed.set_exception(LinkError(why))

    def _break(self, error: BaseException) -> None:
        for future in (self.welcomed, self.ended):
            if not future.done():
                future.set_exception(error)


def _heard_of(future: asyncio.Future[None] | asyncio.Future[str]) -> None:
    """Fetch an error that may have nobody to hear it."""
    if not future.cancelled():
        future.exception()


RETRY_S = 1.0
"""The pause between two tries to reach the scheduler."""


class Host:
    """Engines and functions of this process, for a scheduler with ``hosts=``: use it as ``with Host(...) as host``.

    It joins when it is entered, works in the background, and comes back by itself when the connection was lost.

    Args:
        name: unique among the hosts of a scheduler, without a slash; its engines are ``name/engine`` there.
        engines: engine objects; those of a server need nothing else, and may be none where there are functions.
        rollout, reward, group_reward, filter: as for the scheduler, which must have the same kinds of functions; with
            none of them this host only lends its engines.
        tokenizer, renderer, commit_s, alive_s: as for the scheduler; a tokenizer is needed where that has one, and for
            ``llm.base_url``.
        processor: as for the scheduler, where functions on this host bring images of their own.
        images: their limits, as in the configuration (:class:`april.config.images.ImagesConfig`).
        address: where the scheduler's :class:`april.HostListener` listens.
        token: the listener's.
        join: instead of both, what makes a link on the host's loop.
        rejoin_s: how long it tries to reach the scheduler, at first and after the connection was lost.

    Raises:
        ConfigError: an argument is wrong.
    """

    _gateway_type: Callable[..., Gateway] = Gateway

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
        processor: Any = None,
        images: ImagesConfig | None = None,
        renderer: Any = None,
        commit_s: float = COMMIT_S,
        alive_s: float = ALIVE_S,
        address: str | None = None,
        token: str | None = None,
        join: Callable[[], Awaitable[Link]] | None = None,
        rejoin_s: float = 60.0,
    ) -> None:
        if (join is None) == (address is None or token is None):
            raise ConfigError("a host needs address and token of a HostListener, or join")
        check_signatures(rollout=rollout, reward=reward, group_reward=group_reward, filter=filter)
        self.name = name
        self._life = secrets.token_hex(8)
        self._engines = list(engines)
        self._written: set[str] = set()
        seen = None if processor is None else Images(processor, images)
        tokenizer = seen.tokenizer if seen is not None and tokenizer is None else tokenizer
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._gateway = self._gateway_type(tokenizer, renderer, commit_s, alive_s, seen)
        self._functions = UserFunctions(rollout, reward, group_reward, filter, detokenizer, self._gateway, seen)
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
        self._gateway.close()
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
        """Serve one connection after the other, until the scheduler says goodbye."""
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
