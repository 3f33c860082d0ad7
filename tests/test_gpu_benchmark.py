"""``python -m benchmarks.gpu``: a miniature on the CPU finds all that the real one shall find, and no failure costs
more than its own part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from april.engines.simulated.decode_cost import DecodeCost
from benchmarks.gpu import schedules, step_time
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.record import Deadline, Record
from benchmarks.gpu.shapes import SHAPES, Traffic, build, traffic


def report_of(directory: Path, *options: str, dtype: str = "float32") -> tuple[int, dict[str, Any]]:
    """Exit status and report of a miniature."""
    status = main(["--miniature", "--dtype", dtype, "--out", str(directory), *options])
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
    assert main(["--out", str(tmp_path / "out")]) == 1
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
