"""Benchmarks in small: models by hand and beside the core, timed servers, what each command prints and writes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import torch

from april.engines.protocol import Engine
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.response_lengths import ConstantLengths
from april.simulate import workload
from april.testing import FakeEngine, run_virtual
from benchmarks import abort_latency, client_cost, continuous, real_engines, step_times, stopwatch_engine
from benchmarks.areal_server import EOS, PER_WEIGHTS, TimedServer
from benchmarks.frontier import QUORUMS, Case, cases, core, frontier, main, table
from benchmarks.gpu import schedules, step_time
from benchmarks.gpu.__main__ import main as gpu
from benchmarks.gpu.record import Deadline, Record
from benchmarks.gpu.shapes import SHAPES, Traffic, build, traffic
from benchmarks.quorum_model import EngineCost, QuorumModel
from benchmarks.training_loop import TICK_S, Model, compare


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


def test_both_clients_hold_every_partial_after_an_abort(capsys: pytest.CaptureFixture[str]) -> None:
    """Every turn counts its tokens against what the server sends, by one call and by one call per request."""
    assert abort_latency.main(["--quick"]) == 0
    assert capsys.readouterr().out.count("\n| ") == 2


ROOT = Path(__file__).parent.parent
UNIT = EngineCost(step=1.0, sequence=0.0, resident=0.0, prefill=0.0)


def test_the_model_by_hand() -> None:
    """Two groups of four, a token a second: with a quorum of 3 the batch is there at 4 s, else at 6 s."""
    lengths = {0: (1, 2, 3, 10), 1: (4, 4, 4, 6)}

    def first(quorum: float) -> tuple[float, float]:
        model = QuorumModel(
            UNIT, lambda group: lengths.get(group, (5, 5, 5, 5)), quorum=quorum, over=2, slots=8, bound=5, groups=1,
            n=4, engines=2,
        )  # fmt: skip
        model.run(1)
        return model.delivered[0][:2]

    assert first(0.75) == (pytest.approx(4.0), pytest.approx(1 + 2 + 3 + 4))
    assert first(1.0) == (pytest.approx(6.0), pytest.approx(4 + 4 + 4 + 6))


def test_the_model_counts_older_tokens_by_hand() -> None:
    """One group of four at a time, two in work: what the first delivery cuts at 4 s is old in the second batch."""
    model = QuorumModel(
        UNIT, lambda group: (4, 4, 4, 4) if group == 0 else (6, 6, 6, 6), quorum=0.75, over=2, slots=8, bound=5,
        groups=1, n=4, engines=1,
    )  # fmt: skip
    model.run(2)

    (_, _, old, mean, most), (at, tokens, second_old, second_mean, second_most) = model.delivered
    assert (old, mean, most) == (0.0, 0.0, 0)
    assert (at, tokens) == (pytest.approx(6.0), pytest.approx(24.0))
    assert (second_old, second_mean, second_most) == (pytest.approx(16.0), 1.0, 1)


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


@pytest.mark.parametrize("quorum", [1.0, 0.5])
def test_where_the_bound_binds_the_core_is_ahead_of_the_model(quorum: float) -> None:
    """What is due goes first in the core and not in the model: at least as fast, with younger tokens."""
    (row,) = frontier([Case("sample", quorum, 32, 256, 2)], seeds=1, steps=24, ramp=8)

    assert row["core"]["speed"] >= 0.98 * row["model"]["speed"]
    assert row["core"]["staleness"] <= row["model"]["staleness"]
    assert row["core"]["staleness_max"] == row["model"]["staleness_max"] == 2


def test_a_quorum_takes_younger_tokens_to_the_same_speed() -> None:
    """What april promises: with half of a group as the quorum, N' = 1.4 N is as fast as 2 N whole groups."""
    part, whole = (core(case, 1, 50, 15) for case in (Case("none", 0.5, 45, 360, 8), Case("none", 1.0, 64, 512, 8)))

    assert part["tokens_per_s"] >= 0.98 * whole["tokens_per_s"]
    assert part["off_policy"] <= 0.65 * whole["off_policy"]
    assert part["staleness"] <= 0.5 * whole["staleness"]


