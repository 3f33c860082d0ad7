"""A server that stands still for a while, and goes on whatever happens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from april.errors import EngineError

log = logging.getLogger("april")

class OwnPauses:
    """Pauses by which april ends requests at a server, one at a time: the end of another would end this one."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self.begun = 0
        """So many; a request that was sent before the latest may have been ended, or refused, by it."""

    @property
    def now(self) -> bool:
        """Whether one is under way."""
        return self._one.locked()

    async def over(self) -> None:
        """Until none is."""
        async with self._one:
            pass

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """The time of one of them."""
        async with self._one:
            self.begun += 1
            yield


Call = Callable[[], Coroutine[Any, Any, object]]


@asynccontextmanager
async def while_paused(pause: Call, resume: Call) -> AsyncIterator[None]:
    """``pause`` before, ``resume`` after, also where the pause fails or is cancelled: the server may have taken it.

    Neither call is cut off in the middle, for a resumption that overtakes its pause resumes nothing.

    Raises:
        EngineError: the server could not be paused, or, where nothing else is raised, not be resumed.
    """
    pausing = asyncio.ensure_future(pause())
    try:
        await asyncio.shield(pausing)
        yield
    except BaseException:
        try:
            await asyncio.shield(_undo(pausing, resume))
        except EngineError as error:
            log.warning("a server that was paused may stand still now: %s", error)
        raise
    await asyncio.shield(resume())


async def _undo(pausing: asyncio.Future[object], resume: Call) -> None:
    await asyncio.wait([pausing])
    if not pausing.cancelled():
        pausing.exception()  # whoever waits has it, or was cancelled
    await resume()
