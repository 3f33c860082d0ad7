"""The cost of an engine, fitted to what its requests took."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from april.core import events as ev
from april.core.event_pump import KEPT, Observed, RequestLog
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.fitted_cost import FEWEST, FittedCost, Requests, fit, predicted_s
from april.simulate.simulation import Simulation
from april.simulate.workload import Workload


def logged(mode: str, steps: int = 10) -> tuple[Workload, RequestLog]:
    """The requests of a simulation of the reference workload."""
    workload = Workload()
    simulation = Simulation(
        workload.core_settings(workload.modes[mode]), workload.cost, workload.lengths, engines=workload.engines,
        prompt_len=workload.prompt_len,
    )  # fmt: skip
    log = RequestLog(simulation.core, lambda: simulation.now)
    simulation._pump._core = Observed(simulation.core, [log])
    simulation.run(steps)
    return workload, log


def requests(log: RequestLog) -> dict[str, Requests]:
    """As arrays."""
    return {name: Requests.of(ended) for name, ended in log}


@pytest.mark.parametrize("mode", ["sync", "april", "refill"])
def test_the_cost_of_a_simulated_engine_is_found(mode: str) -> None:
    """What is fitted to one engine says what the requests of its likes took, within 3 % in the mean."""
    workload, log = logged(mode)
    first, *others = requests(log).values()
    assert len(others) == workload.engines - 1
    found = fit(first)
    assert found is not None
    assert found.error < 0.02
    for seen in others:
        took = seen.ended_s - seen.began_s
        assert np.abs(predicted_s(seen, found.cost) - took).sum() / took.sum() < 0.03


def test_a_step_costs_what_it_costs() -> None:
    """Where batches fill and drain: with few sequences and with many, short ones and long ones, within 5 %."""
    rng = np.random.default_rng(0)
    cost = DecodeCost(0.01, 2e-4, 5e-7, 4e-5)
    workload = [(int(rng.integers(50, 4000)), int(rng.integers(10, 2000))) for _ in range(600)]
    seen = Requests.of(decoded(cost, workload, places=48))
    found = fit(seen)
    assert found is not None
    for sequences, resident in ((2, 6_000), (12, 20_000), (24, 70_000), (48, 100_000)):
        assert found.cost.step_s(sequences, resident) == pytest.approx(cost.step_s(sequences, resident), rel=0.05)


def decoded(cost: DecodeCost, workload: list[tuple[int, int]], places: int) -> list[Any]:
    """An engine, step by step; bursts of ``places`` requests, each when the one before has ended."""
    from april.core.event_pump import Ran
    from april.core.types import SampleId

    ended, now = [], 0.0
    for at in range(0, len(workload), places):
        burst = [[context, count, context, count] for context, count in workload[at : at + places]]
        began = now
        now += cost.prefill_s(sum(context for context, *_ in burst))
        running = burst
        while running:
            now += cost.step_s(len(running), sum(r[0] for r in running))
            for r in running:
                r[0], r[1] = r[0] + 1, r[1] - 1
            for r in running:
                if not r[1]:
                    ended.append(Ran("e", SampleId(0, 0), False, 0, began, now, r[2], r[3]))
            running = [r for r in running if r[1]]
    return ended


def test_too_little_is_no_fit() -> None:
    """Few requests, none with tokens, or such as take no time: None instead of a number."""
    workload, log = logged("sync", 1)
    (seen, *_) = requests(log).values()
    assert fit(seen[: FEWEST - 1]) is None
    assert isinstance(fit(seen[: 4 * FEWEST]), FittedCost)
    none = np.zeros(len(seen))
    assert fit(Requests(seen.began_s, seen.ended_s, seen.context, none)) is None
    assert fit(Requests(seen.began_s, seen.began_s, seen.context, seen.generated)) is None
    assert workload.engines == len(requests(log))


def test_the_log_forgets() -> None:
    """Only the latest requests are kept, and what nobody told the end of is not kept for ever."""
    _, log = logged("refill", 6)
    assert all(len(ended) <= KEPT for _, ended in log)
    for number in range(3 * KEPT):
        log._sent[f"lost{number}"] = (0.0, 0)
    Observed(log._core, [log]).handle(ev.StepRequested())
    assert len(log._sent) == len(log._core.context.attempts) > 0
    assert all(log.ran(attempt, 3) is not None for attempt in log._core.context.attempts)


def test_no_requests_take_no_time() -> None:
    """A step may have brought none."""
    assert predicted_s(Requests.of([]), DecodeCost(1e-3, 0.0, 0.0)).tolist() == []
