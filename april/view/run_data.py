"""Reads the record of a run into arrays, for ``april report`` and ``april plan``; nothing is replayed.

The places of an engine or a run are its request slots: the number of requests that it may have in flight at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from april.core.event_pump import RequestSums
from april.core.partial_buffer import IdleCause
from april.core.run_times import SECONDS, SHARES
from april.core.settings import CoreSettings
from april.core.types import Refill, Work
from april.driver.step_limit import LimitDistance, distance_of
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.fitted_cost import FittedCost, Requests, fit
from april.errors import RecordError
from april.record.event_values import from_plain
from april.record.file import BATCH, CLOSED, CUT_OFF, NO_LAST_LINE, REPORT, end_text, lines_of, refuse_other_formats

Floats = NDArray[np.float64]
Slots = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
KINDS = (
    BATCH, REPORT, CUT_OFF, CLOSED, "AttemptEnded", "AttemptFailed", "SampleReturned", "EnginesJoined",
    "EnginesLeft", "WorkChanged",
)  # fmt: skip

LARGEST_VALUE = 1e12
"""Largest time, token count or age that is accepted from a record; no real run reaches it."""
LARGEST_SETTING = 1 << 64
"""Integer settings of this size or more are refused, as the arithmetic here is done in floats."""
MAX_FIT_ERROR = 0.1
"""Largest accepted relative error of the fitted request durations, and largest accepted difference between the engine
limits computed from two halves of the requests. Beyond it, the report calls its engine limit doubtful."""
NEARLY_FULL = 0.9
"""Share of busy places from which on a record shows what decoding costs with all places busy."""
MIN_BUSY_RATIO = 1.5
"""With fewer busy places, this cost can be extrapolated if at least half of the places were busy at times, and the
busiest times had at least this multiple of the busy places of the quietest times."""


class RecordedEngine(msgspec.Struct):
    """An engine in a record. ``max_in_flight`` None means that the engine has no limit beside that of the run."""

    name: str
    max_in_flight: Slots | None = None


class EngineHistory:
    """Tracks which engines and how many places a run had at each time, as engines may join and leave.

    Changes must be added in order of time. Times are seconds since the start of the record.

    Args:
        engines: engines at the start.
        max_in_flight: ``max_in_flight`` of the run at the start.
    """

    def __init__(self, engines: Iterable[RecordedEngine], max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._present: dict[str, int | None] = {}
        self.names: dict[str, None] = {}
        """Names of all engines that were ever part of the run, in the order in which they joined."""
        self.since_s: list[float] = []
        """Times at which the number of places or of engines changed."""
        self.places: list[int] = []
        """Number of places from each time in ``since_s`` on."""
        self._engines: list[int] = []
        self.joined(0.0, engines)

    def joined(self, time_s: float, engines: Iterable[RecordedEngine]) -> None:
        """Add engines that have joined."""
        for engine in engines:
            self._present[engine.name] = engine.max_in_flight
            self.names.setdefault(engine.name)
        self._record_change(time_s)

    def left(self, time_s: float, names: Iterable[str]) -> None:
        """Remove engines that have left."""
        for name in names:
            self._present.pop(name, None)
        self._record_change(time_s)

    def limit_changed(self, time_s: float, max_in_flight: int) -> None:
        """Change the run's ``max_in_flight``."""
        self._max_in_flight = max_in_flight
        self._record_change(time_s)

    def _record_change(self, time_s: float) -> None:
        places = min(self._max_in_flight, sum(slots or self._max_in_flight for slots in self._present.values()))
        if not self.since_s or (places, len(self._present)) != (self.places[-1], self._engines[-1]):
            self.since_s.append(time_s)
            self.places.append(places)
            self._engines.append(len(self._present))

    def at(self, time_s: float) -> tuple[int, int]:
        """Return (number of engines, number of places) at a time."""
        last = max(0, int(np.searchsorted(self.since_s, time_s, "right")) - 1)
        return self._engines[last], self.places[last]

    def place_s(self, since: float, until: float) -> float:
        """Return place-seconds between two times: the number of places, integrated over time."""
        return float(self._seconds_in_force(since, until) @ np.array(self.places, np.float64))

    def engine_s(self, since: float, until: float) -> float:
        """Return engine-seconds between two times: the number of engines, integrated over time."""
        return float(self._seconds_in_force(since, until) @ np.array(self._engines, np.float64))

    def _seconds_in_force(self, since: float, until: float) -> Floats:
        """Return, for each entry of ``since_s``, the seconds between the two times for which its values held."""
        began = np.array(self.since_s)
        ended = np.append(began[1:], np.inf)
        return np.asarray(np.maximum(0.0, np.minimum(ended, until) - np.maximum(began, since)))


