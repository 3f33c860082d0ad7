"""Base classes of april's own engines."""

from __future__ import annotations

from april.engines.protocol import Capabilities


class EngineBase:
    """Stores the name and the capabilities of an engine; both are constant."""

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


class WithoutWeights(EngineBase):
    """Base of engines without a model: a weight update only changes the version number."""

    async def content_of(self, path: str) -> str:
        """Return the path itself: these engines never read it, so its content cannot change."""
        return path
