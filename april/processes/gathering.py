"""Engines that generate only while all ranks have put weights together that are spread over them."""

from __future__ import annotations

from collections.abc import Iterable

from april.engines.protocol import Engine, GathersWeights


def gathering(engines: Iterable[Engine]) -> list[GathersWeights]:
    """Those whose weights are spread over the ranks."""
    return [e for e in engines if e.capabilities.gathers_weights and isinstance(e, GathersWeights)]


def gather(engines: Iterable[Engine]) -> None:
    """Collective; see :class:`april.engines.protocol.GathersWeights`."""
    for engine in gathering(engines):
        engine.gather()


def release(engines: Iterable[Engine]) -> None:
    """The end of it, which waits for no other rank."""
    for engine in gathering(engines):
        engine.release()
