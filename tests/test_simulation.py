"""The simulation: the real core on virtual time, repeatable to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from april.core.settings import CoreSettings
from april.core.types import OnFailedSample, Refill
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.response_lengths import ConstantLengths, LognormalLengths
from april.simulate.simulation import Simulation

ROOT = Path(__file__).parent.parent
COST = DecodeCost(
    base_s=0.004, per_sequence_s=1e-5, per_kv_token_s=1e-8, per_prefill_token_s=1e-6, kv_capacity_tokens=None
)
# The same on Python 3.11, 3.12 and 3.13; a change of it means that some decision changed.
DIGESTS = {
    "sync": "c913b30455b4b3b673d160b22c305077",
    "april": "e3a59fc0a263073564c0954c715bd69f",
    "refill": "a23739f317eb27ef2770b74947742eea",
}


def core(n: int = 1, samples: int = 1, **changes: Any) -> CoreSettings:
    """N x n of at most 100 tokens, all in flight at once, without reward."""
    values = {
        "rollout_batch_size": n, "n_samples_per_prompt": samples, "over_sampling_batch_size": n,
        "max_response_len": 100, "max_in_flight": n * samples, "has_reward": False,
    }  # fmt: skip
    return CoreSettings(**(values | changes))


@pytest.mark.parametrize("hash_seed", ["0", "4242"])
def test_reference_workload_repeats_to_the_last_bit(hash_seed: str) -> None:
    """32 x 8 on four engines: the digest of everything delivered does not depend on the process or the hash seed."""
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "simulated_reference.py")],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(run.stdout) == DIGESTS


@pytest.mark.parametrize(
    ("over", "refill"), [(3, Refill.NONE), (6, Refill.NONE), (4, Refill.GROUP), (3, Refill.SAMPLE)]
)
@pytest.mark.parametrize("quorum", [1.0, 0.75])
def test_tokens_of_the_core_are_those_of_the_engines(over: int, refill: Refill, quorum: float) -> None:
    """Two accountants that know nothing of each other: the decoders' counters and the core's ledger."""
    settings = core(
        3, 4, over_sampling_batch_size=over, max_response_len=600, max_in_flight=16, refill=refill, group_quorum=quorum
    )
    simulation = Simulation(settings, COST, LognormalLengths(60, 0.6, 0.6, seed=3), engines=2, check=True)
    result = simulation.run(25)
    assert {len(step.lengths) for step in result.steps} == {12}

    generated = sum(d.counters().generated_tokens for d in simulation.decoders.values())
    assert generated == simulation.core.tokens.observed == sum(s.generated_tokens for s in result.steps)
    assert simulation.core.tokens.delivered == sum(s.trained_tokens for s in result.steps)
    assert simulation.core.tokens.balanced


def test_equal_lengths_leave_no_tail_and_no_bubble() -> None:
    """With equal lengths sync wastes nothing: the time is steps x step time, computed by hand."""
    result = Simulation(core(2, 4), COST, ConstantLengths(100), prompt_len=10).run(3)

    kv = sum(8 * (10 + s) for s in range(100))
    expected = 100 * (0.004 + 8 * 1e-5) + kv * 1e-8 + 8 * 10 * 1e-6
    assert [s.end_s - s.start_s for s in result.steps] == pytest.approx([expected] * 3)
    assert result.summary()["bubble"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("quorum", [1.0, 0.5])
@pytest.mark.parametrize(
    ("policy", "trained_per_generated"),
    [
        (OnFailedSample.REPLACE, 1 / (1 + 0.05 / 0.95)),  # each failure costs one more response
        (OnFailedSample.SHRINK, 0.95),
        (OnFailedSample.DROP_GROUP, 0.95**8),  # with a quorum more: stragglers that fail cost no group
    ],
)
def test_failing_samples_cost_what_the_policy_says(
    quorum: float, policy: OnFailedSample, trained_per_generated: float
) -> None:
    """5 % of the responses of equal length fail every try: what is trained of what is generated, by hand."""
    settings = core(
        8, 8, refill=Refill.SAMPLE, group_quorum=quorum, on_failed_sample=policy, min_group_size=4,
        max_failed_groups=100,
    )
    simulation = Simulation(settings, COST, ConstantLengths(20), failing=0.05)
    result = simulation.run(150).summary(skip=10)

    share = result["trained_tokens"] / result["generated_tokens"]
    if quorum < 1 and policy is OnFailedSample.DROP_GROUP:
        assert share > trained_per_generated
    else:
        assert share == pytest.approx(trained_per_generated, abs=0.02)
    simulation.core.validate()


@pytest.mark.parametrize(
    ("changes", "failing", "words"),
    [
        ({"has_reward": True}, 0.0, "no rewards and no filter"),
        ({"has_filter": True}, 0.0, "no rewards and no filter"),
        ({}, -0.1, "is a share of the samples"),
        ({}, 1.0, "is a share of the samples"),
    ],
)
def test_what_would_be_stuck_is_refused(changes: dict[str, bool], failing: float, words: str) -> None:
    """Nobody would answer rewards and filters, and all failing would never give a batch."""
    with pytest.raises(ValueError, match=words):
        Simulation(core(**changes), COST, ConstantLengths(3), failing=failing)
