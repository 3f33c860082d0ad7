"""The simulation: the real core on virtual time, repeatable to the last bit; a trainer that takes its time."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from april.core.settings import CoreSettings
from april.core.types import Refill
from april.engines.simulated.decode_cost import DecodeCost, roofline
from april.engines.simulated.response_lengths import LognormalLengths, ResponseLengths
from april.simulate.simulation import Simulation, SimulationResult

COST = DecodeCost(base_s=0.004, per_sequence_s=1e-5, per_kv_token_s=1e-8, per_prefill_token_s=1e-6)
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


def reference_digests() -> dict[str, str]:
    """The reference workload of the APRIL paper (arXiv 2509.18521), ten steps in each of three modes.

    32 groups x 8 samples, responses of at most 16,384 tokens, four engines of two H100 with Qwen3-4B. A digest covers
    every delivered sample with its segments, versions and times.
    """
    lengths = LognormalLengths(2500, 0.8 * math.sqrt(0.6), 0.8 * math.sqrt(0.4), seed=1)
    modes = {"sync": (32, Refill.NONE, 256), "april": (64, Refill.NONE, 512), "refill": (32, Refill.SAMPLE, 256)}
    digests = {}
    for mode, (over, refill, in_flight) in modes.items():
        settings = core(
            32, 8, over_sampling_batch_size=over, max_response_len=16_384, max_in_flight=in_flight, refill=refill
        )
        cost = roofline("qwen3-4b", "h100", tensor_parallel=2)
        digests[mode] = Simulation(settings, cost, lengths, engines=4, prompt_len=128).run(10).digest
    return digests


@pytest.mark.parametrize("hash_seed", ["0", "4242"])
def test_reference_workload_repeats_to_the_last_bit(hash_seed: str) -> None:
    """The digest of everything delivered does not depend on the process or the hash seed."""
    program = "import json, test_simulation; print(json.dumps(test_simulation.reference_digests()))"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, env=os.environ | {"PYTHONHASHSEED": hash_seed},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
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
    result = Simulation(core(2, 4), COST, LognormalLengths(100, 0.0, 0.0), prompt_len=10).run(3)

    kv = sum(8 * (10 + s) for s in range(100))
    expected = 100 * (0.004 + 8 * 1e-5) + kv * 1e-8 + 8 * 10 * 1e-6
    assert [s.end_s - s.start_s for s in result.steps] == pytest.approx([expected] * 3)
    assert result.summary()["bubble"] == pytest.approx(0.0, abs=1e-9)


# ---------------------------------------------------------------- a trainer that takes its time

STEP_ONLY = DecodeCost(base_s=0.004, per_sequence_s=0.0, per_kv_token_s=0.0)
ROLLOUT_S = 100 * 0.004
"""Of a batch of responses of 100 tokens, all in flight at once."""


def trained(
    lengths: ResponseLengths, train_s: float, fetch_ahead: int = 0, steps: int = 12, **changes: Any
) -> tuple[Simulation, SimulationResult]:
    """Batches of 2 x 4, 8 in flight, with the core's books checked after every event."""
    simulation = Simulation(
        core(2, 4, max_response_len=600, **changes), STEP_ONLY, lengths, engines=2, train_s=train_s,
        fetch_ahead=fetch_ahead, check=True,
    )  # fmt: skip
    return simulation, simulation.run(steps)


def periods(result: SimulationResult) -> list[float]:
    """Seconds between two deliveries."""
    return [b.end_s - a.end_s for a, b in itertools.pairwise(result.steps)]


@pytest.mark.parametrize("train_s", [0.1, 0.7])
def test_a_trainer_that_asks_after_the_update_adds_its_time_to_every_step(train_s: float) -> None:
    """Nothing is generated while it trains, and what it trains is new."""
    _, result = trained(LognormalLengths(100, 0.0, 0.0), train_s)

    assert periods(result) == pytest.approx([ROLLOUT_S + train_s] * 11)
    assert {step.metrics["staleness_max"] for step in result.steps} == {0.0}


@pytest.mark.parametrize("train_s", [0.1, 0.7])
def test_a_trainer_that_fetches_one_batch_ahead_waits_for_the_slower_of_the_two(train_s: float) -> None:
    """While it trains the next batch is generated, under weights that are one update older when that is trained."""
    _, result = trained(LognormalLengths(100, 0.0, 0.0), train_s, fetch_ahead=1)

    # the first update comes in the middle of a response, or after several batches: from then on it is regular
    assert sum(periods(result)[4:]) == pytest.approx(7 * max(ROLLOUT_S, train_s))
    assert {step.metrics["staleness_max"] for step in result.steps[4:]} == {1.0}


@pytest.mark.parametrize("refill", [Refill.NONE, Refill.SAMPLE])
@pytest.mark.parametrize(("fetch_ahead", "max_staleness"), [(0, 1), (0, 3), (1, 1), (1, 3), (2, 2)])
def test_the_bound_and_the_books_hold_while_the_trainer_trains(
    refill: Refill, fetch_ahead: int, max_staleness: int
) -> None:
    """Ages are those at the version at which the batch is really trained; engines and ledger count the same tokens."""
    lengths = LognormalLengths(60, 0.6, 0.6, seed=3)
    changes = {"over_sampling_batch_size": 4, "refill": refill, "max_staleness": max_staleness}
    simulation, result = trained(lengths, 0.3, fetch_ahead, 40, **changes)

    oldest = max(step.metrics["staleness_max"] for step in result.steps)
    assert oldest == max(age for step in result.steps for age in step.token_ages) <= max_staleness
    generated = sum(d.counters().generated_tokens for d in simulation.decoders.values())
    assert generated == sum(s.generated_tokens for s in result.steps)
    assert generated == simulation.core.tokens.delivered + sum(simulation.held_lengths())
