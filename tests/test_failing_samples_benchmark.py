"""``benchmarks.failing_samples`` and ``benchmarks.first_lengths``: their figures, on runs that are small."""

from __future__ import annotations

import logging

import pytest

from april.core.types import OnFailedSample
from april.testing import run_virtual
from benchmarks import failing_samples, first_lengths

DROP_GROUP, REPLACE, SHRINK = OnFailedSample


@pytest.mark.parametrize("quorum", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["request", "reward"])
def test_a_sample_that_fails_costs_a_sample(kind: str, quorum: float, caplog: pytest.LogCaptureFixture) -> None:
    """5 % of the samples fail every time: 95 % of what is generated is trained; a third of the groups are not lost."""
    caplog.set_level(logging.CRITICAL, "april")
    chosen = {"quorum": quorum, "tries": 3, "groups": 40, "seed": 0}
    outcomes = {policy: run_virtual(failing_samples.run(kind, policy, **chosen)) for policy in OnFailedSample}
    for policy in (REPLACE, SHRINK):
        assert outcomes[policy].share >= 0.93
        assert outcomes[policy].groups_dropped == 0
    assert outcomes[REPLACE].samples == 40 * 8
    failing = sum(failing_samples.fails((g, i)) for g in range(40) for i in range(8))
    assert outcomes[SHRINK].samples == 40 * 8 - failing
    if quorum == 1:
        assert outcomes[DROP_GROUP].share < 0.8
        assert outcomes[DROP_GROUP].groups_dropped >= 10


def test_each_try_of_a_function_generates_anew(caplog: pytest.LogCaptureFixture) -> None:
    """A function that fails after its response costs the response once for every try."""
    caplog.set_level(logging.CRITICAL, "april")
    shares = [
        run_virtual(failing_samples.run("function, late", REPLACE, quorum=1.0, tries=tries, groups=40, seed=0)).share
        for tries in (1, 3)
    ]
    assert shares[0] > 0.93 > shares[1]


def test_the_first_batch_is_short() -> None:
    """N' = 2 N, the reference workload: half of the mean length in the first batch, none of it dropped."""
    ratios, metrics = first_lengths.run(first_lengths.SCHEDULES["N' = 2 N"], seed=0, steps=3)
    assert ratios[0] < 0.7 < ratios[1]
    assert metrics["length_unknown"] == 0.0