def test_the_page_has_cases() -> None:
    """Rows of the page are ways to schedule that are run, each with a cell for each quorum."""
    page = (ROOT / "docs" / "measurements.md").read_text("utf-8").partition("\n## Quorum\n")[2].partition("\n### ")[0]
    rows = [line for line in page.splitlines() if line.startswith("| ") and "x " in line]
    assert {row.split(" | ")[0].removeprefix("| ") for row in rows} <= {case.name for case in cases()}
    assert rows
    assert all(row.count("x ") == len(QUORUMS) for row in rows)


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


@pytest.mark.parametrize("train_s", [0.5, 4.0])
def test_the_model_of_the_loop_by_hand(train_s: float) -> None:
    """Responses of equal length that all fit: the slower of training and generation is the whole time of a batch."""
    model = Model(
        DecodeCost(base_s=0.01, per_sequence_s=0.0, per_kv_token_s=0.0, per_prefill_token_s=1e-9),
        ConstantLengths(200), bound=2, train_s=train_s, groups=2, n=4, slots=8, engines=2,
    )  # fmt: skip
    model.run(12)

    share, _, most = model.figures(4, limit=8 / 0.01)
    assert share == pytest.approx(1.0, rel=2 * TICK_S)
    assert most <= 2


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
    before, mine = continuous.group_cpu_s(os.getpgrp()), time.process_time()
    while time.process_time() - mine < 0.1:
        pass
    assert continuous.group_cpu_s(os.getpgrp()) - before >= 0.08
    with pytest.raises(ProcessLookupError, match="no process is in group"):
        continuous.group_cpu_s(2**30)


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


def test_without_time_nothing_begins_and_the_report_says_so(tmp_path: Path) -> None:
    """What a run that is cut off has found is in a file that can be read."""
    status, report = report_of(tmp_path, "--minutes", "0")

    assert (status, report["errors"]) == (0, [])
    assert report["bandwidth"] == report["shapes"]["tiny"]["model"] == {"skipped": "no time was left"}