_Group = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
_Time = Annotated[float, msgspec.Meta(ge=-LARGEST_VALUE, le=LARGEST_VALUE)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=int(LARGEST_VALUE))]
_Metric = Annotated[float, msgspec.Meta(ge=-1e39, le=1e39)]
_First = Annotated[list[RecordedEngine], msgspec.Meta(min_length=1)]
_Ran = tuple[str, int, int, bool | int, _Count, _Time, _Count, _Count]
REQUIRED_METRICS = (
    *SECONDS, *SHARES, "trained_tokens", "generated_tokens", "reprefill_tokens", "off_policy_share", "staleness_mean",
    "staleness_max",
)  # fmt: skip
"""Metrics that every batch must have."""


class RecordedBatch(msgspec.Struct):
    """A delivered batch as read from its line in the record, with the time of that line."""

    id: _Count
    metrics: dict[str, _Metric]
    lengths: list[_Count]
    ages: dict[int, _Count]
    """Number of tokens by age, which is the number of weight updates between generation and training."""
    time_s: float = 0.0

    def __post_init__(self) -> None:
        if missing := [name for name in REQUIRED_METRICS if name not in self.metrics]:
            raise ValueError(f"the metric {missing[0]} is missing")


class RecordedReport(msgspec.Struct):
    """The trainer's :func:`april.off_policy_report` on a batch or on a part of it."""

    id: _Count
    report: dict[str, _Metric]


@dataclass(kw_only=True)
class RunData:
    """A run as read from its record.

    Attributes:
        path: path of the record, as the caller gave it.
        name: name of the record.
        head: first line of the record.
        settings: settings of the core at the start.
        engine_history: engines and places over time.
        seconds: time of the last line.
        end: sentence that says how the record ends.
        batches: delivered batches.
        engines: names of the engines with ended requests; ``engine`` holds indices into this list.
        engine, age, began_s, ended_s, context, generated, evaluation: arrays [R] with one entry for each request that
            ended; see :class:`april.core.event_pump.EndedRequest`.
        finished, finished_group: number of response tokens, and group, of each rollout function that returned.
        reports: reports that the trainer gave to ``record_report``, in order.
        failures: number of requests that failed, by kind of failure.
        costs: fitted cost of each engine, by name; engines with too few requests have none.
    """

    path: Path
    name: str
    head: dict[str, Any]
    settings: CoreSettings
    engine_history: EngineHistory
    seconds: float = 0.0
    end: str = NO_LAST_LINE
    batches: list[RecordedBatch] = field(default_factory=list)
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
    reports: list[RecordedReport] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    costs: dict[str, FittedCost] = field(default_factory=dict)

    @property
    def places(self) -> int:
        """The largest number of places that the run had at any time."""
        return max(self.engine_history.places)

    def settings_at(self, batch: RecordedBatch) -> CoreSettings:
        """Return the settings when a batch was delivered; ``auto`` and a lowered staleness bound may change them."""
        found: dict[str, Any] = {}
        for name in self.settings.auto:
            value = batch.metrics.get("auto_refills" if name is Work.REFILL else f"auto_{name}")
            if value is not None:
                kind = type(getattr(self.settings, name))
                found[name] = (Refill.SAMPLE if value else Refill.NONE) if name is Work.REFILL else kind(value)
        found["max_staleness"] = int(batch.metrics.get("staleness_bound", self.settings.max_staleness))
        return replace(self.settings, **found)

    @property
    def cost(self) -> DecodeCost | None:
        """The mean cost of the engines; None if too few requests ended to fit one."""
        return DecodeCost.mean(fitted.cost for fitted in self.costs.values()) if self.costs else None

    @property
    def prompt_len(self) -> int:
        """The median number of tokens of a prompt; at least 1."""
        first = self.context[(self.age == 0) & ~self.evaluation]
        return max(1, round(float(np.median(first)))) if first.size else 1

    @property
    def engine_count(self) -> int:
        """The number of engines at the last delivery; at least 1."""
        return max(1, self.engine_history.at(self.batches[-1].time_s if self.batches else self.seconds)[0])

    def requests_of(self, engine: int, last: int) -> Requests:
        """Return at most ``last`` of the latest requests of an engine; ``engine`` is an index into ``engines``."""
        rows = np.flatnonzero(self.engine == engine)[-last:]
        return Requests(self.began_s[rows], self.ended_s[rows], self.context[rows], self.generated[rows])


FITTED_REQUESTS = 4096
"""Number of an engine's latest requests to which its cost is fitted."""


