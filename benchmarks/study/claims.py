"""What is claimed, judged by intervals: a claim holds, or the data exclude it, or they are too few to decide.

A claim holds unless the condition that was written down is met. Then it is refuted if its whole interval is on the
wrong side of the limit, and undecided if the interval reaches over the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.study import analysis
from benchmarks.study.analysis import Seeds
from benchmarks.study.design import Claim, Design
from benchmarks.study.statistics import Estimate, share_interval
from benchmarks.study.training import Outcome, Settings

HOLDS, REFUTED, UNDECIDED, OPEN = "holds", "refuted", "undecided", "open"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judged claim.

    Attributes:
        claim: the claim.
        verdict: HOLDS, REFUTED, UNDECIDED or OPEN, which is a claim whose trainings are not all there.
        figures: what it was judged by, in words.
    """

    claim: Claim
    verdict: str
    figures: str


def judge(design: Design, outcomes: Mapping[str, Outcome]) -> list[Verdict]:
    """Return a verdict on every claim."""
    planned: dict[str, int] = {}
    trainings = design.trainings()
    for name in trainings:
        named = name.rpartition("/")[0]
        planned[named] = planned.get(named, 0) + 1
    arms = analysis.by_arm(outcomes)
    found = []
    for claim in design.claims:
        if claim.kind.partition("_")[0] in GUARDS:
            found.append(_guarded(claim, outcomes, trainings))
            continue
        arm = arms.get(claim.task, {}).get(claim.arm, {})
        against = arms.get(claim.task, {}).get(claim.against, {})
        wanted = min(planned[f"{claim.task}/{name}"] for name in (claim.arm, claim.against))
        if len(arm.keys() & against.keys()) < wanted:
            found.append(Verdict(claim, OPEN, f"{len(arm.keys() & against.keys())} of {wanted} pairs"))
            continue
        found.append(_judged(claim, arm, against, design))
    return found


def _judged(claim: Claim, arm: Seeds, against: Seeds, design: Design) -> Verdict:
    """Judge a claim on pairs of trainings; it is open if no pair says anything of it."""
    if claim.kind == "cheaper":
        found = analysis.ratio(arm, against, design.tasks[claim.task].late, claim.of)
        if not found.n:
            return Verdict(claim, OPEN, times(found))
        return Verdict(claim, _verdict(-found.high, -found.low, -math.log(claim.limit)), times(found))
    found = analysis.difference(arm, against, "long" if claim.kind == "long_prompts" else "reward")
    if claim.kind in ("non_inferior", "long_prompts"):
        says = f"{shown(found)}, bound {found.lower:+.3f}"
        return Verdict(claim, _verdict(found.lower, found.upper, -claim.limit), says)
    if claim.kind == "better":
        return Verdict(claim, _verdict(found.low, found.high, claim.limit), shown(found))
    if claim.kind == "worse":
        return Verdict(claim, _verdict(-found.high, -found.low, claim.limit), shown(found))
    raise ValueError(f"design: claim {claim.id} is of an unknown kind, {claim.kind}")


def _verdict(low: float, high: float, limit: float) -> str:
    """Return the verdict on the claim that a figure is above ``limit``, by the bounds of its interval."""
    return HOLDS if low > limit else REFUTED if high <= limit else UNDECIDED


GUARDS: dict[str, analysis.Alarm] = {
    "kl": analysis.kl_alarm, "ess": analysis.ess_alarm, "response": analysis.response_alarm, "far": analysis.far_alarm,
}  # fmt: skip
"""Guards by the first word of the kinds of claims about them."""


def _guarded(claim: Claim, outcomes: Mapping[str, Outcome], trainings: Mapping[str, Settings]) -> Verdict:
    """Judge what is claimed of a guard, over all trainings; those on responses over the ones with fresh seeds alone."""
    guard, _, what = claim.kind.partition("_")
    of_responses = guard in ("response", "far")
    chosen = [
        name for name, settings in trainings.items()
        if name.startswith("late") == of_responses and not (guard == "response" and settings.noise)
    ]  # fmt: skip
    found = analysis.guard([outcomes[name] for name in chosen if name in outcomes], GUARDS[guard])
    if what == "false":
        count, of, figures = found.false, found.sound, f"{found.false} of {found.sound} that did not fall"
    else:
        count, of, figures = found.in_time, found.falls, f"{found.in_time} of {found.falls} falls in time"
    if not outcomes.keys() >= set(chosen) or not of:
        return Verdict(claim, OPEN, figures)
    low, high = share_interval(count, of)
    if what == "in_time":
        held, out = count / of >= claim.limit, high < claim.limit
    else:
        held, out = count / of <= claim.limit, low > claim.limit
    return Verdict(claim, HOLDS if held else REFUTED if out else UNDECIDED, figures)


# ---------------------------------------------------------------- in words


def shown(found: Estimate) -> str:
    """Return a difference with half of its interval, which is symmetric."""
    return f"{found.mean:+.3f}" + (f" ±{found.half_width:.3f}" if math.isfinite(found.half_width) else "")


def times(found: Estimate) -> str:
    """Return a log ratio as a factor with its interval; what is censored is said."""
    never = f", {found.censored} of {found.n} never" if found.censored else ""
    if not found.n or math.isnan(found.mean):
        return "none"
    if math.isinf(found.mean):
        return f"never reached{never}"
    return f"{math.exp(found.mean):.2f}x ({_factor(found.low)}\N{EN DASH}{_factor(found.high)}{never})"


def _factor(log: float) -> str:
    return "any" if math.isinf(log) else f"{math.exp(log):.2f}"
