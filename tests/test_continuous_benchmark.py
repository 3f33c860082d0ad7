"""The benchmark of trainers that take time: before an engine that costs what the simulation says, both say the same."""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from april.engines.protocol import Engine
from april.testing import FakeEngine, run_virtual
from benchmarks import continuous, real_engines, step_times, stopwatch_engine
from benchmarks.process_group_cpu import group_cpu_s

SECONDS_PER_TOKEN = 0.01
COMPARED = (
    continuous.STEPWISE, "stepwise, refill, one ahead", "continuous, bound 1", "continuous, bound 2, one ahead",
)  # fmt: skip


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A report in virtual time, of an engine whose steps take the same time whatever runs."""

    async def open_fake(config: object) -> list[Engine]:
        # a response is as long as the benchmark says, and comes when it is complete
        return [FakeEngine("fake", lengths=real_engines.CAP + 1, seconds_per_token=SECONDS_PER_TOKEN, max_running=64)]

    def virtual_time() -> float:
        return asyncio.get_running_loop().time()

    clock = SimpleNamespace(perf_counter=virtual_time, process_time=time.process_time)
    for module in (continuous, real_engines, step_times, stopwatch_engine):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(continuous, "SCHEDULES", {name: continuous.SCHEDULES[name] for name in COMPARED})
    monkeypatch.setattr(continuous, "open_servers", open_fake)
    monkeypatch.setattr(continuous, "limit", lambda config: asyncio.sleep(0, continuous.SLOTS / SECONDS_PER_TOKEN))
    server = {"kind": "vllm", "urls": "http://127.0.0.1:1"}
    return run_virtual(
        continuous.run(server, ["/a", "/b"], train=1.0, turns=2, batches=4, ramp=6, server_group=os.getpgrp())
    )


def test_measured_is_expected(found: dict[str, Any]) -> None:
    """Tokens per second, free slots and staleness; nothing is masked or dropped, and the bounds hold."""
    arms = found["arms"]
    assert tuple(arms) == COMPARED
    for name, row in arms.items():
        assert (row["batches"], row["masked"], row["dropped"]) == (8, 0, 0), name
        assert row["trained_per_s"] == pytest.approx(row["expected_trained_per_s"], rel=0.05), name
        if not continuous.SCHEDULES[name].ahead:  # else the simulation counts from other instants
            assert row["free_slots"] == pytest.approx(continuous.SLOTS * row["expected_bubble"], abs=1.0), name
        assert row["staleness_mean"] == pytest.approx(row["expected_staleness_mean"], abs=0.25), name
        assert row["staleness_max"] <= continuous.SCHEDULES[name].settings["max_staleness"], name
    assert arms[continuous.STEPWISE]["gain"] == 1.0
    assert arms["continuous, bound 1"]["idle_share"] < arms[continuous.STEPWISE]["idle_share"] / 2
    assert continuous.table(found).row_count == len(arms)


def test_cpu_time_of_a_process_group() -> None:
    """It grows by what this process uses; a group that nobody is in is an error."""
    before, mine = group_cpu_s(os.getpgrp()), time.process_time()
    while time.process_time() - mine < 0.1:
        pass
    assert group_cpu_s(os.getpgrp()) - before >= 0.08
    with pytest.raises(ProcessLookupError, match="no process is in group"):
        group_cpu_s(2**30)
