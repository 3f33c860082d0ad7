"""Which engines a recorded run had when, and how many places there were with them: engines of hosts come and go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Slots = Annotated[int, msgspec.Meta(ge=0, le=10**12)]


class Engine(msgspec.Struct):
    """What counts here of the limits of an engine."""

    name: str
    max_in_flight: Slots | None = None


class EnginesThere:
    """Told what changes, in the order of time. Times are seconds of the record.

    Args:
        engines: of the beginning.
        most: ``max_in_flight`` of the run at its beginning.
    """

    def __init__(self, engines: Iterable[Engine], most: int) -> None:
        self._most = most
        self._there: dict[str, int | None] = {}
        """Slots, by name; none: as many as there may be samples in flight."""
        self.names: dict[str, None] = {}
        """All that ever were there, as they came."""
        self.since_s: list[float] = []
        """When the number of places or of engines changed."""
        self.places: list[int] = []
        """How many there were from then on."""
        self._engines: list[int] = []
        self.joined(0.0, engines)

    def joined(self, time_s: float, engines: Iterable[Engine]) -> None:
        """These have come."""
        for engine in engines:
            self._there[engine.name] = engine.max_in_flight
            self.names.setdefault(engine.name)
        self._changed(time_s)

    def left(self, time_s: float, names: Iterable[str]) -> None:
        """These have gone."""
        for name in names:
            self._there.pop(name, None)
        self._changed(time_s)

    def most_changed(self, time_s: float, most: int) -> None:
        """So many samples may be in flight from now on."""
        self._most = most
        self._changed(time_s)

    def _changed(self, time_s: float) -> None:
        places = min(self._most, sum(slots or self._most for slots in self._there.values()))
        if not self.since_s or (places, len(self._there)) != (self.places[-1], self._engines[-1]):
            self.since_s.append(time_s)
            self.places.append(places)
            self._engines.append(len(self._there))

    def at(self, time_s: float) -> tuple[int, int]:
        """(engines, places) at a time."""
        last = max(0, int(np.searchsorted(self.since_s, time_s, "right")) - 1)
        return self._engines[last], self.places[last]

    def place_s(self, since: float, until: float) -> float:
        """Places, summed up over the time between."""
        return float(self._passed(since, until) @ np.array(self.places, np.float64))

    def engine_s(self, since: float, until: float) -> float:
        """Engines, summed up over the time between."""
        return float(self._passed(since, until) @ np.array(self._engines, np.float64))

    def usual(self, until: float) -> int:
        """How many engines there were: the median over the time from the beginning."""
        engines = np.array(self._engines)
        order = np.argsort(engines, kind="stable")
        passed = np.cumsum(self._passed(0.0, until)[order])
        return int(engines[order][np.searchsorted(passed, passed[-1] / 2)])

    def _passed(self, since: float, until: float) -> Floats:
        """Seconds of the time between, by what held."""
        began = np.array(self.since_s)
        ended = np.append(began[1:], np.inf)
        return np.asarray(np.maximum(0.0, np.minimum(ended, until) - np.maximum(began, since)))
