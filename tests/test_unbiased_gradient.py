"""April's advantages give the exact gradient, whoever finished when, in a toy where reward depends on the length.

Each estimate has 100,000 groups of 8 and must be within 3 standard errors (0.3 to 0.5 % of the gradient). Other
baselines, in the place of april's, are off by what the page says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import length_toy as toy
import numpy as np
import pytest
from length_toy import Array, Estimate, Groups

from april.corrections.advantages import Method, first_others, group_advantages

DRAWS = 100_000
PAGE = Path(__file__).parent.parent / "docs" / "measurements.md"


def quorum_advantages(groups: Groups, k: int, method: Method = "rloo") -> Array:
    """As a batch computes them: float [G, n]."""
    return advantages(groups, of_cohort(groups, k), method)


def of_cohort(groups: Groups, k: int) -> Array:
    """Rewards of the first others of each, by april's own function: float [G * n, k]."""
    members, rewards = (np.repeat(a, toy.N, axis=0) for a in groups.cohort(k))
    return first_others(np.tile(np.arange(toy.N), len(groups.kinds)), members, rewards)


def advantages(groups: Groups, others: Array, method: Method) -> Array:
    """float [G, n]; of those that failed 0, whatever their rows say."""
    others = np.where(groups.alive.reshape(-1, 1), others, 0.0)
    found = group_advantages(groups.rewards.reshape(-1), others, method).reshape(groups.kinds.shape)
    return np.where(groups.alive, found, 0.0)


@cache
def whole() -> Groups:
    return toy.draw(DRAWS, seed=1)


def fifth(lengths: Array) -> Array:
    """Of the responses fail, long or short."""
    return np.full(lengths.shape, 0.2)


def per_token(lengths: Array) -> Array:
    """A chance to fail at every token, so long ones fail more often: a quarter of all."""
    return 1 - 0.95**lengths


@cache
def failed(failing: Callable[[Array], Array], replaced: bool) -> Groups:
    return toy.draw(DRAWS, seed=2, failing=failing, replaced=replaced)


@cache
def with_failures(failing: Callable[[Array], Array], replaced: bool, k: int) -> Estimate:
    """Of april's rloo."""
    return toy.estimate(failed(failing, replaced), quorum_advantages(failed(failing, replaced), k))


@pytest.mark.parametrize("k", [4, 8], ids=["quorum 0.5", "quorum 1"])
@pytest.mark.parametrize("method", ["rloo", "dr_grpo"])
def test_a_quorum_does_not_bend_the_gradient(k: int, method: Method) -> None:
    """Early and late samples together; dr_grpo is (k - 1) / k of the gradient, as at quorum 1."""
    scale = 1.0 if method == "rloo" else (k - 1) / k
    found = toy.estimate(whole(), quorum_advantages(whole(), k, method), scale)
    assert found.errors_off < 3
    assert found.noise < 0.006


@pytest.mark.parametrize("k", [4, 8], ids=["quorum 0.5", "quorum 1"])
@pytest.mark.parametrize("replaced", [False, True], ids=["shrink", "replace"])
def test_failures_by_chance_do_not_bend_the_gradient(k: int, replaced: bool) -> None:
    """A fifth of all samples fails, whatever is in them: groups shrink (some to two), or fresh ones come later."""
    sizes = np.unique(failed(fifth, replaced).alive.sum(1))
    assert sizes.tolist() == ([8] if replaced else [2, 3, 4, 5, 6, 7, 8])
    assert with_failures(fifth, replaced, k).errors_off < 3


@cache
def wrong_baselines() -> dict[str, Estimate]:
    """With quorum 0.5: what another baseline in the place of april's makes of the gradient."""
    groups, k = whole(), 4
    _, first = groups.cohort(k)
    with_itself = np.repeat(first, toy.N, axis=0)
    early = groups.rank < k
    part = np.where(early, _mean(groups, early), _mean(groups, ~early))
    return {
        "all siblings, for stragglers": toy.estimate(
            groups, np.where(early, quorum_advantages(groups, k), quorum_advantages(groups, toy.N))
        ),
        "the first k, itself among them": toy.estimate(groups, advantages(groups, with_itself, "rloo")),
        "the first k others, for stragglers": toy.estimate(groups, _late_against_k(groups, k)),
        "its part of the group in the batch": toy.estimate(groups, groups.rewards - part, 0.75),
    }


def _mean(groups: Groups, chosen: Array) -> Array:
    """Mean reward of the chosen ones of each group."""
    return (groups.rewards * chosen).sum(1, keepdims=True) / chosen.sum(1, keepdims=True)


def _late_against_k(groups: Groups, k: int) -> Array:
    _, first = groups.cohort(k)
    early = groups.rank < k
    return np.where(early, quorum_advantages(groups, k), groups.rewards - first.mean(1, keepdims=True))


@cache
def filtered(k: int) -> Estimate:
    """Groups of which the first k have equal rewards are rejected, with their stragglers."""
    groups = whole()
    _, first = groups.cohort(k)
    kept = np.ptp(first, axis=1) > 0
    return toy.estimate(groups, quorum_advantages(groups, k), kept=np.broadcast_to(kept[:, None], groups.kinds.shape))


@cache
def standardised(k: int, many_values: bool) -> Estimate:
    """GRPO as in the paper, with the standard deviation."""
    groups = replace(whole(), reward_of=toy.SHORT_AND_RIGHT) if many_values else whole()
    return toy.estimate(groups, quorum_advantages(groups, k, "grpo"))


@cache
def in_places(runs: int, groups: int, places: int) -> Estimate:
    """Siblings wait for places: so it depends on a response, too, who of the others is first."""
    drawn = toy.draw_in_places(runs, groups, places, seed=4)
    assert len(drawn.kinds) >= DRAWS
    return toy.estimate(drawn, quorum_advantages(drawn, 4))


def figures() -> dict[str, float]:
    """The tables of docs/measurements.md, in per cent."""
    right = {k: toy.estimate(whole(), quorum_advantages(whole(), k)) for k in (4, 8)}
    failures = {"by chance": fifth, "more often when long": per_token}
    found = {"`rloo`, quorum 1": right[8].bias, "`rloo`, quorum 0.5": right[4].bias}
    for name, failing in failures.items():
        for policy in ("shrink", "replace"):
            found[f"{policy}, samples fail {name}"] = with_failures(failing, policy == "replace", 4).bias
    found |= {f"`max_in_flight` {places}": in_places(5_000, 24, places).bias for places in (8, 16)}
    found["one group alone in 4 places"] = in_places(DRAWS, 1, 4).bias
    found |= {name: estimate.bias for name, estimate in wrong_baselines().items()}
    found |= {f"`grpo`, quorum {k / 8:g}": standardised(k, True).bias_of_direction for k in (8, 4)}
    found |= {f"filter, quorum {k / 8:g}": filtered(k).bias_of_direction for k in (8, 4)}
    return {name: 100 * bias for name, bias in found.items()}


@pytest.mark.skipif(not PAGE.exists(), reason="a copy of the tree without docs")
def test_the_figures_on_the_page() -> None:
    """Every row of the table is what is measured here: ``python tests/test_unbiased_gradient.py``."""
    section = PAGE.read_text("utf-8").partition("\n### Bias of the gradient\n")[2].partition("\n##")[0]
    shown = re.findall(r"^\| (.+?) \| ([\d.]+) % \|", section, re.M)
    assert {name: float(per_cent) for name, per_cent in shown} == pytest.approx(figures(), abs=0.1)


if __name__ == "__main__":
    for name, per_cent in figures().items():
        print(f"{name:45} {per_cent:6.2f} %")
