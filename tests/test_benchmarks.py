"""Benchmarks in small: models by hand and beside the core, timed servers, what each command prints and writes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from april.engines.protocol import Engine
from april.simulate import workload
from april.testing import FakeEngine, run_virtual
from benchmarks import client_cost, continuous, long_agent, real_engines, step_times, stopwatch_engine
from benchmarks.frontier import Case, core, frontier, main, table
from benchmarks.gpu import step_time
from benchmarks.gpu.__main__ import main as gpu
from benchmarks.tape_memory import PACKED_BYTES, most_bytes_per_token
from benchmarks.training_loop import compare


def test_both_clients_make_every_request_and_keep_every_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each turn checks every array against what was sent, and the server's count of requests; all four cases run."""
    out = tmp_path / "rows.json"

    assert client_cost.main(["--quick", "--json", str(out)]) == 0

    rows = json.loads(out.read_text("utf-8"))
    assert [(r["case"]["kind"], r["case"]["stream"]) for r in rows] == [
        ("vllm", False), ("vllm", True), ("sglang", False), ("sglang", True),
    ]  # fmt: skip
    assert all(r["case"]["in_flight"] == 16 and r["bare_us"] > 0 and r["april_us"] > 0 for r in rows)
    assert capsys.readouterr().out.count("\n| ") == 4


@pytest.mark.parametrize(
    "case",
    [
        Case("none", 1.0, 64, 512, 8), Case("none", 0.5, 48, 384, 8), Case("none", 0.75, 56, 448, 8),
        Case("sample", 0.5, 32, 256, 8), Case("sample", 1.0, 32, 256, 8),
    ],
    ids=lambda case: f"{case.name}, quorum {case.quorum:g}",
)  # fmt: skip
def test_the_core_is_where_the_model_says(case: Case) -> None:
    """Speed over sync within 2 %, ages within 0.03 of a token share and 0.1 updates, on the reference workload."""
    (row,) = frontier([case], seeds=1, steps=24, ramp=8)

    assert row["core"]["speed"] == pytest.approx(row["model"]["speed"], rel=0.02)
    assert row["core"]["off_policy"] == pytest.approx(row["model"]["off_policy"], abs=0.03)
    assert row["core"]["staleness"] == pytest.approx(row["model"]["staleness"], abs=0.1)
    assert row["core"]["staleness_max"] <= case.bound


def test_a_quorum_takes_younger_tokens_to_the_same_speed() -> None:
    """What april promises: with half of a group as the quorum, N' = 1.4 N is as fast as 2 N whole groups."""
    part, whole = (core(case, 1, 50, 15) for case in (Case("none", 0.5, 45, 360, 8), Case("none", 1.0, 64, 512, 8)))

    assert part["tokens_per_s"] >= 0.98 * whole["tokens_per_s"]
    assert part["off_policy"] <= 0.65 * whole["off_policy"]
    assert part["staleness"] <= 0.5 * whole["staleness"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of one kind, two seeds: rows with their errors, the picture; ``--draw`` prints the same table."""
    files = ["--rows", str(tmp_path / "rows.json"), "--picture", str(tmp_path / "rows.png")]
    few = ["--steps", "5", "--ramp", "2", "--seeds", "2", "--processes", "1", "--kinds", "group"]
    main([*few, "--quorums", "1", "0.5", *files])
    first = capsys.readouterr().out
    main(["--draw", *files])

    rows = json.loads((tmp_path / "rows.json").read_text("utf-8"))
    assert first.endswith(table(rows) + "\n")
    assert capsys.readouterr().out == table(rows) + "\n"
    assert {row["quorum"] for row in rows} == {1.0, 0.5}
    assert all(row["core"]["speed_error"] > 0 for row in rows)
    assert (tmp_path / "rows.png").stat().st_size > 1000


@pytest.fixture(autouse=True)
def few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller sample of the distribution, to be quick."""
    monkeypatch.setattr(workload, "LENGTH_SAMPLES", 8000)


@pytest.mark.parametrize(("train_time", "bound"), [("0.25x", 1), ("1x", 2), ("1x", 4)])
def test_the_loop_is_where_its_model_says(train_time: str, bound: int) -> None:
    """Within 3 % of the model's throughput on the reference workload, at the same ages, with nothing lost."""
    row: dict[str, Any] = compare(train_time, bound, 20, ())

    assert row["core"] == pytest.approx(row["model"], rel=0.03)
    assert row["core_staleness"].split("/")[1] == row["model_staleness"].split("/")[1] == str(bound)
    assert row["core_dropped_or_masked"] == 0


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


def report_of(directory: Path, *options: str, dtype: str = "float32") -> tuple[int, dict[str, Any]]:
    """Exit status and report of a miniature."""
    status = gpu(["--miniature", "--dtype", dtype, "--out", str(directory), *options])
    return status, json.loads((directory / "gpu.json").read_text("utf-8"))


def test_a_miniature_finds_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step times, exactness beside the model's own noise, three schedules with forced lengths, limits, a picture."""
    status, report = report_of(tmp_path)

    assert (status, report["errors"], report["finished"]) == (0, [], True)
    assert report["bandwidth"]["bytes_per_s"] > 0
    tiny = report["shapes"]["tiny"]
    points = tiny["step_times"]["points"]
    assert [(p["batch"], p["asked"]) for p in points] == [(1, 16), (1, 64), (4, 16), (4, 64)]
    assert all(p["steps"] == step_time.STEPS and p["step_s"] > 0 and p["limit_s"] > 0 for p in points)
    exact = tiny["exactness"]
    assert exact["responses"] > exact["cut_and_continued"] > 0
    assert max(exact[key]["max"] for key in ("april", "april_of_continued", "own_padded", "own_cached")) < 1e-4
    arms = tiny["schedules"]["arms"]
    assert {name: arm["in_flight"] for name, arm in arms.items()} == {"sync": 4, "N' = 2N": 8, "refill": 4}
    for arm in arms.values():
        assert arm["counted_steps"] == 2
        assert arm["generated_per_s"] >= 0
        assert {"trained_per_s", "over_sync", "share_of_limit", "share_of_bandwidth", "occupancy"} <= arm.keys()
    assert arms["sync"]["off_policy_share"] == 0 < arms["N' = 2N"]["off_policy_share"]
    picture = tmp_path / "gpu.png"
    said = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG") if picture.exists() else "no picture: matplotlib is not" in said


@pytest.mark.parametrize("per_chunk", [1, 2, 16, 33, 500])
def test_chunks_take_little_more_memory_than_packed_tokens(per_chunk: int) -> None:
    """From 6,000 tokens on, an attempt in flight holds at most 1.5 times the bytes of its packed tokens."""
    assert most_bytes_per_token(8192, per_chunk, 6000) <= 1.5 * PACKED_BYTES


@pytest.mark.parametrize("renderer", long_agent.RENDERERS)
def test_a_turn_of_a_long_conversation_costs_what_an_early_one_does(renderer: str) -> None:
    """The endpoint calls as many Python functions in turn 57 as in turn 15, and the conversation stays one row."""
    costs, rows = long_agent.measure(renderer, 60)
    calls = [cost["calls"] for cost in costs if "calls" in cost]
    assert (len(costs), len(calls), rows) == (60, 10, 1)
    assert calls[-1] < 1.15 * calls[2]
