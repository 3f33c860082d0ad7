"""A run with images on the embedded engine, killed and started again: no response has seen another prompt's image."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from models_that_see import apart_seeing, tiny_processor
from vision_trainer import GROUPS, SAMPLES, Weights, image_of, train

from april.core.attachments import Attachment, Placed
from april.core.versions import FIRST_VERSION
from april.engines.protocol import Chunk

HERE = Path(__file__).parent
STEPS, DIES = 5, 3


def test_two_hundred_responses_over_five_updates_and_a_kill(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Cut, resumed, and after kill -9 continued from a checkpoint: each token is of its own weights and image."""
    command = [sys.executable, str(HERE / "vision_trainer.py"), str(tmp_path), str(STEPS), str(DIES)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]), "OMP_NUM_THREADS": "1"}
    died = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr[-3000:]
    assert len(list(tmp_path.glob("state-*"))) == DIES
    train(tmp_path, STEPS)

    rows = [row for file in sorted(tmp_path.glob("rows-*")) for row in msgspec.msgpack.decode(file.read_bytes())]
    assert len(rows) == STEPS * GROUPS * SAMPLES == 200
    trained = Counter(row["row"] for row in rows)
    assert set(trained.values()) == {SAMPLES}  # each prompt once, whatever was lost with the process
    resumed = [row for row in rows if row["resumes"]]
    across = [row for row in rows if min(row["updates"]) < DIES <= max(row["updates"])]
    assert len(resumed) >= 20
    assert across
    right, wrong = check(rows)
    assert right <= 1e-4
    assert wrong > 0.01
    record_property("largest_difference", right)
    print(f"\n{len(resumed)} resumed, {len(across)} across the kill; {right:.1e} nats, others {wrong:.1e} or more")


def check(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """The largest distance from the weights and the image of each token, and the smallest of a response of some length
    from another prompt's image of the same size."""
    weights, processor = Weights(), tiny_processor()
    right, wrong = [], []
    for updates in sorted({n for row in rows for n in row["updates"]}):
        weights.write(updates)

        def apart(row: dict[str, Any], image: Attachment) -> Any:
            response = Chunk(np.array(row["tokens"], np.int32), np.array(row["logprobs"], np.float32), FIRST_VERSION)
            prompt, placed = np.array(row["prompt"], np.int32), [Placed(image, 0, 0, ())]
            mine = np.array(row["updates"]) == updates  # noqa: B023
            return apart_seeing(weights.model, processor, prompt, placed, response, 0.9)[mine]

        for row in (row for row in rows if updates in row["updates"]):
            assert row["digest"] == image_of(row["row"]).digest
            right.append(apart(row, image_of(row["row"])).max())
            if row["updates"].count(updates) > 10:
                wrong.append(apart(row, image_of(row["row"] + 5)).max())
    return float(max(right)), float(min(wrong))
