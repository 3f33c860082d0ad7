"""Simulated engines on hosts: the same work as in the core's process, through real frames that take time."""

from __future__ import annotations

import pytest
from test_simulation import COST

from april.core.settings import CoreSettings
from april.core.types import GenerationMode, Refill
from april.engines.simulated.response_lengths import LognormalLengths
from april.simulate.hosts import SimulatedHosts
from april.simulate.simulation import Simulation, SimulationResult

LENGTHS = LognormalLengths.split(median=80, sigma=0.8, between_share=0.5, seed=3)
MODES = [(GenerationMode.STEPWISE, 0), (GenerationMode.CONTINUOUS, 1)]


def simulation(generation: GenerationMode, ahead: int, *, hosts: int = 0, latency_s: float = 1e-3) -> Simulation:
    """Six engines with four requests each."""
    settings = CoreSettings(
        rollout_batch_size=3, n_samples_per_prompt=4, over_sampling_batch_size=3, max_response_len=600,
        max_in_flight=24, refill=Refill.SAMPLE, generation=generation, has_reward=False,
    )  # fmt: skip
    return Simulation(
        settings, COST, LENGTHS, engines=6, hosts=hosts, host_latency_s=latency_s, train_s=0.5 * ahead,
        fetch_ahead=ahead, check=True,
    )  # fmt: skip


def delivered(result: SimulationResult) -> list[tuple[float, list[int], dict[int, int]]]:
    """When, how long and how old."""
    return [(s.end_s, s.lengths, s.token_ages) for s in result.steps]


@pytest.mark.parametrize(("generation", "ahead"), MODES)
def test_frames_that_take_no_time_change_nothing(generation: GenerationMode, ahead: int) -> None:
    """One host without latency: each batch at the same time, of the same responses, of the same ages."""
    here, there = (simulation(generation, ahead, hosts=hosts, latency_s=0.0) for hosts in (0, 1))
    assert delivered(here.run(12)) == delivered(there.run(12))


@pytest.mark.parametrize(("generation", "ahead"), MODES)
@pytest.mark.parametrize("hosts", [1, 2, 6])
def test_the_books_agree_over_slow_links(generation: GenerationMode, ahead: int, hosts: int) -> None:
    """Tokens that the core has observed are those that engines made, but for those on their way; none is lost."""
    run = simulation(generation, ahead, hosts=hosts, latency_s=0.02)
    result = run.run(20)
    core, engines = run.core, run.engines
    assert isinstance(engines, SimulatedHosts)
    core.validate()
    assert core.tokens.delivered == sum(s.trained_tokens for s in result.steps)
    while run._batch is None and run.now < result.steps[-1].end_s + 0.05:
        run._ask_or_wait()  # what was on its way has arrived
    running = sum(count for _, count in engines.tokens_in_flight())
    generated = sum(d.counters().generated_tokens for d in run.decoders.values())
    on_their_way = generated - running - core.tokens.observed
    assert 0 <= on_their_way <= 24 * 600
    assert all(d.messages_in > 40 and d.bytes_in > 4 * d.messages_in for d in engines.desks)
    assert all(d.frames_in <= d.messages_in and d.frames_out < d.messages_out for d in engines.desks)


def test_a_slow_link_costs_what_it_must() -> None:
    """A quarter of a second each way is seen, a millisecond is not."""
    rates = [
        simulation(GenerationMode.STEPWISE, 0, hosts=2, latency_s=s).run(12).summary(skip=2)["generated_tokens_per_s"]
        for s in (0.0, 1e-3, 0.25)
    ]
    assert rates[1] > 0.97 * rates[0]
    assert rates[2] < 0.7 * rates[0]
