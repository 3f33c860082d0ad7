"""Each exporter against its real package: what a reader of it finds is what was logged. Nothing leaves the machine."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import april
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine
from april.export import Exporter, TensorBoard, WandB

HOSTILE = 'http://127.0.0.1:8000/\x1b[31m"x"\n'
STEPS = 3


class Words:
    """A tokenizer with text that some would take for markup."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return " ".join(f"<b>{i}</b>" for i in ids)


def run(exporter: Exporter) -> list[april.Batch]:
    """A run of a few steps that tells the exporter; its batches."""
    engine = SimulatedEngine(HOSTILE, DecodeCost(1e-4, 0.0, 0.0), lambda request: 5, max_running=8)
    config = april.Config(rollout_batch_size=2, n_samples_per_prompt=2, max_response_len=9)
    batches = []
    with april.RolloutScheduler(
        config, prompts=[[1, 2, 3]] * 20, reward=lambda prompt, response: float(len(response.tokens)),
        engines=[engine], tokenizer=Words(), exporters=[exporter], sample_texts=2,
    ) as rollouts:  # fmt: skip
        for _ in range(STEPS):
            batches.append(rollouts.next_batch())
            rollouts.weight_update()
    return batches


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they write is below a directory of the test's; a failure of an exporter is one of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.fixture(autouse=True)
def _no_warning(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [r.getMessage() for r in caplog.records if r.name == "april" and "exporter" in r.getMessage()] == []


def test_tensorboard(tmp_path: Path) -> None:
    """Scalars at their steps, and texts in which nothing is markup, read by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    batches = run(TensorBoard(tmp_path / "tb"))
    read = EventAccumulator(str(tmp_path / "tb"))
    read.Reload()
    found = [(e.step, e.value) for e in read.Scalars("april/reward_mean")]
    assert found == [(b.id, b.metrics["reward_mean"]) for b in batches]
    assert len(read.Tags()["scalars"]) == len(batches[-1].metrics.keys() | batches[0].metrics.keys())
    (text, *_) = read.Tensors("april/sample_0")
    said = text.tensor_proto.string_val[0].decode()
    assert "\n    <b>" in said
    from tensorboard.plugins.text.text_plugin import plugin_util

    assert "<b>" not in plugin_util.markdown_to_safe_html(said)


def records_of(data: bytes) -> Iterator[bytes]:
    """Records of W&B's log: blocks of 32 KiB, each piece with a check (4 bytes), its length (2) and its kind (1)."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield parts
            parts = b""


def rows_of_wandb(directory: Path) -> list[dict[str, Any]]:
    """History rows of an offline run, once W&B's own process has written its end."""
    from wandb.proto import wandb_internal_pb2

    (file,) = directory.glob("wandb/offline-run-*/*.wandb")
    for _ in range(300):
        rows, kinds = [], []
        for data in records_of(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kinds.append(record.WhichOneof("record_type"))
            if kinds[-1] == "history":
                rows.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
        if "exit" in kinds:
            return rows
        time.sleep(0.1)
    raise AssertionError(f"the run has not ended: {kinds}")


def test_wandb_in_a_run_of_its_own(tmp_path: Path) -> None:
    """A row per batch, offline."""
    batches = run(WandB(project="april", dir=str(tmp_path)))
    rows = rows_of_wandb(tmp_path)
    found = [(row["april/step"], row["april/reward_mean"]) for row in rows if "april/reward_mean" in row]
    assert found == [(b.id, b.metrics["reward_mean"]) for b in batches]
    assert len([row for row in rows if any(key.startswith("april/sample_texts") for key in row)]) == STEPS


@pytest.mark.parametrize("explicit", [False, True])
def test_wandb_in_a_run_of_yours(tmp_path: Path, explicit: bool) -> None:
    """Your rows and steps stay, and april's figures stand in them; with explicit steps in the row before."""
    import wandb

    mine = wandb.init(project="mine", dir=str(tmp_path))
    exporter = WandB()
    for step in range(4):
        exporter.log({"step_s": float(step)}, step)
        mine.log({"loss": 1.0 / (step + 1)}, **({"step": step} if explicit else {}))
    exporter.close()
    mine.finish()
    rows = rows_of_wandb(tmp_path)
    assert [row["_step"] for row in rows] == [0, 1, 2, 3]
    assert [round(row["loss"], 3) for row in rows] == [1.0, 0.5, 0.333, 0.25]
    assert [row.get("april/step") for row in rows] == ([1, 2, 3, None] if explicit else [0, 1, 2, 3])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
