"""Engines that take a request, the least loaded first; what this costs does not grow with the number of engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from april.core.engine_table import EngineState


SPARE = 64
"""Places of engines that have left, beside as many as there are engines, before all places are given anew."""


class LeastLoaded:
    """An iteration gives those with the fewest requests first, and of equals the one that has been here longest.

    The engines of one load are the bits of one number: to find the first of a thousand is one operation on 16 words.
    """

    def __init__(self) -> None:
        self._engines: dict[int, EngineState] = {}
        """By place."""
        self._joined = 0
        self._with_load: dict[int, int] = {}
        """Bits of the places of all engines that have so many requests and take one more; never 0."""

    def __iter__(self) -> Iterator[EngineState]:
        for load in sorted(self._with_load):
            bits = self._with_load[load]
            while bits:
                first = bits & -bits
                yield self._engines[first.bit_length() - 1]
                bits ^= first

    @property
    def first(self) -> EngineState | None:
        """The first of them; None: no engine takes a request."""
        if not self._with_load:
            return None
        bits = self._with_load[min(self._with_load)]
        return self._engines[(bits & -bits).bit_length() - 1]

    def join(self, engine: EngineState) -> None:
        """It comes behind those that are here."""
        if self._joined > 2 * len(self._engines) + SPARE:  # or the numbers would grow with all that come and go
            there, self._engines = self._engines, {}
            self._joined, self._with_load = 0, {}
            for other in there.values():
                other.load = None
                self._append(other)
        self._append(engine)

    def _append(self, engine: EngineState) -> None:
        engine.order, engine.place = self, self._joined
        self._engines[engine.place] = engine
        self._joined += 1
        engine.moved()

    def leave(self, engine: EngineState) -> None:
        """It is looked for no longer, whatever changes of it."""
        self.move(engine.place, engine.load, None)
        del self._engines[engine.place]
        engine.order = engine.load = None

    def move(self, place: int, before: int | None, load: int | None) -> None:
        """It has other requests than ``before``; None: it takes none."""
        bit = 1 << place
        if before is not None:
            left = self._with_load[before] ^ bit
            if left:
                self._with_load[before] = left
            else:
                del self._with_load[before]
        if load is not None:
            self._with_load[load] = self._with_load.get(load, 0) | bit