def read_run(path: Path) -> RunData:
    """Read the record of a run from a file.

    Raises:
        RecordError: the file is not a record, has another version's format, is damaged, or has nothing to show.
    """
    lines = lines_of(path, KINDS)
    line = next(lines)
    head = line.fields
    refuse_other_formats(path, head)
    batches: list[RecordedBatch] = []
    numbers: dict[str, int] = {}
    failures: Counter[str] = Counter()
    rows: list[tuple[float, ...]] = []
    finished: list[tuple[int, int]] = []
    reports: list[RecordedReport] = []
    seconds, end = 0.0, NO_LAST_LINE
    try:
        settings = from_plain(head["settings"], CoreSettings)
        if any(abs(value) >= LARGEST_SETTING for value in asdict(settings).values() if isinstance(value, int)):
            raise ValueError("a setting is too large")
        slots = msgspec.convert(settings.max_in_flight, Slots)
        history = EngineHistory(msgspec.convert(head["engines"], _First), slots)
        for line in lines:
            parts, seconds = line.fields, msgspec.convert(line.time_s, _Time)
            match line.kind:
                case "AttemptEnded" | "AttemptFailed":
                    if line.kind == "AttemptFailed":
                        failures[str(parts.get("kind", "broke_off"))] += 1
                    if (ran := parts.get("ran")) is not None:
                        engine, _, _, evaluation, age, began, context, generated = msgspec.convert(ran, _Ran)
                        number = numbers.setdefault(engine, len(numbers))
                        rows.append((number, age, began, seconds, context, generated, evaluation))
                case "SampleReturned":
                    group, _ = msgspec.convert(parts["sample"], tuple[_Group, int])
                    finished.append((msgspec.convert(parts.get("generated", 0), _Count), group))
                case "Batch":
                    batches.append(batch := msgspec.convert(parts | {"time_s": seconds}, RecordedBatch, str_keys=True))
                    if (most := batch.metrics.get("auto_max_in_flight")) is not None:  # also after a restore
                        history.limit_changed(seconds, msgspec.convert(int(most), Slots))
                case "Learning":
                    reports.append(msgspec.convert(parts, RecordedReport))
                case "EnginesJoined":
                    history.joined(seconds, msgspec.convert(parts["engines"], list[RecordedEngine]))
                case "EnginesLeft":
                    history.left(seconds, msgspec.convert(parts["names"], list[str]))
                case "WorkChanged":
                    if (most := parts.get("max_in_flight")) is not None:
                        history.limit_changed(seconds, msgspec.convert(most, Slots))
                case what:
                    end = end_text(what, parts) or end
    except RecordError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
        raise RecordError(f"line {line.number} of {path} is not valid: {kind}: {error}") from None
    if not batches and not rows:
        older = _older_record(path)
        raise RecordError(f"{path} has no batch and no finished request, so there is nothing to show{older}")
    columns = np.array(rows, np.float64).reshape(-1, 7).T
    lengths = np.array(finished, np.int64).reshape(-1, 2).T
    run = RunData(
        path=path, name=path.name, head=head, settings=settings, engine_history=history, seconds=seconds, end=end,
        batches=batches, engines=list(numbers),
        engine=columns[0].astype(np.int64), age=columns[1].astype(np.int64), began_s=columns[2], ended_s=columns[3],
        context=columns[4], generated=columns[5], evaluation=columns[6] != 0,
        finished=lengths[0], finished_group=lengths[1], reports=reports, failures=failures,
    )  # fmt: skip
    for number, name in enumerate(run.engines):
        if (cost := fit(run.requests_of(number, FITTED_REQUESTS))) is not None:
            run.costs[name] = cost
    return run


def _older_record(path: Path) -> str:
    """Name the previous record, which was renamed when this one was created, for a message; empty if there is none."""
    aside = (Path(f"{path}.{number}") for number in count(1))
    there = list(takewhile(Path.exists, aside))
    return f"; the previous record is {there[-1]}" if there else ""


def mean_busy(began_s: Floats, ended_s: Floats, edges: Floats) -> Floats:
    """Return the mean number of requests in flight between adjacent ``edges`` [E], as an array [E - 1]."""

    def passed(at: Floats) -> Floats:
        """Return for every edge the sum of the seconds that have passed since each earlier time in ``at``."""
        ordered = np.sort(at)
        before = np.searchsorted(ordered, edges, "right")
        sums = np.concatenate(((0.0,), np.cumsum(ordered)))
        return np.asarray(before * edges - sums[before])

    return np.asarray(np.diff(passed(began_s) - passed(ended_s)) / np.diff(edges))


# ---------------------------------------------------------------- the limit of the engines


