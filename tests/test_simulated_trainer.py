"""A simulation whose training takes time: who waits for whom, and how old what is trained is."""

from __future__ import annotations

import itertools

import pytest

from april.core.settings import CoreSettings
from april.core.types import Refill
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.response_lengths import ConstantLengths, LognormalLengths, ResponseLengths
from april.simulate.simulation import Simulation, SimulationResult

COST = DecodeCost(base_s=0.004, per_sequence_s=0.0, per_kv_token_s=0.0)
ROLLOUT_S = 100 * 0.004
"""Of a batch of responses of 100 tokens, all in flight at once."""


def settings(over: int = 2, refill: Refill = Refill.NONE, max_staleness: int = 5) -> CoreSettings:
    """Batches of 2 x 4, 8 in flight."""
    return CoreSettings(
        rollout_batch_size=2, n_samples_per_prompt=4, over_sampling_batch_size=over, max_response_len=600,
        max_in_flight=8, refill=refill, max_staleness=max_staleness, has_reward=False,
    )  # fmt: skip


def run(
    core: CoreSettings, lengths: ResponseLengths, train_s: float, fetch_ahead: int = 0, steps: int = 12
) -> SimulationResult:
    """With the core's books checked after every event."""
    return Simulation(
        core, COST, lengths, engines=2, train_s=train_s, fetch_ahead=fetch_ahead, check=True
    ).run(steps)  # fmt: skip


def periods(result: SimulationResult) -> list[float]:
    """Seconds between two deliveries."""
    return [b.end_s - a.end_s for a, b in itertools.pairwise(result.steps)]


@pytest.mark.parametrize("train_s", [0.1, 0.7])
def test_a_trainer_that_asks_after_the_update_adds_its_time_to_every_step(train_s: float) -> None:
    """Nothing is generated while it trains, and what it trains is new."""
    result = run(settings(), ConstantLengths(100), train_s)

    assert periods(result) == pytest.approx([ROLLOUT_S + train_s] * 11)
    assert {step.metrics["staleness_max"] for step in result.steps} == {0.0}


@pytest.mark.parametrize("train_s", [0.1, 0.7])
def test_a_trainer_that_fetches_one_batch_ahead_waits_for_the_slower_of_the_two(train_s: float) -> None:
    """While it trains the next batch is generated, under weights that are one update older when that is trained."""
    result = run(settings(), ConstantLengths(100), train_s, fetch_ahead=1)

    # the first update comes in the middle of a response, or after several batches: from then on it is regular
    assert sum(periods(result)[4:]) == pytest.approx(7 * max(ROLLOUT_S, train_s))
    assert {step.metrics["staleness_max"] for step in result.steps[4:]} == {1.0}


@pytest.mark.parametrize("refill", [Refill.NONE, Refill.SAMPLE])
@pytest.mark.parametrize(("fetch_ahead", "max_staleness"), [(0, 1), (0, 3), (1, 1), (1, 3), (2, 2)])
def test_the_bound_and_the_books_hold_while_the_trainer_trains(
    refill: Refill, fetch_ahead: int, max_staleness: int
) -> None:
    """Ages are those at the version at which the batch is really trained; engines and ledger count the same tokens."""
    core = settings(4, refill, max_staleness)
    simulation = Simulation(
        core, COST, LognormalLengths(60, 0.6, 0.6, seed=3), engines=2, train_s=0.3, fetch_ahead=fetch_ahead, check=True
    )
    result = simulation.run(40)

    oldest = max(step.metrics["staleness_max"] for step in result.steps)
    assert oldest == max(age for step in result.steps for age in step.token_ages) <= max_staleness
    generated = sum(d.counters().generated_tokens for d in simulation.decoders.values())
    assert generated == sum(s.generated_tokens for s in result.steps)
    assert generated == simulation.core.tokens.delivered + sum(simulation.held_lengths())
