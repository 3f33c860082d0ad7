"""What a report shows of a run, out of its record: arrays, without running the core again."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from april.core.run_times import SECONDS, SHARES
from april.core.settings import CoreSettings
from april.core.types import Refill, Work
from april.engines.simulated.fitted_cost import FittedCost, Requests, fit
from april.errors import RecordError
from april.record.lines import BATCH, CLOSED, IN_THE_MIDDLE, OVER, end_of, lines_of, refuse_other_formats
from april.record.plain import back
from april.report.engines_there import Engine, EnginesThere, Slots

Floats = NDArray[np.float64]
KINDS = (
    BATCH, OVER, CLOSED, "AttemptEnded", "AttemptFailed", "SampleReturned", "UpdateRequested", "EnginesJoined",
    "EnginesLeft", "WorkChanged",
)  # fmt: skip

MOST = 1e12
"""Of times, tokens and ages in a record; more would be no run."""
BEYOND = 1 << 64
"""Of whole numbers among the settings; with more no arithmetic of floats goes on."""
_Group = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
_Time = Annotated[float, msgspec.Meta(ge=-MOST, le=MOST)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=int(MOST))]
_Metric = Annotated[float, msgspec.Meta(ge=-1e39, le=1e39)]
_First = Annotated[list[Engine], msgspec.Meta(min_length=1)]
_Ran = tuple[str, int, int, bool | int, _Count, _Time, _Count, _Count]
NEEDED = (
    *SECONDS, *SHARES, "trained_tokens", "generated_tokens", "reprefill_tokens", "off_policy_share", "staleness_mean",
    "staleness_max",
)  # fmt: skip
"""Metrics that every batch has."""


class _Delivered(msgspec.Struct):
    """The parts of a line of a batch."""

    id: _Count
    metrics: dict[str, _Metric]
    lengths: list[_Count]
    ages: dict[int, _Count]

    def __post_init__(self) -> None:
        if missing := [name for name in NEEDED if name not in self.metrics]:
            raise ValueError(f"without the metric {missing[0]}")


@dataclass(frozen=True, slots=True)
class Batch:
    """One delivery."""

    id: int
    """Its number, by which everybody knows it."""
    time_s: float
    metrics: dict[str, float]
    lengths: list[int]
    ages: dict[int, int]
    """Tokens by weight updates between them and their training."""


@dataclass(kw_only=True)
class RunData:
    """One run.

    Attributes:
        path: of the record, as it was given.
        name: of the record.
        head: its first line.
        settings: of the core.
        seconds: time of its last line.
        end: how it ends.
        there: which engines there were, and the places.
        engines: names of those whose requests ended, as the arrays number them.
        engine, age, began_s, ended_s, context, generated, evaluation: [R], of every request that ended; see
            :class:`april.core.request_log.Ran`.
        finished, finished_group: response tokens of every rollout function that returned, and whose it was.
        failures: requests that failed, by kind.
        costs: of each engine whose requests tell.
    """

    path: Path
    name: str
    head: dict[str, Any]
    settings: CoreSettings
    there: EnginesThere
    seconds: float = 0.0
    end: str = IN_THE_MIDDLE
    batches: list[Batch] = field(default_factory=list)
    updates_s: list[float] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)
    engine: NDArray[np.int64]
    age: NDArray[np.int64]
    began_s: Floats
    ended_s: Floats
    context: Floats
    generated: Floats
    evaluation: NDArray[np.bool_]
    finished: NDArray[np.int64]
    finished_group: NDArray[np.int64]
    failures: Counter[str] = field(default_factory=Counter)
    costs: dict[str, FittedCost] = field(default_factory=dict)

    @property
    def places(self) -> int:
        """The most that there were at a time."""
        return max(self.there.places)

    def settings_at(self, batch: Batch) -> CoreSettings:
        """The settings as they were when it was delivered: ``auto`` and a lowered bound change them."""
        found: dict[str, Any] = {}
        for name in self.settings.auto:
            value = batch.metrics.get("auto_refills" if name is Work.REFILL else f"auto_{name}")
            if value is not None:
                kind = type(getattr(self.settings, name))
                found[name] = (Refill.SAMPLE if value else Refill.NONE) if name is Work.REFILL else kind(value)
        found["max_staleness"] = int(batch.metrics.get("staleness_bound", self.settings.max_staleness))
        return replace(self.settings, **found)

    @property
    def engine_count(self) -> int:
        """Engines that there were at a time, for most of the run; at least 1."""
        return max(1, self.there.usual(self.seconds))

    def requests_of(self, engine: int, last: int) -> Requests:
        """The last requests of one engine."""
        rows = np.flatnonzero(self.engine == engine)[-last:]
        return Requests(self.began_s[rows], self.ended_s[rows], self.context[rows], self.generated[rows])


FITTED = 4096
"""Latest requests of an engine to which its cost is fitted."""


def read_run(path: Path) -> RunData:
    """Read a record.

    Raises:
        RecordError: it is none, of another april, or damaged; or nothing is in it that could be shown.
    """
    lines = lines_of(path, KINDS)
    line = next(lines)
    head = line.parts
    refuse_other_formats(path, head)
    batches: list[Batch] = []
    updates: list[float] = []
    numbers: dict[str, int] = {}
    failures: Counter[str] = Counter()
    rows: list[tuple[float, ...]] = []
    finished: list[tuple[int, int]] = []
    seconds, end = 0.0, IN_THE_MIDDLE
    try:
        settings = back(head["settings"], CoreSettings)
        if any(abs(value) >= BEYOND for value in asdict(settings).values() if isinstance(value, int)):
            raise ValueError("a setting is beyond all numbers")
        there = EnginesThere(msgspec.convert(head["engines"], _First), msgspec.convert(settings.max_in_flight, Slots))
        for line in lines:
            parts, seconds = line.parts, msgspec.convert(line.time_s, _Time)
            match line.what:
                case "AttemptEnded" | "AttemptFailed":
                    if line.what == "AttemptFailed":
                        failures[str(parts.get("kind", "broke_off"))] += 1
                    if (ran := parts.get("ran")) is not None:
                        engine, _, _, evaluation, age, began, context, generated = msgspec.convert(ran, _Ran)
                        number = numbers.setdefault(engine, len(numbers))
                        rows.append((number, age, began, seconds, context, generated, evaluation))
                case "SampleReturned":
                    group, _ = msgspec.convert(parts["sample"], tuple[_Group, int])
                    finished.append((msgspec.convert(parts.get("generated", 0), _Count), group))
                case "UpdateRequested":
                    updates.append(seconds)
                case "Batch":
                    found = msgspec.convert(parts, _Delivered, str_keys=True)
                    batches.append(Batch(found.id, seconds, found.metrics, found.lengths, found.ages))
                    if (most := found.metrics.get("auto_max_in_flight")) is not None:  # a saved state changes it, too
                        there.most_changed(seconds, msgspec.convert(int(most), Slots))
                case "EnginesJoined":
                    there.joined(seconds, msgspec.convert(parts["engines"], list[Engine]))
                case "EnginesLeft":
                    there.left(seconds, msgspec.convert(parts["names"], list[str]))
                case "WorkChanged":
                    if (most := parts.get("max_in_flight")) is not None:
                        there.most_changed(seconds, msgspec.convert(most, Slots))
                case what:
                    end = end_of(what, parts) or end
    except RecordError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
        raise RecordError(f"line {line.number} of {path} cannot be: {kind}: {error}") from None
    if not batches and not rows:
        raise RecordError(f"{path} has no batch and no request that ended: there is nothing to show{_earlier(path)}")
    columns = np.array(rows, np.float64).reshape(-1, 7).T
    lengths = np.array(finished, np.int64).reshape(-1, 2).T
    run = RunData(
        path=path, name=path.name, head=head, settings=settings, there=there, seconds=seconds, end=end,
        batches=batches, updates_s=updates, engines=list(numbers),
        engine=columns[0].astype(np.int64), age=columns[1].astype(np.int64), began_s=columns[2], ended_s=columns[3],
        context=columns[4], generated=columns[5], evaluation=columns[6] != 0,
        finished=lengths[0], finished_group=lengths[1], failures=failures,
    )  # fmt: skip
    for number, name in enumerate(run.engines):
        if (cost := fit(run.requests_of(number, FITTED))) is not None:
            run.costs[name] = cost
    return run


def _earlier(path: Path) -> str:
    """The name of the latest record that was put aside for this one, if there is any."""
    aside = (Path(f"{path}.{number}") for number in count(1))
    there = list(takewhile(Path.exists, aside))
    return f"; the record before it is {there[-1]}" if there else ""


def mean_busy(began_s: Floats, ended_s: Floats, edges: Floats) -> Floats:
    """Requests in flight, averaged over each interval between ``edges`` [E]; [E - 1]."""

    def passed(at: Floats) -> Floats:
        """Seconds since each of ``at``, summed up, at every edge."""
        ordered = np.sort(at)
        before = np.searchsorted(ordered, edges, "right")
        sums = np.concatenate(((0.0,), np.cumsum(ordered)))
        return np.asarray(before * edges - sums[before])

    return np.asarray(np.diff(passed(began_s) - passed(ended_s)) / np.diff(edges))