def test_a_part_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written down with what it had, the status says it, and the next part runs; in bfloat16 this time."""

    def broken(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(step_time, "_one", broken)
    monkeypatch.setattr(schedules, "measure", broken)
    status, report = report_of(tmp_path, dtype="bfloat16")

    tiny = report["shapes"]["tiny"]
    assert status == 1
    assert report["errors"] == [
        "tiny, step_times: RuntimeError: the device is gone", "tiny, schedules: RuntimeError: the device is gone",
    ]  # fmt: skip
    assert tiny["schedules"]["error"] == "RuntimeError: the device is gone"
    exact = tiny["exactness"]
    assert exact["responses"] > 0
    assert exact["april"]["mean"] < 0.05
    assert exact["own_cached"]["mean"] < 0.05


def test_the_report_is_never_half_a_file(tmp_path: Path) -> None:
    """It is written beside and moved, after every measurement."""
    record = Record(tmp_path, lambda report, path: False)
    before = record.path.read_text("utf-8")
    record.data["more"] = object()  # cannot be written
    with pytest.raises(TypeError):
        record.write()
    assert record.path.read_text("utf-8") == before
    assert not record.drawn


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one sentence, before anything is written."""
    assert gpu(["--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("torch sees no GPU: install a build of torch for it")
    assert not (tmp_path / "out").exists()


def test_step_times_are_fitted() -> None:
    """a + b n + g K is found again; a slope that noise makes negative is none."""
    true = DecodeCost(0.02, 1e-4, 2e-7)
    grid = [(n, held) for n in (1, 8, 64) for held in (100, 1000, 4000)]
    points = [{"batch": n, "held": held, "step_s": true.step_s(n, n * held)} for n, held in grid]
    found = step_time.fitted([*points, {"batch": 256, "held": 4000, "skipped": "out of memory"}])
    assert found is not None
    assert (found.base_s, found.per_sequence_s, found.per_kv_token_s) == pytest.approx((0.02, 1e-4, 2e-7))
    falling = [{"batch": n, "held": 10, "step_s": 0.02 - 1e-4 * n} for n in (1, 2, 4, 8)]
    fitted = step_time.fitted(falling)
    assert fitted is not None
    assert (fitted.per_sequence_s, fitted.per_kv_token_s) == (0.0, 0.0)
    assert step_time.fitted(points[:2]) is None


def test_the_workload_fits_memory_and_time() -> None:
    """Fewer groups where keys and values would not fit, shorter responses where sync would take too long."""
    reads = Traffic(8_000_000_000, 147_456)

    def fitting(free: int, step_s: float, arm_s: float) -> schedules.Workload:
        return schedules.Workload.fitting(
            reads, free, step_s, arm_s, groups=16, samples=8, prompt_len=16, longest=8192
        )

    roomy = fitting(70_000_000_000, 0.03, 30.0)
    assert (roomy.groups, roomy.cap) == (16, 200)
    assert fitting(70_000_000_000, 0.03, 0.1).cap == 32
    small = fitting(16_000_000_000, 0.03, 600.0)
    assert small.groups == 2
    assert small.cap == 4000
    assert max(small.lengths.group(0, 1000).tolist()) <= 4000


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [("0.6b", 596_049_920, 114_688), ("1.7b", 1_720_574_976, 114_688), ("4b", 4_022_468_096, 147_456)],
)
def test_the_shapes_are_those_of_qwen3(name: str, parameters: int, kv_bytes: int) -> None:
    """As many parameters as the models themselves have, besides the bias that keeps EOS from being drawn."""
    model = build(SHAPES[name], torch.device("meta"), torch.bfloat16)
    counted = sum(p.numel() for p in model.parameters())
    assert counted == parameters + SHAPES[name].vocab
    assert traffic(model, SHAPES[name]) == Traffic(2 * counted, kv_bytes)


def test_a_deadline_never_goes_below_nothing() -> None:
    """What is left of a share of the time."""
    assert Deadline(-1.0).left_s == 0.0
    assert Deadline(-1.0).over
    assert not Deadline(100.0).over


PROMPT = [100, 11, 12, 13]


async def post(session: aiohttp.ClientSession, address: str, route: str, **body: Any) -> Any:
    async with session.post(f"http://{address}{route}", json=body) as answer:
        return await answer.json()


async def generate(session: aiohttp.ClientSession, address: str, ids: list[int]) -> tuple[list[int], list[float], str]:
    """Tokens, log-probabilities and the reason of a request."""
    answer = await post(
        session, address, "/generate", input_ids=ids, sampling_params={"max_new_tokens": 500, "stop_token_ids": [EOS]}
    )
    meta = answer["meta_info"]
    pairs = meta["output_token_logprobs"]
    return [token for _, token, _ in pairs], [logprob for logprob, _, _ in pairs], meta["finish_reason"]["type"]


async def test_a_cut_response_goes_on_to_its_own_length_and_says_whose_its_tokens_are() -> None:
    """The length is that of the uncut response, over all requests; a log-probability names the weights."""
    server = TimedServer(places=4, token_s=0.0, mean=200.0)
    other = TimedServer(places=4, token_s=0.0, mean=200.0)
    address, whole = await server.start(), await other.start()
    async with aiohttp.ClientSession() as session:
        uncut, _, reason = await generate(session, whole, PROMPT)
        assert reason == "stop"
        assert len(uncut) > 1
        first = asyncio.create_task(generate(session, address, PROMPT))
        while server.made == 0:  # noqa: ASYNC110 - the server is in this loop
            await asyncio.sleep(0)
        await post(session, address, "/pause_generation")
        tokens, logprobs, reason = await first
        assert (reason, logprobs) == ("abort", [-PER_WEIGHTS] * len(tokens))
        await post(session, address, "/update_weights_from_disk", model_path="-")
        late = asyncio.create_task(generate(session, address, PROMPT + tokens))
        await asyncio.sleep(0)
        await post(session, address, "/continue_generation")
        rest, logprobs, reason = await late
        assert (reason, logprobs) == ("stop", [-2 * PER_WEIGHTS] * len(rest))
        assert len(tokens) + len(rest) == len(uncut)
        assert (tokens + rest)[-1] == EOS
        assert server.violations == []
    await server.close()
    await other.close()


async def test_weights_that_come_while_requests_run_are_a_violation() -> None:
    """And so is taking the memory away: the benchmark fails then, whoever it was."""
    server = TimedServer(places=1, token_s=0.5, mean=1e6)
    address = await server.start()
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(generate(session, address, PROMPT))
        while not server.begun:  # noqa: ASYNC110 - the server is in this loop
            await asyncio.sleep(0)
        await post(session, address, "/update_weights_from_disk", model_path="-")
        await post(session, address, "/release_memory_occupation")
        await post(session, address, "/pause_generation")
        await request
    assert len(server.violations) == 2
    await server.close()
