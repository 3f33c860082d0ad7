"""Measures how far a step was from the limit of its engines, and which causes took the rest of the time.

The limit is the time that the same engines would take for the step's tokens if all places (slots for requests) were
always busy and nothing was prefilled twice. It follows from decoding costs that are fitted to each engine's requests
and grow with the length of the sequence. Tokens that were prefilled again are a loss of their own. The rest of the time
is divided among the causes of empty places, in proportion to the place-seconds of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from april.core.event_pump import KEPT_REQUESTS, RequestLog, RequestSums
from april.core.partial_buffer import IdleCause
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.fitted_cost import MIN_REQUESTS, FittedCost, Requests, fit

GROUPS: dict[str, tuple[IdleCause, ...]] = {
    "bubble": (IdleCause.OVER_SAMPLING, IdleCause.PROMPTS, IdleCause.FUNCTIONS),
    "boundary": (IdleCause.TRAINER, IdleCause.STOP),
    "weight updates": (IdleCause.UPDATE, IdleCause.PAUSE),
    "evaluation": (IdleCause.EVALUATION,),
    "admission": (IdleCause.BOUND, IdleCause.HELD, IdleCause.ENGINES),
}
"""Groups of causes for empty places, by the name used in metrics."""
NEGLIGIBLE_SHARE = 0.02
"""If less than this share of the place-seconds was empty, all lost time counts as unexplained."""
FITS_AT_A_TIME = 2
"""Maximum number of engines whose cost is fitted again when a batch is delivered."""
QUICK_FIT = 512
"""Maximum number of an engine's requests for a fit at a delivery (some 3 ms); larger fits are made between events."""


@dataclass(frozen=True, slots=True)
class LimitDistance:
    """Shares of the time of a step; they add up to 1 unless the fitted cost is too high.

    Attributes:
        at_limit: Share that the step would take at the limit.
        reprefill: Share for prefilling interrupted responses again.
        causes: Shares that were lost to empty places, by the name of the causes' group in GROUPS.
        unexplained: Share that was lost although hardly any place was empty.
    """

    at_limit: float
    reprefill: float
    causes: dict[str, float]
    unexplained: float


def distance_of(
    brought: Iterable[tuple[DecodeCost, RequestSums]], *, places: float, seconds: float, again: float,
    idle: Mapping[str, float],
) -> LimitDistance | None:
    """Compute the distance from the limit over a period; None if there were no requests, or no time passed.

    Args:
        brought: Pairs of each engine's cost and the sums over its requests.
        places: Number of request places of all engines together.
        seconds: Length of the period.
        again: Number of tokens that were prefilled again in the period.
        idle: Place-seconds that were empty, by the name of the cause's group in GROUPS.
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
    if empty < NEGLIGIBLE_SHARE * places * seconds:
        return LimitDistance(at_limit, reprefill, {}, rest)
    return LimitDistance(at_limit, reprefill, {name: rest * of / empty for name, of in idle.items() if of > 0.0}, 0.0)


def idle_of(metrics: Mapping[str, float], places: float) -> dict[str, float]:
    """Return the place-seconds that were empty in the step of a batch, by the name of the cause's group in GROUPS."""
    place_s = places * metrics.get("step_s", 0.0)
    return {
        name: place_s * sum(metrics.get(f"idle_{cause}", 0.0) for cause in causes) for name, causes in GROUPS.items()
    }


class EngineCosts:
    """Holds the cost of decoding on each engine, fitted to its latest requests.

    An engine is fitted again when the number of its requests has grown by half, or all remembered requests are new.
    """

    def __init__(self, requests: RequestLog) -> None:
        self._requests = requests
        self._fitted: dict[str, FittedCost] = {}
        self._seen: dict[str, int] = {}
        """Number of requests of each engine at its latest fit."""

    def fit_again(self, engines: int = 1, most: int = KEPT_REQUESTS) -> None:
        """Fit some engines with enough new requests since their last fit, and forget removed engines.

        Args:
            engines: Maximum number of engines to fit.
            most: Maximum number of remembered requests of an engine; engines with more are left out.
        """
        for gone in self._seen.keys() - {name for name, _ in self._requests}:
            del self._seen[gone]
            self._fitted.pop(gone, None)
        due = [
            (name, ended) for name, ended in self._requests
            if self._requests.count(name)
            >= max(MIN_REQUESTS, min(1.5 * (seen := self._seen.get(name, 0)), seen + KEPT_REQUESTS))
            and len(ended) <= most
        ]  # fmt: skip
        for name, ended in due[:engines]:
            self._seen[name] = self._requests.count(name)
            if (found := fit(Requests.of(ended))) is not None:
                self._fitted[name] = found

    def __iter__(self) -> Iterator[tuple[str, FittedCost]]:
        """Iterate over the names of engines and their fitted costs."""
        return iter(self._fitted.items())

    def of(self, engine: str) -> DecodeCost | None:
        """Return an engine's cost; while it is unknown, the cost of another engine, or None if no cost is known."""
        found = self._fitted.get(engine) or next(iter(self._fitted.values()), None)
        return None if found is None else found.cost

    def limit_metrics(self, metrics: Mapping[str, float], places: float) -> dict[str, float]:
        """Return a batch's metrics ``of_limit`` and ``lost_*``; empty while the cost of all engines is unknown.

        ``metrics`` are the batch's other metrics, ``places`` the number of request places of all engines.
        """
        self.fit_again(FITS_AT_A_TIME, QUICK_FIT)
        known = [(self.of(name), brought) for name, brought in self._requests.take_sums().items()]
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
