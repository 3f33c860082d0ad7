"""The distance of a step from the limit of its engines, and the causes that took the rest.

The limit is the time that the tokens of these requests, each at its place in its response, take on the same engines,
by their fitted cost, when all places are busy all the time and nothing is prefilled twice. Re-prefill costs what its
tokens cost. What is left of the time is shared out among the causes that kept places empty, by how long they did.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from april.core.event_pump import KEPT, RequestLog, RequestSums
from april.core.partial_buffer import Idle
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.fitted_cost import FEWEST, FittedCost, Requests, fit

GROUPS: dict[str, tuple[Idle, ...]] = {
    "bubble": (Idle.OVER_SAMPLING, Idle.PROMPTS, Idle.FUNCTIONS),
    "boundary": (Idle.TRAINER, Idle.STOP),
    "weight updates": (Idle.UPDATE, Idle.PAUSE),
    "evaluation": (Idle.EVALUATION,),
    "admission": (Idle.BOUND, Idle.HELD, Idle.ENGINES),
}
"""The causes of empty places, by name."""
LITTLE_EMPTY = 0.02
"""Share of empty places below which they do not explain what is missing."""
FITS_AT_A_TIME = 4
"""Engines whose cost is fitted anew at a delivery, at most: 15 ms each."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Shares of the time, which add up to 1 unless the fitted cost is too high.

    Attributes:
        at_limit: what the limit takes.
        reprefill: prefilling again what was cut.
        causes: the rest, by what kept places empty.
        unexplained: what is missing while places were full.
    """

    at_limit: float
    reprefill: float
    causes: dict[str, float]
    unexplained: float


def distance_of(
    brought: Iterable[tuple[DecodeCost, RequestSums]], *, places: float, seconds: float, again: float,
    idle: Mapping[str, float],
) -> Distance | None:
    """The distance over some time; None without requests or time.

    Args:
        brought: by engine, its cost and what its requests brought.
        places: of all engines together.
        seconds: that passed.
        again: tokens that were prefilled again, within that time.
        idle: place-seconds that stood empty, by the names of GROUPS.
    """
    pairs = list(brought)
    if not pairs or seconds <= 0.0:
        return None
    per_engine = max(1.0, places / len(pairs))
    limit_s = sum(
        (cost.base_s / per_engine + cost.per_sequence_s) * b.generated + cost.per_kv_token_s * b.resident
        for cost, b in pairs
    )
    prefill_s = sum(cost.per_prefill_token_s for cost, _ in pairs) / len(pairs)
    limit_s += prefill_s * max(0.0, sum(b.context for _, b in pairs) - again)
    whole = seconds * len(pairs)
    at_limit, reprefill = limit_s / whole, prefill_s * again / whole
    rest, empty = max(0.0, 1.0 - at_limit - reprefill), sum(idle.values())
    if empty < LITTLE_EMPTY * places * seconds:
        return Distance(at_limit, reprefill, {}, rest)
    return Distance(at_limit, reprefill, {name: rest * of / empty for name, of in idle.items() if of > 0.0}, 0.0)


def idle_of(metrics: Mapping[str, float], places: float) -> dict[str, float]:
    """Place-seconds that stood empty before a batch, by the names of GROUPS."""
    place_s = places * metrics.get("step_s", 0.0)
    return {
        name: place_s * sum(metrics.get(f"idle_{cause}", 0.0) for cause in causes) for name, causes in GROUPS.items()
    }


class EngineCosts:
    """The cost of decoding on each engine, fitted to its latest requests.

    Anew whenever they are half as many more, or all that are remembered are new.
    """

    def __init__(self, requests: RequestLog) -> None:
        self._requests = requests
        self._fitted: dict[str, FittedCost] = {}
        self._seen: dict[str, int] = {}
        """The requests of each engine at its latest fit."""

    def look(self) -> None:
        """Fit engines that have brought enough since their last fit, a few at a time, and forget those that left."""
        for gone in self._seen.keys() - {name for name, _ in self._requests}:
            del self._seen[gone]
            self._fitted.pop(gone, None)
        due = [
            (name, ended) for name, ended in self._requests
            if self._requests.count(name) >= max(FEWEST, min(1.5 * (seen := self._seen.get(name, 0)), seen + KEPT))
        ]  # fmt: skip
        for name, ended in due[:FITS_AT_A_TIME]:
            self._seen[name] = self._requests.count(name)
            if (found := fit(Requests.of(ended))) is not None:
                self._fitted[name] = found

    def __iter__(self) -> Iterator[tuple[str, FittedCost]]:
        """Iterate over engines and their fitted costs."""
        return iter(self._fitted.items())

    def of(self, engine: str) -> DecodeCost | None:
        """The cost of an engine, or of another one while its own is unknown; None while none is known."""
        found = self._fitted.get(engine) or next(iter(self._fitted.values()), None)
        return None if found is None else found.cost


class StepLimit:
    """The distance of each step from the limit, as metrics."""

    def __init__(self, requests: RequestLog) -> None:
        self._requests = requests
        self.costs = EngineCosts(requests)

    def metrics(self, metrics: Mapping[str, float], places: float) -> dict[str, float]:
        """The metrics of a batch's distance; empty while the cost of engines is unknown."""
        self.costs.look()
        known = [(self.costs.of(name), brought) for name, brought in self._requests.take().items()]
        found = distance_of(
            ((cost, brought) for cost, brought in known if cost is not None),
            places=places, seconds=metrics["step_s"], again=metrics["reprefill_tokens"],
            idle=idle_of(metrics, places),
        )  # fmt: skip
        if found is None:
            return {}
        return {
            "of_limit": found.at_limit,
            "lost_reprefill": found.reprefill,
            **{f"lost_{name.replace(' ', '_')}": found.causes.get(name, 0.0) for name in GROUPS},
            "lost_unexplained": found.unexplained,
        }
