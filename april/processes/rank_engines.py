"""Serves the engines of a rank other than 0 to the scheduler in rank 0's process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from april.config.settings import Config
from april.driver.loop_thread import LoopThread
from april.engines.kinds.factory import create_engines
from april.engines.protocol import Engine
from april.engines.served.server import EngineServer, serve

POLL_S = 0.05
"""Seconds between two checks whether the scheduler has released the engines."""


def shares_trainer_weights(engine: Engine) -> bool:
    """Return True if this process writes the engine's weights, so that the scheduler need not send them."""
    return not (engine.capabilities.remote or engine.capabilities.own_weights)


class RankEngines:
    """Runs the engines of this rank on an event loop of their own.

    Args:
        host: address at which the scheduler reaches this process.
        key: key for the engines' servers, which is the token that the ranks share.

    Raises:
        ConfigError: the engines cannot be created, or the address cannot be used.
    """

    def __init__(
        self, config: Config, model: Any, engines: Sequence[Engine] | None, processor: Any, *, host: str, key: str
    ) -> None:
        self.engines: list[Engine] = []
        self.servers: list[EngineServer] = []
        self.thread = LoopThread("april-engines")
        try:
            if engines is None:
                engines = create_engines(config.engine, model, config.seed, self.thread.run, processor)
            self.engines = list(engines)
            self.thread.run(partial(self._serve, host, key))
        except BaseException:
            self.close()
            raise

    async def _serve(self, host: str, key: str) -> None:
        for engine in self.engines:
            self.servers.append(await serve(engine, host, key=key, shares_model=shares_trainer_weights(engine)))

    def close(self, release_timeout_s: float = 0.0) -> None:
        """Close the engines once the scheduler has released them, or after ``release_timeout_s``; idempotent."""
        try:
            self.thread.end_with(partial(self._end, release_timeout_s))
        finally:  # an interrupt ends only the wait, not the closing
            self.thread.stop(last=partial(self._end, 0.0))

    async def _end(self, release_timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(release_timeout_s):
                while any(server.has_client for server in self.servers):  # noqa: ASYNC110 - there is no event for this
                    await asyncio.sleep(POLL_S)
        for server in self.servers:
            await server.close()
        for engine in self.engines:
            await engine.close()
