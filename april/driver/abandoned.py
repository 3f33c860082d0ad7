"""What is left to do when a scheduler could not be closed: it was never made, was dropped, or did not answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from april.driver.worker_threads import WorkerThreads
from april.engines.protocol import Engine

log = logging.getLogger("april")

PATIENCE_S = 10.0
"""How long engines have to close."""


class Abandoned:
    """Engines, threads, exporters and record of a scheduler that nobody has any more.

    The user's functions are not among them, nor the driver, which has them: they may hold the scheduler, which would
    then never be dropped.

    Args:
        engines: to be closed.
        threads: of the user's functions.
        ends: called when the engines are closed; none of them raises.
    """

    def __init__(
        self, engines: Sequence[Engine], threads: WorkerThreads | None = None, ends: Sequence[Callable[[], None]] = ()
    ) -> None:
        self._engines = engines
        self._threads = threads
        self._ends = ends

    async def dropped(self) -> None:
        """:meth:`end`, and a log that says why."""
        log.warning("a RolloutScheduler was dropped without close(); its threads and engines end now")
        await self.end()

    async def end(self) -> None:
        """Close them; nothing else is left on the loop."""
        if self._threads is not None:
            self._threads.close()
        closing = [asyncio.ensure_future(engine.close()) for engine in self._engines]
        if closing:
            await asyncio.wait(closing, timeout=PATIENCE_S)
        for engine, done in zip(self._engines, closing, strict=True):
            if not done.done():
                done.cancel()
            elif not done.cancelled() and (error := done.exception()) is not None:
                log.error("engine %s could not be closed", engine.name, exc_info=error)
        for end in self._ends:
            end()
