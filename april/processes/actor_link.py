"""Links over calls of the core's actor: the other end calls, the core answers.

Ray does not carry out the calls of an asynchronous actor in the order in which they were made. So an end that calls has
at most one call of each kind on its way, and what is sent meanwhile goes with the next one: frames keep their order,
and many of them are one call. Nothing here imports Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from april.processes.link import Hello, Link, OnFrame, OnLost
from april.server_text import said

T = TypeVar("T")

HEARTBEAT_S = 5.0
"""After which a question for frames is answered though there are none."""


class ServedLink(Link):
    """The core's end, a :class:`april.processes.link.Link`; all on the loop that it is made on.

    Whoever uses it notices an end that asks nothing any more: hosts and ranks owe a sign of life.

    Args:
        hello: what the other end is for.
    """

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.peer = f"{hello.purpose} {hello.name}"
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes] = []
        self._news = asyncio.Event()
        self._early: list[bytes] = []
        self._on_frame: OnFrame | None = None
        self._on_lost: OnLost | None = None
        self._over: str | None = None
        """Why nothing comes or goes any more."""

    # ---------------------------------------------------------------- as a Link

    def open(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        """See :class:`april.processes.link.Link`."""
        self._on_frame, self._on_lost = on_frame, on_lost
        self._loop.call_soon(self._hand_up)

    def send(self, frame: bytes) -> None:
        """See :class:`april.processes.link.Link`."""
        if self._over is None:
            self._out.append(frame)
            self._news.set()

    def close(self) -> None:
        """See :class:`april.processes.link.Link`."""
        self._on_frame = self._on_lost = None
        self._end("closed here")

    # ---------------------------------------------------------------- as the other end calls it

    @property
    def over(self) -> bool:
        """Nothing is left to be asked for."""
        return self._over is not None and not self._out

    async def poll(self) -> list[bytes] | None:
        """What was sent since the last question, once there is something; None: nothing will ever be again."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                await self._news.wait()
        out, self._out = self._out, []
        if self._over is None:
            self._news.clear()
            return out
        return out or None

    def take(self, frames: Sequence[bytes]) -> bool:
        """Frames of the other end, in their order; False: nobody wants them any more."""
        if self._over is not None:
            return False
        self._early += frames
        self._hand_up()
        return True

    def lose(self, why: str) -> None:
        """The other end is gone."""
        if self._over is None:
            self._end(why)
            self._tell_lost()

    # ---------------------------------------------------------------- inside

    def _hand_up(self) -> None:
        while self._early and self._on_frame is not None:
            self._on_frame(self._early.pop(0))
        if self._over is not None:
            self._tell_lost()

    def _tell_lost(self) -> None:
        on_lost, self._on_frame = self._on_lost, None
        self._on_lost = None
        if on_lost is not None and self._over is not None:
            on_lost(self._over)

    def _end(self, why: str) -> None:
        if self._over is None:
            self._over = why
        self._news.set()


class Calls(Protocol):
    """The core's actor, for one link; each call may fail with whatever Ray raises."""

    def poll(self) -> Awaitable[Sequence[bytes] | None]:
        """See :meth:`ServedLink.poll`."""

    def take(self, frames: Sequence[bytes]) -> Awaitable[bool]:
        """See :meth:`ServedLink.take`."""

    def leave(self) -> Awaitable[None]:
        """This end has closed the link."""


class CallingLink(Link):
    """The end that calls, a :class:`april.processes.link.Link`; all on the loop that it lives on."""

    def __init__(self, calls: Calls) -> None:
        self.peer = "the core's actor"
        self._calls = calls
        self._out: list[bytes] = []
        self._news = asyncio.Event()
        self._over = False
        self._tasks: list[asyncio.Future[Any]] = []
        self._on_frame: OnFrame | None = None
        self._on_lost: OnLost | None = None

    def open(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        """See :class:`april.processes.link.Link`."""
        self._on_frame, self._on_lost = on_frame, on_lost
        self._tasks = [asyncio.ensure_future(work()) for work in (self._pull, self._push)]

    def send(self, frame: bytes) -> None:
        """See :class:`april.processes.link.Link`."""
        if not self._over:
            self._out.append(frame)
            self._news.set()

    def close(self) -> None:
        """See :class:`april.processes.link.Link`."""
        if self._over:
            return
        self._over = True
        self._on_frame = self._on_lost = None
        self._news.set()
        if not self._tasks:
            self._tasks = [asyncio.ensure_future(self._push())]

    async def _pull(self) -> None:
        """Frames of the core, until there will be none any more."""
        while (frames := await self._answer(self._calls.poll)) is not None:
            for frame in frames:
                if self._on_frame is not None:
                    self._on_frame(frame)
            if self._over:
                return
        self._lose("the core has closed the connection")

    async def _push(self) -> None:
        """Frames to the core, and at the end that there will be none any more."""
        wanted: bool | None = True
        while wanted and not (self._over and not self._out):
            await self._news.wait()
            self._news.clear()
            out, self._out = self._out, []
            if out:
                wanted = await self._answer(partial(self._calls.take, out))
        if wanted:
            await self._answer(self._calls.leave)
        else:
            self._lose("the core has closed the connection")

    async def _answer(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """None: the core's actor cannot be reached, which is the end of the link."""
        try:
            return await call()
        except Exception as error:  # whatever Ray says of an actor
            self._lose(f"the core's actor cannot be reached: {said(f'{type(error).__name__}: {error}')}")
            return None

    def _lose(self, why: str) -> None:
        on_lost, self._on_frame, self._on_lost = self._on_lost, None, None
        self._over = True
        self._out.clear()
        self._news.set()
        if on_lost is not None:
            on_lost(why)
