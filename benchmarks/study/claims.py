"""What is claimed, judged: a claim holds, is refuted by the condition that was written down, or is open."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from april.demo.statistics import Estimate
from benchmarks.study import analysis
from benchmarks.study.analysis import Seeds
from benchmarks.study.design import Claim, Design
from benchmarks.study.training import Outcome

HOLDS, REFUTED, OPEN = "holds", "refuted", "open"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judged claim.

    Attributes:
        claim: the claim.
        verdict: HOLDS, REFUTED or OPEN, which is a claim whose trainings are not all there.
        figures: what it was judged by, in words.
    """

    claim: Claim
    verdict: str
    figures: str


def judge(design: Design, outcomes: Mapping[str, Outcome]) -> list[Verdict]:
    """Return a verdict on every claim."""
    planned: dict[str, int] = {}
    for name in design.trainings():
        named = name.rpartition("/")[0]
        planned[named] = planned.get(named, 0) + 1
    arms = analysis.by_arm(outcomes)
    found = []
    for claim in design.claims:
        if claim.kind in GUARDS:
            all_there = len(outcomes) == sum(planned.values())
            found.append(_guarded(claim, list(outcomes.values()), all_there))
            continue
        arm = arms.get(claim.task, {}).get(claim.arm, {})
        against = arms.get(claim.task, {}).get(claim.against, {})
        wanted = min(planned[f"{claim.task}/{name}"] for name in (claim.arm, claim.against))
        if len(arm.keys() & against.keys()) < wanted:
            found.append(Verdict(claim, OPEN, f"{len(arm.keys() & against.keys())} of {wanted} pairs"))
            continue
        refuted, figures = _judged(claim, arm, against, design)
        verdict = OPEN if refuted is None else REFUTED if refuted else HOLDS
        found.append(Verdict(claim, verdict, figures))
    return found


def _judged(claim: Claim, arm: Seeds, against: Seeds, design: Design) -> tuple[bool | None, str]:
    """Return whether a claim is refuted, and by what; None if no pair says anything of it."""
    sizes = design.tasks[claim.task]
    if claim.kind == "non_inferior":
        found = analysis.difference(arm, against)
        return found.lower < -claim.limit, f"{shown(found)}, bound {found.lower:+.3f}"
    if claim.kind == "long_prompts":
        found = analysis.difference(arm, against, "long")
        return found.lower < -claim.limit, f"{shown(found)}, bound {found.lower:+.3f}"
    if claim.kind == "better":
        found = analysis.difference(arm, against)
        return found.low <= claim.limit, shown(found)
    if claim.kind == "worse":
        found = analysis.difference(arm, against)
        return found.high >= -claim.limit, shown(found)
    if claim.kind == "cheaper":
        found = analysis.ratio(arm, against, sizes.late, claim.of)
        return (not math.exp(found.high) < claim.limit) if found.n else None, times(found)
    raise ValueError(f"design: claim {claim.id} is of an unknown kind, {claim.kind}")


GUARDS = ("kl_in_time", "kl_false", "ess_late")


def _guarded(claim: Claim, outcomes: Sequence[Outcome], all_there: bool) -> Verdict:
    """Judge what is claimed of a guard, over all trainings of all tasks."""
    found = analysis.guard(outcomes, analysis.ess_alarm if claim.kind == "ess_late" else analysis.kl_alarm)
    if claim.kind == "kl_false":
        figures, share = f"{found.false} of {found.sound} that did not fall", found.false / max(1, found.sound)
    else:
        figures, share = f"{found.in_time} of {found.falls} falls in time", found.in_time / max(1, found.falls)
    if not all_there or not (found.sound if claim.kind == "kl_false" else found.falls):
        return Verdict(claim, OPEN, figures)
    refuted = share < claim.limit if claim.kind == "kl_in_time" else share > claim.limit
    return Verdict(claim, REFUTED if refuted else HOLDS, figures)


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