@dataclass(frozen=True, slots=True)
class RunDistance:
    """Distance of a run from the limit of its engines (:mod:`april.driver.step_limit`), and doubts about this figure.

    Attributes:
        distance: distance from the limit, computed with the cost that was fitted to all requests.
        halves: ``distance.at_limit`` computed with costs that were fitted to the first half of the requests, and to the
            second half; None if one of them is unknown.
        doubt: reason why the distance is only a guess; empty if it can be trusted.
    """

    distance: LimitDistance
    halves: tuple[float, float] | None
    doubt: str


def limit_distance_of(run: RunData) -> RunDistance | None:
    """Compute the limit between the first and the last delivered batch; None if the engines' cost is unknown."""
    if len(run.batches) < 2:
        return None
    since, until = run.batches[0].time_s, run.batches[-1].time_s
    found = distance(run, since, until)
    if found is None:
        return None
    halves = [distance(run, since, until, costs) for costs in _costs_of_halves(run)]
    first, second = halves if len(halves) == 2 else (None, None)
    both = None if first is None or second is None else (first.at_limit, second.at_limit)
    return RunDistance(found, both, _doubt(run, since, until, both))


def _costs_of_halves(run: RunData) -> list[dict[str, FittedCost]]:
    out: list[dict[str, FittedCost]] = [{}, {}]
    for number, name in enumerate(run.engines):
        requests = run.requests_of(number, FITTED_REQUESTS)
        middle = len(requests) // 2
        for costs, half in zip(out, (slice(0, middle), slice(middle, None)), strict=True):
            if (cost := fit(requests[half])) is not None:
                costs[name] = cost
    return out


def _doubt(run: RunData, since: float, until: float, halves: tuple[float, float] | None) -> str:
    error = max(cost.error for cost in run.costs.values())
    if error > MAX_FIT_ERROR:
        return f"the fitted cost misses the duration of a request by {error:.0%} on average"
    edges = np.linspace(since, until, 201)
    busy = mean_busy(run.began_s, run.ended_s, edges) / max(1, run.places)
    few, many = np.quantile(busy, [0.1, 0.95])
    if many < NEARLY_FULL and (many < 0.5 or many < MIN_BUSY_RATIO * few):
        return (
            f"between {few:.0%} and {many:.0%} of the places were busy, which does not show what decoding costs when "
            "all of them are"
        )
    if halves is None:
        return "too few requests ended to compare two halves of them"
    if abs(halves[0] - halves[1]) > MAX_FIT_ERROR * max(halves):
        return (
            f"by the first half of the requests the limit takes {halves[0]:.0%} of the time, by the second half "
            f"{halves[1]:.0%}"
        )
    return ""


def distance(
    run: RunData, since: float, until: float, costs: Mapping[str, FittedCost] | None = None
) -> LimitDistance | None:
    """Return the distance from the engines' limit between two deliveries; None if no cost is known.

    Losses are split up by :class:`april.core.partial_buffer.IdleCause`. An engine with too few requests for a fit is
    given the cost of another engine. ``costs`` None means the costs of the run.
    """
    costs = run.costs if costs is None else costs
    inside = (run.ended_s > since) & (run.ended_s <= until) & (run.generated > 0) & ~run.evaluation
    engine_s = run.engine_history.engine_s(since, until)
    if not costs or not inside.any() or engine_s <= 0.0:
        return None
    others = next(iter(costs.values()))
    brought = []
    for number, name in enumerate(run.engines):
        rows = inside & (run.engine == number)
        if not rows.any():
            continue
        context, count = run.context[rows], run.generated[rows]
        resident = float(np.sum(context * count + count * count / 2))
        cost = costs.get(name, others).cost
        brought.append((cost, RequestSums(int(count.sum()), int(context.sum()), resident)))
    batches = [(batch.time_s, batch.metrics) for batch in run.batches if since < batch.time_s <= until]
    idle = dict.fromkeys(IdleCause, 0.0)
    for time_s, metrics in batches:
        step_s = metrics["step_s"]
        places = run.engine_history.place_s(time_s - step_s, time_s) / step_s if step_s > 0.0 else 0.0
        for cause in IdleCause:
            idle[cause] += places * step_s * metrics.get(f"idle_{cause}", 0.0)
    again = sum(metrics.get("reprefill_tokens", 0.0) for _, metrics in batches)
    # distance_of assumes constant numbers of engines and places, so it gets the averages over time
    seconds = engine_s / len(brought)
    places = run.engine_history.place_s(since, until) / seconds
    return distance_of(
        brought, places=places, seconds=seconds, again=again,
        idle={str(cause): place_s for cause, place_s in idle.items()},
    )  # fmt: skip
