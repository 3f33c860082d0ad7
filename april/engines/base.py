"""Base classes of april's own engines: name, capabilities, version, and whether they are paused or closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from april.core.versions import FIRST_VERSION, PolicyVersion
from april.engines.protocol import Capabilities
from april.errors import EngineError

TURNS = 8
"""Maximum number of event-loop iterations to wait for callers to read their pending chunks."""


class EngineBase:
    """Stores an engine's constant name and capabilities, and whether the engine is paused or closed."""

    _paused = _closed = False

    def __init__(self, name: str, capabilities: Capabilities) -> None:
        self._name, self._capabilities = name, capabilities

    @property
    def name(self) -> str:
        """Short unique label of the engine; for a server, its host and port."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """The abilities found when the engine was created."""
        return self._capabilities

    @property
    def _status(self) -> str:
        return "closed" if self._closed else "paused" if self._paused else ""

    def _require_paused(self, *, stopped: bool = True) -> None:
        if not (self._paused and stopped):
            raise EngineError(f"engine {self._name}: weights can change only while it is paused; await pause() first")


class VersionedEngine(EngineBase):
    """Base of engines for which a weight update only changes the version number."""

    def __init__(self, name: str, capabilities: Capabilities, version: PolicyVersion = FIRST_VERSION) -> None:
        super().__init__(name, capabilities)
        self._version = version

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False

    async def update_weights(self, version: PolicyVersion, path: str | None = None) -> None:
        self._version = version


class WithoutWeights(VersionedEngine):
    """Base of engines without a model."""

    async def content_of(self, path: str) -> str:
        """Return the path itself: these engines never read the path, so its content does not matter."""
        return path

    async def _read_by_callers(self, unread: Callable[[], bool]) -> None:
        """Let callers read their pending chunks while ``unread`` returns True, for at most TURNS iterations."""
        for _ in range(TURNS):
            if unread():
                await asyncio.sleep(0)
