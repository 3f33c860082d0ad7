"""One connection of a host, on its loop: commands come over the link, what happens goes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from april.core import commands as do
from april.core import events as ev
from april.core.versions import FIRST_VERSION
from april.driver.local_host import LocalHost
from april.driver.sample_functions import RolloutSettings, UserFunctions
from april.engines.protocol import Engine
from april.errors import LinkError
from april.processes.joining import joined_frame
from april.processes.link import Link, close_all
from april.processes.messages import (
    AskQuiet,
    AskTapes,
    Goodbye,
    Heartbeat,
    ProtocolError,
    Quieted,
    Refusal,
    TapesSent,
    Welcome,
    decode_to_host,
)
from april.processes.mirror import Forgotten, Mirror

log = logging.getLogger("april")


class HostRefused(LinkError):
    """The scheduler does not want this host, and says why."""


class Serving:
    """See above; made and used on the loop.

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
        self._deadline_s = self._heard_s = self._looked_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._asking: set[asyncio.Task[None]] = set()
        self.welcomed: asyncio.Future[None] = self._loop.create_future()
        """Done when it has joined; or it has raised LinkError."""
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """Why it is over, as the scheduler says; or it has raised LinkError."""
        self.welcomed.add_done_callback(_heard_of)
        self.ended.add_done_callback(_heard_of)
        link.open(self._receive, self._lost)
        self._written = written
        link.send(
            joined_frame(
                name, life, engines, functions, tokenizer=no_functions.detokenizer is not None, written=written
            )
        )

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
        self._heard_s = self._loop.time()
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
        """Whose weights may be others than those of the start: a transfer is told to nobody but by its pause."""
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
        self._deadline_s, self._looked_s = welcome.deadline_s, self._loop.time()
        self._beat(welcome.heartbeat_s)
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
        """What is said in one turn of the loop is one frame."""
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushes = False
        if self._mirror is None or self.ended.done():
            return
        try:
            if (frame := self._mirror.take()) is not None:
                self._link.send(frame)
        except LinkError as error:
            self._break(error)

    def _beat(self, every_s: float) -> None:
        """It lives; and does the scheduler?"""
        if self.ended.done():
            return
        now = self._loop.time()
        if now - self._looked_s > self._deadline_s / 2:
            self._heard_s = now  # this process itself did not run: what it was told meanwhile is on its way
        self._looked_s = now
        if now - self._heard_s >= self._deadline_s:
            self._break(LinkError(f"the scheduler has said nothing for {self._deadline_s:g} s"))
            return
        self._say(Heartbeat())
        self._timer = self._loop.call_later(every_s, self._beat, every_s)

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
    """Its error may have nobody to hear it."""
    if not future.cancelled():
        future.exception()
